"""Passes that find a chain of operations for which there is one kernel.

A pattern is read from its last node backwards. Nodes in the middle that something else still reads
stay; the others fall away with Graph.with_nodes.
"""

from collections.abc import Iterator
from itertools import pairwise

from headway.compiler.graph import BINARY, Graph, Node, node


def fuse_rms_norm(graph: Graph) -> Graph:
    """x * rsqrt(mean(x ** 2) + epsilon) * weight, in either order of the products -> rms_norm."""

    def rule(each: Node) -> Iterator[Node]:
        for scaled, weight in _either_way(each, "mul"):
            if weight not in graph.constants or len(graph.type_of(weight).shape) != 1:
                continue
            found = _normalised(graph, scaled)
            if found is not None and graph.type_of(found[0]).shape == each.type.shape:
                yield node("rms_norm", each.output, [found[0], weight], each.type, epsilon=found[1])
                return
        yield each

    return graph.rewrite(rule)


def _normalised(graph: Graph, name: str) -> tuple[str, float] | None:
    """(x, epsilon) if `name` is x * rsqrt(mean(x ** 2) + epsilon)."""
    product = graph.producer(name, "mul")
    for x, factor in _either_way(product, "mul"):
        if (root := _inverse_root(graph, factor)) is None:
            continue
        total = graph.producer(root, "add")
        if total is None or total["scalar"] is None:
            continue
        mean = graph.producer(total.inputs[0], "mean")
        if mean is not None and _is_square(graph, mean.inputs[0], x):
            return x, total["scalar"]
    return None


def _inverse_root(graph: Graph, name: str) -> str | None:
    """y if `name` is rsqrt(y) or y ** -0.5."""
    if (root := graph.producer(name, "rsqrt")) is not None:
        return root.inputs[0]
    power = graph.producer(name, "pow")
    return power.inputs[0] if power is not None and power["scalar"] == -0.5 else None


def _is_square(graph: Graph, name: str, x: str) -> bool:
    power, product = graph.producer(name, "pow"), graph.producer(name, "mul")
    if power is not None:
        return power["scalar"] == 2 and power.inputs == (x,)
    return product is not None and product.inputs == (x, x)


def fuse_rope(graph: Graph) -> Graph:
    """x * cos + cat(-x[half:], x[:half]) * sin -> rope(x, cos, sin)."""

    def rule(each: Node) -> Iterator[Node]:
        for plain, turned in _either_way(each, "add"):
            for x, cos in _either_way(graph.producer(plain, "mul"), "mul"):
                for rotated, sin in _either_way(graph.producer(turned, "mul"), "mul"):
                    if _rotates(graph, rotated, x) and graph.type_of(x).shape == each.type.shape:
                        yield node("rope", each.output, [x, cos, sin], each.type)
                        return
        yield each

    return graph.rewrite(rule)


def _rotates(graph: Graph, name: str, x: str) -> bool:
    """Whether `name` is cat(-x[half:], x[:half]) along the last dimension."""
    cat = graph.producer(name, "cat")
    size = graph.type_of(x).shape[-1]
    if cat is None or len(cat.inputs) != 2 or not isinstance(size, int) or size % 2:
        return False
    negated = graph.producer(cat.inputs[0], "neg")
    if negated is None or cat["dim"] != len(cat.type.shape) - 1:
        return False
    high = graph.producer(negated.inputs[0], "slice")
    low = graph.producer(cat.inputs[1], "slice")
    return _is_part(high, x, size // 2, size) and _is_part(low, x, 0, size // 2)


def _is_part(part: Node | None, x: str, start: int, end: int) -> bool:
    return (
        part is not None
        and part.inputs == (x,)
        and part["dim"] == len(part.type.shape) - 1
        and (part["start"], part["end"], part["step"]) == (start, end, 1)
    )


def fuse_rotated_attention(graph: Graph) -> Graph:
    """attention(rope(q), rope(k), v) -> rotated_attention, which rotates queries where they lie.

    Only where nothing else reads the memory of q and k.
    """

    def rule(each: Node) -> Iterator[Node]:
        if each.op == "attention":
            query, key = (graph.producer(name, "rope") for name in each.inputs[:2])
            if (
                query is not None
                and key is not None
                and query.inputs[1:] == key.inputs[1:]
                and all(graph.num_uses[rope.output] == 1 for rope in (query, key))
                and all(_is_sole_reader(graph, rope.inputs[0]) for rope in (query, key))
            ):
                inputs = [query.inputs[0], key.inputs[0], each.inputs[2], *query.inputs[1:]]
                yield node(
                    "rotated_attention",
                    each.output,
                    [*inputs, *each.inputs[3:]],
                    each.type,
                    **each.attributes,
                )
                return
        yield each

    return graph.rewrite(rule)


def _is_sole_reader(graph: Graph, name: str) -> bool:
    """Whether what reads `name` once may overwrite it: no other value lies on the same elements."""
    made = graph.producers.get(name)
    if made is None or graph.num_uses[name] != 1:
        return False
    if made.op in ("view", "permute"):
        return _is_sole_reader(graph, made.inputs[0])
    if made.op != "slice":
        return made.op not in ("expand", "cat")
    readers = [other for other in graph.nodes if made.inputs[0] in other.inputs]
    ranges = sorted((other["start"], other["end"]) for other in readers if other.op == "slice")
    apart = all(end <= start for (_, end), (start, _) in pairwise(ranges))
    source = graph.producer(made.inputs[0], "linear")
    return source is not None and len(ranges) == graph.num_uses[made.inputs[0]] and apart


def _either_way(each: Node | None, op: str) -> Iterator[tuple[str, str]]:
    """The two operands of a node in both orders; nothing if it is another operation."""
    if each is not None and each.op == op and each.op in BINARY and len(each.inputs) == 2:
        left, right = each.inputs
        yield left, right
        yield right, left
