"""place: decides which values are buffers and which are only accesses to another's buffer.

Movement operations vanish here: their outputs are accesses. Where strides cannot say what a view
asks for, and for the parts of a cat, one copy is made.
"""

from collections.abc import Mapping
from dataclasses import dataclass

from headway.compiler.access import Access
from headway.compiler.graph import Graph, Node, TensorType, Unsupported, node

Operand = Access | str
"""An access to a buffer, or the name of a constant or an input."""


@dataclass(frozen=True, slots=True)
class Step:
    """One computing node and where its operands lie."""

    node: Node
    inputs: tuple[Operand, ...]
    output: Access


@dataclass(frozen=True, slots=True)
class Placed:
    """A graph whose movement operations are gone."""

    graph: Graph
    steps: tuple[Step, ...]
    buffers: Mapping[str, TensorType]
    """Every buffer that must exist, by name: the value it was made for."""
    outputs: Mapping[str, Operand]


def place(graph: Graph) -> Placed:
    """Give every value its place."""
    return _Placer(graph).placed()


class _Placer:
    def __init__(self, graph: Graph) -> None:
        self.graph = graph
        self.steps: list[Step] = []
        self.buffers: dict[str, TensorType] = {}
        self.accesses: dict[str, Access] = {}

    def placed(self) -> Placed:
        for each in self.graph.nodes:
            if each.op == "cat":
                self._cat(each)
            elif each.op in ("view", "permute", "slice", "expand"):
                self.accesses[each.output] = self._moved(each)
            else:
                inputs = tuple(self._operand(name) for name in each.inputs)
                output = self._allocate(each.output, each.type)
                self.steps.append(Step(each, inputs, output))
                self.accesses[each.output] = output
        outputs = {name: self._operand(value) for name, value in self.graph.outputs.items()}
        return Placed(self.graph, tuple(self.steps), self.buffers, outputs)

    def _allocate(self, name: str, tensor_type: TensorType) -> Access:
        self.buffers[name] = tensor_type
        return Access.whole(name, tensor_type)

    def _operand(self, name: str) -> Operand:
        """Step inputs and constants that nothing moved go by their names."""
        return self.accesses.get(name, name)

    def _access(self, name: str) -> Access:
        """An access to any value; inputs and constants lie whole where they are."""
        return self.accesses.get(name) or Access.whole(name, self.graph.type_of(name))

    def _moved(self, each: Node) -> Access:
        source = self._access(each.inputs[0])
        if each.op == "permute":
            return source.permute(each["dims"])
        if each.op == "expand":
            return source.expand(each.type.shape)
        if each.op == "slice":
            return source.slice(each["dim"], each["start"], each["end"], each["step"])
        viewed = source.view(each.type.shape)
        if viewed is None:
            copy = self._copy(source, self._allocate(f"{each.output}.copy", _type_of(source)), each)
            viewed = copy.view(each.type.shape)
        if viewed is None:
            raise Unsupported(f"a view of {source.shape} as {each.type.shape}")
        return viewed

    def _cat(self, each: Node) -> None:
        whole = self._allocate(each.output, each.type)
        start = 0
        for name in each.inputs:
            source = self._access(name)
            size = source.shape[each["dim"]]
            assert isinstance(size, int), "an open size is not joined to another"
            self._copy(source, whole.slice(each["dim"], start, start + size, 1), each)
            start += size
        self.accesses[each.output] = whole

    def _copy(self, source: Access, target: Access, cause: Node) -> Access:
        name = f"{target.buffer}.{len(self.steps)}"
        made = node("copy", name, cause.inputs[:1], _type_of(target))
        self.steps.append(Step(made, (source,), target))
        return target


def _type_of(access: Access) -> TensorType:
    return TensorType(access.shape)
