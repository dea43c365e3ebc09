"""reduce and softmax over the last dimension: contracts, checked here."""

import torch

from headway.kernels.cpu.library import Team
from headway.kernels.pointwise import indexed, padded_strides
from headway.kernels.reference import reduce as reference

REDUCTIONS = {"sum": 0, "mean": 1, "max": 2}
"""By the number that cpu/reduce.cpp knows them by."""

MAX_OUTER_DIMS = 4


def reduce(operation: str, x: torch.Tensor, *, out: torch.Tensor, team: Team | None = None) -> None:
    """Set `out` [...] to the sum, mean or maximum over the last dimension of `x` [..., W].

    float32, up to 4 dimensions before the last, any strides. A maximum is NaN if an element is.
    Element i is added to partial result i % 16, and those in a tree (i and i + 8, i and i + 4, ...).

    Raises:
        ValueError: an unknown operation, wrong types or shapes, an empty last dimension.
    """
    if operation not in REDUCTIONS:
        raise ValueError(f"no reduction {operation!r}; there are {', '.join(REDUCTIONS)}")
    _check(x, out, x.shape[:-1])
    if team is None:
        out.copy_(reference.reduce(operation, x))
        return
    team.call(
        "reduce",
        operation=REDUCTIONS[operation],
        x=x,
        out=out,
        width=x.shape[-1],
        x_inner_stride=x.stride(-1),
        **indexed("size", [*[1] * (MAX_OUTER_DIMS - out.ndim), *out.shape]),
        **indexed("x_stride", padded_strides(x, MAX_OUTER_DIMS + 1)[:-1]),
        **indexed("out_stride", padded_strides(out, MAX_OUTER_DIMS)),
    )


def softmax(x: torch.Tensor, *, out: torch.Tensor, team: Team | None = None) -> None:
    """Set `out` to the softmax of `x` over the last dimension.

    x, out: float32 [..., W], up to 4 dimensions before the last, any strides; out may be x.

    Raises:
        ValueError: wrong types or shapes, an empty last dimension.
    """
    _check(x, out, x.shape)
    if team is None:
        out.copy_(torch.softmax(x, dim=-1))
        return
    team.call(
        "softmax",
        x=x,
        out=out,
        width=x.shape[-1],
        x_inner_stride=x.stride(-1),
        out_inner_stride=out.stride(-1),
        **indexed("size", [*[1] * (MAX_OUTER_DIMS + 1 - out.ndim), *out.shape[:-1]]),
        **indexed("x_stride", padded_strides(x, MAX_OUTER_DIMS + 1)[:-1]),
        **indexed("out_stride", padded_strides(out, MAX_OUTER_DIMS + 1)[:-1]),
    )


def _check(x: torch.Tensor, out: torch.Tensor, shape: torch.Size) -> None:
    if out.shape != shape or not x.shape[-1]:
        raise ValueError(f"out {tuple(out.shape)} does not hold a result of x {tuple(x.shape)}")
    if x.ndim > MAX_OUTER_DIMS + 1 or {x.dtype, out.dtype} != {torch.float32}:
        raise ValueError(
            f"x is {x.dtype} {tuple(x.shape)} and out {out.dtype}, "
            f"not float32 of up to {MAX_OUTER_DIMS + 1} dimensions"
        )
