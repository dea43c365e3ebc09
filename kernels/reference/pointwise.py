"""Elementwise arithmetic in plain torch."""

from collections.abc import Callable

import torch
from torch.nn import functional

_UNARY: dict[str, Callable[[torch.Tensor], torch.Tensor]] = {
    "copy": lambda x: x,
    "neg": torch.neg,
    "abs": torch.abs,
    "square": torch.square,
    "sqrt": torch.sqrt,
    "rsqrt": torch.rsqrt,
    "reciprocal": torch.reciprocal,
    "relu": torch.relu,
    "exp": torch.exp,
    "tanh": torch.tanh,
    "sigmoid": torch.sigmoid,
    "silu": functional.silu,
    "gelu": functional.gelu,
    "gelu_tanh": lambda x: functional.gelu(x, approximate="tanh"),
    "sin": torch.sin,
    "cos": torch.cos,
    "round_bfloat16": lambda x: x.to(torch.bfloat16).float(),
}
_BINARY: dict[str, Callable[[torch.Tensor, torch.Tensor], torch.Tensor]] = {
    "add": torch.add,
    "sub": torch.sub,
    "mul": torch.mul,
    "div": torch.div,
    "maximum": torch.maximum,
    "minimum": torch.minimum,
    "pow": torch.pow,
    "silu_mul": lambda a, b: functional.silu(a) * b,
    "gelu_mul": lambda a, b: functional.gelu(a) * b,
    "gelu_tanh_mul": lambda a, b: functional.gelu(a, approximate="tanh") * b,
}


def pointwise(
    operation: str, a: torch.Tensor | float, b: torch.Tensor | float | None
) -> torch.Tensor:
    """See kernels/pointwise.py."""
    if b is None:
        return _UNARY[operation](torch.as_tensor(a).float())
    return _BINARY[operation](torch.as_tensor(a).float(), torch.as_tensor(b).float())
