"""Sends prompts to a server over gRPC, in an open or a closed loop, and boils down what came back.

Result keys are those of `vllm bench serve`; tokens are counted from the stream's token ids. Prints
nothing; commands/bench_serve.py shows it.
"""

import asyncio
import contextlib
import math
import random
from collections.abc import Sequence
from dataclasses import dataclass, field
from time import perf_counter
from typing import Any

import grpc
import grpc.aio
import numpy as np

from headway.protos import text_generation_pb2 as pb
from headway.protos import text_generation_pb2_grpc as pb_grpc
from headway.server.client import MAX_MESSAGE_BYTES, is_loopback

LATENCIES = ("ttft", "tpot", "itl", "e2el")
"""Time to first token, per token after the first, between messages, and from end to end."""


@dataclass(frozen=True, slots=True)
class Load:
    """How requests arrive. Both bounds may hold at once; then a request waits for its turn."""

    max_concurrency: int | None = None
    """Requests in flight at most: a closed loop; None is no bound."""
    request_rate: float = math.inf
    """Mean arrivals a second, a Poisson process: an open loop; infinite sends all at once."""
    seed: int = 0


@dataclass(frozen=True, slots=True)
class Answer:
    """What one request came to, on the client's clock. Times are in seconds."""

    start_time: float
    """From the start of the run to the request's sending."""
    num_prompt_tokens: int = 0
    token_ids: tuple[int, ...] = ()
    text: str = ""
    ttft: float = 0.0
    itls: tuple[float, ...] = ()
    """Between messages: one fewer than there were messages with tokens, as vLLM counts."""
    latency: float = 0.0
    speculation: pb.SpeculationStats = field(default_factory=pb.SpeculationStats)
    error: str = ""
    """Why it failed; empty for a whole answer."""


def arrivals(num_requests: int, load: Load) -> list[float]:
    """Return when each request comes, in seconds from the start; equal seeds give equal times."""
    if math.isinf(load.request_rate):
        return [0.0] * num_requests
    draw = random.Random(load.seed)
    times = [0.0]
    while len(times) < num_requests:
        times.append(times[-1] + draw.expovariate(load.request_rate))
    return times[:num_requests]


async def run_load(
    address: str,
    requests: Sequence[pb.GenerateStreamRequest],
    load: Load,
    *,
    max_request_seconds: float,
    deadline: float = math.inf,
) -> tuple[list[Answer], float]:
    """Send every request as the load says and return the answers in order, and the seconds it took.

    A request fails after `max_request_seconds`, and at `deadline` on perf_counter's clock all that
    run or wait do; so the call ends. Failures are answers with an error.
    """
    turns = asyncio.Semaphore(load.max_concurrency or len(requests))
    options = [
        ("grpc.max_receive_message_length", MAX_MESSAGE_BYTES),
        ("grpc.enable_http_proxy", int(not is_loopback(address))),
    ]
    async with grpc.aio.insecure_channel(address, options=options) as channel:
        await _connected(channel, min(max_request_seconds, deadline - perf_counter()))
        stub: Any = pb_grpc.TextGenerationStub(channel)
        started = perf_counter()

        async def one(request: pb.GenerateStreamRequest, seconds: float) -> Answer:
            await asyncio.sleep(started + seconds - perf_counter())
            async with turns:
                timeout = min(max_request_seconds, deadline - perf_counter())
                return await _answer(stub, request, timeout, started)

        times = arrivals(len(requests), load)
        answers = await asyncio.gather(*map(one, requests, times))
        return answers, perf_counter() - started


def summarise(runs: Sequence[tuple[Sequence[Answer], float]]) -> dict[str, Any]:
    """Boil down runs of one case, which followed each other, under the keys of `vllm bench serve`.

    Latencies are over whole answers alone, and None where there is none; failed ones are counted.
    Ours beside vLLM's keys: `tau`, `num_steps`, `output_throughputs` (one for each run).
    """
    answers = [answer for each, _ in runs for answer in each]
    duration = sum(seconds for _, seconds in runs)
    whole = [answer for answer in answers if not answer.error]
    num_in = sum(answer.num_prompt_tokens for answer in whole)
    num_out = sum(len(answer.token_ids) for answer in whole)
    result: dict[str, Any] = {
        "duration": duration,
        "completed": len(whole),
        "failed": len(answers) - len(whole),
        "total_input_tokens": num_in,
        "total_output_tokens": num_out,
        "request_throughput": len(whole) / duration,
        "output_throughput": num_out / duration,
        "total_token_throughput": (num_in + num_out) / duration,
        "output_throughputs": [
            sum(len(answer.token_ids) for answer in each if not answer.error) / seconds
            for each, seconds in runs
        ],
        **_speculation(whole),
        "input_lens": [answer.num_prompt_tokens for answer in answers],
        "output_lens": [0 if answer.error else len(answer.token_ids) for answer in answers],
        "ttfts": [answer.ttft for answer in answers],
        "itls": [list(answer.itls) for answer in answers],
        "start_times": [answer.start_time for answer in answers],
        "generated_texts": [answer.text for answer in answers],
        "errors": [answer.error for answer in answers],
    }
    for name, seconds in _latencies(whole).items():
        result.update(_statistics(name, seconds))
    return result


def first_difference(one: Sequence[Answer], other: Sequence[Answer]) -> str | None:
    """Tell which whole answer to the same request differs in its tokens, or None."""
    for index, (a, b) in enumerate(zip(one, other, strict=True)):
        if not (a.error or b.error) and a.token_ids != b.token_ids:
            return f"request {index}: {len(a.token_ids)} tokens against {len(b.token_ids)} tokens"
    return None


async def _connected(channel: grpc.aio.Channel, seconds: float) -> None:
    """Open the connection before the clock runs; what cannot be reached fails request by request."""
    with contextlib.suppress(TimeoutError):
        await asyncio.wait_for(channel.channel_ready(), max(0.0, seconds))


async def _answer(
    stub: Any, request: pb.GenerateStreamRequest, timeout: float, run_started: float
) -> Answer:
    started = last = perf_counter()
    ttft = 0.0
    itls: list[float] = []
    token_ids: list[int] = []
    text: list[str] = []
    num_prompt_tokens, stats, error = 0, pb.SpeculationStats(), "the stream ended without an end"
    try:
        async for event in stub.GenerateStream(request, timeout=max(0.0, timeout)):
            now = perf_counter()
            if event.HasField("started"):
                num_prompt_tokens = event.started.num_prompt_tokens
            elif event.HasField("finished"):
                stats, error = event.finished.speculation, _failure(event.finished)
            elif event.HasField("delta") and event.delta.token_ids:
                if token_ids:
                    itls.append(now - last)
                else:
                    ttft = now - started
                token_ids += event.delta.token_ids
                text.append(event.delta.text)
                last = now
    except grpc.aio.AioRpcError as failure:
        error = f"{failure.code().name}: {failure.details()}"
    return Answer(
        started - run_started,
        num_prompt_tokens,
        tuple(token_ids),
        "".join(text),
        ttft,
        tuple(itls),
        perf_counter() - started,
        stats,
        error,
    )


def _failure(finished: pb.Finished) -> str:
    """Tell why an answer is not whole; empty for one that ended by itself."""
    if finished.finish_reason in (
        pb.FINISH_REASON_EOS,
        pb.FINISH_REASON_LENGTH,
        pb.FINISH_REASON_STOP_TOKEN,
        pb.FINISH_REASON_STOP_STRING,
    ):
        return ""
    return f"{pb.FinishReason.Name(finished.finish_reason)}: {finished.message}"


def _latencies(whole: Sequence[Answer]) -> dict[str, list[float]]:
    """Return the seconds behind each of LATENCIES."""
    return {
        "ttft": [answer.ttft for answer in whole],
        "tpot": [
            (answer.latency - answer.ttft) / (len(answer.token_ids) - 1)
            for answer in whole
            if len(answer.token_ids) > 1
        ],
        "itl": [gap for answer in whole for gap in answer.itls],
        "e2el": [answer.latency for answer in whole],
    }


def _statistics(name: str, seconds: Sequence[float]) -> dict[str, float | None]:
    keys = [f"{statistic}_{name}_ms" for statistic in ("mean", "median", "std", "p99")]
    if not seconds:
        return dict.fromkeys(keys)
    ms = np.asarray(seconds) * 1e3
    values = (ms.mean(), np.median(ms), ms.std(), np.percentile(ms, 99))
    return dict(zip(keys, map(float, values), strict=True))


def _speculation(whole: Sequence[Answer]) -> dict[str, float | int | None]:
    num_steps = sum(answer.speculation.num_steps for answer in whole)
    num_drafted = sum(answer.speculation.num_drafted for answer in whole)
    num_accepted = sum(answer.speculation.num_accepted for answer in whole)
    num_emitted = sum(answer.speculation.num_emitted for answer in whole)
    return {
        "tau": num_emitted / num_steps if num_steps else None,
        "num_steps": num_steps,
        "spec_decode_draft_tokens": num_drafted,
        "spec_decode_accepted_tokens": num_accepted,
        "spec_decode_acceptance_rate": 100 * num_accepted / num_drafted if num_drafted else None,
    }
