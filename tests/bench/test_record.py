"""Records are lines: a number of bench engine, or a case of bench serve, each."""

import json
from pathlib import Path
from typing import Any

import pytest
import record


def test_lines_of_the_engine() -> None:
    spread = {"p20": 1.0, "p50": 2.0, "p80": 3.0}
    case = {
        "speculation": "off",
        "batch_size": 4,
        "tokens_per_second": spread,
        "decode_tokens_per_second": spread,
        "step_ms": {"model": spread},
        "tau": 1.0,
        "tau_by_category": {"qa": 1.0},
    }
    measured = {
        "model": "m",
        "dtype": "float32",
        "cases": [case],
        "roofline": {
            "bounds": [{"memory_ms": 0.5, "compute_ms": 0.25}],
            "rates": {"read_bytes_per_second": 8.0, "multiply_adds_per_second": 9.0},
        },
        "first_token_seconds": {"30": spread},
        "peak_bytes_over_imports": 7,
    }
    lines = {
        (line["metric"], line.get("category", "")): line for line in record.engine_lines(measured)
    }
    assert lines["tokens_per_second", ""] == {
        "model": "m",
        "dtype": "float32",
        "speculation": "off",
        "batch_size": 4,
        "metric": "tokens_per_second",
        "unit": "tok/s",
        **spread,
    }
    assert lines["tau", "qa"]["p50"] == 1.0
    assert lines["roofline_memory_ms", ""]["p50"] == 0.5
    assert lines["first_token_seconds", ""]["num_prompt_tokens"] == 30
    assert lines["peak_bytes_over_imports", ""]["p50"] == 7
    assert lines["read_bytes_per_second", ""]["p50"] == 8.0
    assert len(lines) == 11


def test_lines_of_the_server_leave_requests_out() -> None:
    case: dict[str, Any] = {key: [1, 2] for key in record.PER_REQUEST}
    measured = {"model_id": "m", "cases": [{**case, "max_concurrency": 8, "mean_ttft_ms": 5.0}]}
    assert list(record.serve_lines(measured)) == [
        {"model": "m", "max_concurrency": 8, "mean_ttft_ms": 5.0}
    ]


def test_a_failed_run_is_not_kept(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(record, "RESULTS", tmp_path)
    monkeypatch.setattr(record, "main", lambda arguments: 1)
    assert record.record("serve", []) == 1
    assert list(tmp_path.iterdir()) == []


def test_a_run_is_kept_with_its_commit(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def bench(arguments: list[str]) -> int:
        assert arguments[:2] == ["bench", "serve"]
        measured = {"model_id": "m", "cases": [{"tau": 1.5}, {"tau": 1.0}]}
        Path(arguments[3]).write_text(json.dumps(measured))
        return 0

    monkeypatch.setattr(record, "RESULTS", tmp_path)
    monkeypatch.setattr(record, "main", bench)
    for _ in range(2):
        assert record.record("serve", ["--drafts=on"]) == 0
    lines = [json.loads(line) for line in (tmp_path / "serve.jsonl").read_text().splitlines()]
    assert [line["tau"] for line in lines] == [1.5, 1.0, 1.5, 1.0]
    assert {"time", "commit", "dirty", "machine"} <= lines[0].keys()
