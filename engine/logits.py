"""From the model's logits to the law a token is drawn from: masks, penalties, temperature, filters.

Exact at every node of a tree: a law depends on the tokens before its own, sequence and branch alike,
and on nothing else. Sums are integers, so no bit depends on threads or on other rows. Knows nothing
of noise or acceptance. V vocabulary, C tokens still considered.
"""

import math
from collections import Counter
from collections.abc import Callable, Collection, Iterable
from dataclasses import dataclass

import torch

from headway.engine.request import SamplingParams
from headway.engine.sequence import Sequence

_ONE = float(1 << 40)
"""A weight of 1 in fixed point: sums over 2**22 tokens fit 63 bits and keep 12 decimal digits."""

_LARGEST = torch.finfo(torch.float32).max


@dataclass(frozen=True, slots=True)
class Context:
    """What comes before a token: a sequence, then the drafts of one branch of its tree."""

    sequence: Sequence
    branch: tuple[int, ...] = ()

    @property
    def params(self) -> SamplingParams:
        return self.sequence.request.sampling

    @property
    def position(self) -> int:
        """Index of the token to be drawn, counted from the start of the prompt."""
        return len(self.sequence.tokens) + len(self.branch)

    @property
    def num_generated(self) -> int:
        return self.sequence.num_generated + len(self.branch)

    @property
    def must_go_on(self) -> bool:
        """Whether the answer is still too short to end."""
        return self.num_generated < self.sequence.request.stopping.min_new_tokens

    def tail(self, num_tokens: int) -> tuple[int, ...]:
        """The last tokens, `num_tokens` of them where there are so many."""
        tokens = (*self.sequence.tokens[-num_tokens:], *self.branch)
        return tokens[-num_tokens:] if num_tokens else ()

    def output_counts(self) -> Counter[int]:
        """How often each token occurs in the answer."""
        return self.sequence.output_counts + Counter(self.branch)


@dataclass(frozen=True, slots=True)
class Law:
    """Tokens that may be drawn and their log weights, one constant short of log p.

    token_ids: [C] int64 ascending, or None for the whole vocabulary; log_weights: [C] float32.
    """

    token_ids: torch.Tensor | None
    log_weights: torch.Tensor


def is_plain(context: Context) -> bool:
    """Whether temperature is all that shapes the law; then rows can be drawn together."""
    params = context.params
    return not (
        params.logit_bias
        or params.allowed_token_ids
        or params.bad_words
        or context.must_go_on
        or _penalises(params)
        or (params.temperature and _filters(params))
    )


def takes_likeliest(sequence: Sequence) -> bool:
    """Whether every token to come is the likeliest of its row, so that accept asks for no more."""
    return sequence.request.sampling.temperature == 0 and is_plain(Context(sequence))


def process(logits: torch.Tensor, context: Context, eos_token_ids: Collection[int] = ()) -> Law:
    """Apply everything the request asks for to one row of logits: [V] float, which is left as it is.

    Masks never empty the law. Where nothing would remain, min_new_tokens gives way first (an answer
    that ends early harms less than a forbidden word), then bad_words; allowed_token_ids always holds.
    Where the model itself gives -inf to all that remain, they are equally likely.
    """
    params = context.params
    scores = logits.to(torch.float32, copy=True)
    _add_bias(scores, params)
    scores = _mask(scores, context, eos_token_ids)
    _penalise(scores, context)
    if params.temperature == 0:
        best = scores.max(-1, keepdim=True)  # the first of equals
        return Law(best.indices, best.values)
    scores.div_(params.temperature).clamp_(max=_LARGEST)  # inf - inf would be NaN in the filters
    return _filter(scores, params)


def _add_bias(scores: torch.Tensor, params: SamplingParams) -> None:
    if params.logit_bias:
        ids = _index(params.logit_bias, scores)
        scores[ids] += scores.new_tensor([params.logit_bias[token_id] for token_id in ids.tolist()])


def _mask(scores: torch.Tensor, context: Context, eos_token_ids: Collection[int]) -> torch.Tensor:
    """Give tokens that may not be drawn a score of -inf."""
    vocab_size = len(scores)
    allowed = _in_vocabulary(context.params.allowed_token_ids, vocab_size)
    banned = _in_vocabulary(_completed_bad_words(context), vocab_size)
    if context.must_go_on:
        stop_ids = context.sequence.request.stopping.stop_token_ids
        banned_too = banned | _in_vocabulary((*eos_token_ids, *stop_ids), vocab_size)
        banned = banned_too if _leaves_some(allowed, banned_too, vocab_size) else banned
    if not _leaves_some(allowed, banned, vocab_size):
        banned = set()
    if not allowed and not banned:
        return scores
    floor = torch.full_like(scores, -math.inf if allowed else 0.0)
    floor[_index(allowed, scores)] = 0.0
    floor[_index(banned, scores)] = -math.inf
    masked = scores + floor
    return masked if masked.max() > -math.inf else floor


def _leaves_some(allowed: set[int], banned: set[int], vocab_size: int) -> bool:
    return not allowed <= banned if allowed else len(banned) < vocab_size


def _completed_bad_words(context: Context) -> Iterable[int]:
    """The last token of every bad word whose other tokens have just been written."""
    words = context.params.bad_words
    tail = context.tail(max((len(word) - 1 for word in words), default=0))
    for *beginning, last in words:
        if not beginning or tail[-len(beginning) :] == tuple(beginning):
            yield last


def _penalises(params: SamplingParams) -> bool:
    return (
        params.repetition_penalty != 1.0
        or params.presence_penalty != 0.0
        or params.frequency_penalty != 0.0
    )


def _penalise(scores: torch.Tensor, context: Context) -> None:
    """Lower the scores of tokens that occurred, prompt included for the repetition penalty alone."""
    params = context.params
    if params.repetition_penalty != 1.0:
        ids = _index({*context.sequence.tokens, *context.branch}, scores)
        seen = scores[ids]
        scores[ids] = torch.where(
            seen > 0, seen / params.repetition_penalty, seen * params.repetition_penalty
        )
    if params.presence_penalty or params.frequency_penalty:
        counts = context.output_counts()
        ids = _index(counts, scores)
        times = scores.new_tensor([counts[token_id] for token_id in ids.tolist()])
        scores[ids] -= params.presence_penalty + params.frequency_penalty * times


def _filters(params: SamplingParams) -> bool:
    return any(setting != off for _, setting, off in _stages(params))


def _stages(
    params: SamplingParams,
) -> tuple[tuple[Callable[[torch.Tensor, float], torch.Tensor], float, float], ...]:
    """The filters in order: what it keeps, its setting, and the setting that keeps every token."""
    return (
        (keep_top_k, params.top_k, 0),
        (keep_top_p, params.top_p, 1.0),
        (keep_min_p, params.min_p, 0.0),
        (keep_typical_p, params.typical_p, 1.0),
    )


def _filter(scores: torch.Tensor, params: SamplingParams) -> Law:
    """Apply the filters one after the other; each sees only what the one before it kept."""
    token_ids: torch.Tensor | None = None
    for keep, setting, off in _stages(params):
        if setting != off:
            kept = keep(scores, setting)
            token_ids = kept if token_ids is None else token_ids[kept]
            scores = scores[kept]
    return Law(token_ids, scores)


def keep_top_k(scores: torch.Tensor, top_k: float) -> torch.Tensor:
    """Keep the k best and all that equal the k-th: scores [C] float32 -> [K] int64 ascending."""
    k = min(int(top_k), len(scores))
    return _where(scores >= scores.topk(k).values[-1])


def keep_top_p(scores: torch.Tensor, top_p: float) -> torch.Tensor:
    """Keep the fewest best that hold `top_p` of the mass, equals together: as `keep_top_k`.

    Only tokens heavier than an equal share of the mass that may be cut are sorted: all others
    together weigh less than that.
    """
    masses = _masses(scores)
    total = int(masses.sum())
    needed = math.ceil(top_p * total)
    heavy = _where(masses > (total - needed) // len(masses))
    heavy_masses = masses[heavy]
    return heavy[-heavy_masses <= _reach(-heavy_masses, heavy_masses, needed)]


def keep_min_p(scores: torch.Tensor, min_p: float) -> torch.Tensor:
    """Keep what is at least `min_p` times as likely as the best: as `keep_top_k`."""
    return _where(scores >= scores.max() + math.log(min_p))


def keep_typical_p(scores: torch.Tensor, typical_p: float) -> torch.Tensor:
    """Keep the fewest tokens of most typical surprise that hold `typical_p` of the mass.

    Typical is near the entropy H: order by |-log p - H| (Meister et al., "Locally Typical Sampling",
    2022). Equals stay together; shapes as `keep_top_k`.
    """
    masses = _masses(scores)
    total = int(masses.sum())
    needed = math.ceil(typical_p * total)
    below_best = scores.max() - scores  # inf for what is masked: 0 * inf below is no moment
    moments = below_best.neg().exp_().mul_(below_best).nan_to_num_(0.0).mul_(_ONE).to(torch.int64)
    # -log p = log Z + below_best and H = log Z + mean(below_best), so log Z cancels.
    strangeness = (below_best - int(moments.sum()) / total).abs_()
    bound = 1.0
    while int((masses * (strangeness <= bound)).sum()) < needed:
        bound *= 2
    near = _where(strangeness <= bound)  # spares sorting the whole vocabulary
    return near[strangeness[near] <= _reach(strangeness[near], masses[near], needed)]


def _masses(scores: torch.Tensor) -> torch.Tensor:
    """exp(score - best) in fixed point: [C] float32 -> [C] int64, whose sums have no rounding."""
    return (scores - scores.max()).exp_().mul_(_ONE).to(torch.int64)


def _reach(keys: torch.Tensor, masses: torch.Tensor, needed: int) -> torch.Tensor:
    """The smallest bound such that tokens with keys up to it weigh `needed`: [C], [C] -> scalar."""
    ordered, order = keys.sort()
    cumulated = masses[order].cumsum(0)
    return ordered[torch.searchsorted(cumulated, needed)]


def _where(mask: torch.Tensor) -> torch.Tensor:
    return mask.nonzero().squeeze(1)


def _in_vocabulary(token_ids: Iterable[int], vocab_size: int) -> set[int]:
    return {token_id for token_id in token_ids if 0 <= token_id < vocab_size}


def _index(token_ids: Iterable[int], scores: torch.Tensor) -> torch.Tensor:
    """Distinct token ids as an index of `scores`; ids beyond the vocabulary are left out."""
    ids = sorted(_in_vocabulary(token_ids, len(scores)))
    return torch.tensor(ids, dtype=torch.int64, device=scores.device)
