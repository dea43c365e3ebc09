"""Graph: what a model computes, as immutable nodes. Every pass takes a graph and returns a new one.

Knows the vocabulary of operations, not how any of them is computed.

    kind        operations                                            attributes
    movement    view, permute, slice, expand, cat                     see access.py
    pointwise   UNARY: one input. BINARY: two inputs, broadcast, or   scalar: float, reversed: bool
                one and the attribute `scalar`
    last dim    sum, mean, max, softmax; the shape says whether it
                is kept
    products    linear (x, weight[, bias][, residual]), matmul,       int8, residual: bool
                embedding (ids, weight)
    rows        gather_rows (x, indices)
    sequences   attention (query, key, value, cache, tables ...)      layer, block_size, scale, ...
    fused       what passes make of the above: rms_norm, rope, gated_linear, ...

Placement adds "copy", where a movement needs one; no graph holds it.
"""

import math
from collections import Counter
from collections.abc import Callable, Iterable, Iterator, Mapping
from dataclasses import dataclass, field, replace
from functools import cached_property
from types import MappingProxyType
from typing import Any

import torch

from headway.kernels.packed import PackedWeight

Dim = int | str
"""A size: a number, or the name of a size that is known when a step runs ("T", the step's rows)."""

Constant = torch.Tensor | PackedWeight

MOVEMENT = frozenset({"view", "permute", "slice", "expand", "cat"})
UNARY = frozenset(
    [
        "neg",
        "exp",
        "rsqrt",
        "sqrt",
        "tanh",
        "sigmoid",
        "silu",
        "gelu",
        "gelu_tanh",
        "relu",
        "sin",
        "cos",
        "reciprocal",
        "abs",
        "to_float",
    ]
)
BINARY = frozenset(["add", "sub", "mul", "div", "pow", "maximum", "minimum"])
LAST_DIM = frozenset(["sum", "mean", "max", "softmax"])
PRODUCTS = frozenset(["linear", "matmul", "embedding", "gather_rows", "attention"])
FUSED = frozenset(
    [
        "layer_norm",
        "rms_norm",
        "rope",
        "rotated_attention",
        "gated_linear",
        "quantise_rows",
        "output_head",
    ]
)
VOCABULARY = MOVEMENT | UNARY | BINARY | LAST_DIM | PRODUCTS | FUSED


class Unsupported(Exception):
    """The model does something that has no lowering; says what. It must be run eagerly instead."""


@dataclass(frozen=True, slots=True)
class TensorType:
    """Shape and element type of a value. Floating types are computed as float32."""

    shape: tuple[Dim, ...]
    dtype: torch.dtype = torch.float32

    @property
    def width(self) -> int:
        """Elements per row, the product of all sizes that are numbers."""
        return math.prod(dim for dim in self.shape if isinstance(dim, int))

    @property
    def rows(self) -> Dim:
        """The one size that is a name, or 1."""
        return next((dim for dim in self.shape if isinstance(dim, str)), 1)


@dataclass(frozen=True)
class Node:
    """One operation: reads values, makes one."""

    op: str
    output: str
    inputs: tuple[str, ...]
    """Names of values: graph inputs, constants or outputs of earlier nodes."""
    type: TensorType
    attributes: Mapping[str, Any] = field(default_factory=lambda: MappingProxyType({}))

    def __getitem__(self, attribute: str) -> Any:
        return self.attributes.get(attribute)


@dataclass(frozen=True)
class Graph:
    """Nodes in an order in which each comes after what it reads."""

    inputs: Mapping[str, TensorType]
    """What changes from step to step, by name."""
    constants: Mapping[str, Constant]
    nodes: tuple[Node, ...]
    outputs: Mapping[str, str]
    """Names the caller knows -> values."""

    @cached_property
    def producers(self) -> Mapping[str, Node]:
        """The node that makes each value."""
        return {node.output: node for node in self.nodes}

    @cached_property
    def num_uses(self) -> Mapping[str, int]:
        """How often each value is read, as an output of the graph included."""
        reads = [name for node in self.nodes for name in node.inputs]
        return Counter([*reads, *self.outputs.values()])

    def type_of(self, name: str) -> TensorType:
        """Type of any value. Packed weights are matrices."""
        if name in self.producers:
            return self.producers[name].type
        if name in self.inputs:
            return self.inputs[name]
        constant = self.constants[name]
        if isinstance(constant, PackedWeight):
            return TensorType((constant.num_outputs, constant.num_inputs))
        return TensorType(tuple(constant.shape), constant.dtype)

    def producer(self, name: str, op: str) -> Node | None:
        """The node that makes `name`, if its operation is `op`."""
        node = self.producers.get(name)
        return node if node is not None and node.op == op else None

    def with_nodes(
        self, nodes: Iterable[Node], constants: Mapping[str, Constant] | None = None
    ) -> "Graph":
        """The same graph of other nodes, less what no output needs any more."""
        kept: list[Node] = []
        needed = set(self.outputs.values())
        for node in reversed(tuple(nodes)):
            if node.output in needed:
                kept.append(node)
                needed.update(node.inputs)
        everything = self.constants if constants is None else constants
        used = {name: value for name, value in everything.items() if name in needed}
        return replace(self, nodes=tuple(reversed(kept)), constants=used)

    def rewrite(self, rule: Callable[[Node], Iterable[Node]]) -> "Graph":
        """Put what `rule` returns in the place of each node."""
        return self.with_nodes([new for node in self.nodes for new in rule(node)])

    def check(self) -> None:
        """Raise ValueError where the graph is not well formed: a pass is wrong."""
        known = {*self.inputs, *self.constants}
        for node in self.nodes:
            if node.op not in VOCABULARY:
                raise ValueError(f"{node.output}: {node.op} is not in the vocabulary")
            if node.output in known:
                raise ValueError(f"{node.output} is made twice")
            if missing := [name for name in node.inputs if name not in known]:
                raise ValueError(f"{node.output} reads {missing} before they are made")
            if len([dim for dim in node.type.shape if isinstance(dim, str)]) > 1:
                raise ValueError(f"{node.output} has two open sizes: {node.type.shape}")
            known.add(node.output)
        if missing := [name for name in self.outputs.values() if name not in known]:
            raise ValueError(f"nothing makes the outputs {missing}")

    def __str__(self) -> str:
        return "\n".join(self._lines())

    def _lines(self) -> Iterator[str]:
        for node in self.nodes:
            attributes = "".join(f" {key}={value}" for key, value in node.attributes.items())
            shape = "x".join(map(str, node.type.shape))
            yield f"{node.output}: [{shape}] = {node.op}({', '.join(node.inputs)}){attributes}"


def node(op: str, output: str, inputs: Iterable[str], shape: TensorType, **attributes: Any) -> Node:
    """Make a node; attributes that are None are left out."""
    given = {key: value for key, value in attributes.items() if value is not None}
    return Node(op, output, tuple(inputs), shape, MappingProxyType(given))
