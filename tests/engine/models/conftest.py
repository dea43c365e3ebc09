"""Tests of models on disk get a cache of their own, empty."""

from pathlib import Path

import pytest


@pytest.fixture
def cache(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    folder = tmp_path / "cache"
    monkeypatch.setenv("HEADWAY_CACHE_DIR", str(folder))
    return folder
