"""Connects transformers' models to paged_attention through transformers' AttentionInterface.

The mask interface is left alone: transformers builds no mask for an implementation that has
registered none, and ours are in ForwardInput.
"""

from typing import Any

import torch
from transformers import AttentionInterface

from headway.engine.batch import ForwardInput
from headway.kernels.attention import paged_attention, write_kv

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
    layer_index: Any = module.layer_idx
    keys, values = forward_input.cache.layer(layer_index)
    write_kv(key[0].transpose(0, 1), value[0].transpose(0, 1), keys, values, forward_input.slots)
    output = paged_attention(
        query[0].transpose(0, 1),
        keys,
        values,
        block_tables=forward_input.block_tables,
        block_size=forward_input.cache.block_size,
        cu_lengths=forward_input.cu_lengths,
        context_lengths=forward_input.context_lengths,
        span_lengths=forward_input.span_lengths,
        positions=forward_input.positions,
        tree_masks=forward_input.tree_masks,
        scale=scaling,
        window=sliding_window,
        softcap=softcap,
    )
    return output[None], None


AttentionInterface.register(ATTENTION, attention)
