"""DraftBudget: the best drafts of all sequences, and no loss where drafts are bad.

Texts are played against a clock that the test owns: no model runs.
"""

import random
from collections.abc import Callable, Mapping
from collections.abc import Sequence as Seq
from dataclasses import dataclass, replace

import pytest

from headway.engine.draft_budget import DraftBudget
from headway.engine.sequence import Sequence
from headway.engine.step_times import StepTimes
from headway.engine.suffix import SuffixDrafter
from headway.engine.tree import DraftTree
from sampling_reference import sequence_of

TABLES: dict[str, Mapping[int, float]] = {
    "native": {1: 7.0, 2: 7.2, 4: 8.6, 6: 11.5, 8: 14.0, 16: 26.0, 32: 50.0, 64: 100.0},
    "flat": {1: 7.0, 64: 8.0},
    "steep": {1: 5.0, 2: 10.0, 64: 320.0},
    "steps": {1: 7.0, 8: 7.1, 9: 12.0, 16: 12.1, 17: 17.0, 24: 17.1, 64: 40.0},
}
DRAFT_SECONDS = 0.03
OTHER_SECONDS = 0.4
"""Of one sequence, and of one step; as all times here in ms, which the budget need not know."""


def test_the_docstrings_example() -> None:
    budget = DraftBudget(StepTimes({1: 5.5, 2: 6.0, 3: 6.5, 4: 7.0, 5: 7.5}))
    sequences = [sequence_of([1]), sequence_of([2])]
    trees = [
        DraftTree((1, 5, 6), (-1, 0, 1), (1.0, 0.5, 0.2)),
        DraftTree((2, 7), (-1, 0), (1.0, 0.9)),
    ]
    budget.settle(sequences, [DraftTree.root_only(1)] * 2, [(0,), (0,)], 2, 0.0, 1.0)
    kept = budget.prune(sequences, trees, 2)
    assert kept == [DraftTree((1, 5), (-1, 0)), trees[1]]
    assert kept[0].survivals == (1.0, 0.5)


def random_tree(rng: random.Random) -> DraftTree:
    parents, survivals = [-1], [1.0]
    for _ in range(rng.randint(0, 9)):
        parents.append(rng.randint(max(0, parents[-1]), len(parents) - 1))
        survivals.append(survivals[parents[-1]] * rng.choice([0.2, 0.5, 0.5, 0.9]))
    depths = DraftTree(tuple(range(len(parents))), tuple(parents)).depths
    assert list(depths) == sorted(depths)
    return DraftTree(tuple(range(len(parents))), tuple(parents), tuple(survivals))


@pytest.mark.parametrize("table", TABLES)
@pytest.mark.parametrize("seed", range(10))
def test_no_other_number_of_drafts_is_better(table: str, seed: int) -> None:
    rng = random.Random(seed)
    times = StepTimes(TABLES[table])
    trees = [random_tree(rng) for _ in range(rng.choice([1, 3, 8]))]
    sequences = [sequence_of([index]) for index in range(len(trees))]
    kept = DraftBudget(times).prune(sequences, trees, len(trees))
    for tree, whole in zip(kept, trees, strict=True):
        tree.check(whole.num_drafted)
        assert all(
            tree.branch(node) == whole.branch(token) for node, token in enumerate(tree.token_ids)
        )
    chances = sorted((s for tree in trees for s in (tree.survivals or ())[1:]), reverse=True)
    rates = [
        (len(trees) + sum(chances[:num])) / times.seconds(len(trees) + num)
        for num in range(len(chances) + 1)
    ]
    num_kept = sum(tree.num_drafted for tree in kept)
    assert rates[num_kept] == pytest.approx(max(rates))


@dataclass
class Played:
    """What it took to emit the texts."""

    milliseconds: float = 0.0
    num_tokens: int = 0
    num_steps: int = 0
    num_drafted: int = 0


def play(
    texts: Seq[Seq[int]],
    num_streams: int,
    table: str,
    budget: DraftBudget | None,
    disturb: Callable[[float], float] = lambda seconds: seconds,
) -> Played:
    """Emit the texts after their first token, so many at a time; without a budget nothing drafts.

    The budget sees times that were disturbed; what is added up is undisturbed.
    """
    times, drafter, played = StepTimes(TABLES[table]), SuffixDrafter(), Played()
    waiting = list(texts)
    live: list[tuple[Sequence, Seq[int]]] = []
    while waiting or live:
        while waiting and len(live) < num_streams:
            sequence = sequence_of([waiting[0][0]])
            sequence.request = replace(sequence.request, request_id=str(len(waiting)))
            live.append((sequence, waiting.pop(0)))
        sequences = [sequence for sequence, _ in live]
        trees = [DraftTree.root_only(sequence.tokens[-1]) for sequence in sequences]
        drafting = 0.0
        if budget is not None and budget.allows_drafts:
            limits = [min(8, len(text) - len(each.tokens) - 1) for each, text in live]
            trees = budget.prune(sequences, drafter.propose(sequences, limits), len(live))
            drafting = DRAFT_SECONDS * len(live)
        paths = [emit(*each, tree) for each, tree in zip(live, trees, strict=True)]
        num_drafted = sum(tree.num_drafted for tree in trees)
        model = times.seconds(len(live) + num_drafted)
        if budget is not None:
            budget.times.note(len(live) + num_drafted, disturb(model))
            budget.settle(sequences, trees, paths, len(live), drafting, OTHER_SECONDS)
        played.milliseconds += model + drafting + OTHER_SECONDS
        played.num_tokens += sum(map(len, paths))
        played.num_steps += len(live)
        played.num_drafted += num_drafted
        live = [(each, text) for each, text in live if len(each.tokens) < len(text)]
    return played


def emit(sequence: Sequence, text: Seq[int], tree: DraftTree) -> list[int]:
    """Append what a pass emits: accepted drafts and the bonus token. Returns the accepted path."""
    path = [0]
    while True:
        sequence.tokens.append(text[len(sequence.tokens)])
        child = tree.child(path[-1], sequence.tokens[-1])
        if child is None or len(sequence.tokens) == len(text):
            return path
        path.append(child)


def noise(num_tokens: int, seed: int, alphabet: int = 40) -> list[int]:
    """Text in which every token occurred before and nothing follows from it."""
    rng = random.Random(seed)
    return [rng.randrange(alphabet) for _ in range(num_tokens)]


@pytest.mark.parametrize("table", TABLES)
@pytest.mark.parametrize("num_streams", [1, 4, 8, 16])
def test_text_that_drafts_badly_loses_little(table: str, num_streams: int) -> None:
    texts = [noise(400, seed) for seed in range(num_streams)]
    plain = play(texts, num_streams, table, None)
    drafting = play(texts, num_streams, table, DraftBudget(StepTimes(TABLES[table])))
    assert drafting.num_tokens == plain.num_tokens
    assert drafting.milliseconds < 1.025 * plain.milliseconds


@pytest.mark.parametrize("table", TABLES)
@pytest.mark.parametrize("num_streams", [1, 16])
@pytest.mark.parametrize("kind", ["bursts", "outliers"])
def test_a_busy_machine_misleads_little(table: str, num_streams: int, kind: str) -> None:
    """Bursts: it is slower for some tens of steps at a time. Outliers: every twentieth step is long."""
    rng, slow = random.Random(1), 1.0

    def disturb(seconds: float) -> float:
        nonlocal slow
        if kind == "bursts":
            slow = rng.choice([1.0, 1.5, 3.0]) if rng.random() < 0.03 else slow
            return seconds * slow
        return seconds * (8.0 if rng.random() < 0.05 else rng.uniform(1.0, 1.3))

    texts = [noise(400, seed) for seed in range(num_streams)]
    plain = play(texts, num_streams, table, None)
    budget = DraftBudget(StepTimes(TABLES[table]))
    drafting = play(texts, num_streams, table, budget, disturb)
    assert drafting.milliseconds < 1.03 * plain.milliseconds


@pytest.mark.parametrize("table", ["native", "flat", "steps"])
@pytest.mark.parametrize("num_streams", [1, 4])
def test_text_that_becomes_predictable_is_noticed(table: str, num_streams: int) -> None:
    period = noise(20, 99)
    texts = [noise(800, seed) + period * 15 for seed in range(num_streams)]
    budget = DraftBudget(StepTimes(TABLES[table]))
    play([text[:800] for text in texts], num_streams, table, budget)
    drafting = play([text[700:] for text in texts], num_streams, table, budget)
    plain = play([text[700:] for text in texts], num_streams, table, None)
    assert drafting.milliseconds < 0.9 * plain.milliseconds


@pytest.mark.parametrize(("table", "least"), [("native", 1.6), ("flat", 4.0), ("steep", 0.97)])
def test_repetition_pays(table: str, least: float) -> None:
    texts = [noise(20, 5) * 20]
    plain = play(texts, 1, table, None)
    drafting = play(texts, 1, table, DraftBudget(StepTimes(TABLES[table])))
    assert plain.milliseconds > least * drafting.milliseconds


def test_a_wrong_table_is_corrected() -> None:
    """The budget believes that rows are free; they are not, and it finds out."""
    texts = [noise(400, seed) for seed in range(4)]
    plain = play(texts, 4, "steep", None)
    drafting = play(texts, 4, "steep", DraftBudget(StepTimes(TABLES["flat"])))
    assert drafting.milliseconds < 1.25 * plain.milliseconds
