"""Trains draft heads for a frozen model: `headway heads train`.

Hidden states are recomputed in every epoch, never stored. Rows and loss are defined in rows.py.
"""

import json
import math
import time
from collections.abc import Collection
from dataclasses import asdict, dataclass
from pathlib import Path
from random import Random
from typing import Any, TextIO

import torch
from rich.console import Console
from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeRemainingColumn
from torch import Tensor
from transformers import PreTrainedTokenizerBase

from headway.draft_heads.config import HeadsTrainConfig, HydraConfig
from headway.draft_heads.data import Example, align, batches, read_examples, split
from headway.draft_heads.draft_vocabulary import coverage, most_frequent
from headway.draft_heads.hydra import HydraHeads, TargetEnds
from headway.draft_heads.rows import (
    Acceptance,
    HeadRows,
    backward,
    compute_rows,
    measure_acceptance,
    num_left_out,
)
from headway.draft_heads.store import CONFIG_FILE, save_heads
from headway.engine.errors import UsageError

MAX_GRADIENT_NORM = 1.0
FINAL_RATE = 0.1
"""The learning rate ends at this part of its peak."""


@dataclass(frozen=True, slots=True)
class TrainReport:
    """What a training run came to; the folder holds the heads with the best tau."""

    num_steps: int
    num_rows: int
    """Positions learnt from, over all epochs."""
    num_skipped_chats: int
    """Chats without an answer of two tokens within max_chat_tokens."""
    num_draft_tokens: int
    """Tokens that heads can draft."""
    num_left_out: int
    """Labels of those positions that heads cannot draft, and so did not learn."""
    coverage: float
    """Share of the held-out answers' tokens that heads can draft."""
    seconds: float
    best: Acceptance
    best_step: int


def train_heads(
    model: Any,
    tokenizer: PreTrainedTokenizerBase,
    config: HeadsTrainConfig,
    console: Console | None = None,
) -> TrainReport:
    """Train heads for a transformers model on config.data and write the best to config.out.

    out/training.jsonl gets a line for every step and every measurement. Without a console nothing
    is shown. Raises UsageError for bad data, a folder in use, or a loss that is no number.
    """
    out = _make_folder(Path(config.out))
    end_ids = _end_ids(model, tokenizer)
    train, held_out, num_skipped = _load_data(config, tokenizer, end_ids)
    vocab_size: int = model.config.get_text_config().vocab_size
    draft_ids = most_frequent(train, config.draft_vocab_size, end_ids, vocab_size)
    heads = new_heads(model, config, draft_ids)
    schedule = _schedule_batches(train, config)
    measured = batches(held_out, config.batch_tokens)
    started, num_rows, num_lost = time.monotonic(), 0, 0
    best, best_step = Acceptance((), -math.inf), 0
    optimizer = torch.optim.AdamW(
        parameter_groups(heads, compute_rows(model, schedule[0], config.num_heads)),
        weight_decay=config.weight_decay,
    )
    with (
        _bar(console or Console(quiet=True)) as bar,
        (out / "training.jsonl").open("w", encoding="utf-8") as log,
    ):
        covered = coverage(draft_ids, held_out)
        _log(
            log,
            num_train=len(train),
            num_held_out=len(held_out),
            num_skipped=num_skipped,
            num_draft_tokens=heads.num_outputs,
            coverage=covered,
        )
        task = bar.add_task("heads", total=len(schedule), loss=math.nan, tau=math.nan)
        for step, batch in enumerate(schedule, 1):
            rate = config.learning_rate * rate_factor(step, len(schedule), config.warmup_ratio)
            rows = compute_rows(model, batch, config.num_heads)
            losses = _step(heads, optimizer, rows, rate, config)
            num_rows += len(rows.hidden)
            num_lost += num_left_out(heads, rows)
            _log(log, step=step, losses=losses, learning_rate=rate, num_rows=num_rows)
            bar.update(task, advance=1, loss=sum(losses) / len(losses))
            if step % config.eval_interval_steps == 0 or step == len(schedule):
                found = measure_acceptance(heads, model, measured)
                _log(log, step=step, seconds=time.monotonic() - started, **asdict(found))
                bar.update(task, tau=found.tau)
                if found.tau > best.tau:
                    best, best_step = found, step
                    training = {"step": step, **asdict(found), **asdict(config)}
                    save_heads(out, heads, model, config.model, training)
    return TrainReport(
        len(schedule),
        num_rows,
        num_skipped,
        heads.num_outputs,
        num_lost,
        covered,
        time.monotonic() - started,
        best,
        best_step,
    )


def new_heads(model: Any, config: HeadsTrainConfig, draft_ids: Tensor | None) -> HydraHeads:
    """Make untrained float32 heads for a transformers model, on its device."""
    text = model.config.get_text_config()
    shape = HydraConfig(
        text.hidden_size,
        text.vocab_size,
        config.num_heads,
        config.tree_shape(),
        config.own_output_heads,
    )
    heads = HydraHeads(shape, TargetEnds.of(model), draft_ids).to(model.device)
    heads.copy_output_head()
    return heads


def parameter_groups(heads: HydraHeads, rows: HeadRows) -> list[dict[str, object]]:
    """Group the parameters by the size of what they are multiplied with.

    A step of Adam changes a weight by the learning rate, and so a product by the rate times the
    input. SmolLM2's embeddings are 16 times smaller than its hidden states: with one rate for both,
    heads would learn from the drafted tokens 16 times more slowly. So each group's rate is divided
    by the root mean square of its input.
    """
    hidden_rms, embedding_rms = (
        max(float(values.float().square().mean().sqrt()), 1e-6)
        for values in (rows.hidden, heads.embed(rows.given))
    )
    embedding_readers = list(heads.inputs[1:].parameters())
    hidden_readers = [*heads.inputs[0].parameters(), *heads.outputs.parameters()]
    return [
        {"params": hidden_readers, "input_rms": hidden_rms},
        {"params": embedding_readers, "input_rms": embedding_rms},
    ]


def rate_factor(step: int, num_steps: int, warmup_ratio: float) -> float:
    """The part of the peak learning rate at a step, from 1: linear warm-up, then half a cosine.

    Example, 100 steps, warm-up 0.04: 0.25 at step 1, 1 at step 4, 0.55 at step 52, 0.1 at step 100.
    """
    num_warmup = max(1, round(num_steps * warmup_ratio))
    if step <= num_warmup:
        return step / num_warmup
    progress = (step - num_warmup) / (num_steps - num_warmup)
    return FINAL_RATE + (1 - FINAL_RATE) * 0.5 * (1 + math.cos(math.pi * progress))


def _make_folder(out: Path) -> Path:
    """Make the folder before hours of work, not after."""
    if (out / CONFIG_FILE).exists():
        raise UsageError(
            f"out: {out} already holds a {CONFIG_FILE}; name another folder or move that one away"
        )
    try:
        out.mkdir(parents=True, exist_ok=True)
    except OSError as error:
        raise UsageError(f"out: {out} cannot be made: {error.strerror}") from error
    return out


def _load_data(
    config: HeadsTrainConfig, tokenizer: PreTrainedTokenizerBase, end_ids: Collection[int]
) -> tuple[list[Example], list[Example], int]:
    """Read the chats that have anything to learn from: train, held out, number skipped."""
    path = Path(config.data)
    found = list(read_examples(path, tokenizer, end_ids, config.max_chat_tokens))
    examples = [example for example in found if len(align(example, config.num_heads)[0])]
    if len(examples) < 2:
        raise UsageError(
            f"data: {path} has {len(examples)} chats with an answer of two tokens or more within "
            f"{config.max_chat_tokens} tokens; at least 2 are needed, one of them to hold out"
        )
    return *split(examples, config.eval_fraction, config.seed), len(found) - len(examples)


def _end_ids(model: Any, tokenizer: PreTrainedTokenizerBase) -> set[int]:
    """Every token that ends an answer: chat models often name more than the tokenizer does."""
    named = model.generation_config.eos_token_id
    ids = named if isinstance(named, list) else [named]
    return {each for each in (*ids, tokenizer.eos_token_id) if each is not None}


def _schedule_batches(train: list[Example], config: HeadsTrainConfig) -> list[list[Example]]:
    """List the batches of all steps, the chats in another order in each epoch."""
    schedule: list[list[Example]] = []
    for epoch in range(config.epochs):
        shuffled = list(train)
        Random(f"{config.seed} {epoch}").shuffle(shuffled)
        schedule += batches(shuffled, config.batch_tokens)
    return schedule[: config.max_steps or None]


def _step(
    heads: HydraHeads,
    optimizer: torch.optim.Optimizer,
    rows: HeadRows,
    rate: float,
    config: HeadsTrainConfig,
) -> list[float]:
    """Take one optimiser step and return the losses before it, one a head."""
    optimizer.zero_grad()
    losses = backward(heads, rows, config.loss)
    norm = torch.nn.utils.clip_grad_norm_(heads.parameters(), MAX_GRADIENT_NORM)
    if not math.isfinite(sum(losses) + float(norm)):
        raise UsageError(
            f"the losses are {losses} and the gradient's norm is {float(norm)}; the best heads so "
            f"far stay in {config.out}; lower learning_rate ({config.learning_rate}) or check that "
            "the model's own logits are finite in this dtype"
        )
    for group in optimizer.param_groups:
        group["lr"] = rate / group["input_rms"]
    optimizer.step()
    return losses


def _log(log: TextIO, **values: object) -> None:
    log.write(json.dumps(values) + "\n")
    log.flush()


def _bar(console: Console) -> Progress:
    return Progress(
        TextColumn("{task.description}"),
        BarColumn(),
        MofNCompleteColumn(),
        TextColumn("loss {task.fields[loss]:.3f}  tau {task.fields[tau]:.2f}"),
        TimeRemainingColumn(),
        console=console,
    )
