"""rope: rotary position embedding in the layout of transformers (halves, not pairs).

Contract, checked here; knows no frequencies: the angles' cosines and sines are arguments.
"""

import torch

from headway.kernels.cpu.library import Team
from headway.kernels.reference import rope as reference


def rope(
    x: torch.Tensor,
    cos: torch.Tensor,
    sin: torch.Tensor,
    *,
    out: torch.Tensor,
    team: Team | None = None,
) -> None:
    """Rotate each head of each row by the angles of the row.

    x, out: [T, H, D] float32, D without gaps; out may be x. cos, sin: [T, R] float32 with the same
    strides and R at most D, even: element i < R / 2 and element i + R / 2 are the two coordinates
    of one rotation, and elements from R on are copied.

    Example, D = 4, R = 2, angle 90 degrees (cos 0 0, sin 1 1): 3 5 7 9 becomes -5 3 7 9.

    Raises:
        ValueError: wrong types, shapes or strides.
    """
    rows, heads, size = x.shape
    rotary = cos.shape[-1]
    if out.shape != x.shape or cos.shape != (rows, rotary) or sin.shape != cos.shape:
        raise ValueError(
            f"x {tuple(x.shape)}, out {tuple(out.shape)}, cos {tuple(cos.shape)} and sin "
            f"{tuple(sin.shape)} must be [T, H, D] twice and [T, R] twice"
        )
    if rotary > size or rotary % 2:
        raise ValueError(f"{rotary} of {size} elements cannot rotate: an even number up to D can")
    if {each.dtype for each in (x, out, cos, sin)} != {torch.float32}:
        raise ValueError(f"x, out, cos and sin must be float32; x is {x.dtype}, cos {cos.dtype}")
    if {each.stride(-1) for each in (x, out, cos, sin)} != {1} or cos.stride() != sin.stride():
        raise ValueError("the last dimensions must have no gaps, and cos and sin the same strides")
    if team is None:
        out.copy_(reference.rope(x, cos, sin))
        return
    team.call(
        "rope",
        x=x,
        x_stride=x.stride(0),
        x_head_stride=x.stride(1),
        cos=cos,
        sin=sin,
        angle_stride=cos.stride(0),
        out=out,
        out_stride=out.stride(0),
        out_head_stride=out.stride(1),
        num_rows=rows,
        num_heads=heads,
        head_size=size,
        rotary_size=rotary,
    )
