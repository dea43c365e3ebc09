"""Fixtures for every room: one thread, no network, uninitialised memory that cannot pass for data."""

import os

os.environ["HF_HUB_OFFLINE"] = "1"
os.environ["TOKENIZERS_PARALLELISM"] = "false"
# Tests speak to loopback alone, which a proxy of the environment cannot reach.
os.environ["no_proxy"] = os.environ["NO_PROXY"] = "localhost,127.0.0.1,::1"

from collections.abc import Iterator
from pathlib import Path

import pytest
import torch

from headway.engine.models.store import list_models
from headway.kernels.cpu.library import Team
from headway.kernels.native import start_team


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


@pytest.fixture(scope="session")
def native_team() -> Iterator[Team]:
    """Two threads at the best level of this machine."""
    team = start_team("auto", 2)
    if team is None:
        pytest.skip("there are no native kernels on this machine")
    yield team
    team.close()


@pytest.fixture(scope="session")
def smollm2() -> Path:
    return _pulled("smollm2-135m")


@pytest.fixture(scope="session")
def gemma3() -> Path:
    return _pulled("gemma3-270m")


def _pulled(name: str) -> Path:
    listing = next(model for model in list_models() if model.name == name)
    if listing.state != "pulled":
        pytest.skip(f"{name} is not in the cache: run headway models pull {name}")
    return listing.path
