"""The lowering table: each operation of the vocabulary -> the rule that makes its calls of kernels."""

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass

import torch

from headway.compiler.graph import BINARY, UNARY, Unsupported
from headway.compiler.lowering import pointwise, products, sequences
from headway.compiler.lowering.emitter import Emitter
from headway.compiler.placement import Placed, Step
from headway.compiler.program import Buffer, Call, Output

Rule = Callable[[Emitter, Step], None]

LOWERING: Mapping[str, Rule] = {
    **dict.fromkeys((*UNARY, *BINARY, "copy"), pointwise.pointwise),
    **dict.fromkeys(("sum", "mean", "max"), pointwise.reduce),
    "softmax": pointwise.softmax,
    "matmul": pointwise.matmul,
    "layer_norm": sequences.layer_norm,
    "rms_norm": sequences.rms_norm,
    "rope": sequences.rope,
    "attention": sequences.attention,
    "rotated_attention": sequences.rotated_attention,
    "embedding": products.embedding,
    "quantise_rows": products.quantise_rows,
    "linear": products.linear,
    "gated_linear": products.gated_linear,
    "output_head": products.output_head,
}


@dataclass(frozen=True, slots=True)
class Lowered:
    """Calls, the memory that they need, and where their results lie."""

    calls: Sequence[Call]
    buffers: Sequence[Buffer]
    outputs: Mapping[str, Output]


def lower(placed: Placed, bound: Mapping[str, torch.Tensor], num_threads: int) -> Lowered:
    """Make the calls for every step of a placed graph.

    bound: graph inputs that are the same tensor in every step; num_threads: of the team that will
    run the calls. Raises Unsupported where an operation has no rule, or a value lies as no kernel
    can read it.
    """
    emitter = Emitter(placed, bound, num_threads)
    outputs: dict[str, Output] = {}
    for step in placed.steps:
        rule = LOWERING.get(step.node.op)
        if rule is None:
            raise Unsupported(f"no kernel for {step.node.op}")
        rule(emitter, step)
        if step.node.op == "output_head":
            outputs |= products.head_outputs(step)
    heads = {step.output.buffer for step in placed.steps if step.node.op == "output_head"}
    for name, operand in placed.outputs.items():
        if emitter.access(operand).buffer not in heads:
            outputs[name] = emitter.output(operand)
    return Lowered(emitter.calls, tuple(emitter.buffers.values()), outputs)
