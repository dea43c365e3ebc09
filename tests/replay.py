"""A stage to replay bug reports on: a reciting model in a real engine behind real gRPC, in three modes.

After a replay the stage is checked: the company that ran beside it was answered right, the gauges of
the registry are back at zero, its counts add up, and a canary is answered right.
"""

import asyncio
import time
from collections.abc import AsyncIterator, Awaitable, Callable, Mapping
from contextlib import asynccontextmanager
from dataclasses import dataclass, field
from itertools import count
from types import MappingProxyType
from typing import Any

import pytest

from fake_engine import EOS_ID
from headway.engine.build import build_engine
from headway.engine.config import EngineConfig
from headway.engine.loop import EngineLoop
from headway.engine.models.attention import ATTENTION
from headway.engine.request import Request, SamplingParams, StoppingParams
from headway.engine.stats import StepRecord
from headway.protos import text_generation_pb2 as pb
from loopback import Running, running
from reciting import FULL_DRAFT, KnowingDrafter, Recital

OFF, ON, BATCH = SPECULATION = ("off", "on", "on, in a batch")
NUM_COMPANIONS = 2
GAUGES = [
    ("headway_requests_running", {}),
    ("headway_requests_waiting", {"reason": "capacity"}),
    ("headway_queued_prompt_tokens", {}),
    ("headway_kv_blocks", {"state": "active"}),
    ("headway_kv_cache_usage_ratio", {}),
]


@dataclass
class Stage:
    """A running server and the truth about what it should say."""

    server: Running
    recital: Recital
    mode: str
    is_over: bool = False
    num_company_answers: int = 0
    wrong: list[pb.Answer] = field(default_factory=list)
    """What the company got and should not have got."""

    @property
    def loop(self) -> EngineLoop:
        loop: EngineLoop = self.server.engine
        return loop

    @property
    def speculates(self) -> bool:
        return self.mode != OFF

    def truth(self, request: pb.GenerateRequest) -> list[int]:
        return truth_of(self.recital, request)

    async def ask(self, request: pb.GenerateRequest) -> pb.Answer:
        """Return the whole answer."""
        response: pb.GenerateResponse = await self.server.stub.Generate(request)
        (answer,) = response.answers
        return answer

    async def ask_twice(self, request: pb.GenerateRequest) -> pb.Answer:
        """Return the answer, and see that its stream says the same."""
        answer = await self.ask(request)
        events = [event async for event in self.server.stub.GenerateStream(as_stream(request))]
        deltas = [event.delta for event in events]
        assert "".join(delta.text for delta in deltas) == answer.text
        assert [i for delta in deltas for i in delta.token_ids] == list(answer.token_ids)
        logprobs = [p for delta in deltas for p in delta.logprobs]
        assert [p.token_id for p in logprobs] == [p.token_id for p in answer.logprobs]
        assert [p.logprob for p in logprobs] == pytest.approx(
            [p.logprob for p in answer.logprobs], abs=1e-4
        )
        end = events[-1].finished
        for name in ("finish_reason", "stop_string", "stop_token_id"):
            assert getattr(end, name) == getattr(answer, name)
        assert end.usage.num_new_tokens == answer.usage.num_new_tokens == len(answer.token_ids)
        return answer

    async def check_right(self, request: pb.GenerateRequest) -> pb.Answer:
        """Ask, and hold the token ids against the truth."""
        answer = await self.ask(request)
        assert list(answer.token_ids) == self.truth(request)
        return answer

    def check_drafts_counted(self, answer: pb.Answer) -> None:
        """See that drafts were accepted where there is a drafter, and counted up to the end alone."""
        stats = answer.speculation
        assert stats.num_emitted == len(answer.token_ids)
        assert stats.num_accepted == sum(stats.accepted_per_position) <= stats.num_drafted
        if not self.speculates:
            assert (stats.num_drafted, stats.num_steps) == (0, stats.num_emitted)
            return
        # The last step has no bonus token where a draft ended the answer.
        assert stats.num_emitted - stats.num_accepted in (stats.num_steps - 1, stats.num_steps)
        assert stats.num_steps < stats.num_emitted

    def total(self, name: str, **labels: str) -> float:
        return self.server.metric(f"headway_{name}_total", **labels)


def truth_of(recital: Recital, request: pb.GenerateRequest) -> list[int]:
    """The token ids of the right answer, up to and with the one that ends it."""
    stops = {*request.stopping.stop_token_ids}
    stops |= set() if request.stopping.ignore_eos else {EOS_ID}
    answer = recital.answer(_in_engine_words(request), request.stopping.max_new_tokens)
    ends = [index + 1 for index, token in enumerate(answer) if token in stops]
    return answer[: ends[0]] if ends else answer


@asynccontextmanager
async def stage(
    mode: str,
    recital: Recital,
    *,
    engine: Mapping[str, Any] = MappingProxyType({}),
    step_seconds: float = 0.0,
) -> AsyncIterator[Stage]:
    """Serve a recital in one mode and check on the way out that nothing is left or wrong.

    `engine` changes EngineConfig; `step_seconds` makes steps slow.
    """
    loop = recital_loop(recital, mode, engine, step_seconds)
    async with running(loop) as server:
        played = Stage(server, recital, mode)
        num_companions = NUM_COMPANIONS if mode == BATCH else 0
        company = [asyncio.create_task(_keep_busy(played, i)) for i in range(num_companions)]
        await until(lambda: loop.num_requests >= num_companions)
        yield played
        played.is_over = True
        await asyncio.gather(*company)
        assert bool(company) == bool(played.num_company_answers)
        assert not played.wrong
        await canary(played)
        await idle(server)
        check_books(played)


def recital_loop(
    recital: Recital,
    mode: str,
    engine: Mapping[str, Any] = MappingProxyType({}),
    step_seconds: float = 0.0,
) -> EngineLoop:
    """A real engine around a recital, with a thread that is not started yet."""
    changes: dict[str, Any] = {
        "kv_cache_bytes": 4 << 20,
        "block_size": 4,
        "max_draft_tokens": FULL_DRAFT,
        "num_threads": 1,
        **engine,
    }
    config = EngineConfig(**{"adaptive_drafts": False, **changes})
    drafter = None if mode == OFF else KnowingDrafter(recital)
    model = recital.model(config.max_context_tokens or 512)
    model.set_attn_implementation(ATTENTION)

    def slow_down(record: StepRecord) -> None:
        time.sleep(step_seconds)

    return EngineLoop(build_engine(model, (EOS_ID,), config, drafter, slow_down), "tiny")


def ask_for(
    prompt: str | list[int], max_new_tokens: int = 24, temperature: float = 0.0, **fields: Any
) -> pb.GenerateRequest:
    """A request; `fields` are those of Sampling, Stopping and ResponseOptions."""
    ids = list(prompt.encode()) if isinstance(prompt, str) else prompt
    request = pb.GenerateRequest(token_ids=pb.TokenIds(ids=ids))
    for name, value in {
        "max_new_tokens": max_new_tokens,
        "temperature": temperature,
        **fields,
    }.items():
        parts: list[Any] = [request.sampling, request.stopping, request.response]
        (part,) = [part for part in parts if name in part.DESCRIPTOR.fields_by_name]
        part.MergeFrom(type(part)(**{name: value}))
    return request


def as_stream(request: pb.GenerateRequest) -> pb.GenerateStreamRequest:
    streamed = pb.GenerateStreamRequest()
    streamed.MergeFromString(request.SerializeToString())
    return streamed


async def idle(server: Running, seconds: float = 5.0) -> None:
    """Wait until the engine has nothing left and no call has anything left to read."""
    await until(lambda: not server.engine.num_requests and server.app._live.is_idle, seconds)  # type: ignore[union-attr] # it was opened


async def until(condition: Callable[[], bool], seconds: float = 5.0) -> None:
    end = time.monotonic() + seconds
    while not condition():
        assert time.monotonic() < end, "waited too long"
        await asyncio.sleep(0.01)


async def canary(played: Stage) -> None:
    """A fresh request is answered right whatever happened before."""
    await played.check_right(ask_for("canary", 9, temperature=0.7, seed=1))


def check_books(played: Stage) -> None:
    """Gauges are at zero, and totals that must agree do, in any mode."""
    metric = played.server.metric
    check_gauges(played.server)
    assert metric("headway_request_generation_tokens_count") == played.total("requests")
    past_stop = played.total("discarded_tokens", reason="past_stop")
    answered = metric("headway_request_generation_tokens_sum")
    assert played.total("generation_tokens") == answered + past_stop
    accepted, steps = played.total("spec_accepted_tokens"), played.total("spec_steps")
    assert (accepted > 0) == (steps > 0) == played.speculates
    assert played.total("spec_emitted_tokens") <= accepted + steps


def check_gauges(server: Running) -> None:
    """Nothing runs, waits or holds a block of the cache."""
    for name, labels in GAUGES:
        assert server.metric(name, **labels) == 0, name


async def _keep_busy(played: Stage, companion: int) -> None:
    """Ask one thing after the other until the play is over, and note each answer that is wrong."""
    for number in count():
        request = ask_for(
            f"company {companion} of {number}" * 2, 12, number % 2, seed=number, ignore_eos=True
        )
        answer = await played.ask(request)
        played.num_company_answers += 1
        if list(answer.token_ids) != played.truth(request):
            played.wrong.append(answer)
        if played.is_over:
            return


def _in_engine_words(request: pb.GenerateRequest) -> Request:
    """The request as the engine should see it, read apart from server/convert.py."""
    laws = {field.name: value for field, value in request.sampling.ListFields()}
    laws["allowed_token_ids"] = tuple(laws.get("allowed_token_ids", ()))
    stopping = StoppingParams(
        request.stopping.max_new_tokens,
        request.stopping.min_new_tokens,
        tuple(request.stopping.stop_token_ids),
    )
    return Request("truth", tuple(request.token_ids.ids), stopping, SamplingParams(**laws))


Play = Callable[[Stage], Awaitable[None]]
