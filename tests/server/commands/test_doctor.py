"""doctor finds what is there, names versions that clash, and says by exit code what is broken."""

import json
from importlib import metadata
from pathlib import Path
from types import SimpleNamespace

import pytest

from headway.kernels import native
from headway.server.cli import main
from headway.server.commands import doctor as module
from headway.server.commands.doctor import Finding, clashes


def test_json_tells_of_this_machine(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    (tmp_path / "file").write_bytes(b"x" * 2**29)
    monkeypatch.setenv("HEADWAY_CACHE_DIR", str(tmp_path))
    monkeypatch.setenv("CXX", "no-such-compiler")  # compiling takes longer than the rest
    code = main(["doctor", "--json"])
    findings = {finding["name"]: finding for finding in json.loads(capsys.readouterr().out)}
    assert code == int(any(finding["verdict"] == "broken" for finding in findings.values()))
    assert findings["torch"]["value"] == metadata.version("torch")
    assert findings["gRPC stubs"]["value"] == "load"
    assert f"{tmp_path}: 0.5 GiB used" in findings["cache"]["value"]
    assert "smollm2-135m" in findings["model smollm2-135m"]["name"]
    assert findings["model smollm2-135m"]["value"] == "not pulled"
    assert {
        "python",
        "grpcio",
        "protobuf",
        "CPU",
        "memory",
        "C++ compiler",
        "kernels",
    } <= findings.keys()


@pytest.mark.parametrize(("verdict", "code"), [("ok", 0), ("note", 0), ("broken", 1)])
def test_table_and_exit_code(
    verdict: module.Verdict,
    code: int,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
) -> None:
    monkeypatch.setattr(module, "examine", lambda: [Finding("thing", "5 [/x]", verdict, "mend it")])
    assert main(["doctor"]) == code
    shown = capsys.readouterr().out
    assert "5 [/x]" in shown
    assert f"{verdict}: mend it" in shown


@pytest.mark.parametrize(
    ("requirement", "found"),
    [
        ("grpcio>=1.0", None),
        ("grpcio<1.0", metadata.version("grpcio")),
        ("GrpcIO ; extra == 'http'", None),
        ("no-such-package-here>=2; python_version > '3'", "missing"),
        ("no-such-package-here; python_version < '3'", None),
    ],
)
def test_clashes_name_the_requirement(requirement: str, found: str | None) -> None:
    clashing = list(clashes("headway", [requirement]))
    assert [finding.value for finding in clashing] == ([] if found is None else [found])
    for finding in clashing:
        assert finding.verdict == "broken"
        assert "headway needs" in finding.advice


def test_no_compiler_is_a_note(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("CXX", "no-such-compiler")
    finding = module._compiler()
    assert finding.verdict == "note"
    assert "no-such-compiler" in finding.value


@pytest.mark.parametrize(
    ("path", "verdict", "value"),
    [
        (__file__, "ok", f"avx2, 3 kernels, {__file__}"),
        ("/gone", "note", "avx2, 3 kernels, compiled at each start"),
        (None, "note", "reference, because it is so"),
    ],
)
def test_kernels_are_told_by_level_and_place(
    path: str | None, verdict: str, value: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    def load_library(choice: str) -> SimpleNamespace:
        if path is None:
            raise native.NativeUnavailable("it is so")
        return SimpleNamespace(level="avx2", kernels=dict.fromkeys("abc"), path=Path(path))

    monkeypatch.setattr(native, "load_library", load_library)
    finding = module._kernels()
    assert (finding.verdict, finding.value) == (verdict, value)


def test_a_cache_that_cannot_be_written_is_broken(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("HEADWAY_CACHE_DIR", str(tmp_path / "cache"))
    monkeypatch.setattr("os.access", lambda *_: False)
    assert next(module._caches()).verdict == "broken"
