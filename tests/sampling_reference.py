"""A plain reference of the sampling law, and random requests to hold the real one against it.

Everything in float64 lists, one token of one sequence at a time, written to be read and not to run fast.
"""

import math
import random
from collections import Counter
from collections.abc import Iterable
from typing import TypeVar

from headway.engine.request import Request, SamplingParams, StoppingParams
from headway.engine.sequence import Sequence

T = TypeVar("T")


def sequence_of(
    prompt: list[int],
    answer: list[int] | None = None,
    sampling: SamplingParams | None = None,
    min_new_tokens: int = 0,
    stop_token_ids: tuple[int, ...] = (),
    num_logprobs: int | None = None,
) -> Sequence:
    """A sequence in the middle of its answer."""
    stopping = StoppingParams(1000, min_new_tokens, stop_token_ids)
    request = Request(
        "r1", tuple(prompt), stopping, sampling or SamplingParams(), num_logprobs=num_logprobs
    )
    sequence = Sequence(request, arrived=0.0)
    grow(sequence, answer or [])
    return sequence


def grow(sequence: Sequence, token_ids: Iterable[int]) -> None:
    """Lengthen the answer, past any end: where it stops is not the sampler's business."""
    token_ids = list(token_ids)
    sequence.tokens.extend(token_ids)
    sequence.output_counts.update(token_ids)


def law(logits: list[float], sequence: Sequence, eos_token_ids: tuple[int, ...]) -> list[float]:
    """The probability of each token after `sequence`."""
    scores = shape(logits, sequence, eos_token_ids)
    temperature = sequence.request.sampling.temperature
    if temperature == 0:
        best = scores.index(max(scores))
        return [float(i == best) for i in range(len(scores))]
    return truncate([score / temperature for score in scores], sequence.request.sampling)


def shape(logits: list[float], sequence: Sequence, eos_token_ids: tuple[int, ...]) -> list[float]:
    """Bias, masks and penalties."""
    sampling, stopping = sequence.request.sampling, sequence.request.stopping
    answer = Counter(sequence.tokens[sequence.num_prompt_tokens :])
    seen = set(sequence.tokens)
    vocabulary = range(len(logits))
    scores = [logits[v] + sampling.logit_bias.get(v, 0.0) for v in vocabulary]
    allowed = sorted(set(sampling.allowed_token_ids) or vocabulary)
    spelled = [
        v
        for v in allowed
        if any(tuple([*sequence.tokens, v][-len(word) :]) == word for word in sampling.bad_words)
    ]
    ends: list[int] = []
    if answer.total() < stopping.min_new_tokens:
        ends = [*eos_token_ids, *stopping.stop_token_ids]
    for banned in ([*spelled, *ends], spelled, []):
        kept = [v for v in allowed if v not in banned]
        if kept:
            break
    for v in vocabulary:
        if v not in kept:
            scores[v] = -math.inf
            continue
        if v in seen:
            penalty = sampling.repetition_penalty
            scores[v] = scores[v] / penalty if scores[v] > 0 else scores[v] * penalty
        scores[v] -= sampling.presence_penalty * (v in answer)
        scores[v] -= sampling.frequency_penalty * answer[v]
    return scores


def truncate(scores: list[float], sampling: SamplingParams) -> list[float]:
    """top_k, top_p, min_p and typical_p, each on the renormalised rest of the one before it."""
    p = softmax(scores)
    if sampling.top_k:
        kth_best = sorted(p, reverse=True)[min(sampling.top_k, len(p)) - 1]
        p = normalise([x if x >= kth_best else 0.0 for x in p])
    if sampling.top_p < 1:
        p = keep_mass(p, [-x for x in p], sampling.top_p)
    least = sampling.min_p * max(p)
    p = normalise([x if x >= least else 0.0 for x in p])
    if sampling.typical_p < 1:
        entropy = -sum(x * math.log(x) for x in p if x > 0)
        strange = [abs(-math.log(x) - entropy) if x > 0 else math.inf for x in p]
        p = keep_mass(p, strange, sampling.typical_p)
    return p


def keep_mass(p: list[float], keys: list[float], mass: float) -> list[float]:
    """The tokens with the smallest keys that hold `mass`, equal keys together."""
    total = 0.0
    for key in sorted(set(keys)):
        total += sum(x for x, k in zip(p, keys, strict=True) if k == key)
        if total >= mass:
            return normalise([x if k <= key else 0.0 for x, k in zip(p, keys, strict=True)])
    return p


def softmax(scores: list[float]) -> list[float]:
    best = max(scores)
    return normalise([math.exp(score - best) for score in scores])


def normalise(weights: list[float]) -> list[float]:
    total = sum(weights)
    return [weight / total for weight in weights]


def random_sampling(rng: random.Random, vocab_size: int, temperature: float) -> SamplingParams:
    """A law with about half of all settings on, in values that matter."""

    def perhaps(setting: T, default: T) -> T:
        return setting if rng.random() < 0.5 else default

    ids = range(vocab_size)
    return SamplingParams(
        logit_bias=perhaps({v: rng.uniform(-4, 4) for v in rng.sample(ids, 3)}, {}),
        allowed_token_ids=perhaps(tuple(rng.sample(ids, rng.randint(1, vocab_size))), ()),
        bad_words=perhaps(
            tuple(tuple(rng.choices(ids, k=rng.randint(1, 3))) for _ in range(4)), ()
        ),
        repetition_penalty=perhaps(rng.uniform(0.5, 2), 1.0),
        presence_penalty=perhaps(rng.uniform(-2, 2), 0.0),
        frequency_penalty=perhaps(rng.uniform(-2, 2), 0.0),
        temperature=temperature,
        top_k=perhaps(rng.randint(1, vocab_size), 0),
        top_p=perhaps(rng.uniform(0.05, 1), 1.0),
        min_p=perhaps(rng.uniform(0, 0.5), 0.0),
        typical_p=perhaps(rng.uniform(0.05, 1), 1.0),
        seed=rng.getrandbits(64),
    )
