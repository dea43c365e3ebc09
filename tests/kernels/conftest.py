"""Fixtures for native bodies: each test that takes `team` runs at every level and team size."""

import functools
import shutil
from collections.abc import Iterator
from pathlib import Path

import pytest

from headway.engine.models.cache import cache_folder
from headway.kernels.cpu.build import LEVELS, build
from headway.kernels.cpu.library import Library, Team


@functools.cache
def library(level: str) -> Library:
    """The library of a level, from the user's cache: what is compiled once serves later runs too."""
    if not shutil.which("g++"):
        pytest.skip("there is no C++ compiler")
    return Library(build(level, cache_folder() / "kernels"))


@pytest.fixture(
    scope="module",
    params=[(level, num_threads) for level in LEVELS for num_threads in (1, 2, 3)],
    ids=lambda param: f"{param[0]}-{param[1]}",
)
def team(request: pytest.FixtureRequest) -> Iterator[Team]:
    """A team of 1, 2 or 3 threads at a level that this processor has."""
    level, num_threads = request.param
    if {"avx2": "avx2", "avx512": "avx512_vnni", "amx": "amx_int8"}[level] not in _processor():
        pytest.skip(f"this processor has no {level}")
    team = Team(library(level), num_threads)
    yield team
    team.close()


@functools.cache
def _processor() -> frozenset[str]:
    return frozenset(Path("/proc/cpuinfo").read_text().split())
