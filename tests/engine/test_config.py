"""EngineConfig refuses what cannot work, and says what would."""

import pytest

from headway.engine.config import EngineConfig


@pytest.mark.parametrize(
    ("name", "value", "said"),
    [
        ("block_size", 0, "at least 1"),
        ("max_chunk_tokens", 0, "at least 1"),
        ("max_context_tokens", -1, "at least 0"),
        ("kv_cache_bytes", -1, "at least 0"),
        ("num_threads", 100_000, "at most 1024"),
        ("max_draft_tokens", 64, "0 to 63"),
        ("max_batch_tokens", 32, r"more than max_running_requests \(32\)"),
    ],
)
def test_settings_that_cannot_work_are_refused(name: str, value: int, said: str) -> None:
    with pytest.raises(ValueError, match=rf"{name} is {value}; .*{said}"):
        EngineConfig(**{name: value})  # type: ignore[arg-type]
