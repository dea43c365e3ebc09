"""Tests of models on disk get a cache of their own, empty."""

from pathlib import Path

import pytest

from headway.engine.models.store import list_models


@pytest.fixture
def cache(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    folder = tmp_path / "cache"
    monkeypatch.setenv("HEADWAY_CACHE_DIR", str(folder))
    return folder


@pytest.fixture
def smollm2() -> Path:
    return _pulled("smollm2-135m")


@pytest.fixture
def gemma3() -> Path:
    return _pulled("gemma3-270m")


def _pulled(name: str) -> Path:
    listing = next(model for model in list_models() if model.name == name)
    if listing.state != "pulled":
        pytest.skip(f"{name} is not in the cache: run headway models pull {name}")
    return listing.path
