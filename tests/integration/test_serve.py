"""The whole server on loopback with a real engine on the tiny model behind it."""

import asyncio
import gc
import random
import resource
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from pathlib import Path

import grpc
import pytest

from fake_engine import EOS_ID, byte_tokenizer
from headway.engine.errors import InvalidRequest
from headway.engine.loop import EngineLoop
from headway.engine.suffix import SuffixDrafter
from headway.protos import text_generation_pb2 as pb
from headway.server.errors import from_rpc_error
from loopback import Running, running
from replay import BATCH, OFF, SPECULATION, idle
from tiny_engine import SMALL, tiny_engine


@asynccontextmanager
async def real(speculation: str = "on", **settings: object) -> AsyncIterator[Running]:
    """Serve the tiny model; "in a batch" keeps two other requests running beside the test's own."""
    drafter = None if speculation == OFF else SuffixDrafter()
    engine = tiny_engine(drafter, SMALL, (EOS_ID,), vocab_size=261, eos_token_id=EOS_ID)
    loop = EngineLoop(engine, "tiny")
    async with running(loop, **settings) as server:
        company = (
            [asyncio.create_task(keep_busy(server, seed)) for seed in range(2)]
            if speculation == BATCH
            else []
        )
        yield server
        for task in company:
            task.cancel()
        await asyncio.gather(*company, return_exceptions=True)
        await idle(server)
        assert engine.pool.num_active == 0 or loop.failure


async def keep_busy(server: Running, seed: int) -> None:
    while True:
        await server.stub.Generate(request(f"company {seed} " * 5, 30, seed=seed))


def request(
    text: str = "abcabcabc", max_new_tokens: int = 24, seed: int = 1, **sampling: object
) -> pb.GenerateRequest:
    return pb.GenerateRequest(
        text=text,
        sampling=pb.Sampling(seed=seed, **sampling),  # type: ignore[arg-type]
        stopping=pb.Stopping(max_new_tokens=max_new_tokens),
    )


async def canary(server: Running) -> None:
    answer = await server.stub.Generate(request("ok", 2))
    assert answer.answers[0].usage.num_new_tokens <= 2


LAWS: list[dict[str, object]] = [
    {"temperature": 0.0},
    {"temperature": 0.7, "min_p": 0.05},
    {"temperature": 1.0, "frequency_penalty": 1.0, "logit_bias": {97: 5.0}},
]


@pytest.mark.parametrize("law", LAWS)
async def test_answers_are_the_same_with_and_without_speculation(law: dict[str, object]) -> None:
    answers = []
    for speculation in SPECULATION:
        async with real(speculation) as server:
            sent = request("the cat the cat the cat", 40, **law)
            answers.append((await server.stub.Generate(sent)).answers[0])
    assert len({tuple(answer.token_ids) for answer in answers}) == 1
    assert len({answer.text for answer in answers}) == 1
    assert answers[0].speculation.num_drafted == 0


async def test_stream_equals_the_unary_answer_whatever_text_comes() -> None:
    async with real() as server:
        for seed in range(5):
            sent = request(seed=seed, temperature=1.5)
            unary = (await server.stub.Generate(sent)).answers[0]
            streamed = pb.GenerateStreamRequest()
            streamed.MergeFromString(sent.SerializeToString())
            events = [event async for event in server.stub.GenerateStream(streamed)]
            ids = [i for event in events for i in event.delta.token_ids]
            assert ids == list(unary.token_ids)
            assert "".join(event.delta.text for event in events) == unary.text
            shown = [i for i in ids if i != EOS_ID]
            assert unary.text == byte_tokenizer().decode(shown)


async def test_seeds_hold_between_servers_and_between_the_n() -> None:
    async with real() as server:
        first = await server.stub.Generate(request(seed=9, temperature=1.0))
        sent = request(seed=9, temperature=1.0)
        sent.n = 3
        several = await server.stub.Generate(sent)
        assert several.answers[0].token_ids == first.answers[0].token_ids
        assert len({tuple(answer.token_ids) for answer in several.answers}) == 3


def bad(field: str, **parts: object) -> tuple[str, pb.GenerateRequest]:
    return field, pb.GenerateRequest(**{"text": "x", **parts})  # type: ignore[arg-type]


BAD = [
    bad("text", text=""),
    bad("token_ids", token_ids={"ids": []}),
    bad("token_ids", token_ids={"ids": [5, -3]}),
    bad("token_ids", token_ids={"ids": [5, 4_000_000]}),
    bad("text", text="x" * 600),
    bad("sampling.temperature", sampling={"temperature": 1e-4}),
    bad("sampling.temperature", sampling={"temperature": float("nan")}),
    bad("sampling.top_p", sampling={"top_p": float("inf")}),
    bad("sampling.top_k", sampling={"top_k": -1}),
    bad("sampling.logit_bias", sampling={"logit_bias": {4_000_000: 1.0}}),
    bad("sampling.allowed_token_ids", sampling={"allowed_token_ids": [300] * 2000}),
    bad("stopping.max_new_tokens", stopping={"max_new_tokens": -1}),
    bad("stopping.min_new_tokens", stopping={"min_new_tokens": -1}),
    bad("stopping.stop_token_ids", stopping={"stop_token_ids": [-1]}),
    bad("speculation.max_draft_tokens", speculation={"max_draft_tokens": -1}),
    bad("cache_salt", cache_salt="s" * 1000),
]


async def test_bad_input_names_its_field_and_harms_nobody() -> None:
    """vllm#7283, #5822, PR 16529, #39734: each of these killed or blocked an engine somewhere."""
    async with real(BATCH) as server:
        for field, sent in BAD:
            with pytest.raises(grpc.RpcError) as caught:
                await server.stub.Generate(sent)
            error = from_rpc_error(caught.value)
            assert isinstance(error, InvalidRequest), caught.value
            assert field in [violation.field for violation in error.violations]
        await canary(server)


@pytest.mark.parametrize("speculation", SPECULATION)
async def test_cancels_and_aborts_leave_nothing_behind(speculation: str) -> None:
    rng = random.Random(3)
    async with real(speculation) as server:
        calls = []
        for number in range(24):
            sent = pb.GenerateStreamRequest(
                request_id=f"r{number}",
                text="abc" * rng.randint(1, 60),
                stopping=pb.Stopping(max_new_tokens=rng.randint(1, 200), ignore_eos=True),
            )
            calls.append(server.stub.GenerateStream(sent))
            await asyncio.sleep(rng.random() / 100)
            if number % 3 == 0:
                rng.choice(calls).cancel()
            if number % 3 == 1:
                await server.stub.Abort(pb.AbortRequest(request_ids=[f"r{rng.randrange(24)}"]))
        for call in calls:
            if not call.cancelled():
                try:
                    events = [event async for event in call]
                except asyncio.CancelledError:
                    continue
                assert events[-1].HasField("finished")
        await canary(server)


async def test_deadline_ends_a_request_within_a_step() -> None:
    async with real() as server:
        sent = request(max_new_tokens=400)
        sent.stopping.ignore_eos = True
        with pytest.raises(grpc.RpcError) as caught:
            await server.stub.Generate(sent, timeout=0.05)
        assert caught.value.code() == grpc.StatusCode.DEADLINE_EXCEEDED
        await idle(server)
        await canary(server)


async def test_score_and_logprobs_agree() -> None:
    async with real() as server:
        sent = request(temperature=0.0, max_new_tokens=4)
        sent.response.num_logprobs = 2
        sent.stopping.ignore_eos = True
        answer = (await server.stub.Generate(sent)).answers[0]
        ids = [*b"abcabcabc", *answer.token_ids]
        scored = await server.stub.Score(pb.ScoreRequest(token_ids=pb.TokenIds(ids=ids)))
        assert list(scored.token_ids) == ids
        tail = [p.logprob for p in scored.logprobs[-4:]]
        assert tail == pytest.approx([p.logprob for p in answer.logprobs], abs=1e-4)
        assert all(p.rank == 1 for p in scored.logprobs[-4:])


async def test_death_of_the_engines_thread_reaches_clients_and_health() -> None:
    async with real() as server:
        call = server.stub.GenerateStream(
            pb.GenerateStreamRequest(
                text="abc", stopping=pb.Stopping(max_new_tokens=400, ignore_eos=True)
            )
        )
        await anext(aiter(call))
        server.engine.engine.step = None  # type: ignore[attr-defined]
        message = await asyncio.wait_for(server.app.health.watch(), 3)
        await server.app.fail(message)
        with pytest.raises(grpc.RpcError) as caught:
            _ = [event async for event in call]
        assert caught.value.code() == grpc.StatusCode.UNAVAILABLE
        assert not server.app.health.is_alive


@pytest.mark.slow
async def test_soak_of_2000_short_requests_with_random_cancels_leaks_nothing() -> None:
    """vllm#57061, triton#7368: state that cancelled requests left behind grew for ever."""
    rng = random.Random(5)

    async def one(server: Running, number: int) -> None:
        sent = request("soak " * rng.randint(1, 8), rng.randint(1, 12), seed=number)
        call = server.stub.Generate(sent)
        if rng.random() < 0.3:
            await asyncio.sleep(rng.random() / 50)
            call.cancel()
        try:
            await call
        except asyncio.CancelledError:
            assert call.cancelled()

    async with real() as server:
        sizes = []
        for start in range(0, 2000, 20):
            await asyncio.gather(*(one(server, start + i) for i in range(20)))
            if start % 400 == 380:
                await idle(server)
                gc.collect()
                sizes.append(resident_bytes())
        await canary(server)
        assert server.metric("headway_requests_running") == 0
        assert server.app.metrics._last_output == {}
        assert sizes[-1] - sizes[1] < 20 * 2**20, sizes


def resident_bytes() -> int:
    return int(Path("/proc/self/statm").read_text().split()[1]) * resource.getpagesize()
