"""Windows count each token once, and the perplexity is that of transformers' own loss."""

import io
import math
from pathlib import Path

import pytest
import torch
from rich.console import Console

from headway.engine.config import EngineConfig
from headway.engine.errors import UsageError
from headway.server.quantize_report import Window, cut, log_probability, measure
from tiny import tiny_model
from tiny_engine import prompt, tiny_engine
from tiny_folder import save_tiny_folder

TEXT = "the quick fox jumps over my lazy dog " * 5


def test_the_example_of_windows() -> None:
    windows = list(cut([], [0, 1, 2, 3, 4, 5], 4, 2))
    assert windows == [Window((0, 1, 2, 3), 3), Window((2, 3, 4, 5), 2)]


@pytest.mark.parametrize("start_ids", [(), (99,)])
@pytest.mark.parametrize("num_tokens", [0, 1, 2, 7, 8, 9, 23, 64])
@pytest.mark.parametrize(("window", "stride"), [(8, 4), (8, 7), (8, 1), (2, 1), (100, 50)])
def test_every_token_counts_once(
    start_ids: tuple[int, ...], num_tokens: int, window: int, stride: int
) -> None:
    counted: list[int] = []
    for each in cut(start_ids, range(num_tokens), window, stride):
        assert len(each.token_ids) <= window
        assert each.token_ids[: len(start_ids)] == start_ids
        assert 0 < each.num_counted < len(each.token_ids)
        counted += each.token_ids[-each.num_counted :]
    assert counted == list(range(0 if start_ids else 1, num_tokens))


def test_the_sum_is_that_of_transformers_own_loss() -> None:
    ids = prompt(40)
    engine = tiny_engine()
    with torch.inference_mode():
        logits = tiny_model()(torch.tensor([ids])).logits[0].log_softmax(-1)
    each = [logits[place - 1, ids[place]].item() for place in range(40)]
    for num_counted in (39, 5):
        found = log_probability(engine, Window(ids, num_counted))
        assert found == pytest.approx(sum(each[-num_counted:]), rel=1e-5)


def report(folder: Path, text: str = TEXT, window_tokens: int = 64) -> list[float]:
    console = Console(file=io.StringIO())
    config = EngineConfig(num_threads=1, kernels="reference")
    found = measure(str(folder), "int4", text, window_tokens, 32, config, console)
    assert found.num_tokens == len(text) - 1  # bytes are this tokenizer's tokens
    assert [(each.weights, each.activations) for each in found.perplexities] == [
        ("float32", "fp32"),
        ("packed", "fp32"),
        ("packed", "int8"),
    ]
    return [each.perplexity for each in found.perplexities]


def test_rounding_changes_perplexity_a_little(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("HEADWAY_CACHE_DIR", str(tmp_path / "cache"))
    perplexities = report(save_tiny_folder(tmp_path / "m"))
    assert len(set(perplexities)) == 3
    for each in perplexities[1:]:
        assert abs(math.log(each / perplexities[0])) < 0.3


@pytest.mark.parametrize(
    ("text", "window_tokens", "message"),
    [("a", 64, "fewer than two tokens"), (TEXT, 1000, "context has 512 tokens")],
)
def test_what_cannot_be_measured_is_refused(
    text: str, window_tokens: int, message: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("HEADWAY_CACHE_DIR", str(tmp_path / "cache"))
    with pytest.raises(UsageError, match=message):
        report(save_tiny_folder(tmp_path / "m"), text, window_tokens)
