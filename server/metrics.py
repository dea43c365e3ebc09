"""What Headway shows to Prometheus: counters and histograms that it keeps, gauges read at each scrape.

Names and meanings are fixed; dashboards and alerts depend on them. Knows no HTTP.
"""

import time
from collections.abc import Iterable, Sequence
from importlib.metadata import PackageNotFoundError, version

import grpc
from prometheus_client import CollectorRegistry, Counter, Histogram
from prometheus_client.core import CounterMetricFamily, GaugeMetricFamily, Metric
from prometheus_client.platform_collector import PlatformCollector
from prometheus_client.process_collector import ProcessCollector
from prometheus_client.registry import Collector

from headway.engine.request import Finish, FinishReason, Output, Request, Timing
from headway.engine.stats import EngineSnapshot, StepRecord
from headway.server.engine_door import EngineDoor

TOKEN_SECONDS = (
    *(0.0005, 0.001, 0.002, 0.004, 0.006, 0.008, 0.01, 0.015, 0.02, 0.03, 0.04, 0.06, 0.08),
    *(0.1, 0.15, 0.2, 0.4, 0.8, 1.5, 3.0, 10.0),
)
"""From 0.5 ms: speculation's gain lies below the first bucket that others use, 10 ms."""
REQUEST_SECONDS = (
    *(0.0005, 0.001, 0.0025, 0.005, 0.01, 0.02, 0.04, 0.06, 0.08, 0.1, 0.25, 0.5, 0.75),
    *(1.0, 2.5, 5.0, 7.5, 10.0, 20.0, 40.0, 80.0, 160.0, 640.0),
)
NUM_TOKENS = tuple(float(m * 10**e) for e in range(6) for m in (1, 2, 5))
NUM_SEQUENCES = (1.0, 2.0, 4.0, 8.0, 16.0, 32.0, 64.0, 128.0, 256.0)
ENGINE_STATES = ("loading", "ready", "draining", "failed")


class Metrics:
    """Everything that is counted while requests come and go. Thread-safe.

    Labelled with the model's name, which is known before the model is loaded.
    """

    def __init__(self, model: str) -> None:
        self.registry = CollectorRegistry()
        self.engine = EngineCollector(model)
        self.registry.register(self.engine)
        ProcessCollector(registry=self.registry)
        PlatformCollector(registry=self.registry)
        self._model = model
        self._last_output: dict[str, float] = {}
        self._make_request_metrics()
        self._make_step_metrics()
        self._make_rpc_metrics()

    def _make_request_metrics(self) -> None:
        self._requests = self._counter("requests", "Requests by how they ended.", "finish_reason")
        self._rejections = self._counter(
            "admission_rejections", "Requests refused because a queue was full.", "reason"
        )
        self._generated = self._counter("generation_tokens", "Tokens that entered answers.")
        self._discarded = self._counter(
            "discarded_tokens", "Tokens computed and not in a completed answer.", "reason"
        )
        # Present with zero from the start, so that a rate over the first one is not lost.
        for finish_reason in FinishReason:
            self._requests.labels(self._model, finish_reason.value)
        for queue in ("requests", "prompt_tokens"):
            self._rejections.labels(self._model, queue)
        seconds = {
            "time_to_first_token": "From arrival to the first token.",
            "e2e_request_latency": "From arrival to the end.",
            "request_queue_time": "From arrival to the first step.",
            "request_prefill_time": "From the first step to the first token.",
            "request_decode_time": "From the first token to the end.",
        }
        self._latency = {
            name: self._histogram(f"{name}_seconds", help_text, REQUEST_SECONDS)
            for name, help_text in seconds.items()
        }
        self._between = self._histogram(
            "inter_token_latency_seconds", "Between two outputs of a request.", TOKEN_SECONDS
        )
        self._per_token = self._histogram(
            "time_per_output_token_seconds",
            "Decode time over tokens after the first.",
            TOKEN_SECONDS,
        )
        self._prompt_size = self._histogram("request_prompt_tokens", "Prompt length.", NUM_TOKENS)
        self._answer_size = self._histogram(
            "request_generation_tokens", "Answer length.", NUM_TOKENS
        )

    def _make_step_metrics(self) -> None:
        self._step = self._histogram(
            "step_seconds", "Time of one engine step by phase.", TOKEN_SECONDS, "phase"
        )
        self._step_tokens = self._histogram("step_tokens", "Tokens in one step.", NUM_TOKENS)
        self._batch_size = self._histogram("batch_size", "Sequences in one step.", NUM_SEQUENCES)
        self._tokenize = self._histogram(
            "tokenize_seconds", "Time to turn one prompt into tokens.", TOKEN_SECONDS
        )

    def _make_rpc_metrics(self) -> None:
        method = ("grpc_type", "grpc_service", "grpc_method")
        registry = self.registry
        self._rpc_started = Counter(
            "grpc_server_started", "Calls begun.", method, registry=registry
        )
        self._rpc_handled = Counter(
            "grpc_server_handled",
            "Calls ended, by status.",
            (*method, "grpc_code"),
            registry=registry,
        )
        self._rpc_seconds = Histogram(
            "grpc_server_handling_seconds",
            "How long calls took.",
            method,
            buckets=REQUEST_SECONDS,
            registry=registry,
        )
        self._rpc_sent = Counter(
            "grpc_server_msg_sent", "Messages sent.", method, registry=registry
        )

    def rpc_started(self, method: str, kind: str) -> None:
        """Count the beginning of a call; `method` is its path, "/package.Service/Method"."""
        self._rpc_started.labels(kind, *_split(method)).inc()

    def rpc_handled(self, method: str, kind: str, code: grpc.StatusCode, seconds: float) -> None:
        """Count the end of a call, whatever ended it."""
        name = code.name.title().replace("_", "")  # DEADLINE_EXCEEDED is DeadlineExceeded there
        name = "OK" if code is grpc.StatusCode.OK else name
        self._rpc_handled.labels(kind, *_split(method), name).inc()
        self._rpc_seconds.labels(kind, *_split(method)).observe(seconds)

    def message_sent(self, method: str, kind: str) -> None:
        """Count one message to a client."""
        self._rpc_sent.labels(kind, *_split(method)).inc()

    def rejected(self, reason: str) -> None:
        """Count a request that a full queue refused."""
        self._rejections.labels(self._model, reason).inc()

    def tokenized(self, seconds: float) -> None:
        """Observe the time that one prompt took in the tokenizer's thread."""
        self._tokenize.labels(self._model).observe(seconds)

    def step_done(self, record: StepRecord) -> None:
        """Observe one step; called on the engine's thread."""
        phases = {
            "draft": record.draft_seconds,
            "model": record.model_seconds,
            "overhead": record.overhead_seconds,
        }
        for phase, seconds in phases.items():
            self._step.labels(self._model, phase).observe(seconds)
        self._step_tokens.labels(self._model).observe(record.num_tokens)
        self._batch_size.labels(self._model).observe(record.num_sequences)

    def output_arrived(self, output: Output) -> None:
        """Observe the time since the request's output before this one."""
        if not output.token_ids:
            return
        now = time.monotonic()
        before = self._last_output.get(output.request_id)
        if before is not None:
            self._between.labels(self._model).observe(now - before)
        self._last_output[output.request_id] = now

    def request_finished(
        self, request: Request, output: Output, finish: Finish, num_new_tokens: int
    ) -> None:
        """Count a request's end, whether or not somebody still reads it."""
        self._last_output.pop(request.request_id, None)
        self._requests.labels(self._model, finish.reason.value).inc()
        self._generated.labels(self._model).inc(num_new_tokens)
        if finish.reason in (FinishReason.CANCELLED, FinishReason.DEADLINE):
            self._discarded.labels(self._model, finish.reason.value).inc(num_new_tokens)
        past_stop = max(0, finish.speculation.num_emitted - num_new_tokens)
        if finish.reason is FinishReason.STOP_STRING:
            self._discarded.labels(self._model, "past_stop").inc(past_stop)
        self._prompt_size.labels(self._model).observe(len(request.prompt_ids))
        self._answer_size.labels(self._model).observe(num_new_tokens)
        self._observe_times(output.timing, num_new_tokens)

    def _observe_times(self, timing: Timing, num_new_tokens: int) -> None:
        spans = {
            "time_to_first_token": (timing.arrived, timing.first_token),
            "e2e_request_latency": (timing.arrived, timing.finished),
            "request_queue_time": (timing.arrived, timing.scheduled),
            "request_prefill_time": (timing.scheduled, timing.first_token),
            "request_decode_time": (timing.first_token, timing.finished),
        }
        for name, (start, end) in spans.items():
            if start and end:  # 0.0 has not happened
                self._latency[name].labels(self._model).observe(end - start)
        if timing.first_token and timing.finished and num_new_tokens > 1:
            decode_seconds = timing.finished - timing.first_token
            self._per_token.labels(self._model).observe(decode_seconds / (num_new_tokens - 1))

    def _counter(self, name: str, help_text: str, *labels: str) -> Counter:
        return Counter(f"headway_{name}", help_text, ("model", *labels), registry=self.registry)

    def _histogram(
        self, name: str, help_text: str, buckets: Sequence[float], *labels: str
    ) -> Histogram:
        return Histogram(
            f"headway_{name}",
            help_text,
            ("model", *labels),
            buckets=buckets,
            registry=self.registry,
        )


class EngineCollector(Collector):
    """Reads the engine when Prometheus asks, so that no gauge can go stale."""

    def __init__(self, model: str) -> None:
        self._model = model
        self.door: EngineDoor | None = None
        """Set once the model is loaded."""
        self.is_draining = False

    def describe(self) -> Iterable[Metric]:
        return []

    def collect(self) -> Iterable[Metric]:
        yield self._labelled("build_info", "The version.", "version", {_version(): 1})
        state = self._state()
        states = {name: float(name == state) for name in ENGINE_STATES}
        yield self._labelled("engine_state", "1 for the state it is in.", "state", states)
        if self.door is not None:
            yield from self._engine_gauges(self.door)
            yield from self._snapshot_gauges(self.door.snapshot())
            yield from self._snapshot_counters(self.door.snapshot())

    def _state(self) -> str:
        if self.door is None:
            return "loading"
        if self.door.failure is not None:
            return "failed"
        if self.is_draining:
            return "draining"
        return "ready" if self.door.ready else "loading"

    def _engine_gauges(self, door: EngineDoor) -> Iterable[Metric]:
        # The engine's clock is monotonic; Prometheus wants seconds since 1970.
        last_step = time.time() - (time.monotonic() - door.last_step_monotonic)
        yield self._gauge("last_step_timestamp_seconds", "When the engine last ticked.", last_step)
        info = self._family("model_info", "The model and its limits.", "max_context_tokens")
        info.add_metric((self._model, str(door.limits.max_context_tokens)), 1)
        yield info

    def _snapshot_gauges(self, now: EngineSnapshot) -> Iterable[Metric]:
        yield self._gauge("requests_running", "Requests that hold cache blocks.", now.num_running)
        waiting = {"capacity": float(now.num_waiting)}
        yield self._labelled("requests_waiting", "Requests in the queue.", "reason", waiting)
        yield self._gauge(
            "queued_prompt_tokens", "Prompt tokens that wait.", now.num_queued_prompt_tokens
        )
        used = now.num_active_blocks / now.num_blocks if now.num_blocks else 0.0
        yield self._gauge("kv_cache_usage_ratio", "Share of blocks that requests hold.", used)
        blocks = {
            "free": float(now.num_blocks - now.num_active_blocks - now.num_cached_blocks),
            "active": float(now.num_active_blocks),
            "cached": float(now.num_cached_blocks),
        }
        yield self._labelled("kv_blocks", "KV cache blocks by state.", "state", blocks)

    def _snapshot_counters(self, now: EngineSnapshot) -> Iterable[Metric]:
        totals = now.counters
        prompt = {"computed": totals.prompt_computed_tokens, "cached": totals.prompt_cached_tokens}
        family = self._counter_family("prompt_tokens", "Prompt tokens by source.", "source")
        for source, count in prompt.items():
            family.add_metric((self._model, source), count)
        yield family
        for name, help_text, count in (
            ("preemptions", "Requests put back to make room.", totals.preemptions),
            ("recomputed_tokens", "Tokens computed again after it.", totals.recomputed_tokens),
            (
                "prefix_cache_query_tokens",
                "Prompt tokens looked up.",
                totals.prefix_query_tokens,
            ),
            ("prefix_cache_hit_tokens", "Prompt tokens found.", totals.prefix_hit_tokens),
            ("prefix_cache_evicted_blocks", "Cached blocks reused.", now.num_evicted_blocks),
            ("spec_steps", "Passes of a sequence with drafts.", totals.spec_steps),
            ("spec_draft_tokens", "Drafted tokens.", totals.spec_drafted_tokens),
            ("spec_accepted_tokens", "Drafted tokens accepted.", totals.spec_accepted_tokens),
            (
                "spec_emitted_tokens",
                "Tokens emitted by those passes, bonus tokens included.",
                totals.spec_emitted_tokens,
            ),
        ):
            family = self._counter_family(name, help_text)
            family.add_metric((self._model,), count)
            yield family
        positions = self._counter_family(
            "spec_accepted_tokens_per_position", "Drafts accepted at a depth.", "position"
        )
        for position, count in enumerate(tuple(totals.spec_accepted_per_position)):
            positions.add_metric((self._model, str(position)), count)
        yield positions

    def _gauge(self, name: str, help_text: str, value: float) -> GaugeMetricFamily:
        family = self._family(name, help_text)
        family.add_metric((self._model,), value)
        return family

    def _labelled(
        self, name: str, help_text: str, label: str, values: dict[str, float]
    ) -> GaugeMetricFamily:
        family = self._family(name, help_text, label)
        for key, value in values.items():
            family.add_metric((self._model, key), value)
        return family

    def _family(self, name: str, help_text: str, *labels: str) -> GaugeMetricFamily:
        return GaugeMetricFamily(f"headway_{name}", help_text, labels=("model", *labels))

    def _counter_family(self, name: str, help_text: str, *labels: str) -> CounterMetricFamily:
        return CounterMetricFamily(f"headway_{name}", help_text, labels=("model", *labels))


def _split(method: str) -> tuple[str, str]:
    service, _, name = method.lstrip("/").partition("/")
    return service, name


def _version() -> str:
    try:
        return version("headway")
    except PackageNotFoundError:
        return "uninstalled"
