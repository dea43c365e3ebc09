"""matmul: products of small strided float32 matrices. Weights are kernels/linear.py's business."""

import torch

from headway.kernels.cpu.library import Team


def matmul(
    a: torch.Tensor, b: torch.Tensor, *, out: torch.Tensor, team: Team | None = None
) -> None:
    """Set out [B, M, N] to a [B, M, K] times b [B, K, N], float32, any strides.

    Every element is added up over k in order, each step rounded once, so that a row's result does
    not depend on the other rows. out must not overlap a or b.

    Raises:
        ValueError: wrong types or shapes.
    """
    batches, rows, inner = a.shape
    columns = b.shape[-1]
    if b.shape != (batches, inner, columns) or out.shape != (batches, rows, columns):
        raise ValueError(
            f"a {tuple(a.shape)}, b {tuple(b.shape)} and out {tuple(out.shape)} must be "
            "[B, M, K], [B, K, N] and [B, M, N]"
        )
    if {a.dtype, b.dtype, out.dtype} != {torch.float32}:
        raise ValueError(f"a, b and out must be float32, not {a.dtype}, {b.dtype} and {out.dtype}")
    if team is None:
        out.copy_(torch.bmm(a, b))
        return
    team.call(
        "matmul",
        a=a,
        b=b,
        out=out,
        num_batches=batches,
        num_rows=rows,
        num_inner=inner,
        num_columns=columns,
        a_batch_stride=a.stride(0),
        a_row_stride=a.stride(1),
        a_inner_stride=a.stride(2),
        b_batch_stride=b.stride(0),
        b_inner_stride=b.stride(1),
        b_column_stride=b.stride(2),
        out_batch_stride=out.stride(0),
        out_row_stride=out.stride(1),
        out_column_stride=out.stride(2),
    )
