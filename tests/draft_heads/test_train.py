import json
import math
from collections.abc import Callable
from copy import deepcopy
from dataclasses import replace
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file
from transformers import LlamaForCausalLM, PreTrainedTokenizerFast

from headway.draft_heads import train as train_module
from headway.draft_heads.config import HeadsTrainConfig
from headway.draft_heads.drafter import HydraDrafter
from headway.draft_heads.rows import Acceptance
from headway.draft_heads.store import load_heads
from headway.draft_heads.train import TrainReport, rate_factor, train_heads
from headway.engine.build import build_engine
from headway.engine.errors import UsageError
from headway.engine.models.attention import ATTENTION
from tiny import VOCAB_SIZE, tiny_model
from tiny_engine import SMALL, request, run

FIRST, COUNT = 6, VOCAB_SIZE - 6
Write = Callable[..., HeadsTrainConfig]


def sentence(seed: int, length: int = 24) -> list[int]:
    """A language of order two: two tokens decide the next, but one in sixteen is chance."""
    generator = torch.Generator().manual_seed(seed)
    words = torch.randint(COUNT, (length,), generator=generator).tolist()
    chance = torch.rand(length, generator=generator).tolist()
    for i in range(2, length):
        if chance[i] > 1 / 16:
            words[i] = (3 * words[i - 1] + words[i - 2] // 29 + 1) % COUNT
    return [FIRST + word for word in words]


@pytest.fixture(scope="module")
def fitted() -> LlamaForCausalLM:
    """The tiny model after a short training on the language: a target worth drafting for."""
    model = tiny_model(initializer_range=0.1).requires_grad_(True)
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-2)
    for step in range(120):
        ids = torch.tensor([sentence(1000 + 32 * step + i) for i in range(32)])
        loss = model(ids, labels=ids).loss
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
    return model.requires_grad_(False)


@pytest.fixture
def write(tmp_path: Path) -> Write:
    """Write sentences to a file and make a config that trains on it."""

    def make(sentences: list[list[int]], **changes: object) -> HeadsTrainConfig:
        path = tmp_path / "data.jsonl"
        lines = [
            json.dumps({"text": " ".join(f"w{word}" for word in words)}) for words in sentences
        ]
        path.write_text("\n".join(lines) + "\n")
        config = HeadsTrainConfig(
            data=str(path), out=str(tmp_path / "heads"), model="tiny", num_heads=3, epochs=4,
            batch_tokens=480, max_chat_tokens=64, learning_rate=5e-3, eval_fraction=0.1,
            eval_interval_steps=40,
        )  # fmt: skip
        return replace(config, **changes)

    return make


def log_of(config: HeadsTrainConfig) -> list[dict[str, object]]:
    return [
        json.loads(line) for line in (Path(config.out) / "training.jsonl").read_text().splitlines()
    ]


@pytest.mark.parametrize("loss", ["hard", "soft"])
def test_heads_learn_to_draft(
    fitted: LlamaForCausalLM, tokenizer: PreTrainedTokenizerFast, write: Write, loss: str
) -> None:
    config = write([sentence(seed) for seed in range(600)], loss=loss)
    report = train_heads(fitted, tokenizer, config)
    assert report.best.tau > 2
    assert report.best.accuracy[0] > 0.6

    lines = log_of(config)
    steps = [line for line in lines if "losses" in line]
    measured = [line for line in lines if "tau" in line]
    assert lines[0] == {
        "num_train": 540, "num_held_out": 60, "num_skipped": 0, "num_draft_tokens": VOCAB_SIZE,
        "coverage": 1.0,
    }  # fmt: skip
    assert len(steps) == report.num_steps
    assert sum(steps[-1]["losses"]) < sum(steps[0]["losses"]) / 2
    assert report.best.tau == max(line["tau"] for line in measured)

    record = json.loads((Path(config.out) / "config.json").read_text())
    assert record["training"]["tau"] == report.best.tau
    assert record["training"]["step"] == report.best_step
    assert load_heads(Path(config.out), fitted).config.num_heads == 3


def test_trained_heads_serve(
    fitted: LlamaForCausalLM, tokenizer: PreTrainedTokenizerFast, write: Write
) -> None:
    config = write([sentence(seed) for seed in range(600)])
    train_heads(fitted, tokenizer, config)
    model = deepcopy(fitted)
    model.set_attn_implementation(ATTENTION)
    requests = [request(f"r{i}", sentence(5000 + i, 12), 24) for i in range(8)]
    settings = replace(SMALL, num_threads=1)
    plain = run(build_engine(model, (), settings), requests)
    drafter = HydraDrafter(load_heads(Path(config.out), model))
    drafted = run(build_engine(model, (), settings, drafter), requests)

    assert [a.token_ids for a in drafted.values()] == [a.token_ids for a in plain.values()]
    finishes = [answer.finish for answer in drafted.values() if answer.finish]
    num_emitted = sum(finish.speculation.num_emitted for finish in finishes)
    num_steps = sum(finish.speculation.num_steps for finish in finishes)
    assert num_emitted == 8 * 24
    assert num_emitted / num_steps > 2  # the first step of each request, without a draft, included


def test_nothing_is_learnt_from_noise(
    fitted: LlamaForCausalLM, tokenizer: PreTrainedTokenizerFast, write: Write
) -> None:
    """The other leak test: a loss below the text's entropy, log 58, would mean a leak."""
    generator = torch.Generator().manual_seed(0)
    noise = torch.randint(FIRST, VOCAB_SIZE, (400, 24), generator=generator).tolist()
    config = write(noise, epochs=1, learning_rate=2e-3)
    report = train_heads(fitted, tokenizer, config)
    late = [line["losses"] for line in log_of(config) if "losses" in line][-5:]
    assert torch.tensor(late).mean() > math.log(COUNT) - 0.1
    assert report.best.tau < 1.15


def test_the_same_seed_gives_the_same_heads(
    fitted: LlamaForCausalLM, tokenizer: PreTrainedTokenizerFast, write: Write, tmp_path: Path
) -> None:
    def run(name: str, seed: int) -> tuple[TrainReport, bytes]:
        config = write(
            [sentence(i) for i in range(40)], max_steps=3, seed=seed, out=str(tmp_path / name)
        )
        report = train_heads(fitted, tokenizer, config)
        return report, (tmp_path / name / "model.safetensors").read_bytes()

    (report, first), (_, again), (_, other) = run("a", 1), run("b", 1), run("c", 2)
    assert report.num_steps == 3
    assert first == again
    assert first != other


def test_the_heads_with_the_best_tau_are_kept(
    fitted: LlamaForCausalLM,
    tokenizer: PreTrainedTokenizerFast,
    write: Write,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    taus = iter([1.5, 2.0, 1.9])
    monkeypatch.setattr(
        train_module, "measure_acceptance", lambda *_: Acceptance((0.5, 0.5, 0.5), next(taus))
    )
    config = write([sentence(i) for i in range(40)], max_steps=3, eval_interval_steps=1)
    report = train_heads(fitted, tokenizer, config)
    record = json.loads((Path(config.out) / "config.json").read_text())
    assert (report.best_step, report.best.tau) == (2, 2.0)
    assert (record["training"]["step"], record["training"]["tau"]) == (2, 2.0)


def test_small_inputs_get_large_steps(
    fitted: LlamaForCausalLM, tokenizer: PreTrainedTokenizerFast, write: Write
) -> None:
    config = write([sentence(i) for i in range(40)], max_steps=1, learning_rate=1e-3)
    train_heads(fitted, tokenizer, config)
    # Adam's first step moves every weight by the learning rate; those of the embeddings start at 0.
    step = load_heads(Path(config.out), fitted).inputs[1].weight.abs().max().item()
    embeddings = fitted.get_input_embeddings().weight[FIRST:]
    assert step == pytest.approx(1e-3 / embeddings.square().mean().sqrt().item(), rel=0.1)


def test_own_output_heads_and_the_eight_node_tree_train(
    fitted: LlamaForCausalLM, tokenizer: PreTrainedTokenizerFast, write: Write
) -> None:
    config = write(
        [sentence(i) for i in range(40)],
        max_steps=2,
        num_heads=5,
        tree="eight",
        own_output_heads=True,
    )
    train_heads(fitted, tokenizer, config)
    heads = load_heads(Path(config.out), fitted)
    assert heads.config.own_output_heads
    assert len(heads.config.tree.paths) == 8
    assert not torch.equal(heads.outputs[0].weight, fitted.lm_head.weight)


@pytest.mark.parametrize("loss", ["hard", "soft"])
def test_a_bfloat16_target_trains_float32_heads(
    fitted: LlamaForCausalLM, tokenizer: PreTrainedTokenizerFast, write: Write, loss: str
) -> None:
    config = write([sentence(i) for i in range(100)], epochs=12, loss=loss)
    train_heads(deepcopy(fitted).to(torch.bfloat16), tokenizer, config)
    losses = [sum(line["losses"]) for line in log_of(config) if "losses" in line]
    assert losses[-1] < losses[0] * 0.7
    stored = load_file(Path(config.out) / "model.safetensors")
    assert {tensor.dtype for tensor in stored.values()} == {torch.float32}


@pytest.mark.parametrize("loss", ["hard", "soft"])
def test_heads_learn_to_draft_a_part_of_the_vocabulary(
    fitted: LlamaForCausalLM, tokenizer: PreTrainedTokenizerFast, write: Write, loss: str
) -> None:
    config = write([sentence(seed) for seed in range(400)], draft_vocab_size=40, loss=loss)
    report = train_heads(fitted, tokenizer, config)
    first, *lines = log_of(config)
    steps = [line for line in lines if "losses" in line]
    assert (first["num_draft_tokens"], first["coverage"]) == (40, report.coverage)
    assert report.num_draft_tokens == 40
    assert 0.5 < report.coverage < 0.9
    assert 0.5 * (1 - report.coverage) < report.num_left_out / (3 * report.num_rows) < 0.5
    assert sum(steps[-1]["losses"]) < sum(steps[0]["losses"]) / 2
    heads = load_heads(Path(config.out), fitted)
    assert heads.draft_ids is not None
    assert 2 in heads.draft_ids  # the end of an answer, which no sentence holds
    # Where the right token cannot be drafted the draft is wrong, so accuracy has a bound.
    assert 0.4 < report.best.accuracy[0] < report.coverage + 0.02


def test_a_loss_that_is_no_number_stops_the_run(
    tokenizer: PreTrainedTokenizerFast, write: Write
) -> None:
    broken = tiny_model()
    broken.model.norm.weight[0] = float("nan")
    config = write([sentence(i) for i in range(40)])
    with pytest.raises(UsageError, match="learning_rate"):
        train_heads(broken, tokenizer, config)
    assert not (Path(config.out) / "config.json").exists()


def test_heads_are_not_overwritten(
    fitted: LlamaForCausalLM, tokenizer: PreTrainedTokenizerFast, write: Write
) -> None:
    config = write([sentence(i) for i in range(4)])
    Path(config.out).mkdir()
    (Path(config.out) / "config.json").write_text("{}")
    with pytest.raises(UsageError, match=r"already holds a config\.json"):
        train_heads(fitted, tokenizer, config)


def test_too_little_data_is_refused_and_empty_chats_are_counted(
    fitted: LlamaForCausalLM, tokenizer: PreTrainedTokenizerFast, write: Write
) -> None:
    with pytest.raises(UsageError, match="has 1 chats"):
        train_heads(fitted, tokenizer, write([sentence(0), [9], [9, 10]]))
    report = train_heads(fitted, tokenizer, write([sentence(0), sentence(1), [9, 10]], max_steps=1))
    assert report.num_skipped_chats == 1


def test_the_schedule_of_the_docstring() -> None:
    rates = {step: rate_factor(step, 100, 0.04) for step in range(1, 101)}
    assert {step: round(rates[step], 6) for step in (1, 4, 52, 100)} == {
        1: 0.25,
        4: 1,
        52: 0.55,
        100: 0.1,
    }
    assert rate_factor(1, 1, 0.0) == 1
