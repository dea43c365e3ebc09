"""Where a model runs and how large its cache is when nobody says."""

import logging
from collections.abc import Callable

import pytest
import torch

from headway.engine import build
from headway.engine.build import build_engine, resolve_device, resolve_dtype, resolve_team
from headway.engine.config import EngineConfig
from headway.engine.errors import ModelLoadError
from headway.kernels import native
from tiny import tiny_model


@pytest.mark.parametrize(
    ("device", "num_gpus", "found"),
    [
        ("auto", 0, "cpu"),
        ("auto", 2, "cuda"),
        ("cpu", 2, "cpu"),
        ("cuda:1", 2, "cuda:1"),
        ("cuda:2", 2, None),
        ("cuda", 0, None),
        ("mps", 0, None),
        ("gpu", 1, None),
    ],
)
def test_a_device_is_there_or_refused(
    device: str, num_gpus: int, found: str | None, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(torch.cuda, "device_count", lambda: num_gpus)
    config = EngineConfig(device=device)
    if found is None:
        with pytest.raises(ModelLoadError, match=rf"device is '{device}'; .* sees {num_gpus} GPUs"):
            resolve_device(config)
    else:
        assert resolve_device(config) == torch.device(found)


@pytest.mark.parametrize(
    ("dtype", "num_gpus", "found"),
    [
        ("auto", 0, torch.float32),
        ("auto", 1, torch.bfloat16),
        ("float16", 0, torch.float16),
    ],
)
def test_auto_dtype_follows_the_device(
    dtype: str, num_gpus: int, found: torch.dtype, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(torch.cuda, "device_count", lambda: num_gpus)
    assert resolve_dtype(EngineConfig(dtype=dtype)) == found  # type: ignore[arg-type]


def test_a_team_is_as_the_settings_say(monkeypatch: pytest.MonkeyPatch) -> None:
    asked = []
    told = []

    def start_team(
        choice: str, num_threads: int, *, pinned: bool, progress: Callable[[int, int], None]
    ) -> None:
        asked.append((choice, num_threads, pinned))
        progress(1, 2)

    monkeypatch.setattr(build, "start_team", start_team)
    monkeypatch.setattr(build, "usable_cores", lambda: 6)
    resolve_team(EngineConfig(device="cpu"), lambda *report: told.append(report))
    resolve_team(EngineConfig(device="cpu", kernels="avx2", num_threads=3, pin_threads=True))
    monkeypatch.setattr(torch.cuda, "device_count", lambda: 1)
    resolve_team(EngineConfig())
    assert asked == [("auto", 6, False), ("avx2", 3, True)]
    assert told == [("compile", 1, 2)]


def test_kernels_that_cannot_be_had_are_an_error_of_loading(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setenv("CXX", "no-such-compiler")
    monkeypatch.setattr(native, "usable_levels", lambda: ["avx2"])
    for level, reason in (("avx2", "no C.. compiler"), ("avx512", "this processor lacks avx512")):
        with pytest.raises(ModelLoadError, match=f"kernels={level}: .*{reason}"):
            resolve_team(EngineConfig(device="cpu", kernels=level))  # type: ignore[arg-type]


@pytest.mark.parametrize(
    ("free", "given", "num_blocks"),
    [
        (40 * 4096, 0, 10),  # a quarter of 40 blocks' bytes
        (1 << 50, 0, (4 << 30) // 4096),  # 4 GiB at most
        (1 << 50, 7 * 4096 + 1, 7),  # as told
        (7 * 4096, 0, None),
    ],
)
def test_cache_size(
    free: int, given: int, num_blocks: int | None, monkeypatch: pytest.MonkeyPatch
) -> None:
    # A block is 2 layers x (key, value) x 8 tokens x 2 heads x 16 x 4 bytes.
    model, config = tiny_model(head_dim=16), EngineConfig(block_size=8, kv_cache_bytes=given)
    monkeypatch.setattr(build, "free_bytes", lambda device: free)
    if num_blocks is None:
        with pytest.raises(ModelLoadError, match="at least 2 are needed, 8,192 bytes"):
            build._num_blocks(model, config)
    else:
        assert build._num_blocks(model, config) == num_blocks


@pytest.mark.parametrize(
    ("dtype", "num_blocks"), [("auto", 64), ("float32", 64), ("bfloat16", 128), ("int8", 204)]
)
def test_a_smaller_type_holds_more_blocks(dtype: str, num_blocks: int) -> None:
    config = EngineConfig(
        block_size=8,
        kv_cache_bytes=64 * 4096,
        kv_cache_dtype=dtype,  # type: ignore[arg-type]
    )
    assert build._num_blocks(tiny_model(head_dim=16), config) == num_blocks


def test_a_cache_that_no_memory_can_hold_is_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(build, "free_bytes", lambda device: 999_999)
    with pytest.raises(ModelLoadError, match=r"kv_cache_bytes is 1,000,000, and 999,999 .* free"):
        build._num_blocks(tiny_model(), EngineConfig(kv_cache_bytes=1_000_000))


def test_the_log_tells_what_auto_came_to(caplog: pytest.LogCaptureFixture) -> None:
    caplog.set_level(logging.INFO, logger="headway.engine.build")
    config = EngineConfig(device="cpu", block_size=8, kv_cache_bytes=64 * 4096, num_threads=1)
    build_engine(tiny_model(head_dim=16), (), config)
    (record,) = caplog.records
    assert record.getMessage() == (
        "kernels=reference compile=off num_threads=1 kv_cache_dtype=float32 kv_cache_tokens=512"
    )
