"""Public bug reports about requests that leave, do not fit, or ask for what cannot be."""

import asyncio
import gc
import random
import time
from typing import Any

import grpc
import pytest

from headway.engine.engine import LOGIT_PIECE
from headway.engine.errors import InvalidRequest
from headway.engine.sequence import Sequence
from headway.protos import text_generation_pb2 as pb
from headway.server.errors import from_rpc_error
from headway.server.stream import Stream
from reciting import VOCAB_SIZE, Recital
from replay import NUM_COMPANIONS, SPECULATION, Play, Stage, as_stream, ask_for, idle, stage, until

RECITAL = Recital([*b"the quick fox jumps over my lazy dog"], strength=3.0)
SMALL_CACHE = {"kv_cache_bytes": 48 * 4 * 264 * 2 * 4}  # 48 blocks of 4 tokens


async def refused(played: Stage, field: str, request: pb.GenerateRequest | pb.ScoreRequest) -> str:
    """Send what must be refused with a violation of `field`, and return the status's text."""
    stub = played.server.stub
    send: Any = stub.Score if isinstance(request, pb.ScoreRequest) else stub.Generate
    with pytest.raises(grpc.RpcError) as caught:
        await send(request)
    assert caught.value.code() == grpc.StatusCode.INVALID_ARGUMENT
    error = from_rpc_error(caught.value)
    assert isinstance(error, InvalidRequest)
    assert [violation.field for violation in error.violations] == [field]
    return caught.value.details() or ""


def live_objects() -> int:
    """State of requests that anything still refers to."""
    gc.collect()
    return sum(type(each) in (Sequence, Stream) for each in gc.get_objects())


async def storm_during_admission(played: Stage) -> None:
    rng = random.Random(57061)
    for number in range(60):
        request = ask_for([rng.randrange(256) for _ in range(400)], 100, ignore_eos=True, seed=1)
        call = played.server.stub.Generate(request)
        await asyncio.sleep(number / 20_000)
        call.cancel()
    stream = played.server.stub.GenerateStream(as_stream(request))
    await anext(aiter(stream))  # this one is admitted for certain
    stream.cancel()
    played.is_over = True
    await idle(played.server)
    assert played.total("requests", finish_reason="cancelled") > 0
    assert not played.loop._queued
    assert live_objects() == 0


async def timeouts_just_below_service_time(played: Stage) -> None:
    request = ask_for("the ", 40, ignore_eos=True)
    truth = played.truth(request)
    began = time.monotonic()
    await played.check_right(request)
    service_seconds = time.monotonic() - began
    rng = random.Random(7368)
    codes = []

    async def hurried() -> None:
        try:
            answer = await played.server.stub.Generate(
                request, timeout=service_seconds * rng.uniform(0.3, 1.0)
            )
        except grpc.RpcError as error:
            codes.append(error.code())
        else:
            codes.append(grpc.StatusCode.OK)
            assert list(answer.answers[0].token_ids) == truth

    for _ in range(2):
        await asyncio.gather(*(hurried() for _ in range(16)))
    assert grpc.StatusCode.DEADLINE_EXCEEDED in codes
    assert set(codes) <= {grpc.StatusCode.OK, grpc.StatusCode.DEADLINE_EXCEEDED}
    await until(lambda: played.loop.num_requests <= NUM_COMPANIONS)


async def streams_dropped_after_64_bytes(played: Stage) -> None:
    request = as_stream(ask_for("the ", 400, ignore_eos=True))
    num_received = []

    async def drop() -> None:
        call = played.server.stub.GenerateStream(request)
        num_bytes = num_tokens = 0
        async for event in call:
            num_bytes += len(event.delta.text.encode())
            num_tokens += len(event.delta.token_ids)
            if num_bytes >= 64:
                break
        call.cancel()
        num_received.append(num_tokens)

    await asyncio.gather(*(drop() for _ in range(5)))
    await until(lambda: played.total("requests", finish_reason="cancelled") == 5)
    counted = played.total("discarded_tokens", reason="cancelled")
    assert sum(num_received) <= counted <= 5 * 400
    assert played.total("generation_tokens") >= counted
    cancelled_calls = played.server.metric(
        "grpc_server_handled_total", grpc_method="GenerateStream", grpc_code="Cancelled"
    )
    assert cancelled_calls == 5


async def prompt_longer_than_the_cache(played: Stage) -> None:
    limits = played.loop.limits
    capacity = limits.max_cache_tokens
    assert capacity < limits.max_context_tokens
    small = [ask_for(f"the {i}", 12, seed=i) for i in range(6)]
    behind = [asyncio.create_task(played.check_right(each)) for each in small[:3]]
    message = await refused(played, "token_ids", ask_for([97] * (capacity + 1)))
    assert f"{capacity:,}" in message
    behind += [asyncio.create_task(played.check_right(each)) for each in small[3:]]
    largest = ask_for([*b"the "] + [97] * (capacity - 5), 100)
    answer = await played.ask(largest)
    assert answer.finish_reason in (pb.FINISH_REASON_LENGTH, pb.FINISH_REASON_EOS)
    largest.stopping.max_new_tokens = 1
    assert list(answer.token_ids) == played.truth(largest)
    await asyncio.gather(*behind)


async def logprobs_of_a_long_prompt(played: Stage) -> None:
    """The tiny model cannot run out of memory, so the rows that are projected at once are watched."""
    runner = played.loop.engine.runner
    project, largest = runner.project, 0

    def watched(hidden):  # type: ignore[no-untyped-def]
        nonlocal largest
        largest = max(largest, len(hidden))
        return project(hidden)

    runner.project = watched  # type: ignore[method-assign]
    for num_tokens in (300, 6_000):
        rng = random.Random(num_tokens)
        ids = [rng.randrange(256) for _ in range(num_tokens)]
        request = ask_for(ids, 0 if num_tokens == 300 else 2, num_prompt_logprobs=1)
        response = await played.server.stub.Generate(request)
        scored = response.prompt_logprobs
        assert [each.token_id for each in scored] == ids[1:]
        for place in (0, 1, LOGIT_PIECE, 255, 256, num_tokens - 2):
            expected = played.recital.logits(ids[: place + 1]).log_softmax(-1)
            assert scored[place].logprob == pytest.approx(expected[ids[place + 1]].item(), abs=1e-3)
            assert scored[place].top[0].token_id == int(expected.argmax())
    assert 0 < largest <= LOGIT_PIECE


async def ids_out_of_the_vocabulary(played: Stage) -> None:
    out_of_vocabulary: list[tuple[str, dict[str, Any]]] = [
        ("sampling.logit_bias", {"logit_bias": {VOCAB_SIZE: 1.0}}),
        ("sampling.logit_bias", {"logit_bias": {-1: 1.0}}),
        ("sampling.logit_bias", {"logit_bias": {2**31 - 1: -100.0}}),
        ("sampling.allowed_token_ids", {"allowed_token_ids": list(range(2_000))}),
        ("stopping.stop_token_ids", {"stop_token_ids": [VOCAB_SIZE]}),
    ]
    for field, fields in out_of_vocabulary:
        message = await refused(played, field, ask_for("the ", **fields))
        assert "ids outside the vocabulary" in message
    within = [i for i in range(200, 210) for _ in range(200)]
    answer = await played.check_right(ask_for("the ", 8, 1.0, allowed_token_ids=within, seed=26))
    assert set(answer.token_ids) <= set(within)


async def nothing_to_read_or_to_write(played: Stage) -> None:
    await refused(played, "text", pb.GenerateRequest(text=""))
    await refused(played, "token_ids", pb.GenerateRequest(token_ids=pb.TokenIds()))
    await refused(played, "text", pb.ScoreRequest(text=""))
    await refused(played, "prompt", pb.GenerateRequest())
    response = await played.server.stub.Generate(ask_for("the fox", 0, num_prompt_logprobs=0))
    (answer,) = response.answers
    assert (answer.text, list(answer.token_ids)) == ("", [])
    assert answer.finish_reason == pb.FINISH_REASON_LENGTH
    assert [each.token_id for each in response.prompt_logprobs] == [*b"he fox"]
    one = await played.server.stub.Score(pb.ScoreRequest(text="t"))
    assert (list(one.token_ids), list(one.logprobs)) == ([*b"t"], [])


async def template_that_refuses_a_system_message(played: Stage) -> None:
    messages = [pb.Message(role="system", content="be brief"), pb.Message(role="user", content="x")]
    request = pb.GenerateRequest(chat=pb.Chat(messages=messages))
    assert "System role not supported" in await refused(played, "chat", request)
    allowed = pb.GenerateRequest(chat=pb.Chat(messages=messages[1:]))
    allowed.stopping.max_new_tokens = 8
    allowed.sampling.temperature = 0.0
    answer = await played.ask(allowed)
    rendered = ask_for("<user>x<assistant>", 8)
    assert list(answer.token_ids) == played.truth(rendered)


PLAYED: list[tuple[str, Play, dict[str, Any]]] = [
    ("row18-vllm-57061-cancelled-while-admitted", storm_during_admission, {}),
    ("row19-triton-7368-timeout-below-service-time", timeouts_just_below_service_time, {}),
    ("row20-vllm-31503-streams-dropped", streams_dropped_after_64_bytes, {}),
    ("row21-vllm-39734-prompt-longer-than-cache", prompt_longer_than_the_cache, SMALL_CACHE),
    (
        "row23-vllm-5907-prompt-logprobs",
        logprobs_of_a_long_prompt,
        {"max_context_tokens": 8192, "kv_cache_bytes": 16 << 20},
    ),
    ("row26-vllm-16529-ids-out-of-vocabulary", ids_out_of_the_vocabulary, {}),
    ("row27-vllm-7283-empty-prompt-and-no-answer", nothing_to_read_or_to_write, {}),
    ("row35-sglang-1342-template-that-raises", template_that_refuses_a_system_message, {}),
]


@pytest.mark.parametrize("mode", SPECULATION)
@pytest.mark.parametrize(
    ("play", "engine"), [each[1:] for each in PLAYED], ids=[each[0] for each in PLAYED]
)
async def test_survived(play: Play, engine: dict[str, Any], mode: str) -> None:
    async with stage(mode, RECITAL, engine=engine) as played:
        await play(played)
