"""Rules for elementwise operations, copies, and operations over the last dimension."""

import torch

from headway.compiler.access import Access
from headway.compiler.graph import Unsupported
from headway.compiler.lowering.emitter import Emitter, size, squeezed
from headway.compiler.placement import Operand, Step
from headway.kernels.pointwise import BINARY, MAX_DIMS, TYPES, UNARY, indexed
from headway.kernels.reduce import MAX_OUTER_DIMS, REDUCTIONS


def pointwise(emitter: Emitter, step: Step) -> None:
    """One elementwise operation, its operands broadcast to the result's shape."""
    node, shape = step.node, step.output.shape
    accesses = [step.output, *(emitter.access(each).expand(shape) for each in step.inputs)]
    sizes, strides = squeezed(accesses, MAX_DIMS)
    left: Operand | None = step.inputs[0]
    right: Operand | None = step.inputs[1] if len(step.inputs) > 1 else None
    left_strides, right_strides = strides[1], strides[2] if right is not None else [0] * MAX_DIMS
    if node["reversed"]:
        left, right, left_strides, right_strides = right, left, right_strides, left_strides
    emitter.call(
        "pointwise",
        operation=(BINARY | UNARY)["copy" if node.op == "to_float" else node.op],
        out=emitter.address(step.output),
        out_type=TYPES[torch.float32],
        a=None if left is None else emitter.address(left),
        a_type=_type(emitter, left),
        b=None if right is None else emitter.address(right),
        b_type=_type(emitter, right),
        scalar=node["scalar"] or 0.0,
        **indexed("size", [size(dim) for dim in sizes]),
        **indexed("out_stride", strides[0]),
        **indexed("a_stride", left_strides),
        **indexed("b_stride", right_strides),
    )


def reduce(emitter: Emitter, step: Step) -> None:
    """A sum, mean or maximum over the last dimension."""
    source = emitter.access(step.inputs[0])
    target = _outer(step.output, len(source.shape))
    width = _width(source)
    outer = Access(source.buffer, source.shape[:-1], source.strides[:-1], source.offset)
    sizes, (x_strides, out_strides) = squeezed([outer, target], MAX_OUTER_DIMS)
    emitter.call(
        "reduce",
        operation=REDUCTIONS[step.node.op],
        x=emitter.address(step.inputs[0]),
        out=emitter.address(step.output),
        width=width,
        x_inner_stride=source.strides[-1],
        **indexed("size", [size(dim) for dim in sizes]),
        **indexed("x_stride", x_strides),
        **indexed("out_stride", out_strides),
    )


def softmax(emitter: Emitter, step: Step) -> None:
    """Softmax over the last dimension."""
    source, target = emitter.access(step.inputs[0]), step.output
    outer = [Access(each.buffer, each.shape[:-1], each.strides[:-1]) for each in (source, target)]
    sizes, (x_strides, out_strides) = squeezed(outer, MAX_OUTER_DIMS)
    emitter.call(
        "softmax",
        x=emitter.address(step.inputs[0]),
        out=emitter.address(target),
        width=_width(source),
        x_inner_stride=source.strides[-1],
        out_inner_stride=target.strides[-1],
        **indexed("size", [size(dim) for dim in sizes]),
        **indexed("x_stride", x_strides),
        **indexed("out_stride", out_strides),
    )


def matmul(emitter: Emitter, step: Step) -> None:
    """A product of two values that are both computed in the step, batched or not."""
    left, right, out = [
        emitter.access(each).expand((*step.output.shape[:-2], *emitter.access(each).shape[-2:]))
        for each in (*step.inputs, step.output)
    ]
    batch = [Access(each.buffer, each.shape[:-2], each.strides[:-2]) for each in (left, right, out)]
    (num_batches,), strides = squeezed(batch, 1)
    emitter.call(
        "matmul",
        a=emitter.address(step.inputs[0]),
        b=emitter.address(step.inputs[1]),
        out=emitter.address(step.output),
        num_batches=size(num_batches),
        num_rows=size(left.shape[-2]),
        num_inner=size(left.shape[-1]),
        num_columns=size(right.shape[-1]),
        a_batch_stride=strides[0][0],
        a_row_stride=left.strides[-2],
        a_inner_stride=left.strides[-1],
        b_batch_stride=strides[1][0],
        b_inner_stride=right.strides[-2],
        b_column_stride=right.strides[-1],
        out_batch_stride=strides[2][0],
        out_row_stride=out.strides[-2],
        out_column_stride=out.strides[-1],
    )


def _type(emitter: Emitter, operand: Operand | None) -> int:
    dtype = torch.float32 if operand is None else emitter.dtype(operand)
    # Constants of any float type are handed over as float32.
    return TYPES[torch.float32 if dtype.is_floating_point else dtype]


def _outer(access: Access, rank: int) -> Access:
    """A reduced result without the dimension that was reduced, where it was kept."""
    if len(access.shape) < rank:
        return access
    return Access(access.buffer, access.shape[:-1], access.strides[:-1], access.offset)


def _width(access: Access) -> int:
    width = access.shape[-1]
    if not isinstance(width, int):
        raise Unsupported("an operation over an open size")
    return width
