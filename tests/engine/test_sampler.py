"""Accepting any tree gives what plain sampling gives, token for token, and plain sampling is right."""

import random
from collections.abc import Callable
from dataclasses import replace

import pytest
import torch
from scipy import stats

from headway.engine.batch import ForwardOutput, needs_logits
from headway.engine.request import SamplingParams, TokenLogprobs
from headway.engine.sampler import Accepted, accept, prompt_logprobs
from headway.engine.sequence import Sequence
from headway.engine.tree import DraftTree
from sampling_reference import grow, law, random_sampling, sequence_of

VOCAB_SIZE = 11
EOS = (2,)
Drafts = Callable[[random.Random, Sequence, list[int]], DraftTree]


def model(tokens: list[int]) -> torch.Tensor:
    """Logits [V] as a pure function of the text, mostly of its last three tokens."""
    generator = torch.Generator().manual_seed(hash((len(tokens) % 5, *tokens[-3:])))
    return torch.randn(VOCAB_SIZE, generator=generator) * 2


def logits_of(sequence: Sequence, tree: DraftTree) -> torch.Tensor:
    """[N, V]: what one pass of the model over the tree would give."""
    nodes = range(len(tree.token_ids))
    return torch.stack([model(sequence.tokens + tree.branch(node)) for node in nodes])


def output_of(logits: torch.Tensor) -> ForwardOutput:
    return ForwardOutput.of(logits, torch.empty(0))


def step(sequences: list[Sequence], trees: list[DraftTree]) -> list[Accepted]:
    pairs = zip(sequences, trees, strict=True)
    logits = torch.cat([logits_of(sequence, tree) for sequence, tree in pairs])
    return accept(sequences, trees, output_of(logits), EOS)


def plain(sequence: Sequence, num_tokens: int) -> list[int]:
    """Sample with no drafts, one token a step."""
    for _ in range(num_tokens):
        [accepted] = step([sequence], [DraftTree.root_only(sequence.tokens[-1])])
        grow(sequence, accepted.token_ids)
    return sequence.tokens[sequence.num_prompt_tokens :]


def right(rng: random.Random, sequence: Sequence, future: list[int]) -> DraftTree:
    return DraftTree.chain(sequence.tokens[-1], future[:4])


def wrong(rng: random.Random, sequence: Sequence, future: list[int]) -> DraftTree:
    drafts = [(token_id + 1) % VOCAB_SIZE for token_id in future[:4]]
    return DraftTree.chain(sequence.tokens[-1], drafts)


def bushy(rng: random.Random, sequence: Sequence, future: list[int]) -> DraftTree:
    """A random tree, breadth first, that may hold the right path, siblings and even twins."""
    token_ids, parents, depths = [sequence.tokens[-1]], [-1], [0]
    for _ in range(rng.randint(0, 14)):
        parent = rng.randrange(max(0, parents[-1]), len(token_ids))
        depth = depths[parent]
        is_right = depth < len(future) and rng.random() < 0.6
        token_ids.append(future[depth] if is_right else rng.randrange(VOCAB_SIZE))
        parents.append(parent)
        depths.append(depth + 1)
    tree = DraftTree(tuple(token_ids), tuple(parents))
    tree.check(14)
    return tree


def speculate(sequence: Sequence, future: list[int], drafts: Drafts, rng: random.Random) -> int:
    """Repeat the plain answer `future` with drafts; return the number of steps it took."""
    num_steps = 0
    while sequence.num_generated < len(future):
        tree = drafts(rng, sequence, future[sequence.num_generated :])
        [accepted] = step([sequence], [tree])
        assert [tree.token_ids[i] for i in accepted.path[1:]] == list(accepted.token_ids[:-1])
        assert [tree.parents[i] for i in accepted.path[1:]] == list(accepted.path[:-1])
        grow(sequence, accepted.token_ids)
        num_steps += 1
    return num_steps


SETTINGS: dict[str, dict[str, object]] = {
    "nothing": {},
    "penalties": {
        "repetition_penalty": 1.3,
        "presence_penalty": 0.7,
        "frequency_penalty": -0.4,
    },
    "bias": {"logit_bias": {3: 2.5, 7: -3.0}},
    "min_p": {"min_p": 0.1},
    "top_k and top_p": {"top_k": 6, "top_p": 0.8},
    "typical": {"typical_p": 0.7},
    "bad words": {"bad_words": ((4,), (3, 5), (1, 1, 9))},
    "allowed": {"allowed_token_ids": (1, 3, 5, 7, 9)},
}


@pytest.mark.parametrize("drafts", [right, wrong, bushy])
@pytest.mark.parametrize("temperature", [0.0, 0.7, 1.0])
@pytest.mark.parametrize("name", SETTINGS)
def test_drafts_change_no_token(name: str, temperature: float, drafts: Drafts) -> None:
    sampling = SamplingParams(temperature=temperature, seed=5, **SETTINGS[name])
    future = plain(sequence_of([1, 4, 4], sampling=sampling, min_new_tokens=6), 24)
    sequence = sequence_of([1, 4, 4], sampling=sampling, min_new_tokens=6)
    num_steps = speculate(sequence, future, drafts, random.Random(0))
    assert sequence.tokens[3:][: len(future)] == future
    expected = {right: [5], wrong: [24], bushy: range(6, 24)}
    assert num_steps in expected[drafts], "right drafts are all accepted, wrong ones never"


@pytest.mark.parametrize("seed", range(32))
def test_any_batch_of_any_requests_with_any_trees(seed: int) -> None:
    """Requests of all kinds share a batch; each ends up with what it gets alone and undrafted."""
    rng = random.Random(seed)

    def batch() -> list[Sequence]:
        return [
            sequence_of([i, 4], sampling=sampling, min_new_tokens=2 * i, stop_token_ids=(6,))
            for i, sampling in enumerate(samplings)
        ]

    temperatures = [0.0] * 5 if seed % 4 == 0 else [0.0, 0.7, 1.0, 1.0, 0.01]
    samplings = [
        random_sampling(rng, VOCAB_SIZE, temperature)
        if rng.random() < 0.7 and seed % 4
        else SamplingParams(temperature=temperature, seed=rng.getrandbits(64))
        for temperature in temperatures
    ]
    futures = [plain(sequence, 8) for sequence in batch()]
    running = batch()
    for _ in range(8):
        trees = [
            bushy(rng, sequence, future[sequence.num_generated :])
            for sequence, future in zip(running, futures, strict=True)
        ]
        for sequence, accepted in zip(running, step(running, trees), strict=True):
            grow(sequence, accepted.token_ids)
    for sequence, future in zip(running, futures, strict=True):
        assert sequence.tokens[2:10] == future


def drawn_at_root(sampling: SamplingParams, tree: DraftTree, num_draws: int) -> torch.Tensor:
    """Token after the prompt for many seeds, all in one batch of trees."""
    sequences = [
        sequence_of([1, 2], sampling=replace(sampling, seed=seed)) for seed in range(num_draws)
    ]
    logits = logits_of(sequences[0], tree).repeat(num_draws, 1)
    accepted = accept(sequences, [tree] * num_draws, output_of(logits))
    return torch.tensor([one.token_ids[0] for one in accepted])


@pytest.mark.parametrize(
    ("sampling", "num_draws"),
    [
        (SamplingParams(), 100_000),
        (SamplingParams(temperature=2.0), 10_000),
        (SamplingParams(temperature=0.3), 10_000),
        (SamplingParams(temperature=0.7, top_p=0.9, logit_bias={3: 1.0}), 2000),
        (SamplingParams(repetition_penalty=1.5, typical_p=0.8), 2000),
    ],
)
def test_the_histogram_is_the_target_law(sampling: SamplingParams, num_draws: int) -> None:
    """With drafts under the root: the likely token, an unlikely one, and children of both."""
    tree = DraftTree((2, 9, 0, 3, 3), (-1, 0, 0, 1, 2))
    drawn = drawn_at_root(sampling, tree, num_draws)
    expected = torch.tensor(law(model([1, 2]).tolist(), sequence_of([1, 2], sampling=sampling), ()))
    counts = torch.bincount(drawn, minlength=VOCAB_SIZE)
    assert not counts[expected == 0].any()
    rare = expected * num_draws < 5  # chi-square needs five of each; the rare ones count as one
    observed = [*counts[~rare].tolist(), int(counts[rare].sum())]
    target = torch.tensor([*expected[~rare].tolist(), float(expected[rare].sum())]).double()
    if target[-1] * num_draws < 1e-3:
        observed, target = observed[:-1], target[:-1]
    assert stats.chisquare(observed, target / target.sum() * num_draws).pvalue > 1e-3


def test_the_histogram_along_the_positions_of_one_seed_is_the_target_law() -> None:
    """One long answer of a model without memory: its tokens are independent draws of one law."""
    row = torch.tensor([0.0, 0.9, -0.7, 0.4, 0.2])
    sequence = sequence_of([1], sampling=SamplingParams(seed=3))
    tree = DraftTree.chain(0, [1] * 4)
    while sequence.num_generated < 5000:
        [accepted] = accept([sequence], [tree], output_of(row.expand(5, -1)))
        grow(sequence, accepted.token_ids)
    answer = torch.tensor(sequence.tokens[1:])
    p = row.double().softmax(0)
    counts = torch.bincount(answer, minlength=5)
    pairs = torch.bincount(answer[:-1] * 5 + answer[1:], minlength=25)
    assert stats.chisquare(counts, p * len(answer)).pvalue > 1e-3
    assert stats.chisquare(pairs, torch.outer(p, p).flatten() * (len(answer) - 1)).pvalue > 1e-3


def test_seeds() -> None:
    def answer(seed: int) -> list[int]:
        return plain(sequence_of([1], sampling=SamplingParams(seed=seed)), 40)

    assert answer(7) == answer(7)
    answers = {tuple(answer(seed)) for seed in (0, 1, 2, 2**63 - 1, 2**63, 2**64 - 1)}
    assert len(answers) == 6


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("fields", [{}, {"min_p": 0.1}, {"logit_bias": {5: 1.0}}])
def test_greedy_takes_the_lowest_of_equals(dtype: torch.dtype, fields: dict[str, object]) -> None:
    logits = torch.zeros(1, 997, dtype=dtype)
    logits[0, [400, 31, 996]] = 5.0
    sequence = sequence_of([1], sampling=SamplingParams(temperature=0.0, **fields))
    [accepted] = accept([sequence], [DraftTree.root_only(1)], output_of(logits))
    assert accepted.token_ids == (31,)


@pytest.mark.parametrize("temperature", [0.0, 1.0])
@pytest.mark.parametrize("num_top", [0, 3, 50])
def test_logprobs_are_those_of_the_node_that_gave_the_token(
    temperature: float, num_top: int
) -> None:
    sampling = SamplingParams(temperature=temperature, seed=1, frequency_penalty=1.0)
    future = plain(sequence_of([1, 4], sampling=sampling), 3)
    sequence = sequence_of([1, 4], sampling=sampling, num_logprobs=num_top)
    unlikely = (future[0] + 1) % VOCAB_SIZE
    tree = DraftTree((4, unlikely, future[0], 0, future[1]), (-1, 0, 0, 1, 2))
    [accepted] = step([sequence], [tree])
    assert accepted.path == (0, 2, 4)
    assert list(accepted.token_ids) == future
    check_logprobs(logits_of(sequence, tree)[[0, 2, 4]], future, accepted.logprobs, num_top)


def check_logprobs(
    logits: torch.Tensor, ids: list[int], scored: tuple[TokenLogprobs, ...], num_top: int
) -> None:
    logprobs = torch.log_softmax(logits.double(), -1)
    for row, token_id, one in zip(logprobs, ids, scored, strict=True):
        order = row.argsort(descending=True)[:num_top].tolist()
        assert one.token_id == token_id
        assert one.logprob == pytest.approx(row[token_id].item(), abs=1e-5)
        assert one.rank == 1 + int((row > row[token_id]).sum())
        assert [i for i, _ in one.top] == order
        assert [p for _, p in one.top] == pytest.approx(row[order].tolist(), abs=1e-5)


def test_no_logprobs_unless_asked_for() -> None:
    [accepted] = step([sequence_of([1])], [DraftTree.root_only(1)])
    assert accepted.logprobs == ()


def test_equal_logprobs_come_lowest_id_first() -> None:
    logits = torch.tensor([[1.0, 2.0, 1.0, 2.0, 1.0, 2.0]])
    [scored] = prompt_logprobs(logits, [5], 4)
    assert scored.rank == 1
    assert [token_id for token_id, _ in scored.top] == [1, 3, 5, 0]


@pytest.mark.parametrize("num_rows", [0, 1, 7])
def test_prompt_logprobs(num_rows: int) -> None:
    logits = torch.randn(num_rows, VOCAB_SIZE, generator=torch.Generator().manual_seed(2))
    ids = [i * 3 % VOCAB_SIZE for i in range(num_rows)]
    check_logprobs(logits, ids, prompt_logprobs(logits, ids, 2), 2)


@pytest.mark.parametrize("bad", [float("nan"), float("inf")])
@pytest.mark.parametrize(
    "fields", [{"temperature": 0.0}, {}, {"top_p": 0.5}, {"logit_bias": {1: 1.0}}]
)
def test_an_unusable_row_ends_its_own_request_alone(bad: float, fields: dict[str, object]) -> None:
    """What was drawn before the bad node stands; other requests of the batch do not notice."""
    sampling = SamplingParams(seed=1, **fields)
    future = plain(sequence_of([1, 4], sampling=sampling), 3)
    sequences = [sequence_of([1, 4], sampling=sampling, num_logprobs=1) for _ in range(3)]
    trees = [DraftTree.chain(4, future[:2])] * 3
    logits = torch.cat([logits_of(sequences[0], trees[0])] * 3)
    logits[4, 5] = bad  # node 1 of the second tree
    first, second, third = accept(sequences, trees, output_of(logits))
    assert first == third
    assert list(first.token_ids) == future
    assert not first.error
    assert list(second.token_ids) == future[:1]
    assert len(second.logprobs) == 1
    assert "not finite at position 3" in second.error
    with pytest.raises(FloatingPointError, match="not finite"):
        prompt_logprobs(logits, [1] * 9, 0)


def test_minus_infinity_is_a_usable_logit() -> None:
    logits = torch.full((1, VOCAB_SIZE), -torch.inf)
    [accepted] = accept([sequence_of([1])], [DraftTree.root_only(1)], output_of(logits))
    assert accepted.error
    logits[0, 6] = -3.0
    for sampling in ({}, {"top_p": 0.9, "typical_p": 0.9, "top_k": 4, "min_p": 0.1}):
        sequence = sequence_of([1], sampling=SamplingParams(**sampling), num_logprobs=1)
        [accepted] = accept([sequence], [DraftTree.root_only(1)], output_of(logits))
        assert accepted.token_ids == (6,)
        assert accepted.logprobs == (TokenLogprobs(6, 0.0, 1, ((6, 0.0),)),)


def test_rows_must_match_the_trees() -> None:
    with pytest.raises(AssertionError, match="3 nodes, but logits of 2"):
        accept(
            [sequence_of([1])], [DraftTree.chain(1, [2, 3])], output_of(torch.zeros(2, VOCAB_SIZE))
        )


@pytest.mark.parametrize(
    ("sampling", "asked", "needed"),
    [
        ({}, {}, False),
        ({"top_k": 5}, {}, False),  # keeps the likeliest
        ({"temperature": 0.5}, {}, True),
        ({"logit_bias": {3: 1.0}}, {}, True),
        ({"frequency_penalty": 0.1}, {}, True),
        ({}, {"num_logprobs": 0}, True),
        ({}, {"min_new_tokens": 1}, True),
    ],
)
def test_a_step_that_needs_no_logits_does_without(
    sampling: dict[str, object], asked: dict[str, int], needed: bool
) -> None:
    params = SamplingParams(**{"temperature": 0.0, **sampling})  # type: ignore[arg-type]
    sequence = sequence_of([1, 4], sampling=params, **asked)
    assert needs_logits(sequence) == needed
    tree = DraftTree.chain(4, plain(sequence_of([1, 4], sampling=params), 3)[:2])
    output = output_of(logits_of(sequence, tree))
    stored = accept([sequence], [tree], output, EOS)
    without = output._replace(logits=None)
    if needed:
        with pytest.raises(AssertionError, match="logits that were not computed"):
            accept([sequence], [tree], without, EOS)
    else:
        assert accept([sequence], [tree], without, EOS) == stored
