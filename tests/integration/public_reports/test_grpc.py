"""Public bug reports about gRPC itself: pings, event loops, forks, sizes, signals. Speculation is on."""

import asyncio
import signal
import socket
import subprocess
import threading
from typing import Any

import grpc
import grpc.aio
import pytest

from fake_engine import served
from headway.protos import text_generation_pb2 as pb
from headway.protos import text_generation_pb2_grpc as pb_grpc
from headway.server.app import serve
from headway.server.client import Client
from headway.server.config import ServeConfig
from loopback import LOCAL
from reciting import Recital
from replay import BATCH, ON, as_stream, ask_for, recital_loop, stage, truth_of, until

RECITAL = Recital([*b"the quick fox jumps over my lazy dog"], strength=3.0)


@pytest.mark.slow
async def test_row29_vllm_55102_pings_on_silent_calls_and_idle_connections() -> None:
    """gRPC pings once a second at most, and by default its server hangs up at the fourth ping."""
    pings = [
        ("grpc.keepalive_time_ms", 1000),
        ("grpc.http2.max_pings_without_data", 0),
        ("grpc.keepalive_permit_without_calls", 1),
        ("grpc.use_local_subchannel_pool", 1),
    ]
    # Steps of six seconds: the call is silent from its start to its one answer.
    async with stage(BATCH, RECITAL, step_seconds=6.0) as played:
        target = played.server.target
        async with (
            grpc.aio.insecure_channel(target, options=pings) as busy,
            grpc.aio.insecure_channel(target, options=pings) as unused,
        ):
            await unused.channel_ready()
            request = ask_for("the ", 8)
            answer = (await pb_grpc.TextGenerationStub(busy).Generate(request)).answers[0]
            assert list(answer.token_ids) == played.truth(request)
            assert unused.get_state() is grpc.ChannelConnectivity.READY


async def test_row30_grpc_42357_a_second_event_loop_in_the_process() -> None:
    """BlockingIOError from grpc.aio's poller when two loops shared it; answers must not suffer."""
    requests = [ask_for("the ", 24, 1.0, seed=seed) for seed in range(4)]
    heard: list[list[int]] = []

    async def from_another_loop(target: str) -> None:
        async with grpc.aio.insecure_channel(target) as channel:
            stub = pb_grpc.TextGenerationStub(channel)
            answers = await asyncio.gather(*(stub.Generate(each) for each in requests))
            heard.extend(list(answer.answers[0].token_ids) for answer in answers)

    async with stage(BATCH, RECITAL) as played:
        target = played.server.target
        thread = threading.Thread(target=lambda: asyncio.run(from_another_loop(target)))
        thread.start()
        await asyncio.gather(*map(played.check_right, requests))
        await asyncio.to_thread(thread.join, 10)
        assert heard == [played.truth(each) for each in requests]


async def test_row30_grpc_25364_clients_in_threads() -> None:
    def ask(target: str) -> list[int]:
        with Client(target) as client:
            events = client.stream([*b"the "], max_new_tokens=24, temperature=0.0)
            return [i for event in events for i in event.delta.token_ids]

    async with stage(BATCH, RECITAL) as played:
        calls = [asyncio.to_thread(ask, played.server.target) for _ in range(4)]
        for token_ids in await asyncio.gather(*calls):
            assert token_ids == played.truth(ask_for("the ", 24))


async def test_row30_grpc_12455_children_started_in_mid_stream() -> None:
    """A child process is a fork after gRPC was imported; compiling a kernel starts one."""
    request = ask_for("the ", 200, ignore_eos=True)
    async with stage(BATCH, RECITAL, step_seconds=0.005) as played:
        token_ids: list[int] = []
        num_children = 0
        async for event in played.server.stub.GenerateStream(as_stream(request)):
            token_ids += event.delta.token_ids
            if event.HasField("delta") and num_children < 8:
                num_children += 1
                subprocess.run(["true"], check=True, timeout=10)
        assert num_children > 3
        assert token_ids == played.truth(request)


async def test_row31_pytorch_serve_1219_request_of_200_mb() -> None:
    async with stage(BATCH, RECITAL) as played:
        with pytest.raises(grpc.RpcError) as caught:
            await played.server.stub.Generate(pb.GenerateRequest(text="x" * 200_000_000))
        assert caught.value.code() == grpc.StatusCode.RESOURCE_EXHAUSTED
        assert "larger than max" in (caught.value.details() or "")


@pytest.mark.slow
async def test_row31_trtllm_13519_reply_beyond_a_clients_4_mib() -> None:
    """Streams stay readable for a client with gRPC's default of 4 MiB; ours reads the whole."""
    options: dict[str, Any] = {
        "max_new_tokens": 1,
        "temperature": 0.0,
        "num_prompt_logprobs": 20,
    }
    ids = [*b"quick fox "] * 2_200
    engine: dict[str, Any] = {"max_context_tokens": 1 << 15, "kv_cache_bytes": 1 << 26}
    request = ask_for(ids, **options)
    async with stage(BATCH, RECITAL, engine=engine) as played:
        with pytest.raises(grpc.RpcError) as caught:
            await played.server.stub.Generate(request)
        assert caught.value.code() == grpc.StatusCode.RESOURCE_EXHAUSTED
        scored = [
            each
            async for event in played.server.stub.GenerateStream(as_stream(request))
            for each in event.prompt_logprobs.logprobs
        ]
        with Client(played.server.target) as client:
            whole = await asyncio.to_thread(lambda: client.generate(ids, **options))
        assert whole.ByteSize() > 4 << 20
        assert [each.token_id for each in scored] == ids[1:]
        assert [each.token_id for each in whole.prompt_logprobs] == ids[1:]
        assert list(whole.answers[0].token_ids) == played.truth(request)


async def test_row33_smg_1172_sigterm_in_mid_stream_and_a_call_one_second_later() -> None:
    loop = recital_loop(RECITAL, ON, step_seconds=0.04)
    port = free_port()
    config = ServeConfig(**{**LOCAL, "port": port, "drain_grace_seconds": 1.3})  # type: ignore[arg-type] # as LOCAL has them
    exit_status = asyncio.create_task(serve(config, "tiny", lambda observe: served(loop)))
    async with grpc.aio.insecure_channel(f"127.0.0.1:{port}") as channel:
        await asyncio.wait_for(channel.channel_ready(), 5)
        stub = pb_grpc.TextGenerationStub(channel)
        await until(lambda: loop.ready)
        requests = [ask_for(f"the {i}", 330, i % 2, seed=i, ignore_eos=True) for i in range(3)]
        streams = [stub.GenerateStream(as_stream(each)) for each in requests]
        for stream in streams:
            await anext(aiter(stream))
        signal.raise_signal(signal.SIGTERM)
        await asyncio.sleep(1.0)
        late = ask_for("late", 5)
        answer = (await stub.Generate(late)).answers[0]
        assert list(answer.token_ids) == truth_of(RECITAL, late)
        await asyncio.sleep(0.6)
        with pytest.raises(grpc.RpcError) as caught:
            await stub.Generate(late)
        assert caught.value.code() == grpc.StatusCode.UNAVAILABLE
        assert "another replica" in (caught.value.details() or "")
        assert loop.num_requests == 3, "the streams ended before the drain could cut them"
        for stream, request in zip(streams, requests, strict=True):
            token_ids = [i async for event in stream for i in event.delta.token_ids]
            assert token_ids == truth_of(RECITAL, request)
    assert await asyncio.wait_for(exit_status, 5) == 0
    left = loop.snapshot()
    assert (left.num_running, left.num_waiting, left.num_active_blocks) == (0, 0, 0)


def free_port() -> int:
    with socket.socket() as held:
        held.bind(("127.0.0.1", 0))
        port: int = held.getsockname()[1]
        return port
