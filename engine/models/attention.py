"""Connects transformers' models to headway::attention through transformers' AttentionInterface.

The mask interface is left alone: transformers builds no mask for an implementation that has
registered none, and ours are in ForwardInput.
"""

from typing import Any

import torch
from transformers import AttentionInterface

from headway.engine.batch import ForwardInput
from headway.kernels.ops import attend
from headway.kernels.ops import attention as attention_op

ATTENTION = "headway"
"""The name to give as `attn_implementation`."""


def attention(
    module: torch.nn.Module,
    query: torch.Tensor,
    key: torch.Tensor,
    value: torch.Tensor,
    attention_mask: torch.Tensor | None,
    *,
    scaling: float,
    forward_input: ForwardInput,
    sliding_window: int | None = None,
    softcap: float | None = None,
    **_: Any,
) -> tuple[torch.Tensor, None]:
    """Write this layer's keys and values to the cache, then attend to it.

    query: [1, H, T, D]; key, value: [1, G, T, D], rotated. Returns [1, T, H, D].
    """
    untyped: Any = module
    cache = forward_input.cache
    arguments = (
        query,
        key,
        value,
        cache.data,
        forward_input.slots,
        forward_input.block_tables,
        forward_input.cu_lengths,
        forward_input.context_lengths,
        forward_input.span_lengths,
        forward_input.positions,
        forward_input.tree_masks,
        untyped.layer_idx,
        cache.block_size,
        scaling,
        sliding_window,
        softcap,
        cache.scales,
    )
    # The operator, which a captured graph shows as one node, knows no team.
    output = attention_op(*arguments) if cache.team is None else attend(*arguments, cache.team)
    return output, None


AttentionInterface.register(ATTENTION, attention)
