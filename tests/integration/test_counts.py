"""A load of every kind on the whole server: what /metrics says adds up to what the clients saw."""

import asyncio
import shutil
import subprocess
import time
import urllib.request
from collections import Counter
from dataclasses import dataclass, field, replace

import grpc
import pytest
import torch

from fake_engine import EOS_ID
from headway.engine.config import EngineConfig
from headway.engine.loop import EngineLoop
from headway.engine.suffix import SuffixDrafter
from headway.protos import text_generation_pb2 as pb
from loopback import Running, running
from tiny_engine import SMALL, tiny_engine

POISON = 0xFF
"""A prompt with this token makes logits that are not finite."""
TIGHT = replace(SMALL, kv_cache_bytes=104 << 10)
"""104 blocks of 4 tokens: the load preempts."""
GAUGES = ("requests_running", "requests_waiting", "queued_prompt_tokens", "kv_cache_usage_ratio")
METHODS = ("Generate", "GenerateStream", "Score")


@dataclass
class Seen:
    """What the clients asked for and got, to hold against the metrics."""

    ends: Counter[tuple[str, str]] = field(default_factory=Counter)
    """Answers by method and finish reason."""
    num_calls: int = 0
    num_prompt_tokens: int = 0
    num_complete_tokens: int = 0
    """Tokens of answers that were not cut short."""

    def sent(self, api: str, reason: str, prompt_tokens: int, num_answers: int = 1) -> None:
        self.num_calls += 1
        self.ends[api, reason] += num_answers
        self.num_prompt_tokens += num_answers * prompt_tokens


def asked(text: str, max_new_tokens: int, seed: int = 1, **fields: object) -> pb.GenerateRequest:
    return pb.GenerateRequest(
        text=text,
        sampling=pb.Sampling(seed=seed, logit_bias={POISON: -100.0}),
        stopping=pb.Stopping(max_new_tokens=max_new_tokens, ignore_eos=True),
        **fields,  # type: ignore[arg-type]
    )


def greedy(request: pb.GenerateRequest) -> pb.GenerateRequest:
    """The likeliest answer, which on the tiny model soon repeats itself: drafts are accepted."""
    request.sampling.temperature = 0.0
    return request


def streamed(request: pb.GenerateRequest) -> pb.GenerateStreamRequest:
    stream = pb.GenerateStreamRequest()
    stream.MergeFromString(request.SerializeToString())
    return stream


async def generate(server: Running, seen: Seen, request: pb.GenerateRequest) -> pb.GenerateResponse:
    answer = await server.stub.Generate(request)
    seen.sent("generate", "length", len(request.text), len(answer.answers))
    seen.num_complete_tokens += sum(each.usage.num_new_tokens for each in answer.answers)
    return answer


async def stream(server: Running, seen: Seen, request: pb.GenerateRequest) -> None:
    events = [event async for event in server.stub.GenerateStream(streamed(request))]
    seen.sent("generate_stream", "length", len(request.text))
    seen.num_complete_tokens += sum(len(event.delta.token_ids) for event in events)


async def stop(server: Running, seen: Seen, request: pb.GenerateRequest) -> None:
    """Ask again with a stop string that the answer is known to reach."""
    free = (await generate(server, seen, request)).answers[0]
    request.stopping.stop_strings.append(free.text[3:6])
    events = [event async for event in server.stub.GenerateStream(streamed(request))]
    assert events[-1].finished.finish_reason == pb.FINISH_REASON_STOP_STRING
    seen.sent("generate_stream", "stop_string", len(request.text))
    seen.num_complete_tokens += sum(len(event.delta.token_ids) for event in events)


async def score(server: Running, seen: Seen, text: str) -> None:
    await server.stub.Score(pb.ScoreRequest(text=text))
    seen.sent("score", "length", len(text))


async def leave(server: Running, seen: Seen, how: str) -> None:
    """Read the first tokens of a long answer, then end it before its end."""
    request = streamed(asked("leave " * 5, 450, request_id=how))
    call = server.stub.GenerateStream(request)
    async for event in call:
        if event.WhichOneof("event") == "delta":
            break
    if how == "abort":
        await server.stub.Abort(pb.AbortRequest(request_ids=[how]))
        assert [event async for event in call][-1].HasField("finished")
    else:
        call.cancel()
    seen.sent("generate_stream", "cancelled", len(request.text))


async def run_late(server: Running, seen: Seen) -> None:
    request = streamed(asked("late " * 6, 450))
    with pytest.raises(grpc.RpcError) as caught:
        _ = [event async for event in server.stub.GenerateStream(request, timeout=0.6)]
    assert caught.value.code() == grpc.StatusCode.DEADLINE_EXCEEDED
    seen.sent("generate_stream", "deadline", len(request.text))


async def fail(server: Running, seen: Seen) -> None:
    request = asked("", 9)
    request.token_ids.ids.extend([97, 98, POISON])
    with pytest.raises(grpc.RpcError) as caught:
        await server.stub.Generate(request)
    assert caught.value.code() == grpc.StatusCode.INTERNAL
    seen.sent("generate", "error", 3)


async def send_nonsense(server: Running, seen: Seen) -> None:
    """A call that the engine never hears of."""
    with pytest.raises(grpc.RpcError) as caught:
        await server.stub.Generate(asked("", 9))
    assert caught.value.code() == grpc.StatusCode.INVALID_ARGUMENT
    seen.num_calls += 1


async def load(server: Running) -> Seen:
    seen = Seen()
    no_drafts = pb.Speculation(enabled=False)
    await asyncio.gather(
        *(generate(server, seen, asked("many " * 9, 40, seed)) for seed in range(6)),
        *(stream(server, seen, greedy(asked("abc" * 20, 60, seed))) for seed in range(3)),
        generate(server, seen, asked("three " * 8, 30, n=3)),
        generate(server, seen, asked("plain " * 8, 30, speculation=no_drafts)),
        stop(server, seen, asked("stop " * 4, 50)),
        score(server, seen, "score " * 7),
        score(server, seen, "s"),
        leave(server, seen, "cancel"),
        leave(server, seen, "abort"),
        run_late(server, seen),
        fail(server, seen),
        send_nonsense(server, seen),
    )
    end = time.monotonic() + 5
    while server.engine.num_requests or not server.app._live.is_idle:  # type: ignore[union-attr]
        assert time.monotonic() < end, "requests are left"
        await asyncio.sleep(0.01)
    return seen


def slow_engine(config: EngineConfig, drafts: bool) -> EngineLoop:
    """The tiny model with steps of 3 ms at least, so that long answers outlast their deadline."""
    drafter = SuffixDrafter() if drafts else None
    engine = tiny_engine(drafter, config, (EOS_ID,), vocab_size=261, eos_token_id=EOS_ID)
    engine._observe_step = lambda record: time.sleep(0.003)
    with torch.inference_mode():
        engine.runner.model.model.embed_tokens.weight[POISON] = float("nan")
    return EngineLoop(engine, "tiny")


@pytest.mark.parametrize("drafts", [False, True], ids=["off", "suffix"])
@pytest.mark.parametrize("config", [SMALL, TIGHT], ids=["roomy", "tight"])
async def test_counts_add_up(config: EngineConfig, drafts: bool) -> None:
    async with running(slow_engine(config, drafts), metrics_port=0) as server:
        seen = await load(server)

        def total(name: str, **labels: str) -> float:
            return server.metric(f"headway_{name}_total", **labels)

        for (api, reason), count in seen.ends.items():
            assert total("requests", api=api, finish_reason=reason) == count, (api, reason)
        num_answers = sum(seen.ends.values())
        assert total("requests") == num_answers
        methods = [server.metric("grpc_server_handled_total", grpc_method=m) for m in METHODS]
        assert sum(methods) == seen.num_calls
        for name in ("prompt", "generation"):
            assert server.metric(f"headway_request_{name}_tokens_count") == num_answers

        assert total("prompt_tokens") == seen.num_prompt_tokens
        assert total("prompt_tokens", source="cached") > 0
        discarded = total("discarded_tokens")
        assert total("generation_tokens") == seen.num_complete_tokens + discarded
        for reason in ("cancelled", "deadline"):
            assert total("discarded_tokens", reason=reason) > 0, reason
        assert (total("preemptions") > 0) == (config is TIGHT)

        for name in GAUGES:
            assert server.metric(f"headway_{name}") == 0, name
        assert server.metric("headway_kv_blocks", state="active") == 0
        num_blocks = server.engine.engine.pool.num_blocks
        assert server.metric("headway_kv_blocks") == num_blocks
        assert server.metric("headway_tokenize_seconds_count") == seen.num_calls
        check_speculation(server, "suffix" if drafts else "off")
        await check_page(server)


def check_speculation(server: Running, method: str) -> None:
    def total(name: str, **labels: str) -> float:
        return server.metric(f"headway_spec_{name}_total", method=method, **labels)

    steps, accepted = total("steps"), total("accepted_tokens")
    assert (steps > 0) == (accepted > 0) == (method == "suffix")
    assert (total("disabled", reason="request") > 0) == (method == "suffix")
    assert accepted <= total("emitted_tokens") <= accepted + steps
    assert accepted <= total("draft_tokens") <= steps * SMALL.max_draft_tokens
    lengths = "headway_spec_accepted_length"
    assert server.metric(f"{lengths}_count") == steps
    assert server.metric(f"{lengths}_sum") == accepted
    if method == "suffix":
        assert total("accepted_tokens_per_position") == accepted
        assert server.metric(f"{lengths}_bucket", le="8.0") == steps


async def check_page(server: Running) -> None:
    """The page of the HTTP port pleases promtool, where there is one."""
    url = f"http://127.0.0.1:{server.app.metrics_port}/metrics"
    page = await asyncio.to_thread(lambda: urllib.request.urlopen(url, timeout=5).read())
    assert b"headway_spec_accepted_length_bucket" in page
    promtool = shutil.which("promtool")
    if promtool is not None:
        said = await asyncio.to_thread(
            subprocess.run, [promtool, "check", "metrics"], input=page, capture_output=True
        )
        assert (said.returncode, said.stderr) == (0, b"")
