"""Puts an Engine together from a loaded model: device, type, threads, and how much cache fits."""

import logging
from collections.abc import Callable
from collections.abc import Sequence as Seq
from functools import partial

import torch
from transformers import PreTrainedModel

from headway.compiler.graph import Unsupported
from headway.engine.compiled import CompiledStep
from headway.engine.config import EngineConfig
from headway.engine.draft_budget import DraftBudget
from headway.engine.engine import Engine
from headway.engine.errors import ModelLoadError
from headway.engine.kv_cache import KVCache, block_bytes
from headway.engine.machine import free_bytes, usable_cores
from headway.engine.models.cache import Progress, no_progress
from headway.engine.models.packed_modules import drop_pages, rounds_inputs, use_team
from headway.engine.runner import ModelRunner
from headway.engine.stats import StepRecord
from headway.engine.tree import Drafter
from headway.engine.validation import Limits
from headway.kernels.attention import CACHE_TYPES
from headway.kernels.cpu.library import Team
from headway.kernels.memory import trim_heap
from headway.kernels.native import NativeUnavailable, start_team

logger = logging.getLogger(__name__)

MAX_CPU_CACHE_BYTES = 4 << 30


def resolve_device(config: EngineConfig) -> torch.device:
    """The device that `config.device` means on this machine. ModelLoadError when it is not there."""
    num_gpus = torch.cuda.device_count()
    if config.device == "auto":
        return torch.device("cuda" if num_gpus else "cpu")
    try:
        device = torch.device(config.device)
    except RuntimeError:
        device = None
    if device is not None and (
        device.type == "cpu" or (device.type == "cuda" and (device.index or 0) < num_gpus)
    ):
        return device
    raise ModelLoadError(
        f"device is {config.device!r}; auto, cpu, cuda or cuda:N are allowed, and torch sees "
        f"{num_gpus} GPUs here"
    )


def resolve_dtype(config: EngineConfig) -> torch.dtype:
    """The type that `config.dtype` means on the device."""
    if config.dtype == "auto":
        return torch.float32 if resolve_device(config).type == "cpu" else torch.bfloat16
    dtype: torch.dtype = getattr(torch, config.dtype)
    return dtype


def resolve_team(config: EngineConfig, progress: Progress = no_progress) -> Team | None:
    """Start the threads for the native kernels; None where the reference serves, and on a GPU.

    Raises ModelLoadError when `config.kernels` names a level that cannot be had.
    """
    if resolve_device(config).type != "cpu":
        return None
    num_threads = config.num_threads or usable_cores()
    try:
        return start_team(
            config.kernels,
            num_threads,
            pinned=config.pin_threads,
            progress=partial(progress, "compile"),
        )
    except NativeUnavailable as error:
        raise ModelLoadError(str(error)) from error


def build_engine(
    model: PreTrainedModel,
    eos_token_ids: Seq[int],
    config: EngineConfig,
    drafter: Drafter | None = None,
    observe_step: Callable[[StepRecord], None] = lambda record: None,
    team: Team | None = None,
) -> Engine:
    """Make and warm up an engine for a model that was loaded with attention `headway`.

    team: threads for the native kernels (resolve_team); without it everything runs in torch. Raises
    ModelLoadError when the cache cannot hold a useful number of tokens or the model cannot be
    served right.
    """
    torch.set_num_threads(config.num_threads or usable_cores())
    num_blocks = _num_blocks(model, config)
    dtype = resolve_cache_dtype(model, config)
    # The native attention has no float16: there, torch's serves.
    attends = team if dtype in CACHE_TYPES else None
    cache = KVCache(model.config, num_blocks, config.block_size, dtype, model.device, attends)
    use_team(model, team)
    compiled = _compiled(model, cache, config, team)
    trim_heap()
    engine = Engine(
        ModelRunner(model, compiled),
        cache,
        eos_token_ids,
        config,
        _limits(model, config, num_blocks * config.block_size),
        drafter,
        DraftBudget() if config.adaptive_drafts else None,
        observe_step,
    )
    engine.warm_up()
    if engine.runner.compiled is not None:
        drop_pages(model)
        trim_heap()
        # torch's own threads would spin after each operation, on the cores that the team needs.
        torch.set_num_threads(1)
    _log_what_runs(engine, cache, config, team)
    return engine


def _log_what_runs(engine: Engine, cache: KVCache, config: EngineConfig, team: Team | None) -> None:
    """Tell what `auto` came to, which the settings in the log do not."""
    logger.info(
        "kernels=%s compile=%s num_threads=%d kv_cache_dtype=%s kv_cache_tokens=%d",
        "reference" if team is None else team.library.level,
        "off" if engine.runner.compiled is None else "on",
        config.num_threads or usable_cores(),
        str(cache.data.dtype).removeprefix("torch."),
        cache.num_blocks * config.block_size,
    )


def _compiled(
    model: PreTrainedModel, cache: KVCache, config: EngineConfig, team: Team | None
) -> CompiledStep | None:
    """The native pass; None, and a line in the log that says why, where the model runs eagerly."""
    if team is None or config.compile == "off":
        return None
    try:
        return CompiledStep(model, cache, config, team)
    except Unsupported as error:
        logger.warning("compile=off, which is slower, because of the model: %s", error)
        return None


def _num_blocks(model: PreTrainedModel, config: EngineConfig) -> int:
    one = block_bytes(model.config, config.block_size, resolve_cache_dtype(model, config))
    num_blocks = (config.kv_cache_bytes or _default_cache_bytes(model.device)) // one
    if config.kv_cache_bytes > (num_free := free_bytes(model.device)):
        raise ModelLoadError(
            f"kv_cache_bytes is {config.kv_cache_bytes:,}, and {num_free:,} bytes are free on "
            f"{model.device}. Lower it, leave it out to take a quarter of that, or free memory"
        )
    if num_blocks < 2:
        raise ModelLoadError(
            f"the KV cache would hold {num_blocks} blocks of {config.block_size} tokens; at least 2 are "
            f"needed, {2 * one:,} bytes. Raise kv_cache_bytes or free memory"
        )
    return num_blocks


def resolve_cache_dtype(model: PreTrainedModel, config: EngineConfig) -> torch.dtype:
    """What `config.kv_cache_dtype` means for this model."""
    if config.kv_cache_dtype != "auto":
        dtype: torch.dtype = getattr(torch, config.kv_cache_dtype)
        return dtype
    is_rounded = rounds_inputs(model) and model.dtype == torch.float32
    return torch.bfloat16 if is_rounded else model.dtype


def _default_cache_bytes(device: torch.device) -> int:
    quarter = free_bytes(device) // 4
    return quarter if device.type == "cuda" else min(quarter, MAX_CPU_CACHE_BYTES)


def _limits(model: PreTrainedModel, config: EngineConfig, cache_tokens: int) -> Limits:
    trained: int = model.config.max_position_embeddings
    return Limits(
        vocab_size=model.config.vocab_size,
        max_context_tokens=min(trained, config.max_context_tokens or trained),
        max_cache_tokens=cache_tokens,
    )
