"""What a step must read and multiply, and how fast this machine reads and multiplies: the bound of its time.

After Williams, Waterman and Patterson, "Roofline", 2009. Knows models by their tensors, not their kernels.
"""

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from itertools import chain
from time import perf_counter
from typing import Any, Literal, cast

import torch
from torch import nn
from transformers import PreTrainedModel

from headway.engine.build import resolve_cache_dtype
from headway.engine.config import EngineConfig
from headway.engine.kv_cache import block_bytes
from headway.engine.machine import usable_cores
from headway.server.engine_bench import CaseResult

MIN_READ_BYTES = 64 << 20
NUM_PROBES = 7
PROBE_SIDE = 512
"""Sides of the matrices of the rate's probe: operands that a core's own cache holds."""

Arithmetic = Literal["float32", "bfloat16", "int8"]


@dataclass(frozen=True, slots=True)
class MachineRates:
    """What was measured here, with the threads that torch uses."""

    read_bytes_per_second: float
    read_buffer_bytes: int
    """As large as what a step reads, since a cache that holds the one holds the other."""
    multiply_adds_per_second: float
    arithmetic: Arithmetic
    """Of the products that the rate is for."""


@dataclass(frozen=True, slots=True)
class ModelWork:
    """What a step costs, from the model's own tensors.

    Example, 10 MB of weights, 5 M multiply-adds a row, 1,000 bytes and 2,000 multiply-adds a row for
    each token of context: a step of 3 rows over 2 sequences of 50 tokens reads 10 MB + 2 * 50 * 1,000
    bytes and does 3 * (5 M + 50 * 2,000) multiply-adds.
    """

    weight_bytes: int
    """All weights as they are held, each once a step; of an embedding that is no output head, nothing."""
    multiply_adds: int
    """Of one row, in products with weights, logits included."""
    cache_bytes: int
    """Keys and values of one token of context."""
    attention_multiply_adds: int
    """Of one row and one token of context."""
    arithmetic: Arithmetic

    def step_bytes(self, num_context_tokens: float) -> float:
        """Bytes that a step reads; `num_context_tokens` are of all its sequences together."""
        return self.weight_bytes + self.cache_bytes * num_context_tokens

    def step_multiply_adds(self, num_rows: float, context_per_sequence: float) -> float:
        """Multiply-adds of a step."""
        return num_rows * (self.multiply_adds + self.attention_multiply_adds * context_per_sequence)


@dataclass(frozen=True, slots=True)
class Bound:
    """How long a step must take, and what it waits for."""

    num_bytes: float
    multiply_adds: float
    memory_ms: float
    compute_ms: float

    @property
    def ms(self) -> float:
        return max(self.memory_ms, self.compute_ms)

    @property
    def by(self) -> Literal["memory", "compute"]:
        return "memory" if self.memory_ms >= self.compute_ms else "compute"


@dataclass(frozen=True, slots=True)
class Roofline:
    """What a bench's steps cost and what the machine allows; one bound for each of its cases."""

    work: ModelWork
    rates: MachineRates
    bounds: tuple[Bound, ...]


def measure_roofline(
    model: PreTrainedModel, config: EngineConfig, cases: Sequence[CaseResult]
) -> Roofline | None:
    """Bound the mean step of each case; None on a GPU, whose rates are not measured here."""
    if model.device.type != "cpu":
        return None
    work = model_work(model, resolve_cache_dtype(model, config))
    # An engine with a team of its own leaves torch one thread.
    torch.set_num_threads(config.num_threads or usable_cores())
    rates = measure_rates(work)
    return Roofline(work, rates, tuple(bound_of(work, rates, case) for case in cases))


def bound_of(work: ModelWork, rates: MachineRates, case: CaseResult) -> Bound:
    """Bound the mean step of a case."""
    num_bytes = work.step_bytes(case.sequences_per_step * case.context_per_sequence)
    multiply_adds = work.step_multiply_adds(case.rows_per_step, case.context_per_sequence)
    return Bound(
        num_bytes,
        multiply_adds,
        1e3 * num_bytes / rates.read_bytes_per_second,
        1e3 * multiply_adds / rates.multiply_adds_per_second,
    )


def model_work(model: PreTrainedModel, cache_dtype: torch.dtype = torch.float32) -> ModelWork:
    """Read off a loaded model what its steps cost with keys and values of a type."""
    untyped: Any = model
    products = [
        module
        for module in untyped.modules()
        if hasattr(module, "in_features") and hasattr(module, "out_features")
    ]
    held = _storages(model)
    head = _storages(untyped.get_output_embeddings())
    for storage in _storages(untyped.get_input_embeddings()):
        if storage not in head:
            held.pop(storage)  # a step reads no more of it than a row for each token
    config = model.config.get_text_config()
    head_size = (
        getattr(config, "head_dim", None) or config.hidden_size // config.num_attention_heads
    )
    layers = config.num_hidden_layers
    return ModelWork(
        weight_bytes=sum(held.values()),
        multiply_adds=sum(each.in_features * each.out_features for each in products),
        cache_bytes=block_bytes(config, 1, cache_dtype),
        attention_multiply_adds=2 * layers * config.num_attention_heads * head_size,
        arithmetic=_arithmetic(max(products, key=lambda each: each.in_features)),
    )


def measure_rates(work: ModelWork) -> MachineRates:
    """Measure this machine in about half a second. What it gives is what torch gets out of it."""
    num_bytes = max(MIN_READ_BYTES, work.weight_bytes)
    buffer = torch.ones(num_bytes // 4)
    read_seconds = _least_seconds(buffer.sum)
    return MachineRates(
        read_bytes_per_second=num_bytes / read_seconds,
        read_buffer_bytes=num_bytes,
        multiply_adds_per_second=PROBE_SIDE**3 / _least_seconds(_product(work.arithmetic)),
        arithmetic=work.arithmetic,
    )


def _storages(module: nn.Module) -> dict[int, int]:
    """Return the bytes of a module's memory by address; what is shared is there once."""
    return {
        tensor.untyped_storage().data_ptr(): tensor.untyped_storage().nbytes()
        for tensor in chain(module.parameters(), module.buffers())
    }


def _arithmetic(product: Any) -> Arithmetic:
    """Tell what a product's operands are: those of packed weights are integers, unless they hold floats."""
    packed = {"f32": "float32", "bf16": "bfloat16"}
    if hasattr(product, "format"):
        return cast("Arithmetic", packed.get(product.format, "int8"))
    return "float32" if product.weight.dtype == torch.float32 else "bfloat16"


def _product(arithmetic: Arithmetic) -> Callable[[], object]:
    if arithmetic == "int8":
        codes = torch.ones(PROBE_SIDE, PROBE_SIDE, dtype=torch.int8)
        return lambda: torch._int_mm(codes, codes)
    dtype: torch.dtype = getattr(torch, arithmetic)
    values = torch.ones(PROBE_SIDE, PROBE_SIDE, dtype=dtype)
    return lambda: values @ values


def _least_seconds(work: Callable[[], object]) -> float:
    """Time something several times: what else a machine does can only add."""
    work()
    times = []
    for _ in range(NUM_PROBES):
        started = perf_counter()
        work()
        times.append(perf_counter() - started)
    return min(times)
