"""Fixtures for every room: one thread, no network, uninitialised memory that cannot pass for data."""

import os

os.environ["HF_HUB_OFFLINE"] = "1"
os.environ["TOKENIZERS_PARALLELISM"] = "false"

from collections.abc import Iterator

import pytest
import torch


@pytest.fixture(autouse=True)
def poisoned_memory() -> Iterator[None]:
    """Fill what torch.empty returns with NaN, so that an element nobody wrote fails its test."""
    torch.use_deterministic_algorithms(True, warn_only=False)
    torch.utils.deterministic.fill_uninitialized_memory = True
    yield
    torch.use_deterministic_algorithms(False)


@pytest.fixture(autouse=True, scope="session")
def one_thread() -> None:
    """Tiny models are faster without a thread team, and tests may run beside each other."""
    torch.set_num_threads(1)
