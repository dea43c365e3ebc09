"""bench engine measures a tiny model, compares outputs, and refuses bad prompt files."""

import json
from pathlib import Path
from typing import Any

import pytest

from headway.engine.request import SpeculationStats
from headway.engine.stats import StepRecord
from headway.server.cli import main
from headway.server.commands import bench
from headway.server.engine_bench import (
    Prompt,
    Run,
    Spread,
    first_difference,
    pick,
    read_prompts,
)

QUICK = ["--max-new-tokens=24", "--num-repeats=2", "--batch-sizes", "1", "3"]


@pytest.fixture(scope="module")
def record(tiny_folder: Path, tmp_path_factory: pytest.TempPathFactory) -> Any:
    folder = tmp_path_factory.mktemp("bench")
    lines = [{"prompt": "ab" * (5 + i), "category": "xy"[i % 2]} for i in range(5)]
    (folder / "prompts.jsonl").write_text("\n".join(map(json.dumps, lines)))
    flags = [f"--prompts={folder / 'prompts.jsonl'}", f"--json={folder / 'out.json'}"]
    tiny = [f"--model={tiny_folder}", "--engine.num-threads=1", "--engine.kv-cache-bytes=1000000"]
    tiny += [
        "--engine.no-adaptive-drafts"
    ]  # whose step times would say that a tiny model need not draft
    assert main(["bench", "engine", *QUICK, *flags, *tiny]) == 0
    return json.loads((folder / "out.json").read_text())


def test_every_mode_at_every_batch_size_is_measured(record: Any) -> None:
    cases = [(case["speculation"], case["batch_size"]) for case in record["cases"]]
    assert cases == [("off", 1), ("suffix", 1), ("off", 3), ("suffix", 3)]
    assert record["is_identical"] is True
    assert record["config"]["max_new_tokens"] == 24
    assert record["config"]["engine.num_threads"] == 1


def test_figures_agree_with_each_other(record: Any) -> None:
    for case in record["cases"]:
        assert 0 < case["num_new_tokens"] <= 5 * 24
        assert case["tokens_per_second"]["p20"] <= case["tokens_per_second"]["p80"]
        assert case["decode_tokens_per_second"]["p50"] > 0
        step = case["step_ms"]
        assert 0 < step["model"]["p50"] < step["step"]["p50"]
        assert 0 < step["overhead"]["p50"] < step["step"]["p50"]
        assert set(case["tau_by_category"]) == {"x", "y"}
    off, suffix = record["cases"][:2]
    assert off["pass_ms"] == suffix["pass_ms"] == {}  # drafts are chosen by none here
    assert off["tau"] == 1.0
    assert suffix["tau"] > 1.0
    assert off["num_new_tokens"] == suffix["num_new_tokens"]


def test_steps_are_held_against_the_machine(record: Any) -> None:
    roofline = record["roofline"]
    assert len(roofline["bounds"]) == len(record["cases"])
    for bound, case in zip(roofline["bounds"], record["cases"], strict=True):
        least = max(bound["memory_ms"], bound["compute_ms"])
        assert 0 < least < case["step_ms"]["step"]["p50"]
        assert bound["num_bytes"] > roofline["work"]["weight_bytes"]
        assert 1 <= case["sequences_per_step"] <= case["batch_size"]
        assert 10 < case["context_per_sequence"] < 60
    off, suffix = record["cases"][:2]
    assert off["rows_per_step"] == off["sequences_per_step"] == 1.0
    assert suffix["rows_per_step"] > 1.0


def test_prompts_alone_and_memory_are_measured(record: Any) -> None:
    first = record["first_token_seconds"]
    assert list(first) == ["30", "511"]  # the tiny model's context ends at 512
    assert 0 < first["30"]["p50"] < first["511"]["p50"]
    assert record["peak_bytes_over_imports"] >= 0


def test_outputs_that_differ_fail(
    tiny_flags: list[str], monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr(bench, "first_difference", lambda one, other: one and "prompt 0, token 1")
    flags = ["--max-new-tokens=2", "--num-repeats=1", "--batch-sizes=4", "--modes", "off", "suffix"]
    assert main(["bench", "engine", *flags, *tiny_flags]) == 1
    assert "outputs differ: batch 4, off against off: prompt 0, token 1" in capsys.readouterr().err


def test_first_difference() -> None:
    one = Run(token_ids={"0": (1, 2, 3), "1": (4, 5)})
    assert first_difference(one, one) is None
    other = Run(token_ids={"0": (1, 2, 3), "1": (4, 6)})
    assert first_difference(one, other) == "prompt 1, token 1: (5,) against (6,)"
    shorter = Run(token_ids={"0": (1, 2), "1": (4, 5)})
    assert first_difference(one, shorter) == "prompt 0, token 2: (3,) against ()"


def test_spread_takes_values_that_occurred() -> None:
    assert Spread.of([5.0, 1.0, 4.0, 2.0, 3.0, 6.0]) == Spread(2.0, 3.0, 5.0)
    assert Spread.of([7.0]) == Spread(7.0, 7.0, 7.0)
    assert Spread.of([]).p50 != Spread.of([]).p50


def test_run_adds_up() -> None:
    step = StepRecord(1, 1, 0.1, 0.2, 0.3, 0.1, 0.1)
    run = Run(token_ids={"a": (1, 2), "b": (3,)}, decode_steps=[step, step])
    run.speculation = {"a": SpeculationStats(num_steps=1, num_emitted=2)}
    assert run.num_new_tokens == 3
    assert run.decode_seconds == pytest.approx(1.6)


def test_prompts_are_picked_evenly_or_repeated() -> None:
    prompts = [Prompt(str(index), "x") for index in range(7)]
    assert [prompt.prompt for prompt in pick(prompts, 3)] == ["0", "2", "4"]
    assert [prompt.prompt for prompt in pick(prompts[:2], 5)] == ["0", "1", "0", "1", "0"]
    assert pick(prompts, 7) == prompts


def test_prompts_may_have_ids(tmp_path: Path) -> None:
    path = tmp_path / "prompts.jsonl"
    path.write_text('{"id": 7, "prompt": "a", "category": "b"}')
    assert read_prompts(path) == [Prompt("a", "b", 7)]


def test_headways_own_prompts() -> None:
    prompts = read_prompts(None)
    assert len(prompts) == 12
    assert len({prompt.category for prompt in prompts}) == 5


@pytest.mark.parametrize(
    ("content", "said"),
    [
        ("", "has no prompts"),
        ('{"prompt": "a", "category": "b"}\nx', "prompts.jsonl:2: Expecting value"),
        ('{"prompt": "a"}', "category"),
        ('{"prompt": "a", "category": "b", "more": 1}', "more"),
        ('{"prompt": "", "category": "b"}', "not empty"),
        ('{"prompt": 5, "category": "b"}', "must be text"),
        ("[]", "prompts.jsonl:1"),
    ],
)
def test_bad_prompt_files_are_refused(
    content: str, said: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    path = tmp_path / "prompts.jsonl"
    path.write_text(content)
    assert main(["bench", "engine", f"--prompts={path}"]) == 2
    assert said in capsys.readouterr().err


def test_a_prompt_beyond_the_context_is_refused(
    tmp_path: Path, tiny_flags: list[str], capsys: pytest.CaptureFixture[str]
) -> None:
    path = tmp_path / "prompts.jsonl"
    path.write_text(json.dumps({"prompt": "a" * 600, "category": "long"}))
    assert main(["bench", "engine", f"--prompts={path}", *tiny_flags]) == 2
    assert "prompt 0: " in capsys.readouterr().err


@pytest.mark.parametrize(
    ("flags", "said"),
    [
        (["--num-repeats=0"], "num_repeats"),
        (["--batch-sizes", "1", "0"], "batch_sizes"),
        (["--modes", "heads"], "no heads are given"),
    ],
)
def test_bad_flags_exit_with_2(
    flags: list[str], said: str, capsys: pytest.CaptureFixture[str]
) -> None:
    with pytest.raises(SystemExit) as stop:
        main(["bench", "engine", *flags])
    assert stop.value.code == 2
    assert said in capsys.readouterr().err


def test_heads_that_are_not_given(capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["bench", "engine", "--speculation=heads"]) == 2
    assert "no heads are given" in capsys.readouterr().err
