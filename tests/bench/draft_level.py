"""Times drafting against a plain step: python tests/bench/draft_level.py --help.

Heads are untrained: what they cost does not depend on what they say. Before each draft the model
computes a step, so that weights come from memory as far as they do in serving. A figure is the
least of many, and the median; the cores should be idle meanwhile. One thread is timed by its own
clock, which stands still while other processes have the core.
"""

import argparse
import os
import time
from collections.abc import Callable, Sequence

import torch

from headway.draft_heads.config import HydraConfig
from headway.draft_heads.drafter import HydraDrafter
from headway.draft_heads.hydra import HydraHeads, TargetEnds
from headway.draft_heads.tree_shape import EIGHT_NODES, TreeShape
from headway.engine.config import EngineConfig
from headway.engine.engine import Engine
from headway.engine.models.store import DEFAULT_MODEL
from headway.engine.request import Request, SamplingParams, StoppingParams
from headway.engine.sequence import Sequence as EngineSequence
from headway.engine.suffix import SuffixDrafter
from headway.engine.tree import Commit, Drafter
from headway.server.assembly import Assembled, ModelSettings, assemble, make_engine

NUM_PROMPT_TOKENS = 128


def request(name: str, num_new: int = 1 << 20) -> Request:
    """Make a greedy request that does not end by itself, of a text with a period."""
    ids = tuple(1000 + i % 37 for i in range(NUM_PROMPT_TOKENS))
    stopping, law = StoppingParams(num_new, ignore_eos=True), SamplingParams(temperature=0.0)
    return Request(name, ids, stopping, law)


def sequences(count: int) -> list[EngineSequence]:
    """Make sequences whose prompts are computed."""
    made = [EngineSequence(request(f"s{i}"), arrived=0.0) for i in range(count)]
    for sequence in made:
        sequence.num_computed = len(sequence.tokens) - 1
    return made


class Plain:
    """Steps of one request without drafts."""

    def __init__(self, assembled: Assembled, clock: Callable[[], float]) -> None:
        self.clock = clock
        self._engine: Engine = make_engine(assembled, "off")
        self._name = 0
        self.seconds: list[float] = []

    def step(self) -> None:
        """Compute one step of one token, and time it."""
        if not self._engine.has_work:
            self._name += 1
            self._engine.add(request(f"r{self._name}", 512))
            self._engine.step()
        begin = self.clock()
        self._engine.step()
        self.seconds.append(self.clock() - begin)


def timed(plain: Plain, propose: Callable[[], object], num_runs: int) -> list[float]:
    """Seconds of proposals, each after a plain step; the first ones are left out."""
    seconds = []
    for _ in range(num_runs + 3):
        plain.step()
        begin = plain.clock()
        propose()
        seconds.append(plain.clock() - begin)
    return seconds[3:]


def make_heads(model: object, tree: TreeShape, num_heads: int, num_tokens: int) -> HydraHeads:
    """Make untrained heads that draft `num_tokens` tokens, all where that is 0."""
    ends = TargetEnds.of(model)
    config = HydraConfig(
        model.config.hidden_size,  # type: ignore[attr-defined] # transformers' own class
        model.config.vocab_size,  # type: ignore[attr-defined] # as above
        num_heads,
        tree,
    )
    draft_ids = torch.arange(num_tokens) * (config.vocab_size // num_tokens) if num_tokens else None
    return HydraHeads(config, ends, draft_ids).requires_grad_(False)


def time_heads(plain: Plain, heads: HydraHeads, team: object, count: int, runs: int) -> list[float]:
    """Time drafts of full trees for `count` sequences."""
    drafter = HydraDrafter(heads, team)  # type: ignore[arg-type] # a Team or None, as assembled
    made = sequences(count)
    states = torch.randn(count, 1, heads.config.hidden_size)
    drafter.observe([Commit(each, state) for each, state in zip(made, states, strict=True)])
    return timed(plain, lambda: drafter.propose(made, [63] * count), runs)


def time_suffix(plain: Plain, count: int, runs: int) -> list[float]:
    """Time proposals of 8 drafts for sequences that grow by a token each time."""
    drafter: Drafter = SuffixDrafter()
    made = sequences(count)

    def propose() -> None:
        for sequence in made:
            sequence.tokens.append(1000 + len(sequence.tokens) % 37)
            sequence.num_computed += 1
        drafter.propose(made, [8] * count)

    return timed(plain, propose, runs)


def report(name: str, seconds: Sequence[float], num_levels: int, plain: Plain) -> None:
    """Print milliseconds of a level, and its part of a plain step timed by turns with it."""
    steps = plain.seconds[-len(seconds) :]
    for kind, pick in (("least", min), ("median", lambda each: sorted(each)[len(each) // 2])):
        level, step = pick(seconds) / num_levels * 1e3, pick(steps) * 1e3
        print(f"{name:38} {kind:6} {level:7.3f} ms  {level / step:6.1%} of {step:.2f} ms")


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--model", default=DEFAULT_MODEL)
    parser.add_argument("--threads", type=int, default=0)
    parser.add_argument("--heads", type=int, default=4, help="heads of the chain")
    parser.add_argument("--tokens", default="8192,0", help="sizes of the draft vocabulary")
    parser.add_argument("--sequences", default="1,8")
    parser.add_argument("--runs", type=int, default=100)
    options = parser.parse_args()
    settings = ModelSettings(options.model, "off", None, EngineConfig(num_threads=options.threads))
    assembled = assemble(settings)
    plain = Plain(assembled, time.thread_time if options.threads == 1 else time.perf_counter)
    print(f"load of the machine {os.getloadavg()[0]:.1f}, {os.cpu_count()} cores")
    trees = {f"chain of {options.heads}": TreeShape.chain(options.heads), "eight": EIGHT_NODES}
    for name, tree in trees.items():
        for num_tokens in map(int, options.tokens.split(",")):
            num_heads = max(options.heads, tree.num_levels)
            heads = make_heads(assembled.loaded.model, tree, num_heads, num_tokens)
            for count in map(int, options.sequences.split(",")):
                seconds = time_heads(plain, heads, assembled.team, count, options.runs)
                case = f"{name}, {heads.num_outputs} tokens, {count} sequences"
                report(f"level: {case}", seconds, tree.num_levels, plain)
    for count in (1, 8, 16):
        seconds = time_suffix(plain, count, options.runs)
        report(f"suffix: {count} sequences", seconds, 1, plain)


if __name__ == "__main__":
    main()
