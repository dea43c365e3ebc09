"""A GGUF file gives the logits of the model it was written from, whatever its type and family."""

from pathlib import Path
from typing import Any

import gguf
import numpy as np
import pytest
import torch
from gguf import GGMLQuantizationType as Type
from safetensors import safe_open
from transformers import AutoModelForCausalLM, PreTrainedModel

from headway.engine.errors import ModelLoadError
from headway.engine.models import convert
from headway.engine.models.architectures import end_token_ids
from headway.engine.models.convert import convert_gguf, converted_folder
from headway.engine.models.gguf_file import READABLE_TYPES, open_gguf
from headway.engine.models.load import load_model
from tiny_gguf import FAMILIES, TOKENS, tiny_family, write_gguf


def logits(model: PreTrainedModel) -> torch.Tensor:
    with torch.inference_mode():
        return model(TOKENS).logits


def assert_loads_as(path: Path, model: PreTrainedModel) -> PreTrainedModel:
    """Packed where the file is quantised, and expanded: as heads are trained and GPUs serve."""
    expected = logits(model)
    expanded = load_model(str(path), keep_packed=False).model
    torch.testing.assert_close(logits(expanded), expected, rtol=0, atol=1e-4)
    loaded = load_model(str(path), activations="fp32").model
    assert expected.std() > 0.05, "logits this flat would hide a wrong weight"
    torch.testing.assert_close(logits(loaded), expected, rtol=0, atol=1e-4)
    return loaded


@pytest.mark.parametrize(
    ("family", "kind"),
    [*(("llama", kind) for kind in READABLE_TYPES), *((f, Type.Q4_1) for f in FAMILIES)],
    ids=lambda value: getattr(value, "name", value),
)
def test_logits_are_those_of_the_model_written(
    family: str, kind: Type, cache: Path, tmp_path: Path
) -> None:
    model = tiny_family(family)
    write_gguf(tmp_path / "tiny.gguf", family, model, kind)
    assert_loads_as(tmp_path / "tiny.gguf", model)


@pytest.mark.parametrize("family", FAMILIES)
def test_logits_are_those_of_transformers_own_gguf_loader(
    family: str, cache: Path, tmp_path: Path
) -> None:
    # transformers does not read Qwen3's size of a head nor Gemma's query scale from the file: it is
    # right where they are the usual ones.
    usual: dict[str, dict[str, int]] = {
        "qwen3": {"head_dim": 128},
        "gemma3": {"head_dim": 256, "query_pre_attn_scalar": 256},
    }
    model = tiny_family(family, **usual.get(family, {}))
    write_gguf(tmp_path / "tiny.gguf", family, model, Type.Q8_0)
    theirs = AutoModelForCausalLM.from_pretrained(
        tmp_path, gguf_file="tiny.gguf", dtype=torch.float32
    )
    assert_loads_as(tmp_path / "tiny.gguf", theirs)


LLAMA3 = {
    "rope_type": "llama3",
    "rope_theta": 500.0,
    "factor": 8.0,
    "low_freq_factor": 1.0,
    "high_freq_factor": 4.0,
    "original_max_position_embeddings": 8192,
}
YARN = {
    "rope_type": "yarn",
    "rope_theta": 500.0,
    "factor": 4.0,
    "original_max_position_embeddings": 32,
}
YARN_KEYS = {
    "rope.scaling.type": "yarn",
    "rope.scaling.factor": 4.0,
    "rope.scaling.original_context_length": 32,
}
LINEAR = {"rope_type": "linear", "rope_theta": 500.0, "factor": 2.0}
LINEAR_KEYS = {"rope.scaling.type": "linear", "rope.scaling.factor": 2.0}
LOCAL = {"rope_type": "default", "rope_theta": 10_000.0}
SIX_SLIDING = ["sliding_attention"] * 6


@pytest.mark.parametrize(
    ("family", "changes", "keys"),
    [
        ("llama", {"rope_parameters": LINEAR}, LINEAR_KEYS),
        ("llama", {"rope_parameters": YARN}, YARN_KEYS),
        ("qwen2", {"rope_parameters": YARN}, YARN_KEYS),
        ("llama", {"tie_word_embeddings": True}, {}),
        ("llama", {"attention_bias": True}, {}),
        ("llama", {"num_key_value_heads": 4}, {"attention.head_count_kv": None}),
        ("llama", {}, {"attention.head_count_kv": [2, 2]}),
        ("qwen3", {"tie_word_embeddings": True}, {}),
        (
            "gemma3",
            {"rope_parameters": {"full_attention": LINEAR, "sliding_attention": LOCAL}},
            LINEAR_KEYS,
        ),
        (
            "gemma3",
            {"layer_types": [*SIX_SLIDING, "full_attention"]},
            {"attention.sliding_window_pattern": 7},
        ),
        (
            "gemma3",
            {"layer_types": ["full_attention", *SIX_SLIDING]},
            {"attention.sliding_window_pattern": [False] + [True] * 6},
        ),
    ],
    ids=str,
)
def test_config_says_what_the_metadata_says(
    family: str, changes: dict[str, Any], keys: dict[str, Any], cache: Path, tmp_path: Path
) -> None:
    model = tiny_family(family, **changes)
    write_gguf(tmp_path / "tiny.gguf", family, model, metadata=keys)
    assert_loads_as(tmp_path / "tiny.gguf", model)


@pytest.mark.parametrize("kind", ["llama3", "longrope"])
def test_rope_factors_become_rope_parameters(kind: str, cache: Path, tmp_path: Path) -> None:
    factors = np.linspace(1, 3, 32, dtype=np.float32)
    rope: dict[str, Any] = {
        "rope_type": "longrope",
        "rope_theta": 500.0,
        "short_factor": factors.tolist(),
        "long_factor": factors.tolist(),
        "attention_factor": 1.0,
        "original_max_position_embeddings": 128,
    }
    if kind == "llama3":
        rope = {**LLAMA3, "rope_theta": 500_000.0}
        inverse = 500_000.0 ** -(np.arange(32) / 32)
        factors = np.array([_llama3_factor(2 * np.pi / f) for f in inverse], np.float32)
    model = tiny_family("llama", rope_parameters=rope)
    write_gguf(
        tmp_path / "tiny.gguf",
        "llama",
        model,
        metadata={"rope.freq_base": rope["rope_theta"]},
        extra={"rope_freqs.weight": factors},
    )
    loaded = assert_loads_as(tmp_path / "tiny.gguf", model)
    assert loaded.config.rope_parameters["rope_type"] == kind


def _llama3_factor(wavelength: float) -> float:
    """Meta's rule for one frequency, as llama.cpp's converter writes it."""
    if wavelength < 8192 / 4.0:
        return 1.0
    if wavelength > 8192 / 1.0:
        return 8.0
    smooth = (8192 / wavelength - 1.0) / (4.0 - 1.0)
    return 1 / ((1 - smooth) / 8.0 + smooth)


def test_every_bit_is_kept(cache: Path, tmp_path: Path) -> None:
    kinds = {Type.F16: torch.float16, Type.BF16: torch.bfloat16, Type.Q8_0: torch.float32}
    for kind, dtype in kinds.items():
        path = tmp_path / f"{kind.name}.gguf"
        model = tiny_family("qwen3")
        write_gguf(path, "qwen3", model, kind)
        with safe_open(convert_gguf(path) / "model.safetensors", framework="pt") as file:
            weight = file.get_tensor("model.layers.1.mlp.up_proj.weight")
        assert weight.dtype == dtype
        assert torch.equal(weight.float(), model.model.layers[1].mlp.up_proj.weight)


def test_large_models_are_written_in_shards(
    cache: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(convert, "_SHARD_BYTES", 1_000_000)
    model = tiny_family("llama")
    write_gguf(tmp_path / "tiny.gguf", "llama", model)
    assert_loads_as(tmp_path / "tiny.gguf", model)
    assert len(list(converted_folder(tmp_path / "tiny.gguf").glob("model-*.safetensors"))) > 2


def test_a_conversion_is_made_once_and_again_when_the_file_changes(
    cache: Path, tmp_path: Path
) -> None:
    path = tmp_path / "tiny.gguf"
    stages: list[tuple[str, int, int]] = []
    write_gguf(path, "llama", tiny_family("llama"))
    first = convert_gguf(path, lambda *stage: stages.append(stage))
    assert stages[-1][0] == "convert"
    assert stages[-1][1] == stages[-1][2] > 0
    stages.clear()
    assert convert_gguf(path, lambda *stage: stages.append(stage)) == first
    assert not stages
    write_gguf(path, "llama", tiny_family("llama"), Type.F16)
    assert convert_gguf(path, lambda *stage: stages.append(stage)) != first
    assert stages


def test_end_tokens_are_those_named_and_those_of_a_turn(cache: Path, tmp_path: Path) -> None:
    path = tmp_path / "tiny.gguf"
    tokens = ["<eos>", "a", "<end_of_turn>", "<|im_end|>"]
    kinds = [gguf.TokenType.CONTROL] * 3 + [gguf.TokenType.NORMAL]
    writer = gguf.GGUFWriter(path, "gemma3")
    writer.add_eos_token_id(0)
    writer.add_eot_token_id(1)
    writer.add_token_list(tokens)
    writer.add_token_types(kinds)
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()
    assert end_token_ids(open_gguf(path)) == (0, 1, 2)


def test_metadata_that_transformers_cannot_work_with_is_refused(
    cache: Path, tmp_path: Path
) -> None:
    keys = {"attention.head_count": 3, "attention.key_length": 64}  # 3 heads of 256 values
    write_gguf(tmp_path / "tiny.gguf", "llama", tiny_family("llama"), metadata=keys)
    with pytest.raises(ModelLoadError, match="transformers refuses the config in its metadata"):
        convert_gguf(tmp_path / "tiny.gguf")


def test_a_damaged_number_of_layers_is_refused_at_once(cache: Path, tmp_path: Path) -> None:
    write_gguf(
        tmp_path / "tiny.gguf", "llama", tiny_family("llama"), metadata={"block_count": 2**31 + 2}
    )
    with pytest.raises(ModelLoadError, match=r"has 21 tensors for 2,147,483,650 layers"):
        convert_gguf(tmp_path / "tiny.gguf")


def test_a_damaged_conversion_says_how_to_mend_it(cache: Path, tmp_path: Path) -> None:
    path = tmp_path / "tiny.gguf"
    write_gguf(path, "llama", tiny_family("llama"))
    weights = convert_gguf(path) / "model.safetensors"
    weights.write_bytes(weights.read_bytes()[:-1])
    with pytest.raises(ModelLoadError, match=r"made from .*tiny\.gguf: remove it, and it is made"):
        load_model(str(path))
