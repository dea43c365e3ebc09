"""Products with packed weights in plain torch: the truth that the native bodies are compared with.

See kernels/linear.py for the shapes and the layout of quantised rows.
"""

import torch
import torch.nn.functional as F

from headway.kernels.pack import unpack
from headway.kernels.packed import LANES, PackedWeight

_BLOCK, _GROUP = 32, 16  # of quantised rows


def quantise_rows(x: torch.Tensor) -> torch.Tensor:
    """[R, K] float32 -> [groups, blocks, 768] uint8."""
    num_rows, num_inputs = x.shape
    padded = F.pad(x, (0, -num_inputs % _BLOCK, 0, -num_rows % _GROUP))
    # [groups, blocks, rows of a group, inputs of a block]
    blocks = padded.view(-1, _GROUP, padded.shape[1] // _BLOCK, _BLOCK).transpose(1, 2)
    scales = blocks.abs().amax(dim=3) / 127
    codes = (blocks / scales[..., None]).clamp(-127, 127).round()
    codes = torch.where(scales[..., None] == 0, 0.0, codes).nan_to_num(0.0).to(torch.int8)
    sums = codes.sum(dim=3, dtype=torch.int32)
    first_sums = codes[..., : _BLOCK // 2].sum(dim=3, dtype=torch.int32)
    parts = [codes.flatten(2), scales, scales * sums, sums, first_sums]
    return torch.cat([part.contiguous().view(torch.uint8) for part in parts], dim=2)


def row_values(data: torch.Tensor, num_rows: int, num_inputs: int) -> torch.Tensor:
    """The rows that quantised rows stand for: [R, K] float32."""
    num_groups, num_blocks, _ = data.shape
    codes_end = _GROUP * _BLOCK
    codes = data[..., :codes_end].contiguous().view(torch.int8)
    scales = data[..., codes_end : codes_end + 4 * _GROUP].contiguous().view(torch.float32)
    blocks = codes.view(num_groups, num_blocks, _GROUP, _BLOCK) * scales[..., None]
    rows = blocks.transpose(1, 2).reshape(num_groups * _GROUP, num_blocks * _BLOCK)
    return rows[:num_rows, :num_inputs]


def linear(
    x: torch.Tensor,
    weight: PackedWeight,
    bias: torch.Tensor | None,
    residual: torch.Tensor | None,
    activation: str | None,
) -> torch.Tensor:
    """[R, K] -> [R, N], or [R, N / 2] with an activation; computed in x's type."""
    y = F.linear(x, unpack(weight).to(x.dtype), None if bias is None else bias.to(x.dtype))
    if activation is None:
        return y if residual is None else y + residual
    gates, ups = y.view(len(y), -1, 2, LANES).unbind(dim=2)
    return (_activate(gates, activation) * ups).flatten(1)


def top(logits: torch.Tensor, num_top: int) -> tuple[torch.Tensor, torch.Tensor]:
    """The best values of each row and their indices, the lowest index first among equals."""
    order = torch.sort(logits, dim=1, descending=True, stable=True)
    return order.values[:, :num_top], order.indices[:, :num_top]


def _activate(gates: torch.Tensor, activation: str) -> torch.Tensor:
    if activation == "silu":
        return F.silu(gates)
    return F.gelu(gates, approximate="tanh" if activation == "gelu_tanh" else "none")
