"""Passes over products with constant weights: packing, joining, and what a product does on its way out."""

from collections import defaultdict
from collections.abc import Iterator
from dataclasses import replace

import torch

from headway.compiler.graph import Constant, Graph, Node, TensorType, node
from headway.kernels.pack import concatenate, interleave, pack
from headway.kernels.packed import LANES, PackedWeight


def pack_weights(graph: Graph) -> Graph:
    """Lay out float weights of products and embeddings as the kernels read them."""
    constants = dict(graph.constants)
    for each in graph.nodes:
        if each.op not in ("linear", "embedding"):
            continue
        name = each.inputs[1]
        weight = constants.get(name)
        if isinstance(weight, torch.Tensor):
            is_half = weight.dtype == torch.bfloat16
            constants[name] = pack(weight, "bf16" if is_half else "f32")
    return replace(graph, constants=constants)


def fuse_gates(graph: Graph) -> Graph:
    """act(x G^T) * (x U^T) -> gated_linear: one product with panels of G and U in turn."""
    constants = dict(graph.constants)

    def rule(each: Node) -> Iterator[Node]:
        found = _gate(graph, each)
        if found is None:
            yield each
            return
        activation, gate, up = found
        name = f"{gate.inputs[1]}|{up.inputs[1]}"
        if name not in constants:
            constants[name] = interleave(_weight(graph, gate), _weight(graph, up))
        yield node(
            "gated_linear",
            each.output,
            [gate.inputs[0], name],
            each.type,
            activation=activation,
            int8=gate["int8"],
        )

    nodes = [new for each in graph.nodes for new in rule(each)]
    return graph.with_nodes(nodes, constants)


def _gate(graph: Graph, each: Node) -> tuple[str, Node, Node] | None:
    """(activation, gate product, up product) if `each` multiplies them and nothing else reads them."""
    if each.op != "mul" or len(each.inputs) != 2:
        return None
    for bent, plain in (each.inputs, each.inputs[::-1]):
        for activation in ("silu", "gelu", "gelu_tanh"):
            act = graph.producer(bent, activation)
            gate = graph.producer(act.inputs[0], "linear") if act is not None else None
            up = graph.producer(plain, "linear")
            if gate is None or up is None or gate.inputs[0] != up.inputs[0]:
                continue
            read_once = all(graph.num_uses[name] == 1 for name in (bent, gate.output, plain))
            if read_once and len(gate.inputs) == len(up.inputs) == 2 and _alike(graph, [gate, up]):
                return activation, gate, up
    return None


def _weight(graph: Graph, each: Node) -> PackedWeight:
    weight = graph.constants[each.inputs[1]]
    assert isinstance(weight, PackedWeight)
    return weight


def _alike(graph: Graph, products: list[Node]) -> bool:
    """Whether the weights can be laid out as one."""
    weights = [graph.constants.get(each.inputs[1]) for each in products]
    shapes = {
        (weight.format, weight.num_inputs, weight.num_outputs % LANES)
        for weight in weights
        if isinstance(weight, PackedWeight)
    }
    packed = all(isinstance(weight, PackedWeight) for weight in weights)
    fixed = all(name in graph.constants for each in products for name in each.inputs[2:])
    return packed and fixed and len(shapes) == 1 and next(iter(shapes))[2] == 0


def join_products(graph: Graph) -> Graph:
    """Products of one input (q, k and v) -> one product, of which the old ones are slices."""
    by_input: dict[tuple[str, int], list[Node]] = defaultdict(list)
    for each in graph.nodes:
        if each.op == "linear" and not each["residual"]:
            by_input[each.inputs[0], len(each.inputs)].append(each)
    constants = dict(graph.constants)
    replaced: dict[str, list[Node]] = {}
    for members in by_input.values():
        if len(members) > 1 and _alike(graph, members):
            joined = _join(graph, members, constants)
            slices = _slices(graph, members, joined.output)
            replaced |= {each.output: [each] for each in slices}
            replaced[slices[0].output].insert(0, joined)
    nodes = [new for each in graph.nodes for new in replaced.get(each.output, [each])]
    return graph.with_nodes(nodes, constants)


def _join(graph: Graph, members: list[Node], constants: dict[str, Constant]) -> Node:
    """The product of all outputs of the members, in their order."""
    first = members[0]
    name = "|".join(each.output for each in members)
    weight = concatenate([_weight(graph, each) for each in members])
    inputs = [first.inputs[0], f"{name}.weight"]
    constants[inputs[1]] = weight
    if len(first.inputs) == 3:
        biases = [graph.constants[each.inputs[2]] for each in members]
        tensors = [bias for bias in biases if isinstance(bias, torch.Tensor)]
        inputs.append(f"{name}.bias")
        constants[inputs[2]] = torch.cat(tensors)
    shape = (*first.type.shape[:-1], weight.num_outputs)
    return node("linear", name, inputs, TensorType(shape), int8=first["int8"])


def _slices(graph: Graph, members: list[Node], joined: str) -> list[Node]:
    """What each member made, as a part of what the joined product makes."""
    slices: list[Node] = []
    start = 0
    for each in members:
        dim, end = len(each.type.shape) - 1, start + _weight(graph, each).num_outputs
        where = {"dim": dim, "start": start, "end": end, "step": 1}
        slices.append(node("slice", each.output, [joined], each.type, **where))
        start = end
    return slices


def fuse_residuals(graph: Graph) -> Graph:
    """residual + x W^T -> a product that adds to what it is given."""

    def rule(each: Node) -> Iterator[Node]:
        if each.op == "add" and len(each.inputs) == 2:
            for name, residual in (each.inputs, each.inputs[::-1]):
                product = graph.producer(name, "linear")
                if product is None or product["residual"] or graph.num_uses[name] > 1:
                    continue
                if residual != name and graph.type_of(residual).shape == each.type.shape:
                    inputs = [*product.inputs, residual]
                    int8 = product["int8"]
                    yield node("linear", each.output, inputs, each.type, residual=True, int8=int8)
                    return
        yield each

    return graph.rewrite(rule)


def fuse_output_head(graph: Graph) -> Graph:
    """The product that makes the output "logits", its choice of rows and its soft-cap -> output_head."""
    name = graph.outputs.get("logits")
    if name is None:
        return graph
    softcap, product_name = _softcapped(graph, name)
    product = graph.producer(product_name, "linear")
    rows = graph.producer(product.inputs[0], "gather_rows") if product is not None else None
    if product is None or rows is None or product["residual"]:
        return graph
    inputs = [rows.inputs[0], rows.inputs[1], *product.inputs[1:]]
    int8 = product["int8"]
    fused = node("output_head", name, inputs, graph.type_of(name), softcap=softcap, int8=int8)
    return graph.rewrite(lambda each: [fused if each.output == name else each])


def _softcapped(graph: Graph, name: str) -> tuple[float | None, str]:
    """(cap, x) if `name` is cap * tanh(x / cap), else (None, name)."""
    product = graph.producer(name, "mul")
    bent = graph.producer(product.inputs[0], "tanh") if product is not None else None
    ratio = graph.producer(bent.inputs[0], "div") if bent is not None else None
    if product is None or ratio is None or ratio["scalar"] is None or ratio["reversed"]:
        return None, name
    if ratio["scalar"] != product["scalar"]:
        return None, name
    return product["scalar"], ratio.inputs[0]


def quantise_inputs(graph: Graph) -> Graph:
    """Round the rows that go into products with quantised weights to int8, once for each value.

    The products that want it carry the attribute int8; output_head rounds the rows it chooses.
    """
    made: set[str] = set()

    def rule(each: Node) -> Iterator[Node]:
        if each.op not in ("linear", "gated_linear") or not each["int8"]:
            yield each
            return
        x = each.inputs[0]
        codes = f"{x}.int8"
        if codes not in made:
            made.add(codes)
            shape = TensorType(graph.type_of(x).shape, torch.int8)
            yield node("quantise_rows", codes, [x], shape)
        yield node(
            each.op, each.output, [codes, *each.inputs[1:]], each.type, **dict(each.attributes)
        )

    return graph.rewrite(rule)
