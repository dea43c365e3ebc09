"""capture: a torch module -> Graph. The one place that knows ATen's operations.

torch.export traces the module once, on fake tensors, so no weight is read and any number of rows is
covered. What the graph's vocabulary has no word for raises Unsupported, which names it.
"""

import warnings
from collections.abc import Callable, Mapping
from dataclasses import replace
from typing import Any

import torch
from torch import fx

from headway.compiler.graph import Constant, Dim, Graph, Node, TensorType, Unsupported, node
from headway.kernels.packed import FORMATS, FormatName, PackedWeight

MODULE_PREFIX = "self."
"""Before the names of constants, which are those that the module gives to its tensors."""


def capture(
    module: torch.nn.Module,
    inputs: Mapping[str, torch.Tensor],
    open_sizes: Mapping[str, Mapping[int, str]],
) -> Graph:
    """Trace `module(inputs)`, which returns a dict of tensors, into a graph.

    open_sizes: for each input, its dimensions that change from step to step, and their names.

    Raises:
        Unsupported: the module cannot be traced, or uses an operation that is not in the table below.
    """
    names = {name for dims in open_sizes.values() for name in dims.values()}
    dims = {name: torch.export.Dim(name, min=2, max=1 << 20) for name in names}
    shapes = {
        name: {dim: dims[size] for dim, size in open_sizes.get(name, {}).items()} or None
        for name in inputs
    }
    try:
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")  # torch.export warns about its own internals
            program = torch.export.export(
                module, (dict(inputs),), dynamic_shapes=(shapes,), strict=False
            )
    except Exception as error:  # whatever the model's Python and torch's tracer raise
        raise Unsupported(f"torch.export: {str(error).splitlines()[0]}") from error
    return _Importer(program, list(inputs), open_sizes).graph()


class _Importer:
    """Turns the nodes of an exported program into ours."""

    def __init__(
        self,
        program: torch.export.ExportedProgram,
        names: list[str],
        open_sizes: Mapping[str, Mapping[int, str]],
    ) -> None:
        self.program = program
        self.names = dict(zip(program.graph_signature.user_inputs, names, strict=True))
        self.open_sizes = open_sizes
        self.inputs: dict[str, TensorType] = {}
        self.constants: dict[str, Constant] = {}
        self.nodes: list[Node] = []
        self.values: dict[fx.Node, str] = {}
        self._symbols: dict[str, str] = {}

    def graph(self) -> Graph:
        for each in self.program.graph.nodes:
            if each.op == "placeholder":
                self._placeholder(each)
            elif each.op == "call_function":
                self._call(each)
        results = next(each for each in self.program.graph.nodes if each.op == "output").args[0]
        spec = self.program.call_spec.out_spec
        assert spec is not None
        names = torch.utils._pytree.tree_unflatten(list(range(len(results))), spec)
        outputs = {name: self.values[results[index]] for name, index in names.items()}
        return Graph(self.inputs, self.constants, tuple(self.nodes), outputs).with_nodes(self.nodes)

    def _placeholder(self, each: fx.Node) -> None:
        signature = self.program.graph_signature
        target = (
            signature.inputs_to_parameters.get(each.name)
            or signature.inputs_to_buffers.get(each.name)
            or signature.inputs_to_lifted_tensor_constants.get(each.name)
        )
        name = self.names[each.name] if target is None else f"{MODULE_PREFIX}{target}"
        self.values[each] = name
        if target is not None:
            value = self.program.state_dict.get(target, self.program.constants.get(target))
            assert isinstance(value, torch.Tensor)
            self.constants[name] = value.detach()
            return
        fake = each.meta["val"]
        for dim, size in self.open_sizes.get(name, {}).items():
            self._symbols[str(fake.shape[dim])] = size
        self.inputs[name] = self.type_of(each)

    def type_of(self, each: fx.Node) -> TensorType:
        """Type of what an fx node makes."""
        fake = each.meta["val"]
        return TensorType(tuple(self._dim(size) for size in fake.shape), fake.dtype)

    def _dim(self, size: int | torch.SymInt) -> Dim:
        if isinstance(size, int):
            return size
        if (name := self._symbols.get(str(size))) is None:
            raise Unsupported(f"a tensor has the size {size}, which is no input's size")
        return name

    def _call(self, each: fx.Node) -> None:
        name = str(each.target).removesuffix(".default")
        if name in _IGNORED:
            return
        if name in _PARTS or not _reads_values(each):
            # Parts are taken by getitem; what reads nothing is the same in every step.
            if name not in _PARTS:
                self.constants[each.name] = _computed(each)
                self.values[each] = each.name
            return
        if name in _SAME_VALUE:
            self.values[each] = self.values[each.args[0]]  # type: ignore[index]  # a tensor node
            return
        make = _OPERATIONS.get(name)
        if make is None:
            raise Unsupported(f"no lowering for {name}")
        made = make(self, each, *each.args, **each.kwargs)
        self.values[each] = made if isinstance(made, str) else made.output
        if isinstance(made, Node):
            self.nodes.append(made)

    def emit(self, op: str, each: fx.Node, inputs: list[fx.Node], **attributes: Any) -> Node:
        """A node that makes what `each` makes."""
        values = [self.values[value] for value in inputs]
        return node(op, each.name, values, self.type_of(each), **attributes)


def _reads_values(each: fx.Node) -> bool:
    return bool(each.all_input_nodes)


def _computed(each: fx.Node) -> torch.Tensor:
    """What a node without inputs makes: torch.ones and its kin."""
    assert callable(each.target)
    made: torch.Tensor = each.target(*each.args, **each.kwargs)
    return made


_Maker = Callable[..., Any]
"""Makes a node, or returns the name of a value that is the same."""

_IGNORED = {"aten._assert_tensor_metadata", "aten.sym_size.int", "aten._assert_scalar"}

_ATTENTION_TENSORS = 11
"""What headway::attention takes before its numbers: query to tree_masks."""

_PARTS = {"aten.chunk", "aten.split.Tensor", "aten.split_with_sizes", "aten.unbind.int"}
"""Operations that make several values, each of them a slice."""

_SAME_VALUE = {
    *("aten.detach", "aten.alias", "aten.contiguous", "aten.clone", "aten.lift_fresh_copy"),
    *("aten.to.device", "aten.dropout"),
}


def _unary(op: str) -> _Maker:
    def make(importer: _Importer, each: fx.Node, x: fx.Node) -> Node:
        return importer.emit(op, each, [x])

    return make


def _binary(op: str) -> _Maker:
    def make(importer: _Importer, each: fx.Node, left: Any, right: Any, alpha: float = 1) -> Node:
        if alpha != 1:
            raise Unsupported(f"aten.{op} with alpha {alpha}")
        if not isinstance(right, fx.Node):
            return importer.emit(op, each, [left], scalar=float(right))
        if not isinstance(left, fx.Node):
            return importer.emit(op, each, [right], scalar=float(left), reversed=True)
        return importer.emit(op, each, [left, right])

    return make


def _reversed_subtraction(
    importer: _Importer, each: fx.Node, subtracted: fx.Node, x: Any, alpha: float = 1
) -> Node:
    made: Node = _SUBTRACT(importer, each, x, subtracted, alpha)
    return made


def _square(importer: _Importer, each: fx.Node, x: fx.Node) -> Node:
    return importer.emit("pow", each, [x], scalar=2.0)


def _last_dim(op: str) -> _Maker:
    def make(
        importer: _Importer, each: fx.Node, x: fx.Node, dims: Any, keepdim: bool = False, **_: Any
    ) -> Node:
        rank = len(x.meta["val"].shape)
        if [dim % rank for dim in ([dims] if isinstance(dims, int) else dims)] != [rank - 1]:
            raise Unsupported(f"{op} over dimensions {dims} of {rank}")
        return importer.emit(op, each, [x])

    return make


def _softmax(importer: _Importer, each: fx.Node, x: fx.Node, dim: int, *_: Any) -> Node:
    if dim % len(x.meta["val"].shape) != len(x.meta["val"].shape) - 1:
        raise Unsupported(f"softmax over dimension {dim}")
    return importer.emit("softmax", each, [x])


def _view(importer: _Importer, each: fx.Node, x: fx.Node, *_: Any, **__: Any) -> Node:
    return importer.emit("view", each, [x])


def _expand(importer: _Importer, each: fx.Node, x: fx.Node, *_: Any, **__: Any) -> Node:
    return importer.emit("expand", each, [x])


def _transpose(importer: _Importer, each: fx.Node, x: fx.Node, first: int, second: int) -> Node:
    dims = list(range(len(x.meta["val"].shape)))
    dims[first], dims[second] = dims[second], dims[first]
    return importer.emit("permute", each, [x], dims=tuple(dims))


def _matrix_transpose(importer: _Importer, each: fx.Node, x: fx.Node) -> Node:
    return importer.emit("permute", each, [x], dims=(1, 0))


def _permute(importer: _Importer, each: fx.Node, x: fx.Node, dims: list[int]) -> Node:
    return importer.emit("permute", each, [x], dims=tuple(dim % len(dims) for dim in dims))


def _slice(
    importer: _Importer,
    each: fx.Node,
    x: fx.Node,
    dim: int = 0,
    start: int | None = None,
    end: int | None = None,
    step: int = 1,
) -> Node | str:
    source = importer.type_of(x).shape
    size, first = source[dim], start or 0
    if source == importer.type_of(each).shape:
        return importer.values[x]
    if not isinstance(size, int) or not isinstance(first, int):
        raise Unsupported(f"a slice of an open size: {first}:{end}")
    first, last, _ = slice(first, end, step).indices(size)
    dim %= len(source)
    return importer.emit("slice", each, [x], dim=dim, start=first, end=last, step=step)


def _select(importer: _Importer, each: fx.Node, x: fx.Node, dim: int, index: int) -> Node:
    source = importer.type_of(x)
    dim %= len(source.shape)
    size = source.shape[dim]
    if not isinstance(size, int):
        raise Unsupported("one row of an open size")
    first = index % size
    shape = (*source.shape[:dim], 1, *source.shape[dim + 1 :])
    one = node(
        "slice",
        f"{each.name}_one",
        [importer.values[x]],
        replace(source, shape=shape),
        dim=dim,
        start=first,
        end=first + 1,
        step=1,
    )
    importer.nodes.append(one)
    return node("view", each.name, [one.output], importer.type_of(each))


def _part(importer: _Importer, each: fx.Node, parts: fx.Node, index: int) -> Node:
    """One of the values that an operation of _PARTS makes."""
    name = str(parts.target).removesuffix(".default")
    source = parts.args[0]
    assert isinstance(source, fx.Node)
    dim: Any = parts.args[1 if "unbind" in name else 2] if _has_dim(parts, name) else 0
    if "unbind" in name:
        return _select(importer, each, source, dim, index)
    sizes = [part.shape[dim] for part in parts.meta["val"]]
    start = sum(sizes[:index])
    made = _slice(importer, each, source, dim, start, start + sizes[index])
    return made if isinstance(made, Node) else importer.emit("view", each, [source])


def _has_dim(parts: fx.Node, name: str) -> bool:
    return len(parts.args) > (1 if "unbind" in name else 2)


def _cat(importer: _Importer, each: fx.Node, parts: list[fx.Node], dim: int = 0) -> Node:
    return importer.emit("cat", each, parts, dim=dim % len(importer.type_of(each).shape))


def _to_dtype(importer: _Importer, each: fx.Node, x: fx.Node, *_: Any, **__: Any) -> Node | str:
    source, target = x.meta["val"].dtype, each.meta["val"].dtype
    if target.is_floating_point and not source.is_floating_point:
        return importer.emit("to_float", each, [x])
    if target.is_floating_point == source.is_floating_point:
        return importer.values[x]  # floats are computed as float32 throughout
    raise Unsupported(f"a cast from {source} to {target}")


def _gelu(importer: _Importer, each: fx.Node, x: fx.Node, approximate: str = "none") -> Node:
    return importer.emit("gelu_tanh" if approximate == "tanh" else "gelu", each, [x])


def _linear(
    importer: _Importer, each: fx.Node, x: fx.Node, weight: fx.Node, bias: fx.Node | None = None
) -> Node:
    return importer.emit("linear", each, [x, weight, *([bias] if bias else [])])


def _packed(
    importer: _Importer, data: fx.Node, weight_format: FormatName, num_outputs: int, num_inputs: int
) -> None:
    """Make a packed weight of the bytes that a custom operation was given."""
    name = importer.values[data]
    held = importer.constants[name]
    if isinstance(held, torch.Tensor):
        importer.constants[name] = PackedWeight(weight_format, num_outputs, num_inputs, held)


def _packed_linear(
    importer: _Importer,
    each: fx.Node,
    x: fx.Node,
    data: fx.Node,
    weight_format: FormatName,
    num_outputs: int,
    num_inputs: int,
    bias: fx.Node | None = None,
    activations: str = "int8",
) -> Node:
    _packed(importer, data, weight_format, num_outputs, num_inputs)
    inputs = [x, data, *([bias] if bias else [])]
    rounded = activations == "int8" and FORMATS[weight_format].scale_bytes > 0
    return importer.emit("linear", each, inputs, int8=rounded or None)


def _embedding(importer: _Importer, each: fx.Node, weight: fx.Node, ids: fx.Node, *_: Any) -> Node:
    return importer.emit("embedding", each, [ids, weight])


def _packed_embedding(
    importer: _Importer,
    each: fx.Node,
    ids: fx.Node,
    data: fx.Node,
    weight_format: FormatName,
    num_outputs: int,
    num_inputs: int,
) -> Node:
    _packed(importer, data, weight_format, num_outputs, num_inputs)
    return importer.emit("embedding", each, [ids, data])


def _index(importer: _Importer, each: fx.Node, x: fx.Node, indices: list[fx.Node | None]) -> Node:
    if len(indices) != 1 or indices[0] is None:
        raise Unsupported("an index other than one list of rows")
    return importer.emit("gather_rows", each, [x, indices[0]])


def _layer_norm(
    importer: _Importer,
    each: fx.Node,
    x: fx.Node,
    shape: list[int],
    weight: fx.Node | None = None,
    bias: fx.Node | None = None,
    epsilon: float = 1e-5,
    *_: Any,
) -> Node:
    if len(shape) != 1 or weight is None:
        raise Unsupported("a layer_norm over several dimensions, or without a weight")
    inputs = [x, weight, *([] if bias is None else [bias])]
    return importer.emit("layer_norm", each, inputs, epsilon=epsilon)


def _rms_norm(
    importer: _Importer,
    each: fx.Node,
    x: fx.Node,
    shape: list[int],
    weight: fx.Node | None = None,
    epsilon: float | None = None,
) -> Node:
    if len(shape) != 1 or weight is None:
        raise Unsupported("an rms_norm over several dimensions, or without a weight")
    epsilon = torch.finfo(torch.float32).eps if epsilon is None else epsilon
    return importer.emit("rms_norm", each, [x, weight], epsilon=epsilon)


def _attention(importer: _Importer, each: fx.Node, *arguments: Any) -> Node:
    tensors, numbers = arguments[:_ATTENTION_TENSORS], list(arguments[_ATTENTION_TENSORS:])
    layer, block_size, scale, window, softcap, scales = numbers + [None] * (6 - len(numbers))
    return importer.emit(
        "attention",
        each,
        [*tensors, *([] if scales is None else [scales])],
        layer=layer,
        block_size=block_size,
        scale=scale,
        window=window,
        softcap=softcap,
    )


_SUBTRACT = _binary("sub")

_OPERATIONS: dict[str, _Maker] = {
    "<built-in function getitem>": _part,
    **{f"aten.{op}": _unary(op) for op in ("neg", "exp", "rsqrt", "sqrt", "tanh", "sigmoid")},
    **{f"aten.{op}": _unary(op) for op in ("silu", "relu", "sin", "cos", "reciprocal", "abs")},
    **{f"aten.{op}.Tensor": _binary(op) for op in ("add", "sub", "mul", "div")},
    **{f"aten.{op}.Scalar": _binary(op) for op in ("add", "sub", "mul", "div")},
    "aten.pow.Tensor_Scalar": _binary("pow"),
    "aten.square": _square,
    "aten.rsub.Scalar": _reversed_subtraction,
    "aten.rsub.Tensor": _reversed_subtraction,
    "aten.maximum": _binary("maximum"),
    "aten.minimum": _binary("minimum"),
    "aten.gelu": _gelu,
    "aten.mean.dim": _last_dim("mean"),
    "aten.sum.dim_IntList": _last_dim("sum"),
    "aten.amax": _last_dim("max"),
    "aten.softmax.int": _softmax,
    "aten._softmax": _softmax,
    "aten.view": _view,
    "aten.reshape": _view,
    "aten._unsafe_view": _view,
    "aten.unsqueeze": _view,
    "aten.squeeze.dim": _view,
    "aten.squeeze.dims": _view,
    "aten.flatten.using_ints": _view,
    "aten.unflatten.int": _view,
    "aten.expand": _expand,
    "aten.transpose.int": _transpose,
    "aten.t": _matrix_transpose,
    "aten.permute": _permute,
    "aten.slice.Tensor": _slice,
    "aten.select.int": _select,
    "aten.cat": _cat,
    "aten.to.dtype": _to_dtype,
    "aten.to.dtype_layout": _to_dtype,
    "aten._to_copy": _to_dtype,
    "aten.type_as": _to_dtype,
    "aten.linear": _linear,
    "aten.embedding": _embedding,
    "aten.index.Tensor": _index,
    "aten.index_select": lambda importer, each, x, _, rows: _index(importer, each, x, [rows]),
    "aten.matmul": lambda importer, each, x, y: importer.emit("matmul", each, [x, y]),
    "aten.bmm": lambda importer, each, x, y: importer.emit("matmul", each, [x, y]),
    "aten.mm": lambda importer, each, x, y: importer.emit("matmul", each, [x, y]),
    "aten.rms_norm": _rms_norm,
    "aten.layer_norm": _layer_norm,
    "headway.linear": _packed_linear,
    "headway.embedding": _packed_embedding,
    "headway.attention": _attention,
}
