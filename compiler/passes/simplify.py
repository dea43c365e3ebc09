"""Passes that leave less to do and change no meaning: constants computed now, equal work done once."""

import torch

from headway.compiler.graph import Graph, Node
from headway.compiler.interpret import evaluate


def fold_constants(graph: Graph) -> Graph:
    """Compute what depends on constants alone, such as Gemma's 1 + weight."""
    constants = dict(graph.constants)
    nodes: list[Node] = []
    for node in graph.nodes:
        operands = [constants.get(name) for name in node.inputs]
        tensors = [value for value in operands if isinstance(value, torch.Tensor)]
        is_open = node.type.rows != 1
        if len(tensors) < len(operands) or is_open or not operands:
            nodes.append(node)
            continue
        floats = [value.float() if value.is_floating_point() else value for value in tensors]
        constants[node.output] = evaluate(node, floats, {}).contiguous()
    return graph.with_nodes(nodes, constants)


def drop_identities(graph: Graph) -> Graph:
    """Remove operations that return what they are given: x * 1, x + 0, a view of the same shape."""
    same: dict[str, str] = {}
    nodes: list[Node] = []
    for node in graph.nodes:
        renamed = _renamed(node, same)
        if _is_identity(graph, renamed):
            same[node.output] = renamed.inputs[0]
        else:
            nodes.append(renamed)
    return _with_outputs(graph, nodes, same)


def merge_equal(graph: Graph) -> Graph:
    """Compute equal expressions once."""
    same: dict[str, str] = {}
    seen: dict[object, str] = {}
    nodes: list[Node] = []
    for node in graph.nodes:
        renamed = _renamed(node, same)
        key = (renamed.op, renamed.inputs, tuple(sorted(renamed.attributes.items())), renamed.type)
        if key in seen:
            same[node.output] = seen[key]
        else:
            seen[key] = node.output
            nodes.append(renamed)
    return _with_outputs(graph, nodes, same)


def _renamed(node: Node, same: dict[str, str]) -> Node:
    inputs = tuple(same.get(name, name) for name in node.inputs)
    return Node(node.op, node.output, inputs, node.type, node.attributes)


def _with_outputs(graph: Graph, nodes: list[Node], same: dict[str, str]) -> Graph:
    outputs = {name: same.get(value, value) for name, value in graph.outputs.items()}
    return Graph(graph.inputs, graph.constants, tuple(nodes), outputs).with_nodes(nodes)


def _is_identity(graph: Graph, node: Node) -> bool:
    if node.op in ("view", "expand", "permute"):
        same_shape = graph.type_of(node.inputs[0]).shape == node.type.shape
        return same_shape and (
            node.op != "permute" or tuple(node["dims"]) == tuple(range(len(node["dims"])))
        )
    if node["scalar"] is None or node["reversed"]:
        return False
    return (node.op, node["scalar"]) in {("mul", 1.0), ("div", 1.0), ("add", 0.0), ("sub", 0.0)}
