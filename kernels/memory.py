"""Memory that native kernels stream through: aligned to cache lines, on huge pages where there are some."""

import ctypes
import mmap
import sys
from collections.abc import Iterable, Sequence

import torch

ALIGNMENT_BYTES = 64
"""A cache line: rows of two threads do not share one, and vectors load whole."""

_HUGE_PAGE_BYTES = 2 << 20
_MADV_HUGEPAGE = 14


def allocate(num_bytes: int) -> torch.Tensor:
    """Bytes that nothing is written to yet, [num_bytes] uint8, from the start of a cache line."""
    held = torch.empty(num_bytes + ALIGNMENT_BYTES, dtype=torch.uint8)
    start = -held.data_ptr() % ALIGNMENT_BYTES
    memory = held[start : start + num_bytes]
    prefer_huge_pages(memory)
    return memory


def gather(tensors: Sequence[torch.Tensor]) -> list[torch.Tensor]:
    """Copy contiguous uint8 tensors into one memory, one after another, each from a cache line on."""
    sizes = [-(-each.nbytes // ALIGNMENT_BYTES) * ALIGNMENT_BYTES for each in tensors]
    parts = allocate(sum(sizes)).split_with_sizes(sizes)
    return [
        part[: each.nbytes].view(each.shape).copy_(each)
        for part, each in zip(parts, tensors, strict=True)
    ]


def prefer_huge_pages(tensor: torch.Tensor) -> None:
    """Ask the system for pages of 2 MiB under a contiguous tensor in the CPU's memory.

    Weights and caches are read from end to end in each step, and small pages cost a translation every
    4 KiB: decoding is some 10 % faster on large ones. Advice only: where it cannot be had, nothing
    changes.
    """
    first = -(-tensor.data_ptr() // _HUGE_PAGE_BYTES) * _HUGE_PAGE_BYTES
    end = tensor.data_ptr() + tensor.nbytes
    length = (end - first) // _HUGE_PAGE_BYTES * _HUGE_PAGE_BYTES
    if length > 0 and tensor.is_cpu and sys.platform == "linux":
        ctypes.CDLL(None).madvise(ctypes.c_void_p(first), ctypes.c_size_t(length), _MADV_HUGEPAGE)


def drop_file_pages(tensors: Iterable[torch.Tensor]) -> None:
    """Give back the memory of tensors that are mapped from files; what is read again is mapped again.

    Nobody may have written to them. Tensors in other memory are left alone: it is the only copy.
    """
    if sys.platform != "linux":
        return
    with open("/proc/self/maps") as file:
        maps = [line.split(maxsplit=5) for line in file]
    mapped = [
        [int(end, 16) for end in fields[0].split("-")]
        for fields in maps
        if len(fields) == 6 and fields[5].startswith("/") and not fields[5].startswith("/dev/")
    ]
    for tensor in tensors:
        first = -(-tensor.data_ptr() // mmap.PAGESIZE) * mmap.PAGESIZE
        end = (tensor.data_ptr() + tensor.nbytes) // mmap.PAGESIZE * mmap.PAGESIZE
        if first < end and any(low <= first and end <= high for low, high in mapped):
            ctypes.CDLL(None).madvise(
                ctypes.c_void_p(first), ctypes.c_size_t(end - first), mmap.MADV_DONTNEED
            )


def trim_heap() -> None:
    """Give what was freed back to the system: after work that made large tensors, of which few stay."""
    trim = getattr(ctypes.CDLL(None), "malloc_trim", None)  # glibc alone has it
    if trim is not None:
        trim(0)
