"""Load on a server: when requests come, what is counted, and what fails."""

import itertools
import math
import statistics
from typing import Any

import pytest

from fake_engine import EOS_ID, FakeEngine
from headway.engine.errors import Overloaded
from headway.engine.request import Request
from headway.protos import text_generation_pb2 as pb
from headway.server.serve_bench import Answer, Load, arrivals, first_difference, run_load, summarise
from loopback import running

VLLM_KEYS = {
    *("duration", "completed", "failed", "total_input_tokens", "total_output_tokens"),
    *("request_throughput", "output_throughput", "total_token_throughput"),
    *("input_lens", "output_lens", "ttfts", "itls", "start_times", "generated_texts", "errors"),
    *(
        f"{statistic}_{latency}_ms"
        for statistic in ("mean", "median", "std", "p99")
        for latency in ("ttft", "tpot", "itl", "e2el")
    ),
    *("spec_decode_acceptance_rate", "spec_decode_draft_tokens", "spec_decode_accepted_tokens"),
}


def request(text: str, **stopping: Any) -> pb.GenerateStreamRequest:
    return pb.GenerateStreamRequest(text=text, stopping=pb.Stopping(**stopping))


def test_arrivals_are_a_poisson_process() -> None:
    times = arrivals(4001, Load(request_rate=20.0, seed=3))
    gaps = [after - before for before, after in itertools.pairwise(times)]
    assert times[0] == 0.0
    assert min(gaps) > 0
    assert statistics.mean(gaps) == pytest.approx(1 / 20, rel=0.05)
    # An exponential gap's deviation is its mean, and one in e is longer than the mean.
    assert statistics.stdev(gaps) == pytest.approx(1 / 20, rel=0.1)
    assert sum(gap > 1 / 20 for gap in gaps) / 4000 == pytest.approx(1 / math.e, abs=0.03)


def test_arrivals_come_from_the_seed() -> None:
    assert arrivals(5, Load(request_rate=2.0, seed=1)) == arrivals(
        5, Load(request_rate=2.0, seed=1)
    )
    assert arrivals(5, Load(request_rate=2.0, seed=1)) != arrivals(
        5, Load(request_rate=2.0, seed=2)
    )
    assert arrivals(3, Load()) == [0.0, 0.0, 0.0]


def test_figures_by_hand() -> None:
    drafted = pb.SpeculationStats(num_steps=2, num_drafted=8, num_accepted=2, num_emitted=5)
    whole = Answer(0.0, 10, (1, 2, 3, 4, 5), "abcde", 0.1, (0.2, 0.3), 0.9, drafted)
    short = Answer(0.5, 7, (1,), "a", 0.3, (), 0.3, pb.SpeculationStats(num_steps=1, num_emitted=1))
    failed = Answer(0.6, 9, (1, 2), "ab", 0.1, (0.1,), 9.0, error="UNAVAILABLE: gone")
    result = summarise([([whole, failed], 1.5), ([short], 0.5)])
    assert result.keys() == VLLM_KEYS | {"tau", "num_steps", "output_throughputs"}
    assert (result["completed"], result["failed"]) == (2, 1)
    assert (result["total_input_tokens"], result["total_output_tokens"]) == (17, 6)
    assert result["duration"] == 2.0
    assert result["output_throughput"] == 3.0
    assert result["total_token_throughput"] == 11.5
    assert result["output_throughputs"] == pytest.approx([5 / 1.5, 1 / 0.5])
    assert result["median_ttft_ms"] == pytest.approx(200)
    assert result["p99_ttft_ms"] == pytest.approx(
        298
    )  # a hundredth of the way back from 300 to 100
    assert result["std_ttft_ms"] == pytest.approx(100)
    assert result["mean_tpot_ms"] == pytest.approx(200)  # of the one answer with more than a token
    assert result["median_itl_ms"] == pytest.approx(250)
    assert result["mean_e2el_ms"] == pytest.approx(600)
    assert result["output_lens"] == [5, 0, 1]
    assert result["errors"] == ["", "UNAVAILABLE: gone", ""]
    assert result["tau"] == 2.0
    assert result["spec_decode_acceptance_rate"] == 25.0


def test_nothing_whole_has_no_latencies() -> None:
    result = summarise([([Answer(0.0, error="no")], 1.0)])
    assert result["mean_ttft_ms"] is None
    assert result["p99_itl_ms"] is None
    assert result["tau"] is None
    assert result["output_throughput"] == 0.0


def test_first_difference() -> None:
    one, same = Answer(0.0, token_ids=(1, 2)), Answer(0.1, token_ids=(1, 2))
    other, failed = Answer(0.0, token_ids=(1, 3, 4)), Answer(0.0, error="no")
    assert first_difference([one, one], [same, same]) is None
    assert first_difference([one, one], [same, other]) == "request 1: 2 tokens against 3 tokens"
    assert first_difference([one], [failed]) is None


async def test_tokens_are_counted_by_id_not_by_message() -> None:
    async with running(FakeEngine(run=4)) as server:
        answers, seconds = await run_load(
            server.target, [request("abc", max_new_tokens=10)], Load(), max_request_seconds=5
        )
    (answer,) = answers
    assert answer.error == ""
    assert answer.num_prompt_tokens == 3
    assert bytes(answer.token_ids) == b"abcabcabca"
    assert answer.text == "abcabcabca"
    assert len(answer.itls) <= 2  # messages of 4, 4 and 2 tokens, unless some came together
    assert 0 < answer.ttft <= answer.latency <= seconds
    assert answer.speculation.num_emitted == 10


async def test_a_closed_loop_keeps_its_bound_and_an_open_one_its_rate() -> None:
    running_now = []

    def script(asked: Request) -> list[int]:
        running_now.append(engine.num_requests)
        return [*b"abcd", EOS_ID]

    engine = FakeEngine(script)
    requests = [request("abc") for _ in range(9)]
    async with running(engine) as server:
        closed, _ = await run_load(
            server.target, requests, Load(max_concurrency=3), max_request_seconds=5
        )
        assert max(running_now) == 2  # beside the one that joins
        running_now.clear()
        rate = Load(request_rate=200.0, seed=1)
        opened, _ = await run_load(server.target, requests, rate, max_request_seconds=5)
    assert not [each.error for each in (*closed, *opened) if each.error]
    for answer, due in zip(opened, arrivals(9, rate), strict=True):
        assert answer.start_time >= due - 1e-3


async def test_failures_are_counted_and_do_not_end_the_run() -> None:
    def refuse(asked: Request) -> None:
        if len(asked.prompt_ids) == 2:
            raise Overloaded("the queue is full", reason="requests", retry_seconds=1.0)

    async with running(FakeEngine(refuse=refuse)) as server:
        requests = [request(text, max_new_tokens=3) for text in ("a", "ab", "abc")]
        answers, seconds = await run_load(
            server.target, requests, Load(max_concurrency=1), max_request_seconds=5
        )
    assert [bool(answer.error) for answer in answers] == [False, True, False]
    assert answers[1].error.startswith("RESOURCE_EXHAUSTED: the queue is full")
    assert summarise([(answers, seconds)])["failed"] == 1


async def test_a_deadline_ends_what_runs_and_what_waits() -> None:
    async with running(FakeEngine(step_seconds=0.05)) as server:
        requests = [request("abc", max_new_tokens=2000) for _ in range(3)]
        answers, seconds = await run_load(
            server.target, requests, Load(max_concurrency=1), max_request_seconds=0.2
        )
    assert [answer.error.split(":")[0] for answer in answers] == ["DEADLINE_EXCEEDED"] * 3
    assert seconds < 3


async def test_a_server_that_is_not_there_fails_every_request() -> None:
    answers, _ = await run_load("127.0.0.1:1", [request("a")], Load(), max_request_seconds=0.3)
    assert answers[0].error.startswith(("UNAVAILABLE", "DEADLINE_EXCEEDED"))
