"""Rules for norms, rotations and attention."""

import torch

from headway.compiler.graph import Unsupported
from headway.compiler.lowering.emitter import Emitter, Rows, size
from headway.compiler.placement import Operand, Step
from headway.compiler.program import Open, Word
from headway.kernels.attention import CACHE_TYPES, attention_scratch_bytes

_NUM_TABLES = 7
"""Inputs of attention that say where its rows and keys are: slots to tree masks."""


def rms_norm(emitter: Emitter, step: Step) -> None:
    """Rows, or heads within rows."""
    emitter.call("rms_norm", **_norm(emitter, step))


def layer_norm(emitter: Emitter, step: Step) -> None:
    """Rows, or heads within rows; with a bias or without."""
    bias = emitter.address(step.inputs[2]) if len(step.inputs) > 2 else None
    emitter.call("layer_norm", **_norm(emitter, step), bias=bias)


def _norm(emitter: Emitter, step: Step) -> dict[str, Word]:
    x, out = Rows.of(emitter.access(step.inputs[0])), Rows.of(step.output)
    return {
        "x": emitter.address(step.inputs[0]),
        "x_stride": x.stride,
        "x_inner_stride": x.inner_stride,
        "weight": emitter.address(step.inputs[1]),
        "epsilon": step.node["epsilon"],
        "out": emitter.address(step.output),
        "out_stride": out.stride,
        "out_inner_stride": out.inner_stride,
        "num_rows": size(x.num_rows),
        "num_inner": x.num_inner,
        "width": x.width,
    }


def rope(emitter: Emitter, step: Step) -> None:
    """Rotate the two halves of each head."""
    x, out = Rows.of(emitter.access(step.inputs[0])), Rows.of(step.output)
    cos, sin = (Rows.of(emitter.access(each)) for each in step.inputs[1:])
    if cos.stride != sin.stride or cos.num_inner > 1 or cos.width != x.width:
        raise Unsupported(f"angles of shape {emitter.access(step.inputs[1]).shape}")
    emitter.call(
        "rope",
        x=emitter.address(step.inputs[0]),
        x_stride=x.stride,
        x_head_stride=x.inner_stride,
        cos=emitter.address(step.inputs[1]),
        sin=emitter.address(step.inputs[2]),
        angle_stride=cos.stride,
        out=emitter.address(step.output),
        out_stride=out.stride,
        out_head_stride=out.inner_stride,
        num_rows=size(x.num_rows),
        num_heads=x.num_inner,
        head_size=x.width,
        rotary_size=x.width,
    )


def attention(emitter: Emitter, step: Step) -> None:
    """Store this layer's keys and values, then attend to the cache."""
    _, key, value, *context = step.inputs
    cache, tables = _cache_and_tables(emitter, step, context)
    k, v = (Rows.of(emitter.access(each)) for each in (key, value))
    emitter.call(
        "write_kv",
        key=emitter.address(key),
        key_stride=k.stride,
        key_head_stride=k.inner_stride,
        value=emitter.address(value),
        value_stride=v.stride,
        value_head_stride=v.inner_stride,
        **cache,
        slots=emitter.address(tables[0]),
        num_rows=size(k.num_rows),
        num_groups=k.num_inner,
        head_size=k.width,
    )
    _attend(emitter, step, k.num_inner, cache, tables)


def rotated_attention(emitter: Emitter, step: Step) -> None:
    """Rotate queries where they lie, store rotated keys and the values, then attend to the cache."""
    query, key, value, cos, sin, *context = step.inputs
    cache, tables = _cache_and_tables(emitter, step, context)
    q, k, v = (Rows.of(emitter.access(each)) for each in (query, key, value))
    angles = Rows.of(emitter.access(cos))
    if angles.stride != Rows.of(emitter.access(sin)).stride or angles.width != q.width:
        raise Unsupported(f"angles of shape {emitter.access(cos).shape}")
    emitter.call(
        "rope_write_kv",
        query=emitter.address(query),
        query_stride=q.stride,
        query_head_stride=q.inner_stride,
        key=emitter.address(key),
        key_stride=k.stride,
        key_head_stride=k.inner_stride,
        value=emitter.address(value),
        value_stride=v.stride,
        value_head_stride=v.inner_stride,
        cos=emitter.address(cos),
        sin=emitter.address(sin),
        angle_stride=angles.stride,
        **cache,
        slots=emitter.address(tables[0]),
        num_rows=size(q.num_rows),
        num_heads=q.num_inner,
        num_groups=k.num_inner,
        head_size=q.width,
        rotary_size=q.width,
    )
    _attend(emitter, step, k.num_inner, cache, tables)


def _attend(
    emitter: Emitter, step: Step, num_groups: int, cache: dict[str, Word], tables: list[Operand]
) -> None:
    q, out = Rows.of(emitter.access(step.inputs[0])), Rows.of(step.output)
    _, block_tables, cu_lengths, context_lengths, span_lengths, positions, masks = (
        emitter.address(each) for each in tables
    )
    scratch_bytes = attention_scratch_bytes(emitter.num_threads, q.num_inner, num_groups, q.width)
    emitter.call(
        "attention",
        query=emitter.address(step.inputs[0]),
        query_stride=q.stride,
        query_head_stride=q.inner_stride,
        **cache,
        block_tables=block_tables,
        table_stride=Open("P"),
        block_size=step.node["block_size"],
        cu_lengths=cu_lengths,
        context_lengths=context_lengths,
        span_lengths=span_lengths,
        positions=positions,
        tree_masks=masks,
        num_sequences=Open("S"),
        num_heads=q.num_inner,
        num_groups=num_groups,
        head_size=q.width,
        window=step.node["window"] or 0,
        scale=step.node["scale"],
        softcap=step.node["softcap"] or 0.0,
        out=emitter.address(step.output),
        out_stride=out.stride,
        out_head_stride=out.inner_stride,
        scratch=emitter.scratch("attention.scratch", scratch_bytes),
        scratch_bytes=scratch_bytes,
    )


def _cache_and_tables(
    emitter: Emitter, step: Step, context: list[Operand]
) -> tuple[dict[str, Word], list[Operand]]:
    """What follows queries, keys and values: arguments for the cache, and slots to tree masks."""
    cache_name, *tables = context
    scales = tables.pop() if len(tables) > _NUM_TABLES else None
    return _layer(emitter, step, cache_name, scales), tables


def _layer(
    emitter: Emitter, step: Step, cache_name: Operand, scales_name: Operand | None
) -> dict[str, Word]:
    """The arguments that describe one layer of the cache."""
    layer: int = step.node["layer"]
    cache = _bound(emitter, cache_name)
    if cache.dtype not in CACHE_TYPES:
        raise Unsupported(f"a cache of {cache.dtype}")
    keys, values = cache[layer]
    scales = None if scales_name is None else _bound(emitter, scales_name)[layer]
    return {
        "key_cache": keys,
        "value_cache": values,
        "key_scales": None if scales is None else scales[0],
        "value_scales": None if scales is None else scales[1],
        "cache_type": CACHE_TYPES[cache.dtype],
        "slot_stride": keys.stride(0),
    }


def _bound(emitter: Emitter, name: Operand) -> torch.Tensor:
    tensor = emitter.bound.get(name) if isinstance(name, str) else None
    if tensor is None:
        raise Unsupported("attention to a cache that is another one in each step")
    return tensor
