"""quantise_rows, linear, output_head and embedding: products with packed weights.

Contracts, checked here; computed by the native bodies on a team, or without one by the reference.

Shapes: R rows, K inputs, N outputs, G = ceil(R / 16) groups, B = ceil(K / 32) blocks, k best outputs.

Quantised rows come in groups of 16 rows and blocks of 32 inputs. A row's block has a scale
a = max |x| / 127 and codes q = x / a rounded, halves to even; zeros if a is 0. Groups follow one
another, and in a group its B blocks, of 768 bytes each:

    codes        bytes 0 to 511: int8 [16 rows, 32 inputs]; inputs beyond K are 0
    scales       512 to 575: float32 [16]: a; 0 for rows beyond the last
    scaled sums  576 to 639: float32 [16]: a times the sum of the row's codes
    sums         640 to 703: int32 [16]: the sum of the row's codes
    first sums   704 to 767: int32 [16]: that of the first 16 codes

Example, K = 40, so B = 2: row 17, input 33 is in group 1, block 1, so its code is byte
(1 * 2 + 1) * 768 + 1 * 32 + 1 = 2337. A block 2.54, -1.27, 0, ... has a = 0.02 and codes 127, -64,
0, ... (-63.5 is halfway).

A product of quantised rows is, in float32 and in this order, with exact integers in brackets:

    y = 0;  for each block of the weight: y = y + [sum q (code - zero)] * (d * a), then
                                          y = y + m * (a * [sum q])  if the format has minimums

each y = ... a fused multiply-add. A product of float rows is one for each input, in order of the
inputs, of x and the weight's value. So a row's result never depends on other rows or threads.
"""

from dataclasses import dataclass
from typing import Literal

import torch

from headway.kernels.cpu.library import Team
from headway.kernels.pack import unpack_rows
from headway.kernels.packed import FORMATS, LANES, PackedWeight
from headway.kernels.reference import linear as reference

ROW_BLOCK = 32
"""Inputs of a quantised row that share a scale."""

ROW_GROUP = 16
"""Quantised rows that lie together."""

ROW_BLOCK_BYTES = 768
"""Bytes of a block of a group."""

MAX_TOP = 64
"""The most outputs that output_head ranks."""

_CHUNK_PANELS = 16  # as in cpu/output_head.cpp

Activation = Literal["silu", "gelu_tanh", "gelu"]

ACTIVATION_NUMBERS: dict[Activation | None, int] = {None: 0, "silu": 1, "gelu_tanh": 2, "gelu": 3}
"""What the native kernels call them."""


@dataclass(frozen=True, slots=True)
class QuantisedRows:
    """Rows in the layout above."""

    num_rows: int
    num_inputs: int
    data: torch.Tensor
    """[G, B, 768] uint8, 64-byte aligned."""


@dataclass(frozen=True, slots=True)
class HeadOutput:
    """What output_head found in each row; None what it was not asked for."""

    logits: torch.Tensor | None
    """[R, N] float32."""
    values: torch.Tensor
    """[R, k] float32, best first. A NaN counts as better than any number."""
    indices: torch.Tensor
    """[R, k] int64, the lowest first among equal values."""
    log_sums: torch.Tensor | None
    """[R] float32: log of the sum of exp(logit)."""


def row_bytes(num_inputs: int) -> int:
    """Bytes of one quantised row; memory is needed for whole groups of rows."""
    return -(-num_inputs // ROW_BLOCK) * ROW_BLOCK_BYTES // ROW_GROUP


def output_head_scratch_bytes(
    num_rows: int, num_outputs: int, num_top: int, num_threads: int
) -> int:
    """Bytes of working memory that the native output_head wants, aligned to 8."""
    num_panels = -(-num_outputs // LANES)
    return 8 * num_rows * (num_threads * num_top + -(-num_panels // _CHUNK_PANELS))


def quantise_rows(
    x: torch.Tensor, *, index: torch.Tensor | None = None, team: Team | None = None
) -> QuantisedRows:
    """Round rows [R, K] float32 to int8 by blocks.

    index: [R'] int64, the rows to take, in order; all of them without it. A NaN or infinity makes
    its block's scale NaN or infinite, and so every product of the row NaN.
    """
    _check_rows(x, index)
    num_rows, num_inputs = len(x) if index is None else len(index), x.shape[1]
    if team is None:
        data = reference.quantise_rows(x if index is None else x[index])
        return QuantisedRows(num_rows, num_inputs, data)
    shape = (-(-num_rows // ROW_GROUP), -(-num_inputs // ROW_BLOCK), ROW_BLOCK_BYTES)
    data = torch.empty(shape, dtype=torch.uint8)
    team.call(
        "quantise_rows",
        x=x,
        x_stride=x.stride(0),
        index=index,
        num_rows=num_rows,
        num_inputs=num_inputs,
        out=data,
    )
    return QuantisedRows(num_rows, num_inputs, data)


def linear(
    x: torch.Tensor | QuantisedRows,
    weight: PackedWeight,
    *,
    bias: torch.Tensor | None = None,
    residual: torch.Tensor | None = None,
    activation: Activation | None = None,
    out: torch.Tensor | None = None,
    team: Team | None = None,
) -> torch.Tensor:
    """Multiply rows by a weight: y = x W^T + bias + residual, [R, N] float32.

    x: [R, K] float32 or quantised rows; those only with a quantised format. bias: [N] float32.
    residual: [R, N] float32, may be `out`. out: where to write, rows of any stride.

    With an activation the weight's panels are in turn gates and what they scale, y is [R, N / 2]:
    y[:, 16 p + i] = act(z[:, 32 p + i]) * z[:, 32 p + 16 + i], where z = x W^T + bias. N must be a
    multiple of 32, and there is no residual.
    """
    num_rows = _check_operands(x, weight, bias)
    width = weight.num_outputs if activation is None else weight.num_outputs // 2
    if activation is not None and (weight.num_outputs % (2 * LANES) or residual is not None):
        raise ValueError(
            f"a gated product has outputs in multiples of {2 * LANES} and no residual; got "
            f"{weight.num_outputs} outputs, residual {residual is not None}"
        )
    for name, tensor in (("residual", residual), ("out", out)):
        if tensor is not None and (tensor.shape != (num_rows, width) or not _has_rows(tensor)):
            raise ValueError(
                f"{name} must be [{num_rows}, {width}] float32 with unit stride in a row; got "
                f"{tuple(tensor.shape)} {tensor.dtype} with strides {tensor.stride()}"
            )
    if out is None:
        out = torch.empty(num_rows, width)
    if team is None:
        rows = _reference_rows(x)
        return out.copy_(reference.linear(rows, weight, bias, residual, activation))
    team.call(
        "linear",
        **_product_arguments(x, weight),
        out=out,
        out_stride=out.stride(0),
        bias=bias,
        residual=residual,
        residual_stride=0 if residual is None else residual.stride(0),
        activation=ACTIVATION_NUMBERS[activation],
    )
    return out


def output_head(
    x: torch.Tensor | QuantisedRows,
    weight: PackedWeight,
    *,
    bias: torch.Tensor | None = None,
    softcap: float | None = None,
    num_top: int = 1,
    with_logits: bool = False,
    with_log_sums: bool = False,
    team: Team | None = None,
) -> HeadOutput:
    """Find the best outputs of rows without storing all of them, unless asked to.

    x, weight, bias: as in linear. softcap: logits are bent to softcap * tanh(logit / softcap).
    num_top: 0 to 64.
    """
    num_rows = _check_operands(x, weight, bias)
    if not 0 <= num_top <= min(MAX_TOP, weight.num_outputs):
        raise ValueError(
            f"num_top is {num_top}; allowed are 0 to {min(MAX_TOP, weight.num_outputs)}"
        )
    if team is None:
        logits = reference.linear(_reference_rows(x), weight, bias, None, None)
        if softcap is not None:
            logits = softcap * torch.tanh(logits / softcap)
        values, indices = reference.top(logits, num_top)
        log_sums = torch.logsumexp(logits, dim=1) if with_log_sums else None
        return HeadOutput(logits if with_logits else None, values, indices, log_sums)
    output = HeadOutput(
        torch.empty(num_rows, weight.num_outputs) if with_logits else None,
        torch.empty(num_rows, num_top),
        torch.empty(num_rows, num_top, dtype=torch.int64),
        torch.empty(num_rows) if with_log_sums else None,
    )
    num_bytes = output_head_scratch_bytes(num_rows, weight.num_outputs, num_top, team.num_threads)
    team.call(
        "output_head",
        **_product_arguments(x, weight),
        bias=bias,
        softcap=softcap or 0.0,
        logits=output.logits,
        logits_stride=weight.num_outputs,
        num_top=num_top,
        values=output.values,
        indices=output.indices,
        log_sums=output.log_sums,
        scratch=torch.empty(num_bytes, dtype=torch.uint8),
    )
    return output


def embedding(
    ids: torch.Tensor, weight: PackedWeight, *, scale: float = 1.0, team: Team | None = None
) -> torch.Tensor:
    """Read rows of a weight: [R] int64 ids below N -> [R, K] float32, times `scale`."""
    if ids.dtype != torch.int64 or ids.dim() != 1 or not ids.is_contiguous():
        raise ValueError(f"ids must be [R] int64, got {tuple(ids.shape)} {ids.dtype}")
    if len(ids) and not 0 <= int(ids.min()) <= int(ids.max()) < weight.num_outputs:
        raise ValueError(
            f"ids are {int(ids.min())} to {int(ids.max())}; the weight has rows 0 to "
            f"{weight.num_outputs - 1}"
        )
    if team is None:
        return unpack_rows(weight, ids) * scale
    out = torch.empty(len(ids), weight.num_inputs)
    team.call(
        "embedding",
        ids=ids,
        num_rows=len(ids),
        weight=weight.data,
        format=FORMATS[weight.format].number,
        num_inputs=weight.num_inputs,
        out=out,
        out_stride=out.stride(0),
        scale=scale,
    )
    return out


def _product_arguments(
    x: torch.Tensor | QuantisedRows, weight: PackedWeight
) -> dict[str, torch.Tensor | int | None]:
    return {
        "x": x.data if isinstance(x, QuantisedRows) else x,
        "x_stride": 0 if isinstance(x, QuantisedRows) else x.stride(0),
        "index": None,
        "num_rows": _num_rows(x),
        "quantised": int(isinstance(x, QuantisedRows)),
        "weight": weight.data,
        "format": FORMATS[weight.format].number,
        "num_outputs": weight.num_outputs,
        "num_inputs": weight.num_inputs,
    }


def _num_rows(x: torch.Tensor | QuantisedRows) -> int:
    return x.num_rows if isinstance(x, QuantisedRows) else len(x)


def _has_rows(tensor: torch.Tensor) -> bool:
    return tensor.dtype == torch.float32 and (tensor.shape[-1] <= 1 or tensor.stride(-1) == 1)


def _check_rows(x: torch.Tensor, index: torch.Tensor | None = None) -> None:
    if x.dim() != 2 or not _has_rows(x):
        raise ValueError(
            f"x must be [R, K] float32 with unit stride in a row; got {tuple(x.shape)} {x.dtype} "
            f"with strides {x.stride()}"
        )
    if index is not None and (index.dim() != 1 or index.dtype != torch.int64):
        raise ValueError(f"index must be [R] int64, got {tuple(index.shape)} {index.dtype}")


def _check_operands(
    x: torch.Tensor | QuantisedRows, weight: PackedWeight, bias: torch.Tensor | None
) -> int:
    """Return the number of rows."""
    if isinstance(x, QuantisedRows):
        num_inputs = x.num_inputs
        if not FORMATS[weight.format].scale_bytes:
            raise ValueError(f"quantised rows need a quantised weight, got {weight.format}")
    else:
        _check_rows(x)
        num_inputs = x.shape[1]
    if num_inputs != weight.num_inputs:
        raise ValueError(f"x has {num_inputs} inputs, the weight {weight.num_inputs}")
    if bias is not None and (bias.shape != (weight.num_outputs,) or not _has_rows(bias)):
        raise ValueError(
            f"bias must be [{weight.num_outputs}] float32, got {tuple(bias.shape)} {bias.dtype}"
        )
    return _num_rows(x)


def _reference_rows(x: torch.Tensor | QuantisedRows) -> torch.Tensor:
    if isinstance(x, QuantisedRows):
        return reference.row_values(x.data, x.num_rows, x.num_inputs)
    return x
