"""KVCache: the tensors that hold keys and values. Which block is whose is block_pool's business."""

from collections.abc import Sequence as Seq

import torch
from transformers import PretrainedConfig

from headway.kernels.attention import move_kv
from headway.kernels.cpu.library import Team
from headway.kernels.memory import prefer_huge_pages


class KVCache:
    """Keys and values of every layer, in blocks of `block_size` tokens.

    data: [layers, 2, slots, key-value heads, head size]; [:, 0] keys, [:, 1] values; slot =
    block * block_size + offset. scales: [layers, 2, slots, key-value heads] float32 where data is
    int8, else None; kernels/attention.py says how values are rounded.
    """

    def __init__(
        self,
        config: PretrainedConfig,
        num_blocks: int,
        block_size: int,
        dtype: torch.dtype,
        device: torch.device,
        team: Team | None = None,
    ) -> None:
        """team: threads for the kernels that read and write the cache; None for plain torch."""
        layers, heads, head_size = _shape(config)
        self.num_blocks = num_blocks
        self.block_size = block_size
        self.team = team
        shape = (layers, 2, num_blocks * block_size, heads)
        # Not zeroed: every slot is written before it is read, and untouched pages cost no memory.
        self.data = torch.empty(*shape, head_size, dtype=dtype, device=device)
        prefer_huge_pages(self.data)
        self.scales = torch.empty(shape, device=device) if dtype == torch.int8 else None

    def move(self, moves: Seq[tuple[int, int]]) -> None:
        """Copy (source, target) slots in every layer; all are read before any is written."""
        if not moves:
            return
        sources, targets = torch.tensor(moves, device=self.data.device).T
        move_kv(self.data, sources, targets, self.team)
        if self.scales is not None:
            move_kv(self.scales[..., None], sources, targets, self.team)


def block_bytes(config: PretrainedConfig, block_size: int, dtype: torch.dtype) -> int:
    """Bytes of one block over all layers, the scales of int8 included."""
    layers, heads, head_size = _shape(config)
    head_bytes = head_size * dtype.itemsize + (torch.float32.itemsize if dtype == torch.int8 else 0)
    return layers * 2 * block_size * heads * head_bytes


def _shape(config: PretrainedConfig) -> tuple[int, int, int]:
    head_size = (
        getattr(config, "head_dim", None) or config.hidden_size // config.num_attention_heads
    )
    return config.num_hidden_layers, config.num_key_value_heads, head_size
