"""Every method over a real loopback connection, with a scripted engine behind it."""

import asyncio
import gc
import time
from collections.abc import AsyncIterator
from types import FrameType

import grpc
import pytest
from google.protobuf.message import Message

from fake_engine import EOS_ID, FakeEngine
from headway.engine.errors import InvalidRequest, Overloaded
from headway.engine.request import FinishReason, Request
from headway.protos import text_generation_pb2 as pb
from headway.server.errors import DETAILS_KEY, PUSHBACK_KEY, from_rpc_error
from loopback import Running, running

Event = pb.GenerateStreamResponse


def stream_request(text: str = "abc", max_new_tokens: int = 6, **fields: object) -> Message:
    request = pb.GenerateStreamRequest(text=text, **fields)
    request.stopping.max_new_tokens = max_new_tokens
    return request


def unary_request(text: str = "abc", max_new_tokens: int = 6, **fields: object) -> Message:
    request = pb.GenerateRequest(text=text, **fields)
    request.stopping.max_new_tokens = max_new_tokens
    return request


async def until(condition: object, seconds: float = 3.0) -> None:
    end = time.monotonic() + seconds
    while not condition():  # type: ignore[operator]
        assert time.monotonic() < end, "waited too long"
        await asyncio.sleep(0.01)


async def canary(server: Running) -> None:
    """A fresh request is answered whatever happened before."""
    answer = await server.stub.Generate(unary_request("ok", 2))
    assert answer.answers[0].text == "ok"


async def collect(call: AsyncIterator[Event], events: list[Event]) -> None:
    """Append what comes, so that what came before an error is seen too."""
    async for event in call:
        events.append(event)  # noqa: PERF401 - a comprehension would lose them


def test_both_generate_requests_have_the_same_fields() -> None:
    def shape(message: type[Message]) -> list[tuple[object, ...]]:
        fields = message.DESCRIPTOR.fields
        return [(f.name, f.number, f.type, f.message_type, f.has_presence) for f in fields]

    assert shape(pb.GenerateRequest) == shape(pb.GenerateStreamRequest)


async def test_stream_tells_start_deltas_and_end() -> None:
    async with running(FakeEngine(run=2)) as server:
        events = [e async for e in server.stub.GenerateStream(stream_request(request_id="r1"))]
        kinds = [event.WhichOneof("event") for event in events]
        assert kinds[0] == "started"
        assert kinds[-1] == "finished"
        assert set(kinds[1:-1]) == {"delta"}
        start, end = events[0].started, events[-1].finished
        assert (start.request_id, start.model, start.num_prompt_tokens) == ("r1", "tiny", 3)
        deltas = [event.delta for event in events[1:-1]]
        assert "".join(d.text for d in deltas) == "abcabc"
        assert [i for d in deltas for i in d.token_ids] == list(b"abcabc")
        assert end.finish_reason == pb.FINISH_REASON_LENGTH
        assert end.usage == pb.Usage(num_prompt_tokens=3, num_new_tokens=6)
        assert end.speculation.num_steps == 3
        assert server.metric("headway_requests_total", finish_reason="length") == 1
        assert server.metric("headway_generation_tokens_total") == 6


async def test_bytes_that_are_no_message_are_the_clients_fault() -> None:
    async with running() as server:
        for method, multi in (("Generate", "unary_unary"), ("GenerateStream", "unary_stream")):
            call = getattr(server.channel, multi)(f"/headway.v1.TextGeneration/{method}")(b"\xff")
            assert await call.code() is grpc.StatusCode.INVALID_ARGUMENT
            assert "request: is not the message that the method takes" in await call.details()


async def test_a_refused_request_is_let_go_of_at_once() -> None:
    gc.collect()
    gc.disable()
    try:
        async with running() as server:
            bad = unary_request(n=99)
            for call in (
                server.stub.Generate(bad),
                server.stub.GenerateStream(stream_request(n=99)),
            ):
                assert await call.code() is grpc.StatusCode.INVALID_ARGUMENT
            await asyncio.sleep(0.05)
            # type(), for isinstance imports what torch has put off
            left = [frame for frame in gc.get_objects() if type(frame) is FrameType]
            names = [
                f.f_code.co_name for f in left if isinstance(f.f_locals.get("request"), Message)
            ]
            assert names == []
    finally:
        gc.enable()


async def test_unary_answer_equals_the_stream_and_reports_its_seed() -> None:
    async with running() as server:
        answer = await server.stub.Generate(unary_request())
        assert answer.answers[0].text == "abcabc"
        assert answer.seed == server.engine.submitted[0].sampling.seed
        other = await server.stub.Generate(unary_request())
        assert other.seed != answer.seed
        seeded = unary_request(sampling=pb.Sampling(seed=2**64 - 1))
        assert (await server.stub.Generate(seeded)).seed == 2**64 - 1


async def test_n_answers_come_by_index_with_derived_seeds() -> None:
    async with running() as server:
        answer = await server.stub.Generate(unary_request(n=3, sampling=pb.Sampling(seed=5)))
        assert [a.index for a in answer.answers] == [0, 1, 2]
        seeds = [r.sampling.seed for r in server.engine.submitted]
        assert seeds[0] == 5
        assert len(set(seeds)) == 3
        again = await server.stub.Generate(unary_request(n=3, sampling=pb.Sampling(seed=5)))
        assert [r.sampling.seed for r in server.engine.submitted[3:]] == seeds
        assert again.answers[2].text == answer.answers[2].text


async def test_refusal_of_one_of_n_ends_the_others() -> None:
    def refuse(request: Request) -> None:
        if request.request_id.endswith("#2"):
            raise Overloaded("full", reason="requests", retry_seconds=1.0)

    async with running(FakeEngine(refuse=refuse, step_seconds=0.02)) as server:
        with pytest.raises(grpc.RpcError):
            await server.stub.Generate(unary_request(n=3, max_new_tokens=4000))
        await until(lambda: server.engine.num_requests == 0)
        assert {i for i, _ in server.engine.aborted} == {
            server.engine.submitted[0].request_id,
            server.engine.submitted[1].request_id,
        }
        await canary(server)


async def test_end_of_sequence_counts_and_its_text_is_hidden_unless_asked_for() -> None:
    script = [*b"ab", EOS_ID, *b"junk"]
    async with running(FakeEngine(lambda r: script, run=7)) as server:
        answer = (await server.stub.Generate(unary_request(max_new_tokens=7))).answers[0]
        assert (answer.text, list(answer.token_ids)) == ("ab", script[:3])
        assert answer.finish_reason == pb.FINISH_REASON_EOS
        assert answer.stop_token_id == EOS_ID
        shown = unary_request(
            max_new_tokens=7,
            stopping=pb.Stopping(include_stop=True),
            response=pb.ResponseOptions(skip_special_tokens=False),
        )
        assert (await server.stub.Generate(shown)).answers[0].text == "ab<|im_end|>"


async def test_logprobs_follow_their_tokens() -> None:
    async with running(FakeEngine(run=3)) as server:
        options = pb.ResponseOptions(num_logprobs=2, num_prompt_logprobs=1)
        request = stream_request("abcd", 7, response=options, n=2)
        events = [e async for e in server.stub.GenerateStream(request)]
        prompt = [p for e in events for p in e.prompt_logprobs.logprobs]
        assert [p.token_id for p in prompt] == list(b"bcd")  # once, not for each of n
        for event in events:
            assert [p.token_id for p in event.delta.logprobs] == list(event.delta.token_ids)
            assert all(len(p.top) == 2 for p in event.delta.logprobs)


async def test_score_reports_every_token_but_the_first() -> None:
    async with running() as server:
        answer = await server.stub.Score(pb.ScoreRequest(text="abc", num_prompt_logprobs=3))
        assert list(answer.token_ids) == list(b"abc")
        assert [p.token_id for p in answer.logprobs] == list(b"bc")
        assert server.engine.submitted[0].stopping.max_new_tokens == 0


async def test_tokenize_count_and_detokenize_agree() -> None:
    async with running() as server:
        text = "a DEF \N{HOT PEPPER}"
        ids = (await server.stub.Tokenize(pb.TokenizeRequest(text=text))).token_ids
        count = await server.stub.CountTokens(pb.CountTokensRequest(text=text))
        assert count.num_tokens == len(ids)
        back = await server.stub.Detokenize(pb.DetokenizeRequest(token_ids=ids))
        assert back.text == text
        chat = pb.Chat(messages=[pb.Message(role="user", content="hi")])
        chat.template_kwargs["mood"] = "glad"
        ids = (await server.stub.Tokenize(pb.TokenizeRequest(chat=chat))).token_ids
        assert bytes(ids).decode() == "<user>hi(glad)<assistant>"


async def test_model_info() -> None:
    async with running(default_max_new_tokens=9) as server:
        info = await server.stub.GetModelInfo(pb.GetModelInfoRequest())
        assert (info.model, info.vocab_size, info.max_context_tokens) == ("tiny", 261, 4096)
        await server.stub.Generate(pb.GenerateRequest(text="x"))
        assert (
            server.engine.submitted[0].stopping.max_new_tokens == info.default_max_new_tokens == 9
        )


async def test_cancel_in_mid_stream_frees_the_request_and_is_counted() -> None:
    """vllm#31503, #55634: aborted requests were never counted."""
    async with running() as server:
        call = server.stub.GenerateStream(stream_request(max_new_tokens=4000))
        await anext(aiter(call))
        await anext(aiter(call))
        call.cancel()
        await until(lambda: server.engine.num_requests == 0)
        await until(lambda: server.metric("headway_requests_total", finish_reason="cancelled") == 1)
        assert server.engine.aborted[0][1] is FinishReason.CANCELLED
        assert server.metric("headway_requests_running") == 0
        await canary(server)


async def test_client_that_stops_reading_holds_little_and_can_be_cancelled() -> None:
    async with running(FakeEngine(lambda r: [97] * 4000, step_seconds=0.0)) as server:
        call = server.stub.GenerateStream(stream_request(max_new_tokens=4000))
        await anext(aiter(call))
        await until(lambda: server.engine.num_requests == 0)
        messages, tokens = 0, 0
        async for event in call:
            messages += event.WhichOneof("event") == "delta"
            tokens += len(event.delta.token_ids)
            assert len(event.delta.token_ids) <= 256
        assert tokens == 4000
        assert messages < 4000


async def test_stop_string_ends_the_engines_work_though_nobody_reads() -> None:
    async with running(FakeEngine(lambda r: [97, 98] * 2000)) as server:
        call = server.stub.GenerateStream(
            stream_request(max_new_tokens=4000, stopping=pb.Stopping(stop_strings=["bab"]))
        )
        await anext(aiter(call))
        await until(lambda: server.engine.num_requests == 0)
        assert server.engine.aborted[0][1] is FinishReason.STOP_STRING
        assert "".join([event.delta.text async for event in call]) == "a"


async def test_deadline_reaches_the_engine_and_ends_the_call() -> None:
    async with running() as server:
        request = stream_request(max_new_tokens=4000)
        call = server.stub.GenerateStream(request, timeout=0.2)
        with pytest.raises(grpc.RpcError) as caught:
            _ = [event async for event in call]
        assert caught.value.code() == grpc.StatusCode.DEADLINE_EXCEEDED
        deadline = server.engine.submitted[0].deadline
        assert deadline is not None
        assert deadline < time.monotonic()
        await until(lambda: server.engine.num_requests == 0)
        await until(lambda: server.metric("headway_requests_total", finish_reason="deadline") == 1)
        await canary(server)


async def test_calls_without_a_deadline_get_the_servers_own() -> None:
    async with running(max_request_seconds=0.1) as server:
        answer = (await server.stub.Generate(unary_request(max_new_tokens=4000))).answers[0]
        assert answer.finish_reason == pb.FINISH_REASON_DEADLINE
        assert answer.text.startswith("abcabc")


async def test_abort_ends_a_stream_with_what_it_has() -> None:
    async with running() as server:
        call = server.stub.GenerateStream(stream_request(max_new_tokens=4000, request_id="mine"))
        await anext(aiter(call))
        await server.stub.Abort(pb.AbortRequest(request_ids=["mine", "never heard of"]))
        events = [event async for event in call]
        assert events[-1].finished.finish_reason == pb.FINISH_REASON_CANCELLED
        assert await call.code() == grpc.StatusCode.OK
        await server.stub.Abort(pb.AbortRequest(request_ids=["mine"]))
        await canary(server)


async def test_request_id_is_unique_among_the_live_and_free_afterwards() -> None:
    async with running() as server:
        call = server.stub.GenerateStream(stream_request(max_new_tokens=4000, request_id="mine"))
        await anext(aiter(call))
        with pytest.raises(grpc.RpcError) as caught:
            await server.stub.Generate(unary_request(request_id="mine"))
        error = from_rpc_error(caught.value)
        assert isinstance(error, InvalidRequest)
        assert error.violations[0].field == "request_id"
        call.cancel()
        await until(lambda: server.engine.num_requests == 0)
        await until(lambda: server.app._live.is_idle)  # type: ignore[union-attr]
        await server.stub.Generate(unary_request(request_id="mine"))


async def test_full_queue_says_when_to_try_again() -> None:
    def refuse(request: Request) -> None:
        raise Overloaded("256 requests wait", reason="requests", retry_seconds=1.5)

    async with running(FakeEngine(refuse=refuse)) as server:
        with pytest.raises(grpc.RpcError) as caught:
            await server.stub.Generate(unary_request())
        assert caught.value.code() == grpc.StatusCode.RESOURCE_EXHAUSTED
        trailers = dict(caught.value.trailing_metadata())
        assert trailers[PUSHBACK_KEY] == "1500"
        assert len(trailers[DETAILS_KEY]) < 4096
        error = from_rpc_error(caught.value)
        assert isinstance(error, Overloaded)
        assert (error.reason, error.retry_seconds) == ("requests", 1.5)
        assert server.metric("headway_admission_rejections_total", reason="requests") == 1


async def test_client_cannot_bring_a_template_of_its_own() -> None:
    async with running() as server:
        chat = pb.Chat(messages=[pb.Message(role="user", content="x")])
        chat.template_kwargs["chat_template"] = "{{ 1 }}"
        with pytest.raises(grpc.RpcError) as caught:
            await server.stub.CountTokens(pb.CountTokensRequest(chat=chat))
        error = from_rpc_error(caught.value)
        assert isinstance(error, InvalidRequest)
        assert error.violations[0].field == "chat.template_kwargs"


async def test_unknown_model_is_not_found() -> None:
    async with running() as server:
        with pytest.raises(grpc.RpcError) as caught:
            await server.stub.Generate(unary_request(model="gpt-9"))
        assert caught.value.code() == grpc.StatusCode.NOT_FOUND
        assert "'gpt-9'" in (caught.value.details() or "")
        await server.stub.Generate(unary_request(model="tiny"))


async def test_engine_that_fails_one_request_finishes_it_and_says_why() -> None:
    class Failing(FakeEngine):
        def abort(self, request_id: str, reason: FinishReason = FinishReason.CANCELLED) -> None:
            super().abort(request_id, FinishReason.ERROR)

    async with running(Failing()) as server:
        call = server.stub.GenerateStream(stream_request(max_new_tokens=4000, request_id="r"))
        await anext(aiter(call))
        await server.stub.Abort(pb.AbortRequest(request_ids=["r"]))
        events: list[Event] = []
        with pytest.raises(grpc.RpcError) as caught:
            await collect(call, events)
        assert events[-1].finished.finish_reason == pb.FINISH_REASON_ERROR
        assert caught.value.code() == grpc.StatusCode.INTERNAL
        await canary(server)


async def test_fault_of_ours_shows_an_id_that_the_log_has(caplog: pytest.LogCaptureFixture) -> None:
    def script(request: Request) -> list[int]:
        if len(request.prompt_ids) == 5:
            raise RuntimeError("secret detail")
        return list(b"ok")

    async with running(FakeEngine(script)) as server:
        with pytest.raises(grpc.RpcError) as caught:
            await server.stub.Generate(unary_request("12345"))
        assert caught.value.code() == grpc.StatusCode.INTERNAL
        details = caught.value.details() or ""
        assert "secret" not in details
        request_id = details.rpartition("request_id=")[2]
        assert request_id in caplog.text
        assert "secret detail" in caplog.text
        await canary(server)
