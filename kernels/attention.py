"""paged_attention and its cache writes: contracts, checked here, computed by a body.

The one body so far is kernels/reference; knows nothing of models, sequences or schedules.

Shapes: T rows, S sequences, H query heads, G key-value heads, D head size, N slots, P blocks.
"""

import torch

from headway.kernels.reference import attention as reference


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
) -> torch.Tensor:
    """Attend from the rows of a step to the cached keys and values of their sequences.

    query: [T, H, D]; key_cache, value_cache: [N, G, D] with H a multiple of G, same dtype; the keys
    and values of this step's rows are already in the cache. Returns [T, H, D].

    block_tables: [S, P] int32, block b of sequence s holds its tokens b * block_size onwards.
    cu_lengths: [S + 1] int32, rows of sequence s are cu_lengths[s] to cu_lengths[s + 1].
    context_lengths: [S] int32, tokens in the cache before this step.
    span_lengths: [S] int32, of a sequence's rows the first ones that are its own tokens, in order;
    the rows after them are drafted nodes 1, 2, ... of a tree whose root is the last span row.
    positions: [T] int64. tree_masks: [T] int64, bit j set where the row sees node j.
    window: keys at least this many positions back are not seen. softcap: scores are bent to
    softcap * tanh(score / softcap).

    Example: 5 tokens cached, a span of 2, a tree of two drafts under its root, both at depth 1:

        row        slot index  position  tree_masks  sees slot indices
        span 0     5           5         0           0..5
        span 1     6           6         0b001       0..6            (the root, node 0)
        node 1     7           7         0b011       0..6, 7
        node 2     8           7         0b101       0..6, 8
    """
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
    )


def write_kv(
    key: torch.Tensor,
    value: torch.Tensor,
    key_cache: torch.Tensor,
    value_cache: torch.Tensor,
    slots: torch.Tensor,
) -> None:
    """Store keys and values [T, G, D] at `slots` [T] int64 of the caches [N, G, D], in place."""
    if key.shape != value.shape or key.shape[1:] != key_cache.shape[1:]:
        raise ValueError(
            f"key {tuple(key.shape)}, value {tuple(value.shape)} and cache "
            f"{tuple(key_cache.shape)} must agree: [T, G, D] twice and [N, G, D]"
        )
    key_cache.index_copy_(0, slots, key)
    value_cache.index_copy_(0, slots, value)


def move_kv(cache: torch.Tensor, source_slots: torch.Tensor, target_slots: torch.Tensor) -> None:
    """Copy slots of a cache [..., N, G, D] onto others, in place; all are read before any is written.

    source_slots, target_slots: [M] int64. Compacts the accepted path of a tree.
    """
    cache[..., target_slots, :, :] = cache[..., source_slots, :, :]
