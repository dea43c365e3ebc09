"""What Prometheus reads off the engine at each scrape: its state, its totals, its settings.

Knows nothing of requests; metrics.py counts those as they come and go.
"""

import time
from collections.abc import Iterable, Mapping, Sequence
from importlib.metadata import PackageNotFoundError, version

from prometheus_client.core import (
    CounterMetricFamily,
    GaugeMetricFamily,
    HistogramMetricFamily,
    Metric,
)
from prometheus_client.registry import Collector

from headway.engine.stats import EngineCounters, EngineSnapshot
from headway.server.engine_door import EngineDoor

ENGINE_STATES = ("loading", "ready", "draining", "failed")


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
        yield self._info("build_info", "Always 1; the version that runs.", {"version": _version()})
        state = self._state()
        yield self._gauges(
            "engine_state",
            "1 for the state that the engine is in, 0 for the others.",
            "state",
            {name: float(name == state) for name in ENGINE_STATES},
        )
        if self.door is not None:
            now = self.door.snapshot()
            yield from self._facts(self.door, now)
            yield from self._queue_and_cache(now)
            yield from self._token_counters(now)
            yield from self._speculation(now.counters, now.info.drafter)
            yield self._gauges(
                "model_pass_seconds",
                "Typical time of a pass of the model over so many rows, by which drafts are chosen.",
                "rows",
                {str(num_rows): seconds for num_rows, seconds in now.step_seconds},
            )

    def _state(self) -> str:
        if self.door is None:
            return "loading"
        if self.door.failure is not None:
            return "failed"
        if self.is_draining:
            return "draining"
        return "ready" if self.door.ready else "loading"

    def _facts(self, door: EngineDoor, now: EngineSnapshot) -> Iterable[Metric]:
        yield self._info(
            "model_info",
            "Always 1; the model and the longest prompt plus answer, in tokens.",
            {"max_context_tokens": str(door.limits.max_context_tokens)},
        )
        yield self._info(
            "cache_config_info",
            "Always 1; the KV cache's blocks, the tokens of one, and the type of its numbers.",
            {
                "block_size": str(now.info.block_size),
                "num_blocks": str(now.num_blocks),
                "dtype": now.info.cache_dtype,
            },
        )
        yield self._info(
            "speculation_info",
            "Always 1; what drafts (off: nothing) and the most tokens it drafts for a sequence in a step.",
            {
                "method": now.info.drafter,
                "max_draft_tokens": str(now.info.max_draft_tokens),
            },
        )
        # The engine's clock is monotonic; Prometheus wants seconds since 1970.
        last_step = time.time() - (time.monotonic() - door.last_step_monotonic)
        yield self._gauge(
            "last_step_timestamp_seconds",
            "When the engine's thread last finished a step, or woke with nothing to do.",
            last_step,
        )

    def _queue_and_cache(self, now: EngineSnapshot) -> Iterable[Metric]:
        yield self._gauge(
            "requests_running", "Answers being computed; they hold cache blocks.", now.num_running
        )
        yield self._gauges(
            "requests_waiting",
            "Answers in the engine's queue, preempted ones included, by what they wait for.",
            "reason",
            {"capacity": now.num_waiting},
        )
        yield self._gauge(
            "queued_prompt_tokens",
            "Prompt tokens of the answers in the queue.",
            now.num_queued_prompt_tokens,
        )
        yield self._gauge(
            "kv_cache_usage_ratio",
            "Share of the cache's blocks that running answers hold, 0 to 1.",
            now.num_active_blocks / now.num_blocks if now.num_blocks else 0.0,
        )
        yield self._gauges(
            "kv_blocks",
            "Cache blocks: held by running answers (active), kept for reuse (cached), empty (free).",
            "state",
            {
                "free": now.num_blocks - now.num_active_blocks - now.num_cached_blocks,
                "active": now.num_active_blocks,
                "cached": now.num_cached_blocks,
            },
        )

    def _token_counters(self, now: EngineSnapshot) -> Iterable[Metric]:
        totals = now.counters
        yield self._counters(
            "prompt_tokens",
            "Prompt tokens by where their keys and values came from; each counts once.",
            "source",
            {"computed": totals.prompt_computed_tokens, "cached": totals.prompt_cached_tokens},
        )
        for name, help_text, count in (
            (
                "generation_tokens",
                "Tokens generated for answers, discarded_tokens included.",
                totals.generated_tokens,
            ),
            (
                "preemptions",
                "Times that a running answer lost its cache blocks to another.",
                totals.preemptions,
            ),
            (
                "recomputed_tokens",
                "Prompt and answer tokens computed once more after a preemption.",
                totals.recomputed_tokens,
            ),
            (
                "prefix_cache_query_tokens",
                "Tokens of admitted sequences, looked up in the prefix cache.",
                totals.prefix_query_tokens,
            ),
            (
                "prefix_cache_hit_tokens",
                "Those of them that were found.",
                totals.prefix_hit_tokens,
            ),
            (
                "prefix_cache_evicted_blocks",
                "Cached blocks that lost their content to a new owner.",
                now.num_evicted_blocks,
            ),
        ):
            family = self._counter_family(name, help_text)
            family.add_metric((self._model,), count)
            yield family

    def _speculation(self, totals: EngineCounters, method: str) -> Iterable[Metric]:
        for name, help_text, count in (
            (
                "spec_steps",
                "Passes of the model over one sequence with at least one drafted token.",
                totals.spec_steps,
            ),
            (
                "spec_draft_tokens",
                "Drafted tokens that those passes verified; all nodes of the trees but their roots.",
                totals.spec_drafted_tokens,
            ),
            (
                "spec_accepted_tokens",
                "Drafted tokens that entered answers.",
                totals.spec_accepted_tokens,
            ),
            (
                "spec_emitted_tokens",
                "Tokens that those passes added to answers: accepted ones and one more each.",
                totals.spec_emitted_tokens,
            ),
        ):
            family = self._counter_family(name, help_text, "method")
            family.add_metric((self._model, method), count)
            yield family
        positions = self._counter_family(
            "spec_accepted_tokens_per_position",
            "Passes whose accepted run was longer than the position; 0 is the first draft.",
            "method",
            "position",
        )
        for position, count in enumerate(totals.spec_accepted_per_position):
            positions.add_metric((self._model, method, str(position)), count)
        yield positions
        yield self._accepted_length(totals.spec_accepted_lengths, method)
        disabled = self._counter_family(
            "spec_disabled",
            "Passes over one sequence in which it could not draft: its request says so (request), the "
            "step's tokens were used up (load), no cache block was free (blocks), drafts have cost more time "
            "than they saved (cost).",
            "method",
            "reason",
        )
        for reason, count in totals.spec_disabled.items():
            disabled.add_metric((self._model, method, reason), count)
        yield disabled

    def _accepted_length(self, lengths: Sequence[int], method: str) -> HistogramMetricFamily:
        """Make a histogram of counts by length: [4, 0, 2] is le 0: 4, le 1: 4, le 2: 6, +Inf: 6."""
        family = HistogramMetricFamily(
            "headway_spec_accepted_length",
            "Drafted tokens accepted in one pass with drafts; the bonus token does not count.",
            labels=("model", "method"),
        )
        buckets = [
            (str(float(length)), float(sum(lengths[: length + 1])))
            for length in range(len(lengths))
        ]
        buckets.append(("+Inf", float(sum(lengths))))
        total = sum(length * num for length, num in enumerate(lengths))
        family.add_metric((self._model, method), buckets, sum_value=total)
        return family

    def _info(self, name: str, help_text: str, labels: Mapping[str, str]) -> GaugeMetricFamily:
        family = GaugeMetricFamily(f"headway_{name}", help_text, labels=("model", *labels))
        family.add_metric((self._model, *labels.values()), 1)
        return family

    def _gauge(self, name: str, help_text: str, value: float) -> GaugeMetricFamily:
        family = GaugeMetricFamily(f"headway_{name}", help_text, labels=("model",))
        family.add_metric((self._model,), value)
        return family

    def _gauges(
        self, name: str, help_text: str, label: str, values: Mapping[str, float]
    ) -> GaugeMetricFamily:
        family = GaugeMetricFamily(f"headway_{name}", help_text, labels=("model", label))
        for key, value in values.items():
            family.add_metric((self._model, key), value)
        return family

    def _counters(
        self, name: str, help_text: str, label: str, values: Mapping[str, int]
    ) -> CounterMetricFamily:
        family = self._counter_family(name, help_text, label)
        for key, value in values.items():
            family.add_metric((self._model, key), value)
        return family

    def _counter_family(self, name: str, help_text: str, *labels: str) -> CounterMetricFamily:
        return CounterMetricFamily(f"headway_{name}", help_text, labels=("model", *labels))


def _version() -> str:
    try:
        return version("headway")
    except PackageNotFoundError:
        return "uninstalled"
