"""What Headway counts for Prometheus while requests and steps come and go.

Names and meanings are fixed; dashboards and alerts depend on them. Knows no HTTP.
"""

import time
from collections.abc import Sequence

import grpc
from prometheus_client import CollectorRegistry, Counter, Histogram
from prometheus_client.platform_collector import PlatformCollector
from prometheus_client.process_collector import ProcessCollector

from headway.engine.request import Finish, FinishReason, Output, Request, Timing
from headway.engine.stats import StepRecord
from headway.server.convert import APIS, Api
from headway.server.engine_collector import EngineCollector

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

INCOMPLETE = (FinishReason.CANCELLED, FinishReason.DEADLINE, FinishReason.ERROR)
"""Ends before the answer is what was asked for."""


class Metrics:
    """Everything that is counted while requests come and go. Thread-safe.

    Labelled with the model's name, which is known before the model is loaded. A request with n = 3 is
    three answers; what is counted of requests is counted for each answer that the engine took on.
    """

    def __init__(self, model: str) -> None:
        self.registry = CollectorRegistry()
        self.engine = EngineCollector(model)
        self.registry.register(self.engine)
        ProcessCollector(registry=self.registry)
        PlatformCollector(registry=self.registry)
        self._model = model
        self._last_output: dict[str, float] = {}
        self._make_request_counters()
        self._make_request_histograms()
        self._make_step_metrics()
        self._make_rpc_metrics()

    def _make_request_counters(self) -> None:
        self._requests = self._counter(
            "requests",
            "Answers that the engine took on, by the method that asked and how they ended.",
            "api",
            "finish_reason",
        )
        self._rejections = self._counter(
            "admission_rejections", "Answers refused because the queue was full.", "reason"
        )
        self._discarded = self._counter(
            "discarded_tokens",
            "Generated tokens outside of complete answers: what came after a stop string (past_stop), "
            "and the whole of an answer that was cancelled, ran out of time or failed, read or not.",
            "reason",
        )
        # Present with zero from the start, so that a rate over the first one is not lost.
        for api in APIS:
            for finish_reason in FinishReason:
                self._requests.labels(self._model, api, finish_reason.value)
        for queue in ("requests", "prompt_tokens"):
            self._rejections.labels(self._model, queue)
        for reason in (*(reason.value for reason in INCOMPLETE), "past_stop"):
            self._discarded.labels(self._model, reason)

    def _make_request_histograms(self) -> None:
        seconds = {
            "time_to_first_token": "From an answer's arrival to its first token.",
            "e2e_request_latency": "From an answer's arrival to its end.",
            "request_queue_time": "From an answer's arrival to its first step.",
            "request_prefill_time": "From an answer's first step to its first token.",
            "request_decode_time": "From an answer's first token to its end.",
        }
        self._latency = {
            name: self._histogram(f"{name}_seconds", help_text, REQUEST_SECONDS)
            for name, help_text in seconds.items()
        }
        self._between = self._histogram(
            "inter_token_latency_seconds",
            "From one output of an answer to the next; an output has all tokens of a step.",
            TOKEN_SECONDS,
        )
        self._per_token = self._histogram(
            "time_per_output_token_seconds",
            "An answer's time after its first token, divided by its tokens after the first.",
            TOKEN_SECONDS,
        )
        self._tokenize = self._histogram(
            "tokenize_seconds",
            "Time to turn one prompt or list of bad words into tokens, the wait for the tokenizer included.",
            TOKEN_SECONDS,
        )
        self._detokenize = self._histogram(
            "detokenize_seconds",
            "Time to turn the tokens of one answer, or of one Detokenize call, into text; all steps together.",
            TOKEN_SECONDS,
        )
        self._prompt_size = self._histogram(
            "request_prompt_tokens", "Tokens of the prompt of one answer.", NUM_TOKENS
        )
        self._answer_size = self._histogram(
            "request_generation_tokens",
            "Tokens of one answer, up to the end of a stop string.",
            NUM_TOKENS,
        )

    def _make_step_metrics(self) -> None:
        step = Histogram(
            "headway_step_seconds",
            "Time of one engine step by phase: drafting (draft), the pass of the model that verifies the "
            "drafts and computes prompts (model), everything else (overhead).",
            ("model", "phase"),
            buckets=TOKEN_SECONDS,
            registry=self.registry,
        )
        self._draft = step.labels(self._model, "draft")
        self._model_pass = step.labels(self._model, "model")
        self._overhead = step.labels(self._model, "overhead")
        self._step_tokens = self._histogram(
            "step_tokens",
            "Tokens computed in one step: prompt chunks, last tokens and drafts.",
            NUM_TOKENS,
        )
        self._batch_size = self._histogram(
            "batch_size", "Sequences computed in one step.", NUM_SEQUENCES
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
            "From the beginning of a call to its end.",
            method,
            buckets=REQUEST_SECONDS,
            registry=registry,
        )
        self._rpc_sent = Counter(
            "grpc_server_msg_sent", "Messages sent to clients.", method, registry=registry
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
        """Observe the time that one prompt took to become tokens."""
        self._tokenize.observe(seconds)

    def detokenized(self, seconds: float) -> None:
        """Observe the time that one answer took to become text."""
        self._detokenize.observe(seconds)

    def step_done(self, record: StepRecord) -> None:
        """Observe one step; called on the engine's thread."""
        self._draft.observe(record.draft_seconds)
        self._model_pass.observe(record.model_seconds)
        self._overhead.observe(record.overhead_seconds)
        self._step_tokens.observe(record.num_tokens)
        self._batch_size.observe(record.num_sequences)

    def output_arrived(self, output: Output) -> None:
        """Observe the time since the request's output before this one."""
        if not output.token_ids:
            return
        now = time.monotonic()
        before = self._last_output.get(output.request_id)
        if before is not None:
            self._between.observe(now - before)
        self._last_output[output.request_id] = now

    def request_finished(
        self, api: Api, request: Request, timing: Timing, finish: Finish, num_new_tokens: int
    ) -> None:
        """Count an answer's end, whether or not somebody still reads it.

        `num_new_tokens` are its tokens; past a stop string the engine may have generated more.
        """
        self._last_output.pop(request.request_id, None)
        self._requests.labels(self._model, api, finish.reason.value).inc()
        num_generated = max(finish.speculation.num_emitted, num_new_tokens)
        if finish.reason in INCOMPLETE:
            self._discarded.labels(self._model, finish.reason.value).inc(num_generated)
        else:
            past_stop = num_generated - num_new_tokens
            self._discarded.labels(self._model, "past_stop").inc(past_stop)
        self._prompt_size.observe(len(request.prompt_ids))
        self._answer_size.observe(num_new_tokens)
        self._observe_times(timing, num_new_tokens)

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
                self._latency[name].observe(end - start)
        if timing.first_token and timing.finished and num_new_tokens > 1:
            decode_seconds = timing.finished - timing.first_token
            self._per_token.observe(decode_seconds / (num_new_tokens - 1))

    def _counter(self, name: str, help_text: str, *labels: str) -> Counter:
        return Counter(f"headway_{name}", help_text, ("model", *labels), registry=self.registry)

    def _histogram(self, name: str, help_text: str, buckets: Sequence[float]) -> Histogram:
        family = Histogram(
            f"headway_{name}", help_text, ("model",), buckets=buckets, registry=self.registry
        )
        return family.labels(self._model)


def _split(method: str) -> tuple[str, str]:
    service, _, name = method.lstrip("/").partition("/")
    return service, name
