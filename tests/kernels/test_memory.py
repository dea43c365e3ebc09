"""Memory for native kernels: aligned, and usable whatever pages it gets."""

from pathlib import Path

import pytest
import torch

from headway.kernels.memory import (
    ALIGNMENT_BYTES,
    allocate,
    drop_file_pages,
    gather,
    prefer_huge_pages,
)


@pytest.mark.parametrize("num_bytes", [0, 1, 100, 5 << 20])
def test_memory_begins_at_a_cache_line_and_holds_what_is_written(num_bytes: int) -> None:
    memory = allocate(num_bytes)
    assert memory.data_ptr() % ALIGNMENT_BYTES == 0
    assert memory.shape == (num_bytes,)
    assert memory.fill_(7).eq(7).all()


def test_gathered_tensors_lie_in_one_memory_each_from_a_cache_line_on() -> None:
    tensors = [torch.randint(0, 255, shape, dtype=torch.uint8) for shape in ((3, 5), (0, 2), (70,))]
    copies = gather(tensors)
    assert copies[2].data_ptr() - copies[0].data_ptr() == ALIGNMENT_BYTES
    assert all(torch.equal(copy, each) for copy, each in zip(copies, tensors, strict=True))


def test_advice_changes_no_value() -> None:
    tensor = torch.arange(3 << 20)
    prefer_huge_pages(tensor)
    assert torch.equal(tensor, torch.arange(3 << 20))


def test_dropped_pages_come_back_from_the_file_and_other_memory_stays(tmp_path: Path) -> None:
    values = torch.arange(1 << 18)
    path = tmp_path / "values"
    path.write_bytes(values.numpy().tobytes())
    mapped = torch.from_file(str(path), shared=False, size=values.numel(), dtype=torch.int64)
    assert torch.equal(mapped, values)
    before = resident_bytes()
    drop_file_pages([mapped, values])
    assert before - resident_bytes() > values.nbytes / 2
    assert torch.equal(mapped, values)
    assert torch.equal(values, torch.arange(1 << 18))


def resident_bytes() -> int:
    fields = Path("/proc/self/statm").read_text().split()
    return int(fields[1]) * 4096
