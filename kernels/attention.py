"""paged_attention and its cache writes: contracts, checked here, computed by a body.

Without a team the body is kernels/reference. Knows nothing of models, sequences or schedules.

Shapes: T rows, S sequences, H query heads, G key-value heads, D head size, N slots, P blocks.

Caches are float32, bfloat16 (rounded to nearest, ties to even) or int8 with scales [N, G] float32,
one for each slot and head, for keys and for values: scale = max|x| / 127, code = x / scale rounded
to nearest, ties to even, and the cached value is code * scale, all in float32. Zeros have scale 0.
Example: 0.5 -1.0 0.25 0.0 has scale 1 / 127 and codes 64 -127 32 0 (63.5 and 31.75 before rounding).
"""

import torch

from headway.kernels.cpu.library import Argument, Team
from headway.kernels.reference import attention as reference

CACHE_TYPES = {torch.float32: 0, torch.bfloat16: 1, torch.int8: 2}
"""By the number that cpu/kv_write.h knows them by."""

# As in cpu/attention.cpp and cpu/attention_product.h, whose Room these lay out.
_CHUNK = 64
_TILE_QUERIES = 192
_BLOCK_ROWS = 6
_PARTS_BYTES = 4 << 20


def paged_attention(
    query: torch.Tensor,
    key_cache: torch.Tensor,
    value_cache: torch.Tensor,
    *,
    block_tables: torch.Tensor,
    block_size: int,
    cu_lengths: torch.Tensor,
    context_lengths: torch.Tensor,
    span_lengths: torch.Tensor,
    positions: torch.Tensor,
    tree_masks: torch.Tensor,
    scale: float,
    window: int | None = None,
    softcap: float | None = None,
    key_scales: torch.Tensor | None = None,
    value_scales: torch.Tensor | None = None,
    team: Team | None = None,
) -> torch.Tensor:
    """Attend from the rows of a step to the cached keys and values of their sequences.

    query: [T, H, D]; key_cache, value_cache: [N, G, D] with H a multiple of G, same dtype; the keys
    and values of this step's rows are already in the cache. Returns [T, H, D].

    block_tables: [S, P] int32, block b of sequence s holds its tokens b * block_size onwards.
    cu_lengths: [S + 1] int32, rows of sequence s are cu_lengths[s] to cu_lengths[s + 1].
    context_lengths: [S] int32, tokens in the cache before this step.
    span_lengths: [S] int32, of a sequence's rows the first ones that are its own tokens, in order;
    the rows after them are drafted nodes 1, 2, ... of a tree whose root is the last span row. A
    node comes after its parent and its position is its parent's plus one.
    positions: [T] int64. tree_masks: [T] int64, bit j set where the row sees node j: itself and its
    ancestors.
    window: keys at least this many positions back are not seen. softcap: scores are bent to
    softcap * tanh(score / softcap). key_scales, value_scales: of int8 caches, see above.

    Example: 5 tokens cached, a span of 2, a tree of two drafts under its root, both at depth 1:

        row        slot index  position  tree_masks  sees slot indices
        span 0     5           5         0           0..5
        span 1     6           6         0b001       0..6            (the root, node 0)
        node 1     7           7         0b011       0..6, 7
        node 2     8           7         0b101       0..6, 8

    With a team, a row's result is the same to the bit whatever the other rows are, for any number
    of threads, and whether a key was drafted or is the sequence's own.

    Raises:
        ValueError: wrong types, shapes or strides.
    """
    _check_attention(query, key_cache, value_cache, positions, tree_masks)
    _check_cache(key_cache, value_cache, key_scales, value_scales)
    if team is None:
        return reference.paged_attention(
            query,
            key_cache,
            value_cache,
            block_tables=block_tables,
            block_size=block_size,
            cu_lengths=cu_lengths,
            context_lengths=context_lengths,
            span_lengths=span_lengths,
            positions=positions,
            tree_masks=tree_masks,
            scale=scale,
            window=window,
            softcap=softcap,
            key_scales=key_scales,
            value_scales=value_scales,
        )
    _check_integers(block_tables, cu_lengths, context_lengths, span_lengths)
    _, num_heads, head_size = query.shape
    rows = _dense_heads(query)
    out = torch.empty(query.shape)
    num_bytes = attention_scratch_bytes(team.num_threads, num_heads, key_cache.shape[1], head_size)
    scratch = torch.empty(num_bytes, dtype=torch.uint8)
    team.call(
        "attention",
        query=rows,
        query_stride=rows.stride(0),
        query_head_stride=rows.stride(1),
        **_cache_arguments(key_cache, value_cache, key_scales, value_scales),
        block_tables=block_tables,
        table_stride=block_tables.stride(0),
        block_size=block_size,
        cu_lengths=cu_lengths,
        context_lengths=context_lengths,
        span_lengths=span_lengths,
        positions=positions,
        tree_masks=tree_masks,
        num_sequences=len(context_lengths),
        num_heads=num_heads,
        num_groups=key_cache.shape[1],
        head_size=head_size,
        window=window,
        scale=scale,
        softcap=softcap or 0.0,
        out=out,
        out_stride=out.stride(0),
        out_head_stride=out.stride(1),
        scratch=scratch,
        scratch_bytes=num_bytes,
    )
    return out.to(query.dtype)


def attention_scratch_bytes(
    num_threads: int, num_heads: int, num_groups: int, head_size: int
) -> int:
    """Bytes that the native attention works in, 64-byte aligned, whatever the step holds.

    For each thread: packed keys [D, 64] and values [64, D] of a chunk and of a tree's nodes, and
    room for the parts of the queries it works on; then, for all, parts that are yet to be merged.
    """
    padded = -(-head_size // 16) * 16
    queries = max(_TILE_QUERIES, num_heads // num_groups) + 16
    floats = 2 * _CHUNK * (head_size + padded) + (_BLOCK_ROWS + queries) * padded + 2 * queries
    return num_threads * floats * 4 + _PARTS_BYTES


def write_kv(
    key: torch.Tensor,
    value: torch.Tensor,
    key_cache: torch.Tensor,
    value_cache: torch.Tensor,
    slots: torch.Tensor,
    *,
    key_scales: torch.Tensor | None = None,
    value_scales: torch.Tensor | None = None,
    team: Team | None = None,
) -> None:
    """Store keys and values [T, G, D] at `slots` [T] int64 of the caches [N, G, D], in place.

    They are rounded to the caches' type as said at the top; `slots` must be distinct.

    Raises:
        ValueError: wrong types, shapes or strides.
    """
    if key.shape != value.shape or key.shape[1:] != key_cache.shape[1:]:
        raise ValueError(
            f"key {tuple(key.shape)}, value {tuple(value.shape)} and cache "
            f"{tuple(key_cache.shape)} must agree: [T, G, D] twice and [N, G, D]"
        )
    _check_cache(key_cache, value_cache, key_scales, value_scales)
    if team is None:
        reference.write_cache(key, key_cache, key_scales, slots)
        reference.write_cache(value, value_cache, value_scales, slots)
        return
    key, value = _dense_heads(key), _dense_heads(value)
    team.call(
        "write_kv",
        key=key,
        key_stride=key.stride(0),
        key_head_stride=key.stride(1),
        value=value,
        value_stride=value.stride(0),
        value_head_stride=value.stride(1),
        **_cache_arguments(key_cache, value_cache, key_scales, value_scales),
        slots=slots,
        num_rows=len(slots),
        num_groups=key.shape[1],
        head_size=key.shape[2],
    )


def move_kv(
    cache: torch.Tensor,
    source_slots: torch.Tensor,
    target_slots: torch.Tensor,
    team: Team | None = None,
) -> None:
    """Copy slots of a cache [..., N, G, D] onto others, in place; all are read before any is written.

    source_slots, target_slots: [M] int64. Compacts the accepted path of a tree. The scales of an
    int8 cache, [..., N, G], move in a call of their own: as a cache of D = 1.
    """
    if team is None:
        cache[..., target_slots, :, :] = cache[..., source_slots, :, :]
        return
    if not cache.is_contiguous():
        raise ValueError(f"a cache must be contiguous, not of strides {cache.stride()}")
    slot_bytes = cache.shape[-2] * cache.shape[-1] * cache.element_size()
    scratch = torch.empty(team.num_threads * len(source_slots) * slot_bytes, dtype=torch.uint8)
    team.call(
        "move_kv",
        data=cache,
        layer_bytes=cache.shape[-3] * slot_bytes,
        slot_bytes=slot_bytes,
        num_layers=cache[..., 0, 0, 0].numel(),
        sources=source_slots.contiguous(),
        targets=target_slots.contiguous(),
        num_moves=len(source_slots),
        scratch=scratch,
    )


def _dense_heads(x: torch.Tensor) -> torch.Tensor:
    """`x` as float32 with elements of a head side by side."""
    x = x.float()
    return x if x.stride(-1) == 1 else x.contiguous()


def _cache_arguments(
    key_cache: torch.Tensor,
    value_cache: torch.Tensor,
    key_scales: torch.Tensor | None,
    value_scales: torch.Tensor | None,
) -> dict[str, Argument]:
    return {
        "key_cache": key_cache,
        "value_cache": value_cache,
        "key_scales": key_scales,
        "value_scales": value_scales,
        "cache_type": CACHE_TYPES[key_cache.dtype],
        "slot_stride": key_cache.stride(0),
    }


def _check_attention(
    query: torch.Tensor,
    key_cache: torch.Tensor,
    value_cache: torch.Tensor,
    positions: torch.Tensor,
    tree_masks: torch.Tensor,
) -> None:
    num_rows, num_heads, head_size = query.shape
    if key_cache.shape != value_cache.shape or key_cache.shape[-1] != head_size:
        raise ValueError(
            f"caches {tuple(key_cache.shape)}, {tuple(value_cache.shape)} and query "
            f"{tuple(query.shape)} must agree: [N, G, D] twice and [T, H, D]"
        )
    if num_heads % key_cache.shape[1]:
        raise ValueError(
            f"{num_heads} query heads are no multiple of {key_cache.shape[1]} key-value heads"
        )
    if positions.shape != (num_rows,) or tree_masks.shape != (num_rows,):
        raise ValueError(f"positions and tree_masks need one entry for each of {num_rows} rows")


def _check_integers(*tensors: torch.Tensor) -> None:
    for tensor in tensors:
        if tensor.dtype != torch.int32 or tensor.stride(-1) != 1:
            raise ValueError(
                f"block_tables and lengths must be int32 without gaps, not {tensor.dtype} "
                f"{tuple(tensor.shape)} of strides {tensor.stride()}"
            )


def _check_cache(
    key_cache: torch.Tensor,
    value_cache: torch.Tensor,
    key_scales: torch.Tensor | None,
    value_scales: torch.Tensor | None,
) -> None:
    if key_cache.dtype != value_cache.dtype or key_cache.stride() != value_cache.stride():
        raise ValueError(
            f"caches of {key_cache.dtype} and {value_cache.dtype}, strides {key_cache.stride()} "
            f"and {value_cache.stride()}: keys and values must be stored alike"
        )
    if key_cache.stride()[1:] != (key_cache.shape[2], 1):
        raise ValueError(f"heads of a slot must lie side by side; strides are {key_cache.stride()}")
    for name, scales in (("key_scales", key_scales), ("value_scales", value_scales)):
        wanted = key_cache.shape[:2] if key_cache.dtype == torch.int8 else None
        if (None if scales is None else scales.shape) != wanted:
            given = "none" if scales is None else str(tuple(scales.shape))
            raise ValueError(
                f"{name}: {given} with a cache {tuple(key_cache.shape)} of {key_cache.dtype}; "
                "int8 has scales [N, G], other types have none"
            )
        if scales is not None and (scales.dtype != torch.float32 or not scales.is_contiguous()):
            raise ValueError(f"{name} must be contiguous float32, not {scales.dtype}")
