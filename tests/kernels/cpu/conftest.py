"""A small library: the team and one body, so that tests which compile are fast."""

import shutil
from pathlib import Path

import pytest

from headway.kernels.cpu.build import SOURCES, build
from headway.kernels.cpu.levels import usable_levels
from headway.kernels.cpu.library import Library


@pytest.fixture(scope="session")
def small_sources(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("sources")
    for path in (SOURCES / "team.cpp", SOURCES / "team.h", Path(__file__).parent / "add_one.cpp"):
        shutil.copy(path, folder)
    return folder


@pytest.fixture(scope="session")
def small_library(
    tmp_path_factory: pytest.TempPathFactory, small_sources: Path, compiler: list[str]
) -> Library:
    """At the least level: the team is the same at each."""
    if "avx2" not in usable_levels():
        pytest.skip("this machine lacks AVX2")
    path = build("avx2", tmp_path_factory.mktemp("kernels"), sources=small_sources)
    return Library(path, "avx2")
