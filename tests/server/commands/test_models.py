"""models pull and list show what the store says; models quantize packs and measures."""

import json
from pathlib import Path

import pytest
from gguf import GGMLQuantizationType as Type

from headway.engine.models import store
from headway.server.cli import main
from tiny_folder import save_tiny_folder
from tiny_gguf import tiny_family, write_gguf


@pytest.fixture(autouse=True)
def empty_cache(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.setenv("HEADWAY_CACHE_DIR", str(tmp_path))
    return tmp_path


def test_list_as_json(empty_cache: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["models", "list", "--json"]) == 0
    listings = {listing["name"]: listing for listing in json.loads(capsys.readouterr().out)}
    assert listings["smollm2-135m"]["licence"] == "Apache-2.0"
    assert listings["smollm2-135m"]["state"] == "not pulled"
    assert listings["smollm2-135m"]["path"].startswith(str(empty_cache))


def test_list_as_a_table(capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["models", "list"]) == 0
    assert "smollm2-135m" in capsys.readouterr().out


def test_pull_prints_the_path_and_draws_bars(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    def pull(name: str, progress: store.Progress) -> Path:
        progress("download", 5_000_000, 10_000_000)
        progress("download", 10_000_000, 10_000_000)
        return Path("/models") / name

    monkeypatch.setattr(store, "pull", pull)
    assert main(["models", "pull"]) == 0
    captured = capsys.readouterr()
    assert captured.out == "/models/smollm2-135m\n"
    assert "download" in captured.err
    assert "10.0/10.0 MB" in captured.err


def test_pull_of_an_unknown_model_names_those_known(capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["models", "pull", "smollm"]) == 2
    captured = capsys.readouterr()
    assert "smollm2-135m" in captured.err
    assert captured.err.count("\n") == 1


def test_quantize_packs_a_folder_and_measures_a_text(
    empty_cache: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    folder = save_tiny_folder(empty_cache / "m")
    text = empty_cache / "text.txt"
    text.write_text("the quick fox jumps over my lazy dog " * 5)
    flags = ["--report", str(text), "--window-tokens", "64", "--stride-tokens", "32"]
    flags += ["--num-threads", "1", "--kernels", "reference"]
    command = ["models", "quantize", str(folder), "--to", "int4", *flags]
    assert main(command) == 0
    printed = capsys.readouterr()
    assert "matrices by format: 2 q8, 14 q4_1" in printed.out
    assert "against float32" in printed.out
    assert "pack" in printed.err
    assert main([*command, "--json"]) == 0
    record = json.loads(capsys.readouterr().out)
    assert record["quantize"] == "int4"
    assert 0 < record["packed_bytes"] < record["source_bytes"] / 3
    assert record["report"]["num_tokens"] == len(text.read_text()) - 1
    assert len(record["report"]["perplexities"]) == 3


def test_quantize_rounds_float_weights_to_int8_and_keeps_quantised_ones(
    empty_cache: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    folder = save_tiny_folder(empty_cache / "m")
    write_gguf(empty_cache / "tiny.gguf", "llama", tiny_family("llama"), Type.Q4_K)
    for source, formats in ((folder, "16 q8"), (empty_cache / "tiny.gguf", "16 q4_k")):
        assert main(["models", "quantize", str(source)]) == 0
        assert f"matrices by format: {formats}" in capsys.readouterr().out
    assert main(["models", "quantize", str(empty_cache / "tiny.gguf"), "--to", "int8"]) == 2
    assert "is quantised already" in capsys.readouterr().err


@pytest.mark.parametrize("content", [None, b"\xff\xfe"])
def test_quantize_needs_a_text_that_can_be_read(
    content: bytes | None, empty_cache: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    text = empty_cache / "text.txt"
    if content is not None:
        text.write_bytes(content)
    assert main(["models", "quantize", "smollm2-135m", "--report", str(text)]) == 2
    assert "cannot be read as UTF-8 text" in capsys.readouterr().err


def test_quantize_refuses_a_stride_that_skips_tokens(capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit):
        main(["models", "quantize", "--stride-tokens", "512"])
    assert "stride_tokens is 512 and window_tokens 512" in capsys.readouterr().err
