"""What Prometheus sees: names, labels, buckets, and that everything returns to zero."""

import asyncio
import shutil
import subprocess

import grpc
import pytest
from prometheus_client import generate_latest

from fake_engine import FakeEngine
from headway.engine.request import (
    Finish,
    FinishReason,
    Output,
    Request,
    SpeculationStats,
    StoppingParams,
    Timing,
)
from headway.engine.stats import EngineCounters, EngineInfo, EngineSnapshot, StepRecord
from headway.protos import text_generation_pb2 as pb
from headway.server.metrics import Metrics
from loopback import running

EXPECTED = {
    "requests_running": ("gauge", ("model",)),
    "requests_waiting": ("gauge", ("model", "reason")),
    "queued_prompt_tokens": ("gauge", ("model",)),
    "kv_cache_usage_ratio": ("gauge", ("model",)),
    "kv_blocks": ("gauge", ("model", "state")),
    "cache_config_info": ("gauge", ("block_size", "dtype", "model", "num_blocks")),
    "speculation_info": ("gauge", ("max_draft_tokens", "method", "model")),
    "model_info": ("gauge", ("max_context_tokens", "model")),
    "build_info": ("gauge", ("model", "version")),
    "engine_state": ("gauge", ("model", "state")),
    "last_step_timestamp_seconds": ("gauge", ("model",)),
    "requests": ("counter", ("api", "finish_reason", "model")),
    "admission_rejections": ("counter", ("model", "reason")),
    "prompt_tokens": ("counter", ("model", "source")),
    "generation_tokens": ("counter", ("model",)),
    "discarded_tokens": ("counter", ("model", "reason")),
    "preemptions": ("counter", ("model",)),
    "recomputed_tokens": ("counter", ("model",)),
    "prefix_cache_query_tokens": ("counter", ("model",)),
    "prefix_cache_hit_tokens": ("counter", ("model",)),
    "prefix_cache_evicted_blocks": ("counter", ("model",)),
    "spec_steps": ("counter", ("method", "model")),
    "spec_draft_tokens": ("counter", ("method", "model")),
    "spec_accepted_tokens": ("counter", ("method", "model")),
    "spec_emitted_tokens": ("counter", ("method", "model")),
    "spec_accepted_tokens_per_position": ("counter", ("method", "model", "position")),
    "spec_accepted_length": ("histogram", ("method", "model")),
    "spec_disabled": ("counter", ("method", "model", "reason")),
    "model_pass_seconds": ("gauge", ("model", "rows")),
    "step_seconds": ("histogram", ("model", "phase")),
    "step_tokens": ("histogram", ("model",)),
    "batch_size": ("histogram", ("model",)),
    "tokenize_seconds": ("histogram", ("model",)),
    "detokenize_seconds": ("histogram", ("model",)),
    "time_to_first_token_seconds": ("histogram", ("model",)),
    "inter_token_latency_seconds": ("histogram", ("model",)),
    "time_per_output_token_seconds": ("histogram", ("model",)),
    "e2e_request_latency_seconds": ("histogram", ("model",)),
    "request_queue_time_seconds": ("histogram", ("model",)),
    "request_prefill_time_seconds": ("histogram", ("model",)),
    "request_decode_time_seconds": ("histogram", ("model",)),
    "request_prompt_tokens": ("histogram", ("model",)),
    "request_generation_tokens": ("histogram", ("model",)),
}


class CountingEngine(FakeEngine):
    """A fake whose snapshot has a number of its own in every place."""

    def snapshot(self) -> EngineSnapshot:
        counters = EngineCounters(
            prompt_computed_tokens=11,
            prompt_cached_tokens=12,
            generated_tokens=13,
            recomputed_tokens=14,
            preemptions=15,
            prefix_query_tokens=16,
            prefix_hit_tokens=17,
            spec_drafted_tokens=19,
            spec_emitted_tokens=21,
            spec_accepted_lengths=[4, 0, 2, 1],
            spec_disabled={"request": 24, "load": 25, "blocks": 26, "cost": 27},
        )
        return EngineSnapshot(
            1,
            2,
            3,
            num_blocks=64,
            num_active_blocks=16,
            num_cached_blocks=8,
            num_evicted_blocks=7,
            counters=counters,
            info=EngineInfo(16, "bfloat16", "suffix", 3),
            step_seconds=((1, 0.005), (4, 0.007)),
        )


def busy_metrics() -> Metrics:
    metrics = Metrics("tiny")
    metrics.engine.door = CountingEngine()
    metrics.step_done(StepRecord(2, 9, 0.0001, 0.0002, 0.004, 0.0003, 0.0001))
    metrics.tokenized(0.002)
    metrics.detokenized(0.003)
    metrics.rejected("requests")
    request = Request("r", (1, 2, 3), StoppingParams(10))
    for token in range(2):
        metrics.output_arrived(Output("r", Timing(1.0), token_ids=(token,)))
    end = Output("r", Timing(100.0, 100.5, 101.0, 103.0), token_ids=(1,))
    metrics.request_finished("score", request, end.timing, Finish(FinishReason.CANCELLED), 5)
    speculation = SpeculationStats(num_steps=4, num_emitted=9)
    for reason in (FinishReason.STOP_STRING, FinishReason.ERROR):
        finish = Finish(reason, speculation=speculation)
        metrics.request_finished("generate", request, Timing(0.0), finish, 6)
    metrics.rpc_started("/headway.v1.TextGeneration/Generate", "unary")
    metrics.rpc_handled(
        "/headway.v1.TextGeneration/Generate", "unary", grpc.StatusCode.DEADLINE_EXCEEDED, 0.1
    )
    metrics.message_sent("/headway.v1.TextGeneration/Generate", "unary")
    return metrics


def test_names_types_and_labels() -> None:
    seen = {}
    for family in busy_metrics().registry.collect():
        if family.name.startswith("headway_"):
            labels = {k for sample in family.samples for k in sample.labels if k != "le"}
            seen[family.name.removeprefix("headway_")] = (family.type, tuple(sorted(labels)))
    assert seen == EXPECTED


@pytest.mark.parametrize(
    ("name", "labels", "value"),
    [
        ("requests_running", {}, 1),
        ("requests_waiting", {"reason": "capacity"}, 2),
        ("queued_prompt_tokens", {}, 3),
        ("kv_cache_usage_ratio", {}, 0.25),
        ("kv_blocks", {"state": "free"}, 40),
        ("kv_blocks", {"state": "cached"}, 8),
        ("prompt_tokens_total", {"source": "computed"}, 11),
        ("prompt_tokens_total", {"source": "cached"}, 12),
        ("recomputed_tokens_total", {}, 14),
        ("preemptions_total", {}, 15),
        ("prefix_cache_query_tokens_total", {}, 16),
        ("prefix_cache_hit_tokens_total", {}, 17),
        ("prefix_cache_evicted_blocks_total", {}, 7),
        ("generation_tokens_total", {}, 13),
        ("cache_config_info", {"block_size": "16", "num_blocks": "64", "dtype": "bfloat16"}, 1),
        ("speculation_info", {"method": "suffix", "max_draft_tokens": "3"}, 1),
        ("spec_steps_total", {"method": "suffix"}, 7),
        ("spec_draft_tokens_total", {"method": "suffix"}, 19),
        ("spec_accepted_tokens_total", {"method": "suffix"}, 7),
        ("spec_emitted_tokens_total", {"method": "suffix"}, 21),
        ("spec_accepted_tokens_per_position_total", {"method": "suffix", "position": "0"}, 3),
        ("spec_accepted_tokens_per_position_total", {"method": "suffix", "position": "2"}, 1),
        ("spec_accepted_length_bucket", {"method": "suffix", "le": "0.0"}, 4),
        ("spec_accepted_length_bucket", {"method": "suffix", "le": "1.0"}, 4),
        ("spec_accepted_length_bucket", {"method": "suffix", "le": "3.0"}, 7),
        ("spec_accepted_length_bucket", {"method": "suffix", "le": "+Inf"}, 7),
        ("spec_accepted_length_count", {"method": "suffix"}, 7),
        ("spec_accepted_length_sum", {"method": "suffix"}, 7),
        ("spec_disabled_total", {"method": "suffix", "reason": "request"}, 24),
        ("spec_disabled_total", {"method": "suffix", "reason": "load"}, 25),
        ("spec_disabled_total", {"method": "suffix", "reason": "blocks"}, 26),
        ("spec_disabled_total", {"method": "suffix", "reason": "cost"}, 27),
        ("model_pass_seconds", {"rows": "4"}, 0.007),
        ("requests_total", {"api": "score", "finish_reason": "cancelled"}, 1),
        ("requests_total", {"api": "generate_stream", "finish_reason": "error"}, 0),
        ("discarded_tokens_total", {"reason": "cancelled"}, 5),
        ("discarded_tokens_total", {"reason": "past_stop"}, 3),
        ("discarded_tokens_total", {"reason": "error"}, 9),
        ("discarded_tokens_total", {"reason": "deadline"}, 0),
        ("detokenize_seconds_sum", {}, 0.003),
        ("time_to_first_token_seconds_sum", {}, 1.0),
        ("request_queue_time_seconds_sum", {}, 0.5),
        ("request_decode_time_seconds_sum", {}, 2.0),
        ("time_per_output_token_seconds_sum", {}, 0.5),
        ("e2e_request_latency_seconds_sum", {}, 3.0),
        ("step_seconds_sum", {"phase": "overhead"}, 0.0005),
        ("inter_token_latency_seconds_bucket", {"le": "0.0005"}, 1),
    ],
)
def test_values(name: str, labels: dict[str, str], value: float) -> None:
    registry = busy_metrics().registry
    found = registry.get_sample_value(f"headway_{name}", {"model": "tiny", **labels})
    assert found == pytest.approx(value)


def test_calls_are_counted_under_the_usual_names() -> None:
    labels = {
        "grpc_type": "unary",
        "grpc_service": "headway.v1.TextGeneration",
        "grpc_method": "Generate",
    }
    registry = busy_metrics().registry
    handled = {**labels, "grpc_code": "DeadlineExceeded"}
    assert registry.get_sample_value("grpc_server_started_total", labels) == 1
    assert registry.get_sample_value("grpc_server_handled_total", handled) == 1
    assert registry.get_sample_value("grpc_server_msg_sent_total", labels) == 1
    assert registry.get_sample_value("grpc_server_handling_seconds_count", labels) == 1


def test_what_has_not_happened_is_not_observed() -> None:
    metrics = Metrics("tiny")
    request = Request("r", (1,), StoppingParams(1))
    cancelled = Output("r", Timing(0.0, finished=5.0))
    finish = Finish(FinishReason.CANCELLED)
    metrics.request_finished("generate", request, cancelled.timing, finish, 0)
    for name in ("e2e_request_latency", "time_to_first_token"):
        count = metrics.registry.get_sample_value(
            f"headway_{name}_seconds_count", {"model": "tiny"}
        )
        assert not count


def test_promtool_finds_nothing_to_say() -> None:
    promtool = shutil.which("promtool")
    if promtool is None:
        pytest.skip("promtool is not installed (package prometheus)")
    text = generate_latest(busy_metrics().registry)
    result = subprocess.run([promtool, "check", "metrics"], input=text, capture_output=True)
    assert (result.returncode, result.stderr) == (0, b"")


async def test_gauges_return_to_zero_after_mixed_load() -> None:
    async with running(FakeEngine(run=3)) as server:
        calls = [
            server.stub.GenerateStream(
                pb.GenerateStreamRequest(text="abc", stopping=pb.Stopping(max_new_tokens=400), n=2)
            )
            for _ in range(5)
        ]
        for call in calls:
            await anext(aiter(call))
        assert server.metric("headway_requests_running") == 10
        calls[0].cancel()
        for call in calls[1:]:
            assert [event async for event in call]
        assert server.metric("headway_requests_running") == 0
        assert server.metric("headway_kv_cache_usage_ratio") == 0
        assert server.metric("headway_requests_total", finish_reason="length") == 8
        assert server.app.metrics._last_output == {}


@pytest.mark.parametrize("num_after", [0, 400], ids=["with its end", "before its end"])
async def test_an_answer_that_cannot_be_read_is_counted_once(num_after: int) -> None:
    no_token: int = None  # type: ignore[assignment] # the fault: reading it raises
    engine = FakeEngine(lambda request: [97, no_token] + [97] * num_after)
    async with running(engine) as server:
        stopping = pb.Stopping(max_new_tokens=2 + num_after)
        with pytest.raises(grpc.RpcError) as caught:
            await server.stub.Generate(pb.GenerateRequest(text="abc", stopping=stopping))
        assert caught.value.code() == grpc.StatusCode.INTERNAL
        while engine.num_requests or not server.app._live.is_idle:  # type: ignore[union-attr]
            await asyncio.sleep(0.01)
        ended = {"api": "generate", "finish_reason": "error"}
        assert server.metric("headway_requests_total", **ended) == 1
        assert server.metric("headway_requests_total") == 1
        discarded = server.metric("headway_discarded_tokens_total", reason="error")
        assert discarded == server.metric("headway_generation_tokens_total") >= 2
        assert server.app.metrics._last_output == {}
