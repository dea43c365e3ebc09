"""KVCache: the tensors that hold keys and values. Which block is whose is block_pool's business."""

from collections.abc import Sequence as Seq

import torch
from transformers import PretrainedConfig

from headway.kernels.attention import move_kv


class KVCache:
    """Keys and values of every layer, in blocks of `block_size` tokens.

    data: [layers, 2, slots, key-value heads, head size]; [:, 0] keys, [:, 1] values; slot =
    block * block_size + offset.
    """

    def __init__(
        self,
        config: PretrainedConfig,
        num_blocks: int,
        block_size: int,
        dtype: torch.dtype,
        device: torch.device,
    ) -> None:
        layers, heads, head_size = _shape(config)
        self.num_blocks = num_blocks
        self.block_size = block_size
        # Not zeroed: every slot is written before it is read, and untouched pages cost no memory.
        self.data = torch.empty(
            layers, 2, num_blocks * block_size, heads, head_size, dtype=dtype, device=device
        )

    def layer(self, index: int) -> tuple[torch.Tensor, torch.Tensor]:
        """The key and the value cache of one layer, [slots, heads, head size] each."""
        return self.data[index, 0], self.data[index, 1]

    def move(self, moves: Seq[tuple[int, int]]) -> None:
        """Copy (source, target) slots in every layer; all are read before any is written."""
        if moves:
            slots = torch.tensor(moves, device=self.data.device)
            move_kv(self.data, slots[:, 0], slots[:, 1])


def block_bytes(config: PretrainedConfig, block_size: int, dtype: torch.dtype) -> int:
    """Bytes of one block over all layers."""
    layers, heads, head_size = _shape(config)
    return layers * 2 * block_size * heads * head_size * dtype.itemsize


def _shape(config: PretrainedConfig) -> tuple[int, int, int]:
    head_size = (
        getattr(config, "head_dim", None) or config.hidden_size // config.num_attention_heads
    )
    return config.num_hidden_layers, config.num_key_value_heads, head_size
