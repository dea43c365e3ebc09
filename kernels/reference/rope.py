"""Rotary position embedding in plain torch."""

import torch


def rope(x: torch.Tensor, cos: torch.Tensor, sin: torch.Tensor) -> torch.Tensor:
    """See kernels/rope.py."""
    rotary = cos.shape[-1]
    turned, kept = x[..., :rotary], x[..., rotary:]
    first, second = turned.chunk(2, dim=-1)
    across = torch.cat([-second, first], dim=-1)
    return torch.cat([turned * cos[:, None] + across * sin[:, None], kept], dim=-1)
