"""Attention over a paged cache in plain torch: the truth that fast bodies are compared with."""

import torch


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
    window: int | None,
    softcap: float | None,
    key_scales: torch.Tensor | None,
    value_scales: torch.Tensor | None,
) -> torch.Tensor:
    """See kernels/attention.py. Works through the sequences one by one."""
    output = torch.empty_like(query)
    starts: list[int] = cu_lengths.tolist()
    contexts: list[int] = context_lengths.tolist()
    spans: list[int] = span_lengths.tolist()
    for index, (context, span) in enumerate(zip(contexts, spans, strict=True)):
        rows = slice(starts[index], starts[index + 1])
        num_keys = context + rows.stop - rows.start
        slots = _slots(block_tables[index], block_size, num_keys)
        mask = None
        if num_keys > context + 1 or (window is not None and num_keys > window):
            mask = visible_keys(context, span, positions[rows], tree_masks[rows], window)
        keys = _read(key_cache, key_scales, slots)
        values = _read(value_cache, value_scales, slots)
        output[rows] = _attend(query[rows], keys, values, mask, scale, softcap)
    return output


def visible_keys(
    context: int,
    span: int,
    positions: torch.Tensor,
    tree_masks: torch.Tensor,
    window: int | None,
) -> torch.Tensor:
    """Which keys each row of one sequence sees: bool [rows, context + rows].

    positions, tree_masks: [rows] int64, as in kernels/attention.py.
    """
    device = positions.device
    num_nodes = len(positions) - span
    own = torch.arange(context + span, device=device)
    key_positions = torch.cat([own, positions[span:]])
    nodes = torch.arange(1, num_nodes + 1, device=device)
    visible = torch.cat([own <= positions[:, None], (tree_masks[:, None] >> nodes) & 1 == 1], dim=1)
    if window is not None:
        visible &= positions[:, None] - key_positions < window
    return visible


def write_cache(
    x: torch.Tensor, cache: torch.Tensor, scales: torch.Tensor | None, slots: torch.Tensor
) -> None:
    """Store x [T, G, D] at `slots` of a cache [N, G, D], with scales [N, G] if it is int8."""
    if scales is not None:
        x = x.float()
        scale = x.abs().amax(dim=-1) / 127
        scales.index_copy_(0, slots, scale)
        # Zeros have scale 0 and code 0, not 0 / 0.
        x = torch.round(x / scale.where(scale > 0, 1)[..., None])
    cache.index_copy_(0, slots, x.to(cache.dtype))


def _read(cache: torch.Tensor, scales: torch.Tensor | None, slots: torch.Tensor) -> torch.Tensor:
    if scales is None:
        return cache[slots]
    return cache[slots].float() * scales[slots][..., None]


def _slots(block_table: torch.Tensor, block_size: int, num_tokens: int) -> torch.Tensor:
    """Slots of a sequence's first `num_tokens` tokens, int64."""
    offsets = torch.arange(block_size, device=block_table.device)
    return (block_table[:, None].long() * block_size + offsets).flatten()[:num_tokens]


def _attend(
    query: torch.Tensor,
    key: torch.Tensor,
    value: torch.Tensor,
    mask: torch.Tensor | None,
    scale: float,
    softcap: float | None,
) -> torch.Tensor:
    """query [rows, H, D], key and value [keys, G, D], mask [rows, keys] -> [rows, H, D]."""
    num_rows, num_heads, head_size = query.shape
    num_groups = key.shape[1]
    # The query heads of a group are more rows of one product: keys and values are never repeated.
    grouped = query.view(num_rows, num_groups, -1, head_size).permute(1, 2, 0, 3)
    flat = grouped.reshape(num_groups, -1, head_size).float()
    scores = torch.bmm(flat, key.permute(1, 2, 0).float()) * scale
    if softcap is not None:
        scores = softcap * torch.tanh(scores / softcap)
    if mask is not None:
        by_row = scores.view(num_groups, -1, num_rows, key.shape[0])
        scores = by_row.masked_fill(~mask, float("-inf")).view_as(scores)
    mixed = torch.bmm(torch.softmax(scores, dim=-1), value.permute(1, 0, 2).float())
    by_head = mixed.view(num_groups, -1, num_rows, head_size).permute(2, 0, 1, 3)
    return by_head.reshape(num_rows, num_heads, head_size).to(query.dtype)
