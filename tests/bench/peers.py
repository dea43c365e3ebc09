"""Headway beside other engines: same prompts, same weights, in turn. `python tests/bench/peers.py --help`.

Each peer is a process in its own environment (tests/bench/peers/). All are loaded, then every measure
is taken of one peer after the other, and that again in each round, so that what else the machine does
hits them all. Prints one table; --record keeps the numbers in tests/bench/results/peers.jsonl.
"""

import argparse
import contextlib
import json
import statistics
import sys
import time
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from peer_process import LIBRARIES, PEERS, PeerFailed, Process, install, python_of
from record import append, head
from rich.box import SIMPLE
from rich.console import Console
from rich.table import Table

from headway.engine.errors import HeadwayError
from headway.engine.machine import usable_cores
from headway.engine.models.store import DEFAULT_MODEL
from headway.server.engine_bench import pick, read_prompts

RESULTS = Path(__file__).parent / "results" / "peers.jsonl"
FIRST_TOKEN_PROMPT, PREFILL_PROMPT = 30, 512
NUM_FIRST_TOKENS = 3
"""Times that a first token is timed in each round."""


OURS = ("headway", "headway-plain")


@dataclass(frozen=True, slots=True)
class Plan:
    """What every peer is asked."""

    prompts: Sequence[Sequence[int]]
    streams: Sequence[int]
    num_rounds: int
    max_new_tokens: int
    limit_seconds: float

    def text(self, num_tokens: int, start: int) -> list[int]:
        """Return tokens for a prompt that is timed alone, other ones for each start.

        So a peer that keeps prompts, as some cannot be told not to, finds no beginning of one.
        """
        ids = [token for prompt in self.prompts for token in prompt]
        return [ids[(start + i) % len(ids)] for i in range(num_tokens)]

    def prompts_of(self, num_streams: int, round_index: int) -> list[Sequence[int]]:
        """Return a round's share of the prompts, of twice as many as there are streams at least.

        Example, 16 prompts in 2 rounds: round 1 of one stream takes 1, 3, 5 ..; of 16 streams all,
        twice.
        """
        if num_streams * 2 > len(self.prompts) // self.num_rounds:
            return [self.prompts[i % len(self.prompts)] for i in range(num_streams * 2)]
        return list(self.prompts[round_index :: self.num_rounds])


def measure(peer: Process, plan: Plan, round_index: int) -> Iterator[tuple[str, float]]:
    """Take every measure of one peer once; yields its name and value for each."""
    for num_streams in plan.streams:
        prompts = plan.prompts_of(num_streams, round_index)
        answer = peer.ask(
            {
                "do": "generate",
                "prompts": prompts,
                "num_streams": num_streams,
                "max_new_tokens": plan.max_new_tokens,
                "limit_seconds": plan.limit_seconds,
            }
        )
        if round_index == 0 and num_streams == plan.streams[0]:
            peer.answers = answer["token_ids"]
        yield f"tokens_per_second_{num_streams}", _num_tokens(answer) / answer["seconds"]
    for length, name in ((FIRST_TOKEN_PROMPT, "first_token_ms"), (PREFILL_PROMPT, "prefill_ms")):
        messages = [
            {
                "do": "first_token",
                "prompt": plan.text(length, 1 + i + round_index * NUM_FIRST_TOKENS),
            }
            for i in range(NUM_FIRST_TOKENS)
        ]
        seconds = [peer.ask(message)["seconds"] for message in messages]
        yield name, 1e3 * statistics.median(seconds)
    yield "peak_bytes", peer.ask({"do": "memory"})["bytes"]


def run(arguments: argparse.Namespace) -> int:
    """Load every peer that is here, measure them by turns, print the table."""
    console = Console(stderr=True)
    started = time.perf_counter()
    deadline = started + arguments.max_seconds
    peers: list[Process] = []
    found: dict[str, dict[str, list[float]]] = {}
    notes: dict[str, str] = {}
    try:
        plan, settings = _prepare(arguments, console)
        for name in arguments.peers:
            console.print(f"loading {name}")
            try:
                peers.append(Process(name, python_of(name, arguments.env), settings))
            except PeerFailed as error:
                notes[name] = str(error)
                console.print(f"left out: {error}", markup=False)
        for round_index in range(plan.num_rounds):
            found_now = _round(plan, round_index, peers, notes, console, deadline)
            if found_now is None:
                console.print(f"round {round_index + 1} is left out: --max-seconds had passed")
                break
            for name, measured in found_now.items():
                for key, value in measured.items():
                    found.setdefault(name, {}).setdefault(key, []).append(value)
    finally:
        for peer in peers:
            peer.close()
    answers = {peer.name: peer.answers for peer in peers}
    names = [name for name in arguments.peers if name in found and name not in notes]
    rows = {name: _row(name, found[name], answers) for name in names}
    Console().print(_table(rows, {peer.name: peer.version for peer in peers}, notes, plan))
    console.print(f"{time.perf_counter() - started:.0f} s")
    measured_by_peer = {
        peer.name: {"version": peer.version, **rows[peer.name]}
        for peer in peers
        if peer.name in rows
    }
    return _keep(arguments, plan, measured_by_peer, notes)


def _round(
    plan: Plan,
    round_index: int,
    peers: Sequence[Process],
    notes: dict[str, str],
    console: Console,
    deadline: float,
) -> dict[str, dict[str, float]] | None:
    """Measure every peer once; what fails is noted and left out. None where time is up before the end.

    The first round is always finished: without it there is nothing to show.
    """
    found = {}
    for peer in [each for each in peers if each.name not in notes]:
        if round_index and time.perf_counter() > deadline:
            return None
        console.print(f"round {round_index + 1}, {peer.name}")
        try:
            _warm_up(peer, plan)
            found[peer.name] = dict(measure(peer, plan, round_index))
        except PeerFailed as error:
            notes[peer.name] = str(error)
            console.print(f"left out: {error}", markup=False)
    return found


def _prepare(arguments: argparse.Namespace, console: Console) -> tuple[Plan, dict[str, Any]]:
    """Have Headway tell the prompts' tokens and where the weights are.

    In a process that ends with that: what is made once, and cached, counts in nobody's memory.
    """
    settings = {
        "name": arguments.model,
        "heads": arguments.heads,
        "num_threads": arguments.num_threads or usable_cores(),
        "max_context_tokens": arguments.max_context_tokens,
        "max_streams": max(arguments.streams),
    }
    console.print(f"preparing {arguments.model}")
    chosen = pick(read_prompts(arguments.prompts), arguments.num_prompts)
    texts = [prompt.prompt for prompt in chosen]
    with contextlib.closing(Process("headway-plain", sys.executable, settings)) as process:
        prompts = process.ask({"do": "tokenize", "texts": texts})["tokenize"]
        weights = process.ask({"do": "describe"})["describe"]
    room = arguments.max_context_tokens - arguments.max_new_tokens
    prompts = [prompt for prompt in prompts if len(prompt) <= room]
    if len(prompts) < len(texts):
        console.print(
            f"{len(texts) - len(prompts)} prompts are longer than {room} tokens: left out"
        )
    if not prompts:
        raise PeerFailed("no prompt is short enough; raise --max-context-tokens")
    plan = Plan(
        prompts,
        arguments.streams,
        arguments.num_rounds,
        arguments.max_new_tokens,
        arguments.limit_seconds,
    )
    return plan, {**settings, **weights}


def _warm_up(peer: Process, plan: Plan) -> None:
    streams = max(plan.streams)
    peer.ask(
        {
            "do": "generate",
            "prompts": plan.prompts_of(streams, 0)[:streams],
            "num_streams": streams,
            "max_new_tokens": 4,
            "limit_seconds": plan.limit_seconds,
        }
    )


def _num_tokens(answer: dict[str, Any]) -> int:
    return sum(map(len, answer["token_ids"]))


def _row(
    name: str, measured: dict[str, list[float]], answers: dict[str, list[list[int]]]
) -> dict[str, float]:
    """Boil the rounds down to medians; memory to its peak.

    A peer that does better one request after the other than several at once is shown by that.
    """
    row = {key: statistics.median(values) for key, values in measured.items()}
    row["peak_bytes"] = max(measured["peak_bytes"])
    if name not in OURS:
        alone = row.get("tokens_per_second_1", 0.0)
        row |= {k: max(v, alone) for k, v in row.items() if k.startswith("tokens_per_second_")}
    row["prefill_tokens_per_second"] = PREFILL_PROMPT / (row["prefill_ms"] / 1e3)
    row["same_tokens"] = same_tokens(answers[name], answers[next(n for n in OURS if n in answers)])
    return row


def same_tokens(one: Sequence[Sequence[int]], other: Sequence[Sequence[int]]) -> float:
    """Return the share of tokens before the first that differs, over answers to the same prompts.

    Answers that a limit cut are compared as far as both go.
    """
    same = total = 0
    for a, b in zip(one, other, strict=False):
        pairs = list(zip(a, b, strict=False))
        total += len(pairs)
        same += next((i for i, (x, y) in enumerate(pairs) if x != y), len(pairs))
    return same / total if total else 0.0


def _table(
    rows: dict[str, dict[str, float]], versions: dict[str, str], notes: dict[str, str], plan: Plan
) -> Table:
    """Show each peer's numbers, and how many times as fast Headway is (its first row)."""
    speeds = [f"tokens_per_second_{streams}" for streams in plan.streams]
    table = Table(
        *("peer", *(f"{n} at once" for n in plan.streams), "prefill", "first ms", "MB", "same"),
        title="tokens/s, and how many times the first row's",
        caption=f"Greedy, {plan.max_new_tokens} new tokens at most. prefill: a prompt of "
        f"{PREFILL_PROMPT} tokens; first token: of {FIRST_TOKEN_PROMPT}. MB: peak above what was held "
        "once the libraries were imported. same: share of tokens before the first that differs "
        "from Headway's; weights of another type differ sooner.",
        box=SIMPLE,
        padding=(0, 1, 0, 0),
    )
    base = next(iter(rows.values()), {})
    for name, row in rows.items():
        ratios = {key: row[key] / base[key] for key in row if base.get(key)}
        table.add_row(
            f"{name}\n{versions[name]}",
            *(
                f"{row[key]:.1f}\n{ratios[key]:.2f}"
                for key in (*speeds, "prefill_tokens_per_second", "first_token_ms")
            ),
            f"{row['peak_bytes'] / 1e6:.0f}",
            f"{row['same_tokens']:.0%}",
        )
    for name in notes:
        table.add_row(name, "left out")
    return table


def _keep(
    arguments: argparse.Namespace,
    plan: Plan,
    measured: dict[str, dict[str, Any]],
    notes: dict[str, str],
) -> int:
    """Write what was asked for. Exit code 1 where Headway itself could not be measured."""
    what = {
        "model": arguments.model,
        "num_prompts": len(plan.prompts),
        "num_rounds": plan.num_rounds,
        "max_new_tokens": plan.max_new_tokens,
        "num_threads": arguments.num_threads or usable_cores(),
    }
    if arguments.json is not None:
        everything = {**head(), **what, "peers": measured, "left_out": notes}
        arguments.json.write_text(json.dumps(everything, indent=2) + "\n")
    if arguments.record:
        append(RESULTS, ({**head(), **what, "peer": name, **row} for name, row in measured.items()))
    return 0 if any(name in measured for name in OURS) else 1


def parse(flags: Sequence[str] | None = None) -> argparse.Namespace:
    """Read the flags; ends the process with 2 where they are wrong."""
    parser = argparse.ArgumentParser(description=(__doc__ or "").split("`")[0])
    parser.add_argument(
        "--peers",
        nargs="+",
        choices=PEERS,
        default=list(PEERS),
        metavar="PEER",
        help=", ".join(PEERS),
    )
    parser.add_argument("--model", default=DEFAULT_MODEL, help="as headway serve takes it")
    parser.add_argument("--heads", help="folder of draft heads")
    parser.add_argument("--prompts", type=Path, help="JSONL; Headway's own when not given")
    parser.add_argument("--num-prompts", type=int, default=16, help="taken evenly from the file")
    parser.add_argument("--num-rounds", type=int, default=2)
    parser.add_argument("--streams", nargs="+", type=int, default=[1, 4, 8, 16])
    parser.add_argument("--max-new-tokens", type=int, default=128)
    parser.add_argument("--max-context-tokens", type=int, default=1024)
    parser.add_argument("--limit-seconds", type=float, default=10.0, help="of one measure")
    parser.add_argument(
        "--max-seconds", type=float, default=420.0, help="after this no further round is finished"
    )
    parser.add_argument("--num-threads", type=int, default=0, help="0 takes every core")
    parser.add_argument("--json", type=Path, help="file for everything that was measured")
    parser.add_argument("--record", action="store_true", help="keep the numbers")
    parser.add_argument(
        "--env", action="append", default=[], type=_named_folder, help="LIBRARY=FOLDER of a venv"
    )
    parser.add_argument("--install", choices=LIBRARIES, help="make a peer's environment, and end")
    arguments = parser.parse_args(flags)
    arguments.env = dict(arguments.env)
    numbers = (arguments.num_prompts, arguments.num_rounds, arguments.max_new_tokens)
    if min(*numbers, *arguments.streams) < 1 or arguments.limit_seconds <= 0:
        parser.error("numbers of prompts, rounds, tokens and streams are at least 1")
    if not set(OURS) & set(arguments.peers):
        parser.error(f"--peers must have one of {', '.join(OURS)}: it tokenises for the others")
    return arguments


def _named_folder(text: str) -> tuple[str, Path]:
    name, separator, folder = text.partition("=")
    if not separator or name not in (*LIBRARIES, "transformers"):
        raise argparse.ArgumentTypeError(
            f"{text!r} is not LIBRARY=FOLDER; libraries are {', '.join(LIBRARIES)}, transformers"
        )
    return name, Path(folder).expanduser()


def main() -> int:
    arguments = parse()
    if arguments.install:
        return install(arguments.install)
    try:
        return run(arguments)
    except (PeerFailed, HeadwayError) as error:
        print(f"peers: {error}", file=sys.stderr)
        return 2


if __name__ == "__main__":
    sys.exit(main())
