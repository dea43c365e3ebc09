"""What the READMEs and the sample settings say stays true."""

import re
from pathlib import Path

import pytest

from headway.server.cli import COMMANDS
from headway.server.commands.serve import ServeCommandConfig
from headway.server.settings import read_config

ROOT = Path(__file__).resolve().parents[1]
ROOMS = ["compiler", "deploy", "draft_heads", "engine", "kernels", "protos", "server"]
READMES = [ROOT / room / "README.md" for room in ROOMS]


@pytest.mark.parametrize("path", READMES, ids=lambda path: path.parent.name)
def test_a_rooms_readme_fits_a_screen(path: Path) -> None:
    assert len(path.read_text().splitlines()) < 60


@pytest.mark.parametrize("path", [ROOT / "README.md", *READMES], ids=lambda path: path.parent.name)
def test_links_and_files_exist(path: Path) -> None:
    text = path.read_text()
    links = re.findall(r"\]\(([^)#]+)\)", text)
    files = re.findall(rf"`((?:{'|'.join(ROOMS)}|tests)/[\w./-]+\.\w+)`", text)
    examples = [name for name in files if Path(name).stem in ("x", "test_x")]
    for name in {*links, *files}.difference(examples):
        assert (path.parent / name).exists() or (ROOT / name).exists(), name


@pytest.mark.parametrize("room", ["compiler", "draft_heads", "engine", "kernels", "server"])
def test_a_rooms_readme_names_its_modules_and_no_others(room: str) -> None:
    named = set(re.findall(r"\b\w+\.py\b", (ROOT / room / "README.md").read_text()))
    assert {path.name for path in (ROOT / room).glob("*.py")} <= named
    known = {path.name for each in (*ROOMS, "tests") for path in (ROOT / each).rglob("*.py")}
    assert named - {"x.py", "test_x.py"} <= known


def test_every_command_is_in_the_readme() -> None:
    text = (ROOT / "README.md").read_text()
    assert not [name for name in COMMANDS if f"`{name}`" not in text]


def test_the_sample_settings_are_settings() -> None:
    path = ROOT / "deploy" / "headway.toml"
    config = read_config(ServeCommandConfig, ["--config", str(path)], "headway serve")
    assert config == read_config(ServeCommandConfig, [], "headway serve"), (
        "the sample holds the defaults"
    )
