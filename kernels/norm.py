"""rms_norm and layer_norm: contracts, checked here.

Gemma's weights, which stand for 1 + weight, are the caller's to add up beforehand.
"""

import torch
from torch.nn import functional

from headway.kernels.cpu.library import Team


def rms_norm(
    x: torch.Tensor,
    weight: torch.Tensor,
    epsilon: float,
    *,
    out: torch.Tensor,
    team: Team | None = None,
) -> None:
    """Set `out` to x / sqrt(mean(x^2) + epsilon) * weight over the last dimension.

    x, out: float32 [T, W], or [T, H, W] for norms of single heads; W without gaps; out may be x.
    weight: [W] float32.

    Raises:
        ValueError: wrong types, shapes or strides.
    """
    _check(x, out, weight)
    if team is None:
        out.copy_(functional.rms_norm(x, (x.shape[-1],), weight, epsilon))
        return
    team.call("rms_norm", weight=weight, epsilon=epsilon, **_rows(x, out))


def layer_norm(
    x: torch.Tensor,
    weight: torch.Tensor | None,
    bias: torch.Tensor | None,
    epsilon: float,
    *,
    out: torch.Tensor,
    team: Team | None = None,
) -> None:
    """Set `out` to (x - mean) / sqrt(variance + epsilon) * weight + bias over the last dimension.

    x, out: float32 [T, W] or [T, H, W]; W without gaps; out may be x. weight, bias: [W] float32.

    Raises:
        ValueError: wrong types, shapes or strides.
    """
    _check(x, out, *(each for each in (weight, bias) if each is not None))
    if team is None:
        out.copy_(functional.layer_norm(x, (x.shape[-1],), weight, bias, epsilon))
        return
    team.call("layer_norm", weight=weight, bias=bias, epsilon=epsilon, **_rows(x, out))


def _rows(x: torch.Tensor, out: torch.Tensor) -> dict[str, torch.Tensor | int]:
    return {
        "x": x,
        "x_stride": x.stride(0),
        "x_inner_stride": x.stride(1) if x.ndim == 3 else 0,
        "out": out,
        "out_stride": out.stride(0),
        "out_inner_stride": out.stride(1) if x.ndim == 3 else 0,
        "num_rows": x.shape[0],
        "num_inner": x.shape[1] if x.ndim == 3 else 1,
        "width": x.shape[-1],
    }


def _check(x: torch.Tensor, out: torch.Tensor, *weights: torch.Tensor) -> None:
    width = x.shape[-1]
    if x.ndim not in (2, 3) or out.shape != x.shape:
        raise ValueError(
            f"x {tuple(x.shape)} and out {tuple(out.shape)} must be [T, W] or [T, H, W] alike"
        )
    if any(weight.shape != (width,) or not weight.is_contiguous() for weight in weights):
        raise ValueError(f"weights {[tuple(w.shape) for w in weights]} must be [{width}] each")
    if {each.dtype for each in (x, out, *weights)} != {torch.float32}:
        raise ValueError(f"x, out and weights must be float32; x is {x.dtype}, out {out.dtype}")
    if x.stride(-1) != 1 or out.stride(-1) != 1:
        raise ValueError(f"the last dimension has gaps: strides {x.stride()} and {out.stride()}")
