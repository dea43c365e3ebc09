"""An engine around the tiny model, a drafter of known quality, and a way to run requests."""

import random
from collections.abc import Iterable, Mapping
from collections.abc import Sequence as Seq
from dataclasses import dataclass, field

from headway.engine.build import build_engine
from headway.engine.config import EngineConfig
from headway.engine.draft_budget import DraftBudget
from headway.engine.engine import Engine
from headway.engine.models.attention import ATTENTION
from headway.engine.request import Finish, Output, Request, StoppingParams, TokenLogprobs
from headway.engine.sequence import Sequence
from headway.engine.step_times import StepTimes
from headway.engine.tree import Commit, Drafter, DraftTree
from tiny import EOS_ID, VOCAB_SIZE, tiny_model

SMALL = EngineConfig(kv_cache_bytes=1 << 20, block_size=4, num_threads=1, adaptive_drafts=False)
"""Verifies every draft, so that steps can be counted; tests of the budget inject one."""


def tiny_engine(
    drafter: Drafter | None = None,
    config: EngineConfig = SMALL,
    eos_token_ids: Seq[int] = (EOS_ID,),
    budget: DraftBudget | None = None,
    **model_changes: object,
) -> Engine:
    """An engine on the tiny model in float32 with one thread."""
    model = tiny_model(**model_changes)  # type: ignore[arg-type]
    model.set_attn_implementation(ATTENTION)
    engine = build_engine(model, eos_token_ids, config, drafter)
    engine.budget = budget or engine.budget
    return engine


class FixedTimes(StepTimes):
    """Step times that are given and stay: {rows: seconds}."""

    def note(self, num_rows: int, seconds: float) -> None:
        pass


def prompt(length: int, seed: int = 0) -> tuple[int, ...]:
    """Random token ids, special ones left out."""
    rng = random.Random(seed * 1_000 + length)
    return tuple(rng.randrange(3, VOCAB_SIZE) for _ in range(length))


def request(request_id: str, prompt_ids: Seq[int], max_new: int = 24, **changes: object) -> Request:
    stopping = changes.pop("stopping", StoppingParams(max_new, ignore_eos=True))
    return Request(request_id, tuple(prompt_ids), stopping, **changes)  # type: ignore[arg-type]


@dataclass
class Answer:
    """All outputs of one request, put together."""

    token_ids: list[int] = field(default_factory=list)
    logprobs: list[TokenLogprobs] = field(default_factory=list)
    prompt_logprobs: list[TokenLogprobs] = field(default_factory=list)
    num_cached_tokens: int = 0
    finish: Finish | None = None

    def take(self, output: Output) -> None:
        assert self.finish is None, "an output after the last one"
        self.token_ids += output.token_ids
        self.logprobs += output.logprobs
        self.prompt_logprobs += output.prompt_logprobs
        self.num_cached_tokens = output.num_cached_tokens
        self.finish = output.finish


def run(
    engine: Engine, requests: Iterable[Request], join_every: int = 0, max_steps: int = 5_000
) -> dict[str, Answer]:
    """Serve the requests to their ends; with `join_every`, one more joins every so many steps."""
    waiting = list(requests)
    answers = {each.request_id: Answer() for each in waiting}
    for step in range(max_steps):
        while waiting and (not join_every or step % join_every == 0):
            engine.add(waiting.pop(0))
            if join_every:
                break
        if not engine.has_work and not waiting:
            break
        for output in engine.step():
            answers[output.request_id].take(output)
    assert not engine.has_work, f"still busy after {max_steps} steps"
    assert engine.pool.num_active == 0
    return answers


class ScriptedDrafter:
    """Drafts random legal trees. On one path the known answer is drafted with probability `hits`."""

    name = "scripted"
    needs_hidden = True

    def __init__(
        self, answers: Mapping[tuple[int, ...], Seq[int]] | None = None, hits: float = 0.0
    ) -> None:
        self.answers = answers or {}
        self.hits = hits
        self.rng = random.Random(7)
        self.known: set[str] = set()

    def propose(self, sequences: Seq[Sequence], max_drafted: Seq[int]) -> list[DraftTree]:
        return [self._tree(*each) for each in zip(sequences, max_drafted, strict=True)]

    def _tree(self, sequence: Sequence, max_drafted: int) -> DraftTree:
        answer = self.answers.get(sequence.request.prompt_ids, ())
        tokens, parents, depths, right = [sequence.tokens[-1]], [-1], [0], 0
        for _ in range(self.rng.randint(0, max_drafted)):
            parent = self.rng.choice(
                [i for i, d in enumerate(depths) if d + 1 >= depths[-1] and d <= depths[-1]]
            )
            token, index = self.rng.randrange(VOCAB_SIZE), sequence.num_generated + depths[parent]
            hit = parent == right and self.rng.random() < self.hits and index < len(answer)
            if hit:
                token = answer[index]
            if any(p == parent and t == token for p, t in zip(parents, tokens, strict=True)):
                continue
            right = len(tokens) if hit else right
            tokens.append(token)
            parents.append(parent)
            depths.append(depths[parent] + 1)
        return DraftTree(tuple(tokens), tuple(parents))

    def observe(self, commits: Seq[Commit]) -> None:
        for commit in commits:
            assert commit.hidden is not None
            assert commit.hidden.isfinite().all()
            self.known.add(commit.sequence.request.request_id)

    def forget(self, sequence: Sequence) -> None:
        self.known.discard(sequence.request.request_id)
