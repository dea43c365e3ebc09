"""Memory for native kernels: aligned, and usable whatever pages it gets."""

import pytest
import torch

from headway.kernels.memory import ALIGNMENT_BYTES, allocate, prefer_huge_pages


@pytest.mark.parametrize("num_bytes", [0, 1, 100, 5 << 20])
def test_memory_begins_at_a_cache_line_and_holds_what_is_written(num_bytes: int) -> None:
    memory = allocate(num_bytes)
    assert memory.data_ptr() % ALIGNMENT_BYTES == 0
    assert memory.shape == (num_bytes,)
    assert memory.fill_(7).eq(7).all()


def test_advice_changes_no_value() -> None:
    tensor = torch.arange(3 << 20)
    prefer_huge_pages(tensor)
    assert torch.equal(tensor, torch.arange(3 << 20))
