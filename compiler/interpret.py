"""What operations of the vocabulary mean, in plain torch: the oracle of passes and lowerings.

Not attention, which is the caller's, nor quantise_rows and rotated_attention, which change where
values lie and how they are rounded: kernels/reference has those.
"""

from collections.abc import Callable, Mapping
from typing import Any

import torch
from torch.nn import functional

from headway.compiler.graph import BINARY, LAST_DIM, UNARY, Graph, Node
from headway.kernels.pack import unpack
from headway.kernels.packed import LANES, PackedWeight

Values = Mapping[str, torch.Tensor]


def interpret(
    graph: Graph,
    inputs: Values,
    sizes: Mapping[str, int],
    attend: Callable[..., torch.Tensor] | None = None,
) -> dict[str, torch.Tensor]:
    """Compute a graph's outputs node by node. `attend` stands for the attention operation."""
    values: dict[str, torch.Tensor] = dict(inputs)
    for name, constant in graph.constants.items():
        values[name] = unpack(constant) if isinstance(constant, PackedWeight) else constant
    for node in graph.nodes:
        operands = [values[name] for name in node.inputs]
        if node.op == "attention":
            assert attend is not None
            values[node.output] = attend(node, *operands)
        else:
            values[node.output] = evaluate(node, operands, sizes)
    return {name: values[value] for name, value in graph.outputs.items()}


def evaluate(node: Node, operands: list[torch.Tensor], sizes: Mapping[str, int]) -> torch.Tensor:
    """Compute one node. `sizes` gives the open sizes."""
    if node.op in UNARY:
        return _UNARY[node.op](operands[0])
    if node.op in BINARY:
        return _binary(node, operands)
    if node.op in LAST_DIM:
        return _last_dim(node, operands[0])
    return _OTHERS[node.op](node, sizes, *operands)


def _shape(node: Node, sizes: Mapping[str, int]) -> list[int]:
    return [sizes[dim] if isinstance(dim, str) else dim for dim in node.type.shape]


def _binary(node: Node, operands: list[torch.Tensor]) -> torch.Tensor:
    left: Any
    right: Any
    left, right = operands[0], operands[1] if len(operands) == 2 else node["scalar"]
    if node["reversed"]:
        left, right = right, left
    if not isinstance(left, torch.Tensor):
        left = torch.tensor(left)
    result: torch.Tensor = getattr(torch, node.op)(
        left, right if isinstance(right, torch.Tensor) else torch.tensor(right)
    )
    return result


def _last_dim(node: Node, x: torch.Tensor) -> torch.Tensor:
    if node.op == "softmax":
        return x.softmax(-1)
    keepdim = len(node.type.shape) == x.dim()
    result: torch.Tensor = getattr(x, "amax" if node.op == "max" else node.op)(-1, keepdim=keepdim)
    return result


_UNARY: dict[str, Callable[[torch.Tensor], torch.Tensor]] = {
    **{op: getattr(torch, op) for op in ("neg", "exp", "rsqrt", "sqrt", "tanh", "sigmoid")},
    **{op: getattr(torch, op) for op in ("relu", "sin", "cos", "reciprocal", "abs")},
    "silu": functional.silu,
    "gelu": functional.gelu,
    "gelu_tanh": lambda x: functional.gelu(x, approximate="tanh"),
    "to_float": torch.Tensor.float,
}


def _slice(node: Node, sizes: Mapping[str, int], x: torch.Tensor) -> torch.Tensor:
    index = [slice(None)] * node["dim"] + [slice(node["start"], node["end"], node["step"])]
    return x[tuple(index)]


def _linear(
    node: Node,
    sizes: Mapping[str, int],
    x: torch.Tensor,
    weight: torch.Tensor,
    *more: torch.Tensor,
) -> torch.Tensor:
    y = functional.linear(x.float(), weight.float())
    for term in more:  # a bias, a residual
        y = y + term
    return y


def _rms_norm(
    node: Node, sizes: Mapping[str, int], x: torch.Tensor, weight: torch.Tensor
) -> torch.Tensor:
    return x * torch.rsqrt(x.square().mean(-1, keepdim=True) + node["epsilon"]) * weight


def _rope(
    node: Node, sizes: Mapping[str, int], x: torch.Tensor, cos: torch.Tensor, sin: torch.Tensor
) -> torch.Tensor:
    low, high = x.chunk(2, -1)
    return x * cos + torch.cat([-high, low], -1) * sin


def _gated_linear(
    node: Node, sizes: Mapping[str, int], x: torch.Tensor, weight: torch.Tensor
) -> torch.Tensor:
    both = functional.linear(x, weight)
    pairs = both.view(*both.shape[:-1], -1, 2, LANES)
    gated: torch.Tensor = _UNARY[node["activation"]](pairs[..., 0, :]) * pairs[..., 1, :]
    return gated.flatten(-2)


def _output_head(
    node: Node,
    sizes: Mapping[str, int],
    hidden: torch.Tensor,
    rows: torch.Tensor,
    weight: torch.Tensor,
    *bias: torch.Tensor,
) -> torch.Tensor:
    logits = functional.linear(hidden[rows], weight, *bias)
    cap = node["softcap"]
    return logits if cap is None else cap * torch.tanh(logits / cap)


_OTHERS: dict[str, Callable[..., torch.Tensor]] = {
    "view": lambda node, sizes, x: x.reshape(_shape(node, sizes)),
    "permute": lambda node, sizes, x: x.permute(node["dims"]),
    "expand": lambda node, sizes, x: x.expand(_shape(node, sizes)),
    "slice": _slice,
    "cat": lambda node, sizes, *parts: torch.cat(parts, node["dim"]),
    "matmul": lambda node, sizes, x, y: x @ y,
    "gather_rows": lambda node, sizes, x, rows: x[rows],
    "embedding": lambda node, sizes, ids, weight: functional.embedding(ids, weight),
    "linear": _linear,
    "rms_norm": _rms_norm,
    "layer_norm": lambda node, sizes, x, weight, bias=None: functional.layer_norm(
        x, x.shape[-1:], weight, bias, node["epsilon"]
    ),
    "rope": _rope,
    "gated_linear": _gated_linear,
    "output_head": _output_head,
}
