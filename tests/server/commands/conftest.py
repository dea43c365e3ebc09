"""The tiny model's folder, once for all commands."""

from pathlib import Path

import pytest

from tiny_folder import save_tiny_folder


@pytest.fixture(scope="session")
def tiny_folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return save_tiny_folder(tmp_path_factory.mktemp("tiny"))


@pytest.fixture
def tiny_flags(tiny_folder: Path) -> list[str]:
    """Flags that every command with a model understands."""
    return [f"--model={tiny_folder}", "--engine.num-threads=1", "--engine.kv-cache-bytes=1000000"]
