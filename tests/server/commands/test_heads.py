"""heads train writes heads that the other commands then draft with."""

import json
from pathlib import Path

import pytest

from headway.server.cli import main


def test_train_then_draft_with_the_heads(
    tmp_path: Path, tiny_folder: Path, tiny_flags: list[str], capsys: pytest.CaptureFixture[str]
) -> None:
    chats = [
        {
            "messages": [
                {"role": role, "content": role[0] * (8 + i)} for role in ("user", "assistant")
            ]
        }
        for i in range(8)
    ]
    data, out, record = tmp_path / "chats.jsonl", tmp_path / "heads", tmp_path / "record.json"
    data.write_text("\n".join(map(json.dumps, chats)))
    shape = ["--num-heads=2", "--epochs=1", "--max-chat-tokens=64", "--batch-tokens=256"]
    flags = [f"--data={data}", f"--out={out}", f"--model={tiny_folder}", *shape]
    assert main(["heads", "train", *flags]) == 0
    assert "tau" in capsys.readouterr().out

    bench = ["--modes", "off", "heads", "--batch-sizes=2", "--num-repeats=1", "--max-new-tokens=8"]
    assert main(["bench", "engine", *bench, *tiny_flags, f"--heads={out}", f"--json={record}"]) == 0
    cases = json.loads(record.read_text())["cases"]
    assert [case["speculation"] for case in cases] == ["off", "heads"]
    assert cases[1]["step_ms"]["draft"]["p50"] > cases[0]["step_ms"]["draft"]["p50"]


@pytest.mark.parametrize(
    ("flags", "said"),
    [
        (["--data=/no/such.jsonl"], "/no/such.jsonl"),
        (["--data=/no/such.jsonl", "--num-heads=0"], "num_heads: got 0"),
    ],
)
def test_what_cannot_be_trained_is_one_line(
    flags: list[str],
    said: str,
    tmp_path: Path,
    tiny_folder: Path,
    capsys: pytest.CaptureFixture[str],
) -> None:
    command = ["heads", "train", f"--out={tmp_path / 'heads'}", f"--model={tiny_folder}"]
    assert main([*command, *flags]) == 2
    assert said in capsys.readouterr().err.splitlines()[-1]
