"""Writes and reads PackedWeight: from float matrices, back to floats, joined with one another, cut.

The layout is told in kernels/packed.py. Knows no files; gguf_blocks.py packs what GGUF files hold.

N outputs, K inputs, P panels of 16 outputs, B blocks of inputs, W 32-bit words of codes that one
output has in one block.
"""

from collections.abc import Sequence
from typing import NamedTuple

import torch
import torch.nn.functional as F

from headway.kernels.packed import FORMATS, LANES, FormatName, PackedWeight

_CHUNK_VALUES = 1 << 20
"""Values that are worked on at once: what they need in between stays in a processor's cache."""

# Steps tried for a block of q4_1, as multiples of (max - min) / 15. Shorter ones clip the ends.
_Q4_1_STEPS = (1.0, 0.96, 0.92, 0.88, 0.84, 0.8, 0.76)


class Blocks(NamedTuple):
    """Rows of a quantised matrix before their lanes are interleaved."""

    codes: torch.Tensor
    """[rows, B, block] uint8, a byte for each code, whatever its bits."""
    scales: torch.Tensor
    """[rows, B], of the format's type."""
    minimums: torch.Tensor | None
    """[rows, B], if the format has them."""


def data_shape(format: FormatName, num_outputs: int, num_inputs: int) -> tuple[int, int, int]:
    """Return the shape of PackedWeight.data: panels, blocks, bytes of a block."""
    form = FORMATS[format]
    return -(-num_outputs // LANES), -(-num_inputs // form.block), form.block_bytes


def allocate(format: FormatName, num_outputs: int, num_inputs: int) -> PackedWeight:
    """Return a weight with memory that nothing is written to yet."""
    shape = data_shape(format, num_outputs, num_inputs)
    return PackedWeight(format, num_outputs, num_inputs, torch.empty(shape, dtype=torch.uint8))


def pack(matrix: torch.Tensor, format: FormatName) -> PackedWeight:
    """Pack a float matrix [N, K]: as it is for f32 and bf16, else rounded to the format's codes.

    q4_1 takes, for each block, of a few steps the one with the least squared error. q8 takes the
    step max |x| / 127. Steps and minimums are float16.

    Raises:
        ValueError: the format has no rounding here, or a value does not fit into it.
    """
    if format not in ("f32", "bf16", "q4_1", "q8"):
        raise ValueError(f"floats are packed as f32, bf16, q4_1 or q8, not as {format!r}")
    num_outputs, num_inputs = matrix.shape
    weight = allocate(format, num_outputs, num_inputs)
    block = FORMATS[format].block
    for rows in row_chunks(weight):
        part = F.pad(matrix[rows], (0, -num_inputs % block))
        if format == "f32" or format == "bf16":
            dtype = torch.float32 if format == "f32" else torch.bfloat16
            write_words(
                weight, rows.start, part.to(dtype).contiguous().view(torch.int32)[..., None]
            )
            continue
        values = part.float().view(len(part), -1, block)
        blocks = _round_q4_1(values) if format == "q4_1" else _round_q8(values)
        write_blocks(weight, rows.start, blocks)
    return weight


def unpack(
    weight: PackedWeight, first_panel: int = 0, num_panels: int | None = None
) -> torch.Tensor:
    """Return exactly the values of a weight, or of some of its panels: [rows, K] float32."""
    words, scales, minimums = _fields(weight)
    panels = slice(first_panel, None if num_panels is None else first_panel + num_panels)
    rows = words[panels].permute(0, 3, 1, 2).flatten(0, 1)
    values = _values(
        weight,
        rows,
        None if scales is None else scales[panels].transpose(1, 2).flatten(0, 1),
        None if minimums is None else minimums[panels].transpose(1, 2).flatten(0, 1),
    )
    return values[: weight.num_outputs - first_panel * LANES]


def unpack_rows(weight: PackedWeight, rows: torch.Tensor) -> torch.Tensor:
    """Return the values of chosen outputs: rows [n] int64 -> [n, K] float32."""
    words, scales, minimums = _fields(weight)
    panel, lane = rows // LANES, rows % LANES
    return _values(
        weight,
        words[panel, :, :, lane],
        None if scales is None else scales[panel, :, lane],
        None if minimums is None else minimums[panel, :, lane],
    )


def joinable(weights: Sequence[PackedWeight]) -> bool:
    """Tell whether weights read the same inputs and fill their panels, so that they can be joined.

    The last one's panel may have room left.
    """
    same = {(weight.format, weight.num_inputs) for weight in weights}
    return len(same) == 1 and all(weight.num_outputs % LANES == 0 for weight in weights[:-1])


def concatenate(weights: Sequence[PackedWeight]) -> PackedWeight:
    """Join weights along their outputs: one product gives what each of them gives, side by side.

    Raises ValueError unless they are joinable.
    """
    _check_joinable(weights)
    data = torch.cat([weight.data for weight in weights])
    num_outputs = sum(weight.num_outputs for weight in weights)
    return PackedWeight(weights[0].format, num_outputs, weights[0].num_inputs, data)


def interleave(gate: PackedWeight, up: PackedWeight) -> PackedWeight:
    """Join two weights so that their panels alternate: gate 0, up 0, gate 1, up 1, ...

    A product that has both halves of a gated activation at hand applies it at once.

    Raises ValueError unless they are joinable, of one size and without room in the last panel.
    """
    _check_joinable([gate, up, gate])
    if gate.num_outputs != up.num_outputs:
        raise ValueError(f"gate has {gate.num_outputs} outputs and up {up.num_outputs}; not equal")
    data = torch.stack([gate.data, up.data], dim=1).flatten(0, 1)
    return PackedWeight(gate.format, 2 * gate.num_outputs, gate.num_inputs, data)


def take_outputs(weight: PackedWeight, rows: torch.Tensor) -> PackedWeight:
    """Keep some of the outputs: rows [n] int64, in the order wanted.

    Codes and scales move as they are, so the product with an output stays the same to the bit.
    """
    words, scales, minimums = _fields(weight)
    panel, lane = rows // LANES, rows % LANES
    taken = allocate(weight.format, len(rows), weight.num_inputs)
    write_words(taken, 0, words[panel, :, :, lane])
    _write_numbers(
        taken,
        0,
        [None if each is None else each[panel, :, lane] for each in (scales, minimums)],
    )
    return taken


def row_chunks(weight: PackedWeight) -> list[slice]:
    """Cut a weight's outputs into runs of whole panels of about a million values."""
    step = max(1, _CHUNK_VALUES // max(1, weight.num_inputs) // LANES) * LANES
    starts = range(0, weight.num_outputs, step)
    return [slice(start, min(start + step, weight.num_outputs)) for start in starts]


def write_blocks(weight: PackedWeight, first_row: int, blocks: Blocks) -> None:
    """Write rows from `first_row`, a multiple of 16, on; a last panel is filled up with zeros."""
    form = FORMATS[weight.format]
    codes = blocks.codes
    if form.code_bits == 4:
        # Groups j and j + block / 8 of four inputs lie block / 2 inputs apart.
        codes = codes[..., : form.block // 2] | codes[..., form.block // 2 :] << 4
    write_words(weight, first_row, codes.contiguous().view(torch.int32))
    _write_numbers(weight, first_row, [blocks.scales, blocks.minimums])


def write_words(weight: PackedWeight, first_row: int, words: torch.Tensor) -> None:
    """Write the codes of rows from `first_row` on: words [rows, B, W] int32."""
    lanes = _by_panel(words).permute(0, 2, 3, 1).contiguous().view(torch.uint8).flatten(2)
    first_panel = first_row // LANES
    target = weight.data[first_panel : first_panel + len(lanes)]
    target[..., target.shape[-1] - lanes.shape[-1] :] = lanes


def _write_numbers(
    weight: PackedWeight, first_row: int, columns: Sequence[torch.Tensor | None]
) -> None:
    """Write the scales and minimums of rows from `first_row` on: [rows, B] each, if there are any."""
    dtype = _scale_type(weight)
    first_panel, first_byte = first_row // LANES, 0
    for numbers in columns:
        if numbers is None:
            continue
        lanes = _by_panel(numbers.to(dtype)).transpose(1, 2).contiguous().view(torch.uint8)
        num_bytes = lanes.shape[-1]
        target = weight.data[first_panel : first_panel + len(lanes)]
        target[..., first_byte : first_byte + num_bytes] = lanes
        first_byte += num_bytes


def _by_panel(rows: torch.Tensor) -> torch.Tensor:
    """[rows, ...] -> [P, 16, ...], filled up with zeros."""
    room = -len(rows) % LANES
    if room:
        rows = torch.cat([rows, rows.new_zeros(room, *rows.shape[1:])])
    return rows.reshape(-1, LANES, *rows.shape[1:])


def _scale_type(weight: PackedWeight) -> torch.dtype:
    return torch.float16 if FORMATS[weight.format].scale_bytes == 2 else torch.float32


def _fields(
    weight: PackedWeight,
) -> tuple[torch.Tensor, torch.Tensor | None, torch.Tensor | None]:
    """Views of a weight's memory: words [P, B, W, 16] int32, scales and minimums [P, B, 16]."""
    form = FORMATS[weight.format]
    num_bytes = LANES * form.scale_bytes
    scales = minimums = None
    if num_bytes:
        scales = weight.data[..., :num_bytes].view(_scale_type(weight))
    if form.has_minimum:
        minimums = weight.data[..., num_bytes : 2 * num_bytes].view(_scale_type(weight))
    first = num_bytes * (1 + form.has_minimum)
    words = weight.data[..., first:].view(torch.int32)
    return words.view(*words.shape[:2], -1, LANES), scales, minimums


def _values(
    weight: PackedWeight,
    words: torch.Tensor,
    scales: torch.Tensor | None,
    minimums: torch.Tensor | None,
) -> torch.Tensor:
    """words [rows, B, W] int32, scales and minimums [rows, B] -> [rows, K] float32."""
    form = FORMATS[weight.format]
    if scales is None:
        dtype = torch.float32 if weight.format == "f32" else torch.bfloat16
        values = words.clone(memory_format=torch.contiguous_format).view(dtype).float()
    else:
        codes = words.clone(memory_format=torch.contiguous_format).view(torch.uint8)
        if form.code_bits == 4:
            codes = torch.cat([codes & 15, codes >> 4], dim=-1)
        values = codes.float()
        if form.zero:
            values -= form.zero
        values *= scales.float()[..., None]
        if minimums is not None:
            # Two roundings, as in GGUF's own definition: fused, the last bit would differ.
            values += minimums.float()[..., None]
    return values.flatten(1)[:, : weight.num_inputs]


def _check_joinable(weights: Sequence[PackedWeight]) -> None:
    if not joinable(weights):
        found = [(weight.format, weight.num_outputs, weight.num_inputs) for weight in weights]
        raise ValueError(
            "weights of one format and one number of inputs can be joined, all but the last with "
            f"a multiple of {LANES} outputs; these are (format, outputs, inputs): {found}"
        )


def _round_q8(values: torch.Tensor) -> Blocks:
    """values: [rows, B, block] float32."""
    scales = _to_float16(values.abs().amax(-1) / 127)
    codes = _divide(values, scales.float()[..., None]).round_().clamp_(-127, 127).add_(128)
    return Blocks(codes.to(torch.uint8), scales, None)


def _round_q4_1(values: torch.Tensor) -> Blocks:
    """Try several steps; for each, fit step and minimum to the codes that it gives.

    With codes q fixed, the squared error of d q + m is least at the line through (q, x):
    d = cov(q, x) / var(q), m = mean(x) - d mean(q). values: [rows, B, block] float32
    """
    low, high = values.aminmax(dim=-1, keepdim=True)
    middle, mean = (low + high) / 2, values.mean(-1, keepdim=True)
    best_error = torch.full_like(low, torch.inf)
    best_step, best_minimum = torch.zeros_like(low), low
    for factor in _Q4_1_STEPS:
        step = (high - low) * (factor / 15)
        codes = _divide(values - (middle - 7.5 * step), step).round_().clamp_(0, 15)
        mean_code = codes.mean(-1, keepdim=True)
        centred = codes - mean_code
        step = _divide((centred * values).mean(-1, keepdim=True), centred.square().mean(-1, True))
        step = _to_float16(step).float()
        minimum = _to_float16(mean - step * mean_code).float()
        error = (
            (_q4_1_codes(values, step, minimum) * step + minimum - values).square().sum(-1, True)
        )
        better = error < best_error
        best_error = torch.where(better, error, best_error)
        best_step = torch.where(better, step, best_step)
        best_minimum = torch.where(better, minimum, best_minimum)
    codes = _q4_1_codes(values, best_step, best_minimum).to(torch.uint8)
    return Blocks(codes, best_step[..., 0].half(), best_minimum[..., 0].half())


def _q4_1_codes(values: torch.Tensor, step: torch.Tensor, minimum: torch.Tensor) -> torch.Tensor:
    return _divide(values - minimum, step).round_().clamp_(0, 15)


def _divide(values: torch.Tensor, step: torch.Tensor) -> torch.Tensor:
    """values / step, and 0 where the step is 0: a block of equal values has none."""
    return (values / step).masked_fill_(step == 0, 0.0)


def _to_float16(values: torch.Tensor) -> torch.Tensor:
    rounded = values.half()
    if not rounded.isfinite().all():
        raise ValueError(
            "a quantised block has steps and minimums up to 65,504, and this matrix has larger "
            "values, or ones that are not finite. Keep it in float32 or bfloat16"
        )
    return rounded
