"""Files that are not what they seem are refused with a sentence, never with numpy's traceback."""

import struct
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from gguf import GGMLQuantizationType as Type

from headway.engine.errors import ModelLoadError
from headway.engine.models.convert import convert_gguf, converted_folder
from headway.engine.models.gguf_file import open_gguf
from tiny_gguf import tiny_family, write_gguf

Damage = Callable[[bytes], bytes]


@pytest.fixture(scope="module")
def whole(tmp_path_factory: pytest.TempPathFactory) -> bytes:
    path = tmp_path_factory.mktemp("whole") / "tiny.gguf"
    write_gguf(path, "llama", tiny_family("llama"), Type.Q8_0)
    return path.read_bytes()


def at(offset: int, form: str, *values: int) -> Damage:
    """Overwrite numbers at an offset."""

    def damage(data: bytes) -> bytes:
        changed = bytearray(data)
        struct.pack_into(form, changed, offset, *values)
        return bytes(changed)

    return damage


def after(text: bytes, form: str, *values: int) -> Damage:
    """Overwrite numbers behind the first occurrence of a text."""
    return lambda data: at(data.index(text) + len(text), form, *values)(data)


DAMAGED: dict[str, tuple[Damage, str]] = {
    "empty": (lambda data: b"", "cannot be read"),
    "zip": (lambda data: b"PK\3\4" + data[4:], r"not a GGUF file: it starts with b'PK"),
    "three bytes": (lambda data: data[:3], "not a GGUF file"),
    "big-endian": (at(4, ">I", 3), "big-endian"),
    "version 1": (at(4, "<I", 1), "GGUF version 1; versions 2 and 3"),
    "cut in the preamble": (lambda data: data[:20], "cut short"),
    "cut in a key": (lambda data: data[:40], "cut short"),
    "cut in the tensor table": (
        lambda data: data[: data.index(b"blk.1.attn_q.weight") + 20],
        "cut short",
    ),
    "cut in the tensors": (lambda data: data[:-1000], "cut short: tensor .* Download it again"),
    "endless key": (at(24, "<Q", 1 << 62), "cut short"),
    "endless tensors": (at(8, "<Q", 1 << 60), "damaged|cut short"),
    "endless metadata": (at(16, "<Q", 1 << 60), "damaged|cut short"),
    "unknown metadata type": (after(b"general.architecture", "<I", 77), "no metadata type 77"),
    "binary in a text": (after(b"general.architecture", "<IQI", 8, 4, 0xFFFFFFFF), "not UTF-8"),
    "no such dimensions": (after(b"token_embd.weight", "<I", 9), "has 9 dimensions"),
    "part of a block": (after(b"token_embd.weight", "<IQ", 2, 255), "not a multiple of the 32"),
    "unreadable type": (
        after(b"token_embd.weight", "<IQQI", 2, 256, 67, int(Type.IQ2_XXS)),
        r"token_embd.weight is of type IQ2_XXS, .* Q4_0, Q4_1",
    ),
    "unknown type": (after(b"token_embd.weight", "<IQQI", 2, 256, 67, 999), "of type 999"),
}


@pytest.mark.parametrize(("damage", "message"), DAMAGED.values(), ids=DAMAGED)
def test_a_damaged_or_foreign_file_is_refused(
    damage: Damage, message: str, whole: bytes, tmp_path: Path
) -> None:
    path = tmp_path / "bad.gguf"
    path.write_bytes(damage(whole))
    with pytest.raises(ModelLoadError, match=message):
        open_gguf(path)


def test_every_cut_of_the_header_is_noticed(whole: bytes, tmp_path: Path) -> None:
    path = tmp_path / "cut.gguf"
    end_of_header = whole.index(b"blk.1.ffn_up.weight")
    for length in range(0, end_of_header, 97):
        path.write_bytes(whole[:length])
        with pytest.raises(ModelLoadError):
            open_gguf(path)


UNFIT: dict[str, tuple[dict[str, Any], str]] = {
    "foreign architecture": ({"family": "falcon"}, r"architecture 'falcon'; .* llama, qwen2"),
    "missing tensor": (
        {"leave_out": ("blk.1.attn_k.weight",)},
        r"no tensor blk.1.attn_k.weight \(for model.layers.1.self_attn.k_proj.weight\)",
    ),
    "no embedding": ({"leave_out": ("token_embd.weight",)}, "no tensor token_embd.weight"),
    "wrong shape": (
        {"metadata": {"feed_forward_length": 480}},
        r"ffn_gate.weight of shape \(256, 256\), not \(480, 256\)",
    ),
    "more layers than said": ({"metadata": {"block_count": 1}}, "no place for.*blk.1"),
    "experts": (
        {"extra": {"blk.0.ffn_gate_inp.weight": np.zeros((4, 256), np.float32)}},
        "no place for.*ffn_gate_inp",
    ),
    "missing key": ({"metadata": {"block_count": None}}, "llama.block_count is None; it must be"),
    "text for a number": ({"metadata": {"context_length": "long"}}, "context_length is 'long'"),
    "no heads": ({"metadata": {"attention.head_count": 0}}, "head_count is 0"),
    "heads by layer": ({"metadata": {"attention.head_count_kv": [1, 2]}}, r"is \[1, 2\]"),
    "partial rotary": ({"metadata": {"rope.dimension_count": 16}}, "must be 64, the size of a"),
    "unknown scaling": ({"metadata": {"rope.scaling.type": "su"}}, "'su'; .*linear or yarn"),
    "scaling by nothing": ({"metadata": {"rope.scaling.type": "linear"}}, "factor is None"),
    "short rope factors": (
        {"extra": {"rope_freqs.weight": np.ones(7, np.float32)}},
        r"rope_freqs.weight of shape \(7,\), not \(32,\)",
    ),
}


@pytest.mark.parametrize(("changes", "message"), UNFIT.values(), ids=UNFIT)
def test_a_model_that_is_not_whole_or_not_known_is_refused(
    changes: dict[str, Any], message: str, cache: Path, tmp_path: Path
) -> None:
    path = tmp_path / "bad.gguf"
    changes = {"family": "llama", **changes}
    write_gguf(path, changes.pop("family"), tiny_family("llama"), **changes)
    with pytest.raises(ModelLoadError, match=message):
        convert_gguf(path)
    assert not converted_folder(path).exists()
