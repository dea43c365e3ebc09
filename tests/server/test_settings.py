"""Files and flags become a config, flags win, and whatever is wrong is named."""

from dataclasses import dataclass, field
from pathlib import Path
from typing import Annotated, Literal

import pytest

from headway.engine.errors import UsageError
from headway.server.settings import (
    FLAT,
    POSITIONAL,
    REPEATED,
    flat_items,
    read_config,
)


@dataclass(frozen=True, slots=True)
class Section:
    """A section."""

    block_size: int = 16
    """Tokens in a block."""
    prefix_cache: bool = True
    """Share prefixes."""
    device: str = "auto"
    """Where."""

    def __post_init__(self) -> None:
        if self.block_size < 1:
            raise ValueError(f"block_size is {self.block_size}; it must be at least 1")


@dataclass(frozen=True, slots=True)
class Part:
    """A part whose fields stand among the others."""

    model: str = "small"
    """Which model."""
    engine: Section = field(default_factory=Section)


@dataclass(frozen=True, slots=True)
class Config:
    """A command."""

    prompt: Annotated[str, POSITIONAL] = ""
    """A text."""
    kind: Literal["chain", "tree"] = "chain"
    """A choice."""
    scale: float = 1.0
    """A number."""
    is_loud: bool = False
    """A switch."""
    sizes: tuple[int, ...] = (1, 4)
    """Several numbers."""
    stops: Annotated[tuple[str, ...], REPEATED] = ()
    """Several texts."""
    bias: Annotated[tuple[tuple[int, float], ...], REPEATED] = ()
    """Several pairs."""
    part: Annotated[Part, FLAT] = field(default_factory=Part)


def read(tmp_path: Path, toml: str, *flags: str) -> Config:
    path = tmp_path / "settings.toml"
    path.write_text(toml)
    return read_config(Config, ["--config", str(path), *flags], "headway test")


def test_defaults_file_and_flags_in_this_order(tmp_path: Path) -> None:
    toml = 'model = "medium"\nscale = 0.5\n[engine]\nblock_size = 32\ndevice = "cpu"'
    found = read(tmp_path, toml, "--engine.block-size", "8", "--scale=0.25")
    assert found.part.engine == Section(block_size=8, device="cpu")
    assert (found.part.model, found.scale, found.kind) == ("medium", 0.25, "chain")


@pytest.mark.parametrize(
    ("toml", "flags", "name", "expected"),
    [
        ("is_loud = true", [], "is_loud", True),
        ("is_loud = true", ["--no-is-loud"], "is_loud", False),
        ("is_loud = false", ["--is-loud"], "is_loud", True),
        ("sizes = [2, 3]", [], "sizes", (2, 3)),
        ("sizes = [2, 3]", ["--sizes", "5"], "sizes", (5,)),
        ("sizes = [2, 3]", ["a prompt"], "sizes", (2, 3)),
        ('stops = ["a b", "-c"]', [], "stops", ("a b", "-c")),
        ('stops = ["a"]', ["--stops", "b"], "stops", ("b",)),
        ('stops = ["a"]', ["--stops=b", "--stops=c"], "stops", ("b", "c")),
        ("bias = [[3, -0.5], [4, 1]]", [], "bias", ((3, -0.5), (4, 1.0))),
        ("scale = 2", [], "scale", 2.0),
        ('kind = "tree"', [], "kind", "tree"),
    ],
)
def test_values_of_every_shape(
    tmp_path: Path, toml: str, flags: list[str], name: str, expected: object
) -> None:
    if toml.startswith("sizes") and flags == ["a prompt"]:
        flags = ["--scale=1", *flags]
    assert getattr(read(tmp_path, toml, *flags), name) == expected


def test_a_negated_flag_wins_inside_a_section(tmp_path: Path) -> None:
    found = read(tmp_path, "[engine]\nprefix_cache = true", "--engine.no-prefix-cache")
    assert not found.part.engine.prefix_cache


@pytest.mark.parametrize(
    ("toml", "said"),
    [
        ("modell = 'x'", "no setting 'modell'; near ones are model"),
        (
            "[engine]\nblok_size = 1",
            "no setting 'engine.blok_size'; near ones are engine.block_size",
        ),
        ("block_size = 1", "near ones are engine.block_size"),
        ("[engin]\nblock_size = 1", "no setting 'engin'"),
        ("prompt = 'x'", "no setting 'prompt'"),
        ("zzzzzz = 1", "--help lists them all"),
        ("scale = true", "scale is True"),
        ("is_loud = 1", "is_loud is 1; true or false"),
        ("model = {a = 1}", "model is {'a': 1}"),
        ("model = ", "is not TOML"),
    ],
)
def test_a_wrong_file_is_refused_with_its_name(tmp_path: Path, toml: str, said: str) -> None:
    with pytest.raises(UsageError) as caught:
        read(tmp_path, toml)
    assert said in str(caught.value)
    assert "settings.toml" in str(caught.value)


def test_a_missing_file_is_refused(tmp_path: Path) -> None:
    with pytest.raises(UsageError, match="cannot be read: No such file"):
        read_config(Config, [f"--config={tmp_path / 'none.toml'}"], "headway test")


@pytest.mark.parametrize("flags", [["--config"], ["--config=a", "--config=b"], ["--config="]])
def test_config_takes_one_file(flags: list[str]) -> None:
    with pytest.raises(UsageError, match="one TOML file"):
        read_config(Config, flags, "headway test")


@pytest.mark.parametrize(
    ("flags", "said"),
    [
        (["--engine.blok-size", "3"], "--engine.block-size"),
        (["--scale", "big"], "--scale"),
        (["--kind", "bush"], "tree"),
        (["--engine.block-size", "0"], "must be at least 1"),
    ],
)
def test_a_wrong_flag_exits_with_2_and_names_what_is_allowed(
    flags: list[str], said: str, capsys: pytest.CaptureFixture[str]
) -> None:
    with pytest.raises(SystemExit) as stop:
        read_config(Config, flags, "headway test")
    assert stop.value.code == 2
    assert said in capsys.readouterr().err


def test_a_wrong_value_in_a_file_names_the_file(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    with pytest.raises(SystemExit) as stop:
        read(tmp_path, "[engine]\nblock_size = 'big'")
    assert stop.value.code == 2
    said = capsys.readouterr().err
    assert "--engine.block-size" in said
    assert "settings.toml" in said


def test_flat_items_name_settings_as_a_file_does() -> None:
    names = [name for name, _ in flat_items(Config())]
    assert names[-4:] == ["model", "engine.block_size", "engine.prefix_cache", "engine.device"]
