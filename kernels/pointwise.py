"""pointwise: elementwise arithmetic on strided tensors, and copies; the table of its operations.

Contract, checked here; knows nothing of graphs. reduce.py and matmul.py hold what adds up.
"""

from collections.abc import Sequence
from typing import TypeVar

import torch

from headway.kernels.cpu.library import Team
from headway.kernels.reference import pointwise as reference

MAX_DIMS = 5

UNARY = {
    "copy": 0,  # also converts: int64, int32, bool and bfloat16 to float32, float32 to bfloat16
    "neg": 1,
    "abs": 2,
    "square": 3,
    "sqrt": 4,
    "rsqrt": 5,
    "reciprocal": 6,
    "relu": 7,
    "exp": 8,
    "tanh": 9,
    "sigmoid": 10,
    "silu": 11,
    "gelu": 12,
    "gelu_tanh": 13,
    "sin": 14,
    "cos": 15,
    "round_bfloat16": 16,  # to bfloat16 and back: what a model of that type keeps of a float
}
"""Operations of one operand, by the number that cpu/pointwise.cpp knows them by."""

BINARY = {
    "add": 32,
    "sub": 33,
    "mul": 34,
    "div": 35,
    "maximum": 36,
    "minimum": 37,
    "pow": 38,  # whole and half exponents up to 8 by products and roots
    "silu_mul": 39,  # silu(a) * b: the gated activation, as are the next two
    "gelu_mul": 40,
    "gelu_tanh_mul": 41,
}
"""Operations of two operands."""

TYPES = {
    torch.float32: 0,
    torch.bfloat16: 1,
    torch.int64: 2,
    torch.int32: 3,
    torch.bool: 4,
}
"""Element types by number. Arithmetic is float32 whatever the operands are."""

Operand = torch.Tensor | float
T = TypeVar("T")


def pointwise(
    operation: str,
    a: Operand,
    b: Operand | None = None,
    *,
    out: torch.Tensor,
    team: Team | None = None,
) -> None:
    """Set `out` to operation(a) or operation(a, b), broadcast to its shape.

    out: float32 or bfloat16, up to 5 dimensions, any strides; it may be an operand itself, but not
    another view of one. a, b: tensors of TYPES that broadcast to out, or one of them a number.

    Example, [2, 3] = [2, 1] + [3] as the body sees it, with dimensions of size 1 in front: size
    1 1 1 2 3, out_stride 0 0 0 3 1, a_stride 0 0 0 1 0, b_stride 0 0 0 0 1.

    Raises:
        ValueError: an unknown operation, a type or shape that it cannot work on, two numbers.
    """
    _check(operation, a, b, out)
    if team is None:
        out.copy_(reference.pointwise(operation, a, b))
        return
    scalar = next((float(x) for x in (a, b) if x is not None and not _is_tensor(x)), 0.0)
    team.call(
        "pointwise",
        operation=(UNARY | BINARY)[operation],
        scalar=scalar,
        **_operand("out", out, out.shape),
        **_operand("a", a, out.shape),
        **_operand("b", b, out.shape),
        **indexed("size", [*[1] * (MAX_DIMS - out.ndim), *out.shape]),
    )


def indexed(name: str, values: Sequence[T]) -> dict[str, T]:
    """Arguments of an array field: size0=2, size1=3 for ("size", [2, 3])."""
    return {f"{name}{index}": value for index, value in enumerate(values)}


def padded_strides(tensor: torch.Tensor, num_dims: int) -> list[int]:
    """Strides of `tensor` behind zeros for the dimensions that it lacks."""
    return [*[0] * (num_dims - tensor.ndim), *tensor.stride()]


def _is_tensor(operand: Operand | None) -> bool:
    return isinstance(operand, torch.Tensor)


def _operand(
    name: str, operand: Operand | None, shape: torch.Size
) -> dict[str, torch.Tensor | int | None]:
    if not isinstance(operand, torch.Tensor):
        return {name: None, f"{name}_type": 0, **indexed(f"{name}_stride", [0] * MAX_DIMS)}
    strides = padded_strides(operand.expand(shape), MAX_DIMS)
    kind = TYPES[operand.dtype]
    return {name: operand, f"{name}_type": kind, **indexed(f"{name}_stride", strides)}


def _check(operation: str, a: Operand, b: Operand | None, out: torch.Tensor) -> None:
    if operation not in (UNARY if b is None else BINARY):
        count = "one operand" if b is None else "two operands"
        known = ", ".join(UNARY if b is None else BINARY)
        raise ValueError(f"no operation {operation!r} of {count}; there are {known}")
    if out.dtype not in (torch.float32, torch.bfloat16) or out.ndim > MAX_DIMS:
        raise ValueError(f"out is {out.dtype} {tuple(out.shape)}, not floats of up to 5 dimensions")
    tensors = [operand for operand in (a, b) if isinstance(operand, torch.Tensor)]
    if not tensors:
        raise ValueError(f"{operation} needs a tensor among its operands")
    for tensor in tensors:
        if tensor.dtype not in TYPES:
            raise ValueError(
                f"{operation} of {tensor.dtype}; there are {', '.join(map(str, TYPES))}"
            )
        aligned = zip(reversed(tensor.shape), reversed(out.shape), strict=False)
        if tensor.ndim > out.ndim or any(size not in (1, wanted) for size, wanted in aligned):
            raise ValueError(
                f"an operand {tuple(tensor.shape)} does not broadcast to out {tuple(out.shape)}"
            )
