"""Emitter: where rules put the calls they make, and how they name the memory that those work on."""

from collections.abc import Mapping
from dataclasses import dataclass

import torch

from headway.compiler.access import Access
from headway.compiler.graph import Dim, Unsupported
from headway.compiler.placement import Operand, Placed
from headway.compiler.program import Buffer, Call, Open, Output, Place, Word
from headway.kernels.packed import PackedWeight


@dataclass(frozen=True, slots=True)
class Rows:
    """A value as rows of `width` neighbouring elements, `num_inner` of them for each step row.

    Example, heads in a buffer of 960 a row, shape [1, 9, T, 64] and strides 0, 64, 960, 1: T rows at
    stride 960, 9 inner ones at stride 64, width 64.
    """

    num_rows: Dim
    stride: int
    num_inner: int
    inner_stride: int
    width: int

    @classmethod
    def of(cls, access: Access) -> "Rows":
        """Raises Unsupported for values of more dimensions, or whose last one is not contiguous."""
        *outer, (width, step) = zip(access.shape, access.strides, strict=True)
        if not isinstance(width, int) or (step != 1 and width != 1):
            raise Unsupported(f"rows of {access}")
        dims = [(size, stride) for size, stride in outer if size != 1]
        open_dims = [pair for pair in dims if isinstance(pair[0], str)]
        inner = [pair for pair in dims if isinstance(pair[0], int)]
        if len(inner) == 1 and not open_dims:
            open_dims, inner = inner, []
        if len(open_dims) > 1 or len(inner) > 1:
            raise Unsupported(f"rows of {access}")
        num_rows, stride = open_dims[0] if open_dims else (1, 0)
        num_inner, inner_stride = inner[0] if inner else (1, 0)
        assert isinstance(num_inner, int)
        return cls(num_rows, stride, num_inner, inner_stride, width)


class Emitter:
    """Collects calls, and the buffers that come up on the way."""

    def __init__(self, placed: Placed, bound: Mapping[str, torch.Tensor], num_threads: int) -> None:
        """bound: graph inputs that are the same tensor in every step, such as the KV cache."""
        self.num_threads = num_threads
        self.graph = placed.graph
        self.bound = bound
        self.calls: list[Call] = []
        self.buffers = {
            name: Buffer(name, tensor_type.width * 4, tensor_type.rows)
            for name, tensor_type in placed.buffers.items()
        }

    def call(self, kernel: str, **arguments: Word) -> None:
        """Add a call; arguments are the fields of the kernel."""
        self.calls.append(Call(kernel, arguments))

    def scratch(self, name: str, row_bytes: int, rows: Dim = 1, *, row_group: int = 1) -> Place:
        """Memory of another size than its value's shape says, or beside any value."""
        self.buffers[name] = Buffer(name, row_bytes, rows, row_group)
        return Place(name)

    def access(self, operand: Operand) -> Access:
        """An access to any operand; inputs and constants lie whole where they are."""
        if isinstance(operand, Access):
            return operand
        return Access.whole(operand, self.graph.type_of(operand))

    def address(self, operand: Operand) -> Word:
        """Where the first element of an operand is."""
        access = self.access(operand)
        if access.buffer in self.buffers:
            return Place(access.buffer, access.offset * 4)
        if access.buffer in self.graph.inputs:
            if access.offset:
                raise Unsupported(f"a part of the input {access.buffer}")
            return self.bound.get(access.buffer, Open(access.buffer))
        return self.constant(access.buffer).flatten()[access.offset :]

    def constant(self, name: str) -> torch.Tensor:
        """A float or integer constant, contiguous; floats are float32."""
        value = self.graph.constants[name]
        assert isinstance(value, torch.Tensor), f"{name} is packed"
        return (value.float() if value.is_floating_point() else value).contiguous()

    def weight(self, name: Operand) -> PackedWeight:
        """A packed constant."""
        value = self.graph.constants.get(name) if isinstance(name, str) else None
        if not isinstance(value, PackedWeight):
            raise Unsupported("a product with a weight that is computed in each step")
        return value

    def dtype(self, operand: Operand) -> torch.dtype:
        """Element type of an operand."""
        name = self.access(operand).buffer
        return torch.float32 if name in self.buffers else self.graph.type_of(name).dtype

    def output(self, operand: Operand) -> Output:
        """A result the caller reads: rows one after another in a buffer."""
        access = self.access(operand)
        rows = Rows.of(access)
        if (
            access.buffer not in self.buffers
            or rows.num_inner > 1
            or rows.stride not in (0, rows.width)
        ):
            raise Unsupported(f"the output {access}")
        return Output(Place(access.buffer, access.offset * 4), rows.num_rows, rows.width)


def size(dim: Dim) -> Word:
    """A size as an argument."""
    return Open(dim) if isinstance(dim, str) else dim


def squeezed(accesses: list[Access], num_dims: int) -> tuple[list[Dim], list[list[int]]]:
    """Sizes, and strides of each access, in exactly `num_dims` dimensions: all have one shape.

    Sizes of 1 are dropped and neighbours joined where every access allows it; 1s fill up the front.
    """
    sizes: list[Dim] = []
    strides: list[list[int]] = [[] for _ in accesses]
    for index, dim in enumerate(accesses[0].shape):
        if dim == 1:
            continue
        steps = [access.strides[index] for access in accesses]
        outer = sizes[-1] if sizes else None
        pairs = list(zip(strides, steps, strict=True))
        if (
            isinstance(dim, int)
            and isinstance(outer, int)
            and all(old[-1] == dim * step for old, step in pairs)
        ):
            sizes[-1] = outer * dim
            for old, step in pairs:
                old[-1] = step
        else:
            sizes.append(dim)
            for old, step in pairs:
                old.append(step)
    missing = num_dims - len(sizes)
    if missing < 0:
        raise Unsupported(f"{len(sizes)} dimensions that do not join, in {accesses[0]}")
    return [1] * missing + sizes, [[0] * missing + steps for steps in strides]
