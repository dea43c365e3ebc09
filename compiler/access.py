"""Access: where the elements of a value lie in a buffer. Movement operations make new accesses, not copies.

The affine case of a virtual tensor's index map: element (i, j, ...) of the value is element
offset + i * strides[0] + j * strides[1] + ... of the buffer. In a buffer the open size, if there is
one, is the outermost, so every stride is a number.

Example: a product writes buffer q [T, 576]; the model sees it as 9 heads of 64:

    value                        shape            strides          offset
    q                            [1, T, 576]      0, 576, 1        0
    view 1, T, 9, 64             [1, T, 9, 64]    0, 576, 64, 1    0
    permute 0, 2, 1, 3           [1, 9, T, 64]    0, 64, 576, 1    0
    slice dim 3, 32 to 64        [1, 9, T, 32]    0, 64, 576, 1    32
"""

from collections.abc import Sequence
from dataclasses import dataclass, replace

from headway.compiler.graph import Dim, TensorType


@dataclass(frozen=True, slots=True)
class Access:
    """The elements of one value."""

    buffer: str
    shape: tuple[Dim, ...]
    strides: tuple[int, ...]
    """Elements. Sizes of 1 have stride 0."""
    offset: int = 0

    @classmethod
    def whole(cls, buffer: str, tensor_type: TensorType) -> "Access":
        """A new buffer, the open size outermost and the others in their order."""
        strides = [0] * len(tensor_type.shape)
        step = 1
        for index, dim in reversed(list(enumerate(tensor_type.shape))):
            if isinstance(dim, int):
                strides[index] = 0 if dim == 1 else step
                step *= dim
        for index, dim in enumerate(tensor_type.shape):
            if isinstance(dim, str):
                strides[index] = step
        return cls(buffer, tensor_type.shape, tuple(strides))

    def permute(self, dims: Sequence[int]) -> "Access":
        """Dimension i of the result is dimension dims[i]."""
        return replace(
            self,
            shape=tuple(self.shape[dim] for dim in dims),
            strides=tuple(self.strides[dim] for dim in dims),
        )

    def slice(self, dim: int, start: int, end: Dim, step: int) -> "Access":
        """Elements start, start + step, ... below end of one dimension."""
        size = self.shape[dim]
        if isinstance(size, str) or isinstance(end, str):
            assert (start, end, step) == (0, size, 1), "an open size is taken whole"
            return self
        shape, strides = list(self.shape), list(self.strides)
        shape[dim] = max(0, -(-(end - start) // step))
        strides[dim] *= step
        offset = self.offset + start * self.strides[dim]
        return replace(self, shape=tuple(shape), strides=tuple(strides), offset=offset)

    def expand(self, shape: Sequence[Dim]) -> "Access":
        """Repeat dimensions of size 1, and new ones in front, by a stride of 0."""
        missing = len(shape) - len(self.shape)
        old = (1,) * missing + self.shape
        strides = (0,) * missing + self.strides
        kept = [
            stride if size == target else 0
            for size, target, stride in zip(old, shape, strides, strict=True)
        ]
        return replace(self, shape=tuple(shape), strides=tuple(kept))

    def view(self, shape: Sequence[Dim]) -> "Access | None":
        """The same elements under another shape, or None where strides cannot say that.

        Each size of the result must be made of whole neighbouring dimensions or cut one of them.
        """
        pieces = self._merged()
        strides: list[int] = []
        left: Dim = 1
        stride = 0
        for dim in reversed(shape):
            if dim == 1:
                strides.append(0)
                continue
            if left == 1:
                if not pieces:
                    return None
                left, stride = pieces.pop()
            if dim == left:
                strides.append(stride)
                left = 1
            elif isinstance(dim, int) and isinstance(left, int) and left % dim == 0:
                strides.append(stride)
                left, stride = left // dim, stride * dim
            else:
                return None
        if left != 1 or pieces:
            return None
        return replace(self, shape=tuple(shape), strides=tuple(reversed(strides)))

    def _merged(self) -> list[tuple[Dim, int]]:
        """(size, stride) of the dimensions, sizes of 1 dropped, neighbours joined where they can be."""
        merged: list[tuple[Dim, int]] = []
        for size, stride in zip(self.shape, self.strides, strict=True):
            if size == 1:
                continue
            if merged and isinstance(size, int):
                outer, outer_stride = merged[-1]
                if isinstance(outer, int) and outer_stride == size * stride:
                    merged[-1] = (outer * size, stride)
                    continue
            merged.append((size, stride))
        return merged
