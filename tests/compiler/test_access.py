"""Access: every chain of movements addresses what torch's views address."""

import random
from math import prod

import pytest
import torch

from headway.compiler.access import Access
from headway.compiler.graph import TensorType

ROWS = 7


def elements(access: Access, memory: torch.Tensor) -> torch.Tensor:
    shape = [ROWS if size == "T" else size for size in access.shape]
    return memory.as_strided(shape, access.strides, access.offset)


def open_shape(tensor: torch.Tensor, open_dim: int) -> list[int | str]:
    return ["T" if dim == open_dim else size for dim, size in enumerate(tensor.shape)]


def moved(
    rng: random.Random, access: Access, value: torch.Tensor, open_dim: int
) -> tuple[Access | None, torch.Tensor, int]:
    """One random movement of both, and where the open size is afterwards."""
    kind = rng.choice(["permute", "slice", "expand", "split", "flatten"])
    fixed = [dim for dim in range(value.dim()) if dim != open_dim]
    dim = rng.choice(fixed)
    size = value.shape[dim]
    if kind == "permute":
        dims = rng.sample(range(value.dim()), value.dim())
        return access.permute(dims), value.permute(dims), dims.index(open_dim)
    if kind == "slice":
        start, step = rng.randrange(size), rng.randint(1, 3)
        end = rng.randint(start + 1, size)
        index = [slice(None)] * dim + [slice(start, end, step)]
        return access.slice(dim, start, end, step), value[tuple(index)], open_dim
    if kind == "expand":
        wider = value.expand(3, *value.shape)
        return access.expand(open_shape(wider, open_dim + 1)), wider, open_dim + 1
    if kind == "split":
        factor = rng.choice([n for n in range(1, size + 1) if size % n == 0])
        split = value.unflatten(dim, (factor, size // factor))
        moved_dim = open_dim + (dim < open_dim)
        return access.view(open_shape(split, moved_dim)), split, moved_dim
    if dim + 1 in fixed:
        flat = value.flatten(dim, dim + 1)
        moved_dim = open_dim - (dim < open_dim)
        return access.view(open_shape(flat, moved_dim)), flat, moved_dim
    return access, value, open_dim


@pytest.mark.parametrize("seed", range(40))
def test_random_chains_address_what_torch_addresses(seed: int) -> None:
    rng = random.Random(seed)
    for _ in range(10):
        sizes = [rng.choice([1, 2, 3, 4, 6, 8]) for _ in range(3)]
        memory = torch.arange(ROWS * prod(sizes))
        value = memory.view(ROWS, *sizes)
        access: Access | None = Access.whole("x", TensorType(("T", *sizes)))
        open_dim = 0
        for _ in range(6):
            assert access is not None
            before = access
            access, value, open_dim = moved(rng, access, value, open_dim)
            if access is None:  # only where torch would copy, too
                with pytest.raises(RuntimeError):
                    elements(before, memory).view(value.shape)
                break
            assert torch.equal(elements(access, memory), value)


def test_the_worked_example() -> None:
    whole = Access.whole("q", TensorType((1, "T", 576)))
    heads = whole.view((1, "T", 9, 64))
    assert heads is not None
    high = heads.permute((0, 2, 1, 3)).slice(3, 32, 64, 1)
    assert (high.shape, high.strides, high.offset) == ((1, 9, "T", 32), (0, 64, 576, 1), 32)


def test_the_open_size_is_outermost_in_a_new_buffer() -> None:
    assert Access.whole("x", TensorType((1, 3, "T", 4))).strides == (0, 4, 12, 1)


def test_heads_and_rows_cannot_be_joined_across() -> None:
    by_head = Access.whole("x", TensorType((3, "T", 4)))
    assert by_head.view(("T", 12)) is None
    assert by_head.permute((1, 0, 2)).view(("T", 12)) == Access("x", ("T", 12), (12, 1))
