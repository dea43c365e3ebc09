"""Every processor against a plain reference, and every node of a tree against its own sequence."""

import math
import random

import pytest
import torch

from headway.engine.logits import (
    Context,
    Law,
    is_plain,
    keep_min_p,
    keep_top_k,
    keep_top_p,
    keep_typical_p,
    process,
)
from headway.engine.request import SamplingParams
from sampling_reference import law, random_sampling, sequence_of

VOCAB_SIZE = 13
EOS = (2, 90)
"""90 is outside the vocabulary, as a padded model's ids may be."""


def probabilities(result: Law, vocab_size: int = VOCAB_SIZE) -> torch.Tensor:
    ids = torch.arange(vocab_size) if result.token_ids is None else result.token_ids
    return torch.zeros(vocab_size).scatter(0, ids, result.log_weights.softmax(0))


def random_logits(seed: int, vocab_size: int = VOCAB_SIZE) -> torch.Tensor:
    generator = torch.Generator().manual_seed(seed)
    return torch.randn(vocab_size, generator=generator) * 3


SETTINGS = {
    "nothing": SamplingParams(),
    "logit_bias": SamplingParams(logit_bias={0: 3.5, 4: -100.0, 12: 100.0}),
    "allowed": SamplingParams(allowed_token_ids=(3, 11, 5)),
    "one bad token": SamplingParams(bad_words=((5,),)),
    "bad word ends here": SamplingParams(bad_words=((7, 4, 6), (9, 4, 8), (4, 3))),
    "bad word over the prompt's end": SamplingParams(bad_words=((1, 5, 7, 4, 10),)),
    "bad word longer than the text": SamplingParams(bad_words=((3,) * 9 + (4,),)),
    "repetition": SamplingParams(repetition_penalty=1.7),
    "repetition reversed": SamplingParams(repetition_penalty=0.3),
    "presence": SamplingParams(presence_penalty=1.5),
    "frequency": SamplingParams(frequency_penalty=-0.7),
    "all penalties": SamplingParams(
        repetition_penalty=1.2, presence_penalty=-1.0, frequency_penalty=0.4
    ),
    "greedy": SamplingParams(temperature=0.0, repetition_penalty=1.3, top_p=0.1, typical_p=0.2),
    "cold": SamplingParams(temperature=0.01),
    "hot": SamplingParams(temperature=100.0),
    "top_k 1": SamplingParams(top_k=1),
    "top_k beyond": SamplingParams(top_k=500),
    "top_p": SamplingParams(top_p=0.8),
    "top_p tiny": SamplingParams(top_p=1e-9),
    "min_p": SamplingParams(min_p=0.1),
    "typical_p": SamplingParams(typical_p=0.6),
    "typical_p tiny": SamplingParams(typical_p=1e-9),
    "all filters": SamplingParams(temperature=0.8, top_k=9, top_p=0.9, min_p=0.02, typical_p=0.8),
}


@pytest.mark.parametrize("name", SETTINGS)
@pytest.mark.parametrize("seed", range(3))
def test_each_setting_equals_the_reference(name: str, seed: int) -> None:
    sequence = sequence_of([1, 5], [7, 4, 7, 4], SETTINGS[name])
    logits = random_logits(seed)
    before = logits.clone()
    result = probabilities(process(logits, Context(sequence), EOS))
    expected = law(logits.tolist(), sequence, EOS)
    torch.testing.assert_close(result, torch.tensor(expected), rtol=1e-3, atol=1e-5)
    assert torch.equal(logits, before), "logprobs are read from the same row later"


@pytest.mark.parametrize("seed", range(300))
def test_any_mix_at_any_node_equals_the_reference_of_the_longer_sequence(seed: int) -> None:
    """The branch counts: for penalties, bad words and min_new_tokens, prompt or not."""
    rng = random.Random(seed)
    sampling = random_sampling(rng, VOCAB_SIZE, rng.choice([0.0, 0.5, 1.0, 2.0]))
    stopping = {"min_new_tokens": rng.randint(0, 8), "stop_token_ids": (3, 6)}
    tokens = rng.choices(range(VOCAB_SIZE), k=12)
    here = sequence_of(tokens[:4], tokens[4:8], sampling, **stopping)
    grown = sequence_of(tokens[:4], tokens[4:], sampling, **stopping)
    logits = random_logits(seed)
    at_node = process(logits, Context(here, tuple(tokens[8:])), EOS)
    alone = process(logits, Context(grown), EOS)
    assert torch.equal(at_node.log_weights, alone.log_weights)
    assert torch.equal(probabilities(at_node), probabilities(alone))
    expected = torch.tensor(law(logits.tolist(), grown, EOS))
    torch.testing.assert_close(probabilities(at_node), expected, rtol=1e-3, atol=1e-5)


@pytest.mark.parametrize(
    ("sampling", "min_new_tokens", "possible"),
    [
        pytest.param({"allowed_token_ids": (2,)}, 9, {2}, id="min tokens give way"),
        pytest.param({"allowed_token_ids": (5,), "bad_words": ((5,),)}, 0, {5}, id="bad words too"),
        pytest.param(
            {"allowed_token_ids": (2, 5), "bad_words": ((5,),)}, 9, {2}, id="min tokens first"
        ),
        pytest.param(
            {"bad_words": tuple((v,) for v in range(13))}, 0, set(range(13)), id="all are bad"
        ),
        pytest.param(
            {"bad_words": tuple((v,) for v in range(13) if v != 2)},
            9,
            {2},
            id="only the end is left",
        ),
        pytest.param({"allowed_token_ids": (7, 400, -1)}, 0, {7}, id="foreign ids are ignored"),
        pytest.param(
            {"logit_bias": {400: 9.0}, "bad_words": ((400,), (4, -3))}, 9, None, id="foreign"
        ),
    ],
)
def test_masks_never_empty_the_law(
    sampling: dict[str, object], min_new_tokens: int, possible: set[int] | None
) -> None:
    sequence = sequence_of([1], [4], SamplingParams(**sampling), min_new_tokens)
    result = probabilities(process(random_logits(0), Context(sequence), EOS))
    assert set(result.nonzero()[:, 0].tolist()) == (possible or set(range(13)) - {2})


def test_tokens_the_model_rules_out_are_equals_when_nothing_else_remains() -> None:
    logits = random_logits(0)
    logits[[3, 8]] = -math.inf
    sequence = sequence_of([1], [4], SamplingParams(allowed_token_ids=(3, 8), top_p=0.9))
    result = probabilities(process(logits, Context(sequence)))
    assert result[[3, 8]].tolist() == [0.5, 0.5]


def test_extreme_penalties_stay_numbers() -> None:
    params = SamplingParams(
        repetition_penalty=1e-300, temperature=0.01, top_p=0.9, min_p=0.1, typical_p=0.9
    )
    for logits in (random_logits(1), torch.full((VOCAB_SIZE,), 3e38), torch.zeros(VOCAB_SIZE)):
        result = process(logits, Context(sequence_of([1], [4, 5], params)))
        assert result.log_weights.isfinite().all()
        assert len(result.log_weights) > 0


@pytest.mark.parametrize(
    ("keep", "setting", "kept"),
    [
        (keep_top_k, 2, [1, 3, 4]),
        (keep_top_k, 3, [1, 3, 4]),
        (keep_top_p, 0.3, [1, 3, 4]),
        (keep_top_p, 0.95, [0, 1, 3, 4, 5]),
        (keep_typical_p, 0.3, [1, 3, 4]),
    ],
)
def test_equals_stay_together(keep: object, setting: float, kept: list[int]) -> None:
    scores = torch.tensor([1.0, 3.0, -2.0, 3.0, 3.0, 1.0])
    assert callable(keep)
    assert keep(scores, setting).tolist() == kept


def test_min_p_keeps_the_bound_itself() -> None:
    scores = torch.tensor([0.0, math.log(0.5), math.log(0.49)])
    assert keep_min_p(scores, 0.5).tolist() == [0, 1]


@pytest.mark.parametrize("scale", [0.0, 0.5, 3.0, 30.0])
def test_top_p_on_a_large_vocabulary_is_the_fewest_tokens(scale: float) -> None:
    scores = random_logits(3, 20_011) * scale
    p = scores.double().softmax(0)
    kept = keep_top_p(scores, 0.9)
    if scale == 0:
        assert len(kept) == len(p), "all are equal"
        return
    assert p[kept].sum() >= 0.9 - 1e-6
    assert p[kept].sum() - p[kept].min() < 0.9 + 1e-6


@pytest.mark.parametrize("fields", [{"top_p": 0.95}, {"typical_p": 0.9}, {"top_k": 900}])
def test_threads_change_no_bit(fields: dict[str, float]) -> None:
    logits = random_logits(5, 150_001)
    context = Context(sequence_of([1], sampling=SamplingParams(**fields)))
    alone = process(logits, context)
    torch.set_num_threads(3)
    try:
        shared = process(logits, context)
    finally:
        torch.set_num_threads(1)
    assert torch.equal(alone.log_weights, shared.log_weights)
    assert alone.token_ids is not None
    assert torch.equal(alone.token_ids, shared.token_ids)


@pytest.mark.parametrize(
    ("sampling", "min_new_tokens", "plain"),
    [
        ({"temperature": 0.7}, 0, True),
        ({"temperature": 0.0, "top_k": 5, "min_p": 0.3}, 0, True),
        ({"temperature": 1.0, "top_k": 5}, 0, False),
        ({"temperature": 0.0, "logit_bias": {1: 2.0}}, 0, False),
        ({"temperature": 0.0, "presence_penalty": 0.1}, 0, False),
        ({"temperature": 0.0}, 2, True),
        ({"temperature": 0.0}, 3, False),
    ],
)
def test_is_plain(sampling: dict[str, object], min_new_tokens: int, plain: bool) -> None:
    sequence = sequence_of([1], [3], SamplingParams(**sampling), min_new_tokens)
    assert is_plain(Context(sequence, branch=(4,))) is plain
