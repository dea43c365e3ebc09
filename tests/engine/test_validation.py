"""Every limit of a request, at its edges, with messages that name field, value, limit and remedy."""

from dataclasses import replace

import pytest

from headway.engine.errors import InvalidRequest
from headway.engine.request import Request, SamplingParams, StoppingParams
from headway.engine.validation import Limits, check_request

LIMITS = Limits(vocab_size=100, max_context_tokens=32, max_cache_tokens=24)
NAN, INF = float("nan"), float("inf")
GOOD = Request("r1", (1, 2, 3), StoppingParams(max_new_tokens=8, min_new_tokens=2))


def changed(**fields: object) -> Request:
    """GOOD with fields replaced, in whichever of its parts they live."""
    parts = {}
    for name in ("sampling", "stopping", "speculation"):
        part = getattr(GOOD, name)
        own = {field: fields.pop(field) for field in list(fields) if hasattr(part, field)}
        parts[name] = replace(part, **own)
    return replace(GOOD, **parts, **fields)


FINE: list[dict[str, object]] = [
    {},
    {"prompt_ids": (0, 99)},
    {"prompt_ids": (5,) * 23},
    {"prompt_ids": (5,) * 24, "max_new_tokens": 0, "min_new_tokens": 0},
    {"max_new_tokens": 10**9},
    {"min_new_tokens": 8},
    *({"temperature": value} for value in (0.0, 0, 0.01, 1, 100.0)),
    *({"top_k": value} for value in (0, 1, 10**6)),
    *({"top_p": value} for value in (1e-9, 1, 1.0)),
    *({"min_p": value} for value in (0.0, 0.999)),
    *({"typical_p": value} for value in (1e-9, 1.0)),
    *({"repetition_penalty": value} for value in (1e-9, 10.0)),
    *({"presence_penalty": value} for value in (-2.0, 2)),
    *({"frequency_penalty": value} for value in (-2, 2.0)),
    {"logit_bias": {0: -100.0, 99: 100}},
    {"allowed_token_ids": (0, 99)},
    {"bad_words": ((0,), (99,) * 64)},
    *({"seed": value} for value in (0, 2**64 - 1)),
    {"stop_token_ids": (0, 99)},
    *({"num_logprobs": value} for value in (None, 0, 20)),
    *({"num_prompt_logprobs": value} for value in (None, 0, 20)),
    {"max_draft_tokens": 63},
    {"max_draft_tokens": 0},
    {"priority": -(2**31)},
    {"cache_salt": "s" * 256},
    {"deadline": 1e9},
]

BAD: list[tuple[str, dict[str, object], str]] = [
    ("prompt", {"prompt_ids": ()}, "has no tokens; it needs at least 1"),
    ("prompt", {"prompt_ids": (5,) * 32}, "has 32 tokens; .* context of 32 .* Shorten"),
    ("prompt", {"prompt_ids": (5,) * 1000}, "has 1,000 tokens"),
    (
        "prompt",
        {"prompt_ids": (5,) * 24},
        "has 24 tokens; .* whole KV cache of 24.*kv_cache_bytes",
    ),
    (
        "prompt",
        {"prompt_ids": (5,) * 25, "max_new_tokens": 0, "min_new_tokens": 0},
        "has 25 tokens",
    ),
    ("prompt", {"prompt_ids": (5, 100, -1)}, "2 token ids .* first 100; ids go from 0 to 99"),
    ("prompt", {"prompt_ids": (-1,)}, "the first -1"),
    ("max_new_tokens", {"max_new_tokens": -1, "min_new_tokens": 0}, "is -1; .* at least 0"),
    ("min_new_tokens", {"min_new_tokens": -1}, "is -1; .* at least 0 and at most 8"),
    ("min_new_tokens", {"min_new_tokens": 9}, "is 9; .* at most 8. Lower it, or raise max_new"),
    *(
        ("temperature", {"temperature": value}, "must be 0, or at least 0.01 and at most 100")
        for value in (1e-4, -1.0, 100.1, NAN, INF, -INF)
    ),
    ("temperature", {"temperature": 1e-4}, "is 0.0001; .* Use 0 for the likeliest token"),
    ("temperature", {"temperature": NAN}, "is nan;"),
    ("top_k", {"top_k": -1}, "is -1; it must be at least 0. Use 0"),
    *(("top_p", {"top_p": v}, "above 0 and at most 1. Use 1") for v in (0.0, -0.1, 1.01, NAN)),
    *(("min_p", {"min_p": v}, "at least 0 and below 1. Use 0") for v in (-0.1, 1.0, NAN)),
    *(("typical_p", {"typical_p": v}, "above 0 and at most 1") for v in (0.0, 1.5, NAN)),
    *(
        ("repetition_penalty", {"repetition_penalty": v}, "above 0 and at most 10")
        for v in (0.0, -1.0, 10.5, NAN, INF)
    ),
    *(
        ("presence_penalty", {"presence_penalty": v}, "at least -2 and at most 2")
        for v in (-2.1, 3.0, NAN)
    ),
    *(("frequency_penalty", {"frequency_penalty": v}, "at least -2") for v in (-2.1, 3.0, NAN)),
    ("logit_bias", {"logit_bias": {100: 1.0}}, "the first 100"),
    *(
        ("logit_bias", {"logit_bias": {4: v}}, f"is {v} for token 4; .* from -100 to 100")
        for v in (-100.5, 101.0, NAN, INF, -INF)
    ),
    ("logit_bias", {"logit_bias": dict.fromkeys(range(99), NAN)}, "is nan for token 0"),
    ("allowed_token_ids", {"allowed_token_ids": (3, 100)}, "1 token ids .* first 100"),
    ("allowed_token_ids", {"allowed_token_ids": (3,) * 16_385}, "16,385 ids; at most 16,384"),
    ("bad_words", {"bad_words": ((3,), (4, 100))}, "first 100"),
    ("bad_words", {"bad_words": ((3,), ())}, "without tokens, at index 1"),
    ("bad_words", {"bad_words": ((3,),) * 257}, "257 entries; at most 256"),
    ("bad_words", {"bad_words": ((3,) * 65,)}, "an entry of 65 tokens; at most 64"),
    ("seed", {"seed": -1}, "is -1; .* at most 18,446,744,073,709,551,615"),
    ("seed", {"seed": 2**64}, "is 18446744073709551616"),
    ("stop_token_ids", {"stop_token_ids": (-7,)}, "first -7"),
    ("stop_token_ids", {"stop_token_ids": (3,) * 257}, "257 ids; at most 256"),
    *(("num_logprobs", {"num_logprobs": v}, "at least 0 and at most 20") for v in (-1, 21)),
    *(("num_prompt_logprobs", {"num_prompt_logprobs": v}, "at most 20") for v in (-1, 21)),
    *(("max_draft_tokens", {"max_draft_tokens": v}, "at most 63") for v in (-1, 64)),
    ("priority", {"priority": 2**31}, "at most 2,147,483,647"),
    ("cache_salt", {"cache_salt": "s" * 257}, "257 characters; at most 256"),
    *(("deadline", {"deadline": v}, "finite") for v in (NAN, INF)),
]


@pytest.mark.parametrize("fields", FINE)
def test_the_edges_are_allowed(fields: dict[str, object]) -> None:
    check_request(changed(**fields), LIMITS)


@pytest.mark.parametrize(("field", "fields", "message"), BAD)
def test_beyond_them_the_field_is_named(
    field: str, fields: dict[str, object], message: str
) -> None:
    with pytest.raises(InvalidRequest, match=message) as caught:
        check_request(changed(**fields), LIMITS)
    assert [violation.field for violation in caught.value.violations] == [field]


def test_too_many_of_one_kind() -> None:
    limits = replace(LIMITS, max_logit_bias=2)
    with pytest.raises(InvalidRequest, match="logit_bias: has 3 entries; at most 2 are allowed"):
        check_request(changed(logit_bias={1: 1.0, 2: 1.0, 3: 1.0}), limits)


def test_every_violation_is_reported_at_once() -> None:
    request = Request(
        "r1",
        (),
        StoppingParams(-1),
        SamplingParams(temperature=NAN, top_p=0.0, bad_words=((), (100,))),
        num_logprobs=-1,
    )
    with pytest.raises(InvalidRequest) as caught:
        check_request(request, LIMITS)
    fields = [violation.field for violation in caught.value.violations]
    assert sorted(fields) == sorted(
        [
            "prompt",
            "max_new_tokens",
            "temperature",
            "top_p",
            "num_logprobs",
            "bad_words",
            "bad_words",
        ]
    )
