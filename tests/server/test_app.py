"""The server as a process: health, drain, death, ports, connections."""

import asyncio
import signal
import socket
import time
import urllib.error
import urllib.request
from collections.abc import Callable
from contextlib import asynccontextmanager

import grpc
import grpc.aio
import pytest
from grpc_health.v1 import health_pb2, health_pb2_grpc
from grpc_reflection.v1alpha import reflection_pb2, reflection_pb2_grpc

from fake_engine import FakeEngine, served
from headway.engine.errors import EngineStopped, ModelLoadError, UsageError
from headway.protos import text_generation_pb2 as pb
from headway.protos import text_generation_pb2_grpc as pb_grpc
from headway.server import app as app_module
from headway.server.app import App, serve
from headway.server.config import ServeConfig
from headway.server.engine_door import ServedModel
from headway.server.errors import from_rpc_error
from headway.server.health import NOT_SERVING, SERVICE_NAME, SERVING
from loopback import LOCAL, Running, running

LONG = 4000


def request(max_new_tokens: int = 3, **fields: object) -> pb.GenerateStreamRequest:
    return pb.GenerateStreamRequest(
        text="abc", stopping=pb.Stopping(max_new_tokens=max_new_tokens), **fields
    )


def free_port() -> int:
    with socket.socket() as held:
        held.bind(("127.0.0.1", 0))
        port: int = held.getsockname()[1]
        return port


async def until(condition: Callable[[], bool], seconds: float = 3.0) -> None:
    end = time.monotonic() + seconds
    while not condition():
        assert time.monotonic() < end, "waited too long"
        await asyncio.sleep(0.01)


async def check(server: Running, service: str) -> int:
    stub = health_pb2_grpc.HealthStub(server.channel)
    answer = await stub.Check(health_pb2.HealthCheckRequest(service=service))
    return int(answer.status)


async def get(port: int, path: str) -> tuple[int, str]:
    def read() -> tuple[int, str]:
        try:
            with urllib.request.urlopen(f"http://127.0.0.1:{port}{path}", timeout=5) as answer:
                return answer.status, answer.read().decode()
        except urllib.error.HTTPError as error:
            with error:
                return error.code, error.read().decode()

    return await asyncio.to_thread(read)


async def test_health_turns_serving_only_after_the_model_is_loaded() -> None:
    async with running(opened=False) as server:
        assert await check(server, "") == SERVING
        assert await check(server, SERVICE_NAME) == NOT_SERVING
        call = server.stub.GenerateStream(request())
        with pytest.raises(grpc.RpcError) as caught:
            await anext(aiter(call))
        assert isinstance(from_rpc_error(caught.value), EngineStopped)
        assert "loading" in (caught.value.details() or "")
        server.app.open(served(server.engine))
        await server.app.health.refresh()
        assert await check(server, SERVICE_NAME) == SERVING
        assert [e async for e in server.stub.GenerateStream(request())]


async def test_every_watcher_hears_of_a_change_though_another_has_left() -> None:
    async with running() as server:
        stub = health_pb2_grpc.HealthStub(server.channel)
        asked = health_pb2.HealthCheckRequest(service=SERVICE_NAME)
        leaves, stays = stub.Watch(asked), stub.Watch(asked)
        assert (await anext(aiter(leaves))).status == SERVING
        assert (await anext(aiter(stays))).status == SERVING
        leaves.cancel()
        await asyncio.sleep(0.05)
        server.app.health.is_draining = True
        await server.app.health.refresh()
        answer = await asyncio.wait_for(anext(aiter(stays)), 3)
        assert answer.status == NOT_SERVING
        stays.cancel()


async def test_stalled_engine_is_not_serving_and_an_idle_one_is() -> None:
    async with running(max_stall_seconds=0.05) as server:
        server.engine.last_step_monotonic -= 100
        await server.app.health.refresh()
        assert await check(server, "") == SERVING  # nothing to do is no stall
        call = server.stub.GenerateStream(request(LONG))
        await anext(aiter(call))
        server.engine._step_seconds = 0.5
        await asyncio.sleep(0.2)
        await server.app.health.refresh()
        assert await check(server, "") == NOT_SERVING
        server.engine._step_seconds = 0.001
        call.cancel()
        await until(lambda: server.engine.num_requests == 0)


async def test_drain_finishes_what_runs_and_refuses_what_is_new() -> None:
    async with running(FakeEngine(step_seconds=0.005)) as server:
        call = server.stub.GenerateStream(request(60))
        await anext(aiter(call))
        draining = asyncio.create_task(server.app.drain(0.05))
        await until(lambda: server.engine._draining)
        assert await check(server, "") == NOT_SERVING
        assert await check(server, SERVICE_NAME) == NOT_SERVING
        with pytest.raises(grpc.RpcError) as caught:
            await anext(aiter(server.stub.GenerateStream(request())))
        assert caught.value.code() == grpc.StatusCode.UNAVAILABLE
        events = [event async for event in call]
        assert events[-1].finished.usage.num_new_tokens == 60
        await asyncio.wait_for(draining, 3)


async def test_requests_that_come_during_the_grace_are_served() -> None:
    """vllm PR 56886: routers go on sending for seconds after SIGTERM."""
    async with running() as server:
        draining = asyncio.create_task(server.app.drain(0.5))
        await until(lambda: server.app.health.is_draining)
        assert [e async for e in server.stub.GenerateStream(request())]
        await draining


async def test_drain_aborts_what_does_not_finish_in_time() -> None:
    async with running(FakeEngine(step_seconds=0.005), drain_seconds=0.1) as server:
        call = server.stub.GenerateStream(request(LONG))
        started = await anext(aiter(call))
        assert started.HasField("started")
        await server.app.drain(0.0)
        events: list[pb.GenerateStreamResponse] = []
        with pytest.raises(grpc.RpcError) as caught:
            events.extend([event async for event in call])
        assert caught.value.code() == grpc.StatusCode.UNAVAILABLE
        assert "shutting down" in (caught.value.details() or "")


@pytest.mark.parametrize("silent_death", [False, True])
async def test_death_of_the_engine_ends_streams_and_health(silent_death: bool) -> None:
    async with running(FakeEngine(silent_death=silent_death)) as server:
        call = server.stub.GenerateStream(request(LONG))
        await anext(aiter(call))
        server.engine.die("out of memory")
        message = await asyncio.wait_for(server.app.health.watch(), 3)
        assert message == "out of memory"
        await server.app.fail(message)
        with pytest.raises(grpc.RpcError) as caught:
            _ = [event async for event in call]
        assert caught.value.code() == grpc.StatusCode.UNAVAILABLE
        assert "out of memory" in (caught.value.details() or "")
        assert await check(server, "") == NOT_SERVING
        ended = {"api": "generate_stream", "finish_reason": "error"}
        assert server.metric("headway_requests_total", **ended) == 1
        assert server.app.metrics._last_output == {}


def test_the_argument_that_lets_clients_ping_is_the_one_that_works() -> None:
    """gRPC ignores min_recv_ping_interval_without_data_ms without a word."""
    given = dict(app_module.options(ServeConfig()))
    assert given["grpc.http2.max_ping_strikes"] == 0
    assert not [name for name in given if "min_recv_ping" in name]
    assert given["grpc.so_reuseport"] == 0
    assert given["grpc.max_connection_age_ms"] == 600_000
    never = dict(app_module.options(ServeConfig(max_connection_age_seconds=0)))
    assert "grpc.max_connection_age_ms" not in never


async def test_message_sizes_are_capped_on_the_way_in_and_not_out() -> None:
    """pytorch/serve#1219: 4 MiB clients broke on big answers; an unlimited server is a risk."""
    async with running(max_message_bytes=100_000) as server:
        with pytest.raises(grpc.RpcError) as caught:
            await server.stub.CountTokens(pb.CountTokensRequest(text="x" * 200_000))
        assert caught.value.code() == grpc.StatusCode.RESOURCE_EXHAUSTED
        assert "larger than max" in (caught.value.details() or "")
        ids = pb.TokenIds(ids=[97] * 4000)
        options = pb.ResponseOptions(num_prompt_logprobs=20)
        big = pb.GenerateRequest(
            token_ids=ids, response=options, stopping=pb.Stopping(max_new_tokens=1)
        )
        answer = await server.stub.Generate(big)
        assert answer.ByteSize() > 500_000
        cap = [("grpc.max_receive_message_length", 100_000)]
        async with grpc.aio.insecure_channel(server.target, options=cap) as channel:
            stub = pb_grpc.TextGenerationStub(channel)
            with pytest.raises(grpc.RpcError) as caught:
                await stub.Generate(big)  # type: ignore[misc]
            assert caught.value.code() == grpc.StatusCode.RESOURCE_EXHAUSTED
            streamed = pb.GenerateStreamRequest()
            streamed.MergeFromString(big.SerializeToString())
            events = [e async for e in stub.GenerateStream(streamed)]  # type: ignore[attr-defined]
            assert sum(len(e.prompt_logprobs.logprobs) for e in events) == 3999


async def services(server: Running) -> list[str]:
    stub = reflection_pb2_grpc.ServerReflectionStub(server.channel)
    asked = reflection_pb2.ServerReflectionRequest(list_services="")
    async for answer in stub.ServerReflectionInfo(iter([asked])):
        return [service.name for service in answer.list_services_response.service]
    return []


async def test_reflection_lists_the_services_unless_switched_off() -> None:
    async with running() as server:
        assert {SERVICE_NAME, "grpc.health.v1.Health"} <= set(await services(server))
    async with running(reflection=False) as server:
        with pytest.raises(grpc.RpcError) as caught:
            await services(server)
        assert caught.value.code() == grpc.StatusCode.UNIMPLEMENTED


async def test_http_probes_and_metrics() -> None:
    async with running(opened=False, metrics_port=0) as server:
        port = server.app.metrics_port
        assert await get(port, "/healthz") == (200, "ok\n")
        assert (await get(port, "/readyz"))[0] == 503
        assert (
            'headway_engine_state{model="tiny",state="loading"} 1.0'
            in (await get(port, "/metrics"))[1]
        )
        server.app.open(served(server.engine))
        await server.app.health.refresh()
        assert await get(port, "/readyz") == (200, "ok\n")
        assert (await get(port, "/nothing"))[0] == 404
        server.engine.die("gone")
        await server.app.health.watch()
        assert (await get(port, "/healthz"))[0] == 503


@pytest.mark.parametrize("field", ["port", "metrics_port"])
async def test_port_in_use_is_one_clear_line(field: str) -> None:
    with socket.socket() as held:
        held.bind(("127.0.0.1", 0))
        held.listen()
        port = held.getsockname()[1]
        config = ServeConfig(**{**LOCAL, field: port})  # type: ignore[arg-type]

        def never(observe: object) -> ServedModel:
            raise AssertionError("ports come before the model")

        with pytest.raises(UsageError, match=rf"cannot listen on 127.0.0.1:{port}: .* \({field};"):
            await serve(config, "tiny", never)


async def test_two_servers_never_share_a_port() -> None:
    async with running() as server:
        other = App(ServeConfig(**{**LOCAL, "port": server.app.port}), "tiny")  # type: ignore[arg-type]
        with pytest.raises(UsageError):
            await other.start()
        await other.stop()


@asynccontextmanager
async def serving(engine: FakeEngine, **settings: object):  # type: ignore[no-untyped-def]
    """Run `serve` as a command would, and yield its task and a stub."""
    config = ServeConfig(**{**LOCAL, "port": free_port(), **settings})  # type: ignore[arg-type]
    task = asyncio.create_task(serve(config, "tiny", lambda observe: served(engine)))
    async with grpc.aio.insecure_channel(f"127.0.0.1:{config.port}") as channel:
        await asyncio.wait_for(channel.channel_ready(), 5)
        await until(lambda: engine.ready)
        yield task, pb_grpc.TextGenerationStub(channel)
    assert task.done()


async def test_sigterm_drains_and_exits_0() -> None:
    engine = FakeEngine(step_seconds=0.005)
    async with serving(engine) as (task, stub):
        call = stub.GenerateStream(request(40))
        await anext(aiter(call))
        signal.raise_signal(signal.SIGTERM)
        events = [event async for event in call]
        assert events[-1].finished.usage.num_new_tokens == 40
        assert await asyncio.wait_for(task, 5) == 0


async def test_second_signal_stops_at_once() -> None:
    async with serving(FakeEngine(step_seconds=0.005), drain_seconds=60.0) as (task, stub):
        call = stub.GenerateStream(request(LONG))
        await anext(aiter(call))
        signal.raise_signal(signal.SIGTERM)
        await asyncio.sleep(0.1)
        assert not task.done()
        signal.raise_signal(signal.SIGINT)
        assert await asyncio.wait_for(task, 5) == 1
        with pytest.raises(grpc.RpcError):
            _ = [event async for event in call]


async def test_engine_death_ends_the_process_with_1() -> None:
    engine = FakeEngine()
    async with serving(engine) as (task, stub):
        call = stub.GenerateStream(request(LONG))
        await anext(aiter(call))
        engine.die("out of memory")
        with pytest.raises(grpc.RpcError) as caught:
            _ = [event async for event in call]
        assert caught.value.code() == grpc.StatusCode.UNAVAILABLE
        assert await asyncio.wait_for(task, 5) == 1


async def test_a_model_that_cannot_be_loaded_ends_it() -> None:
    def load(observe: object) -> ServedModel:
        raise ModelLoadError("no such model: smolm2; near ones: smollm2-135m")

    config = ServeConfig(**LOCAL)  # type: ignore[arg-type]
    with pytest.raises(ModelLoadError, match="near ones: smollm2-135m"):
        await serve(config, "tiny", load)


async def test_signal_while_the_model_loads_ends_at_once() -> None:
    def load(observe: object) -> ServedModel:
        time.sleep(0.6)
        return served(FakeEngine())

    task = asyncio.create_task(serve(ServeConfig(**LOCAL), "tiny", load))  # type: ignore[arg-type]
    await asyncio.sleep(0.1)
    began = time.monotonic()
    signal.raise_signal(signal.SIGTERM)
    assert await asyncio.wait_for(task, 3) == 0
    assert time.monotonic() - began < 0.4
    await asyncio.sleep(0.6)  # the thread's late result is nobody's
