"""Fixtures for native bodies: each test that takes `team` runs at every level and team size.

`pytest tests/kernels --sanitizers=address,undefined` runs those tests alone, on instrumented bodies;
cpu/test_sanitizers.py knows how to start the interpreter for that.
"""

import os
import sys
from collections.abc import Iterator

import pytest

from headway.kernels.cache import cache_folder
from headway.kernels.cpu.build import BuildError, build, find_compiler
from headway.kernels.cpu.levels import LEVELS, LevelName, usable_levels
from headway.kernels.cpu.library import Library, Team


def pytest_addoption(parser: pytest.Parser) -> None:
    parser.addoption("--sanitizers", default="", help="sanitizers to build native bodies with")


def pytest_collection_modifyitems(config: pytest.Config, items: list[pytest.Item]) -> None:
    """Of a sanitizer's run, keep the tests that run the bodies, with two threads: it is slow."""
    if config.getoption("--sanitizers"):
        items[:] = [item for item in items if _runs_bodies(item)]


def _runs_bodies(item: pytest.Item) -> bool:
    callspec = getattr(item, "callspec", None)
    num_threads = callspec.params.get("team", 2) if callspec else 2
    return "library" in getattr(item, "fixturenames", ()) and num_threads == 2


@pytest.fixture(scope="session")
def compiler() -> list[str]:
    try:
        return find_compiler()
    except BuildError as error:
        pytest.skip(str(error))


@pytest.fixture
def environment() -> dict[str, str]:
    """For interpreters that a test starts: headway need not be installed."""
    return os.environ | {"PYTHONPATH": os.pathsep.join(filter(None, sys.path))}


@pytest.fixture(scope="session", params=LEVELS)
def library(request: pytest.FixtureRequest, compiler: list[str]) -> Library:
    """The library of a level, from the user's cache: what is compiled once serves later runs too."""
    level: LevelName = request.param
    if level not in usable_levels():
        pytest.skip(f"this machine lacks {level}")
    sanitizers = request.config.getoption("--sanitizers").split(",")
    folder = cache_folder() / "kernels"
    return Library(build(level, folder, sanitizers=[*filter(None, sanitizers)]), level)


@pytest.fixture(scope="module", params=[1, 2, 3])
def team(request: pytest.FixtureRequest, library: Library) -> Iterator[Team]:
    """A team of 1, 2 or 3 threads at a level that this machine has."""
    team = Team(library, request.param)
    yield team
    team.close()
