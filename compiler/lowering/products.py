"""Rules for products with packed weights, and for choosing rows."""

import torch

from headway.compiler.graph import Dim, Unsupported
from headway.compiler.lowering.emitter import Emitter, Rows, size
from headway.compiler.placement import Operand, Step
from headway.compiler.program import Open, Output, Place, Word
from headway.kernels.linear import (
    ACTIVATION_NUMBERS,
    ROW_GROUP,
    output_head_scratch_bytes,
    row_bytes,
)
from headway.kernels.packed import FORMATS


def quantise_rows(emitter: Emitter, step: Step) -> None:
    """Rows of int8 codes with their scales, in a layout of their own."""
    x = _rows(emitter, step.inputs[0])
    _quantise(emitter, step.inputs[0], None, x.num_rows, step.output.buffer)


def _quantise(
    emitter: Emitter, rows: Operand, index: Operand | None, num_rows: Dim, name: str
) -> Place:
    x = _rows(emitter, rows)
    out = emitter.scratch(name, row_bytes(x.width), num_rows, ROW_GROUP)
    emitter.call(
        "quantise_rows",
        x=emitter.address(rows),
        x_stride=x.stride,
        index=None if index is None else emitter.address(index),
        num_rows=size(num_rows),
        num_inputs=x.width,
        out=out,
    )
    return out


def linear(emitter: Emitter, step: Step) -> None:
    """A product, with a bias and what it is added to if there are such."""
    extra = list(step.inputs[2:])
    residual = extra.pop() if step.node["residual"] else None
    bias = extra.pop() if extra else None
    out = _rows(emitter, step.output)
    added = None if residual is None else _rows(emitter, residual)
    emitter.call(
        "linear",
        **_product(emitter, step.inputs[0], step.inputs[1], step.node["int8"]),
        index=None,
        out=emitter.address(step.output),
        out_stride=out.stride,
        bias=None if bias is None else emitter.address(bias),
        residual=None if residual is None else emitter.address(residual),
        residual_stride=0 if added is None else added.stride,
        activation=0,
    )


def gated_linear(emitter: Emitter, step: Step) -> None:
    """act(gate) * up, where the weight's panels are gates and ups in turn."""
    emitter.call(
        "linear",
        **_product(emitter, step.inputs[0], step.inputs[1], step.node["int8"]),
        index=None,
        out=emitter.address(step.output),
        out_stride=_rows(emitter, step.output).stride,
        bias=None,
        residual=None,
        residual_stride=0,
        activation=ACTIVATION_NUMBERS[step.node["activation"]],
    )


def output_head(emitter: Emitter, step: Step) -> None:
    """Scores of chosen rows: the best of each, and all of them where the caller gives room."""
    hidden, chosen, weight_name, *bias = step.inputs
    weight = emitter.weight(weight_name)
    rows = step.output.shape[0]
    name = step.output.buffer
    product = _product(emitter, hidden, weight_name, None)
    scratch_bytes = output_head_scratch_bytes(1, weight.num_outputs, 1, emitter.num_threads)
    index: Operand | None = chosen
    if step.node["int8"]:
        codes = _quantise(emitter, hidden, chosen, rows, f"{name}.int8")
        product |= {"x": codes, "x_stride": 0, "quantised": 1}
        index = None
    emitter.call(
        "output_head",
        **(product | {"num_rows": size(rows)}),
        index=None if index is None else emitter.address(index),
        bias=emitter.address(bias[0]) if bias else None,
        softcap=step.node["softcap"] or 0.0,
        logits=Open("logits"),
        logits_stride=weight.num_outputs,
        num_top=1,
        values=emitter.scratch("best_values", 4, rows),
        indices=emitter.scratch("best_ids", 8, rows),
        log_sums=None,
        scratch=emitter.scratch(f"{name}.scratch", scratch_bytes, rows),
    )


def head_outputs(step: Step) -> dict[str, Output]:
    """Where output_head leaves what the caller reads."""
    rows = step.output.shape[0]
    return {
        "best_values": Output(Place("best_values"), rows, 1),
        "best_ids": Output(Place("best_ids"), rows, 1, torch.int64),
    }


def embedding(emitter: Emitter, step: Step) -> None:
    """Rows of a packed weight."""
    ids, weight = emitter.access(step.inputs[0]), emitter.weight(step.inputs[1])
    out = _rows(emitter, step.output)
    if ids.buffer not in emitter.graph.inputs or out.stride != weight.num_inputs:
        raise Unsupported("an embedding of ids that are computed in the step")
    emitter.call(
        "embedding",
        ids=emitter.address(step.inputs[0]),
        num_rows=size(out.num_rows),
        weight=weight.data,
        format=FORMATS[weight.format].number,
        num_inputs=weight.num_inputs,
        out=emitter.address(step.output),
        out_stride=out.stride,
        scale=1.0,
    )


def _product(
    emitter: Emitter, x: Operand, weight_name: Operand, int8: bool | None
) -> dict[str, Word]:
    """The arguments that every product begins with."""
    weight, rows = emitter.weight(weight_name), _rows(emitter, x)
    return {
        "x": emitter.address(x),
        "x_stride": 0 if int8 else rows.stride,
        "num_rows": size(rows.num_rows),
        "quantised": int(bool(int8)),
        "weight": weight.data,
        "format": FORMATS[weight.format].number,
        "num_outputs": weight.num_outputs,
        "num_inputs": weight.num_inputs,
    }


def _rows(emitter: Emitter, operand: Operand) -> Rows:
    rows = Rows.of(emitter.access(operand))
    if rows.num_inner > 1:
        raise Unsupported(f"a product over {emitter.access(operand)}")
    return rows
