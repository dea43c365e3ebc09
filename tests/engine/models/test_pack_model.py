"""Quantised models load packed, have the logits of their rounded weights, and are packed once."""

import json
import logging
from collections.abc import Callable
from pathlib import Path
from typing import Any

import gguf
import numpy as np
import pytest
import torch
from gguf import GGMLQuantizationType as Type
from safetensors.torch import load_file, save_file
from torch import nn
from transformers import (
    AutoModelForCausalLM,
    MixtralConfig,
    PreTrainedConfig,
    PreTrainedModel,
    Qwen3MoeConfig,
)

from headway.engine.config import Quantize
from headway.engine.errors import ModelLoadError
from headway.engine.models.load import LoadedModel, load_model
from headway.engine.models.packed_modules import PackedEmbedding, PackedLinear
from headway.kernels.gguf_blocks import BLOCK_TYPES
from headway.kernels.pack import pack, unpack
from headway.kernels.packed import FormatName
from tiny_gguf import FAMILIES, TOKENS, tiny_family, write_gguf

FORMATS = {f"packed as {kind.format}": (name, kind.format) for name, kind in BLOCK_TYPES.items()}


def logits(model: PreTrainedModel) -> torch.Tensor:
    with torch.inference_mode():
        return model(TOKENS).logits


def assert_packed(model: PreTrainedModel, format: FormatName, head: FormatName) -> None:
    """No matrix is held in floats, and each has its format."""
    formats = {name: each.format for name, each in model.named_modules() if is_packed(each)}
    ends = {"model.embed_tokens", "lm_head"}
    assert {formats[name] for name in ends} == {head}
    assert {formats[name] for name in formats.keys() - ends} == {format}
    assert all(value.ndim < 2 for value in model.parameters())
    assert not any(isinstance(each, nn.Linear | nn.Embedding) for each in model.modules())


def is_packed(module: nn.Module) -> bool:
    return isinstance(module, PackedLinear | PackedEmbedding)


@pytest.mark.parametrize(("name", "format"), FORMATS.values(), ids=FORMATS)
def test_a_quantised_gguf_file_stays_packed(
    name: str, format: FormatName, cache: Path, tmp_path: Path
) -> None:
    write_gguf(tmp_path / "tiny.gguf", "llama", tiny_family("llama"), Type[name])
    model = load_model(str(tmp_path / "tiny.gguf")).model
    assert_packed(model, format, format)
    assert model.dtype == torch.float32
    assert not model.training


def test_activations_are_rounded_unless_kept(cache: Path, tmp_path: Path) -> None:
    write_gguf(tmp_path / "tiny.gguf", "qwen3", tiny_family("qwen3"), Type.Q8_0)
    rounded = logits(load_model(str(tmp_path / "tiny.gguf")).model)
    whole = logits(load_model(str(tmp_path / "tiny.gguf"), activations="fp32").model)
    assert 1e-4 < (rounded - whole).abs().max() < 0.1 * whole.std()


def rounded_like(model: PreTrainedModel, quantize: Quantize) -> PreTrainedModel:
    """Round the matrices in place, as `quantize` says."""
    for name, value in model.state_dict().items():
        if value.ndim == 2:
            is_end = name in ("model.embed_tokens.weight", "lm_head.weight")
            format: FormatName = "q8" if quantize == "int8" or is_end else "q4_1"
            value.copy_(unpack(pack(value.clone(), format)))
    return model


@pytest.mark.parametrize("quantize", ["int8", "int4"])
@pytest.mark.parametrize("family", FAMILIES)
def test_a_float_checkpoint_is_rounded(
    family: str, quantize: Quantize, cache: Path, tmp_path: Path
) -> None:
    model = tiny_family(family)
    model.save_pretrained(tmp_path / "m")
    loaded = load_model(str(tmp_path / "m"), quantize=quantize, activations="fp32")
    assert loaded.path == tmp_path / "m"
    assert_packed(loaded.model, "q8" if quantize == "int8" else "q4_1", "q8")
    before = logits(model)
    after = logits(rounded_like(model, quantize))
    torch.testing.assert_close(logits(loaded.model), after, rtol=0, atol=1e-4)
    assert (before - after).abs().max() > 1e-3


def test_the_dtype_is_that_of_norms_and_activations(cache: Path, tmp_path: Path) -> None:
    model = tiny_family("qwen2")  # which has biases
    model.save_pretrained(tmp_path / "m")
    loaded = load_model(str(tmp_path / "m"), torch.bfloat16, quantize="int8", activations="fp32")
    assert loaded.model.dtype == torch.bfloat16
    assert logits(loaded.model).dtype == torch.bfloat16
    expected = logits(rounded_like(model, "int8").bfloat16()).float()
    assert (logits(loaded.model).float() - expected).abs().max() < 0.1 * expected.std()


def test_a_tied_head_shares_the_embeddings_memory(cache: Path, tmp_path: Path) -> None:
    write_gguf(tmp_path / "tiny.gguf", "gemma3", tiny_family("gemma3"), Type.Q8_0)
    model: Any = load_model(str(tmp_path / "tiny.gguf")).model
    assert model.lm_head.data.data_ptr() == model.model.embed_tokens.data.data_ptr()


def test_float_tensors_of_a_quantised_file_stay_floats(cache: Path, tmp_path: Path) -> None:
    """A tied embedding in F16 among Q4_1: the head is its transpose, in the dtype asked for."""
    model = tiny_family("qwen3", tie_word_embeddings=True)
    embedding = model.model.embed_tokens.weight
    half = gguf.quantize(embedding.numpy(), Type.F16)
    name = {"leave_out": ("token_embd.weight",), "extra": {"token_embd.weight": half}}
    write_gguf(tmp_path / "tiny.gguf", "qwen3", model, Type.Q4_1, **name)  # type: ignore[arg-type]  # both
    embedding.copy_(torch.from_numpy(np.array(half)).float())
    loaded: Any = load_model(str(tmp_path / "tiny.gguf"), activations="fp32").model
    assert isinstance(loaded.model.embed_tokens, nn.Embedding)
    assert loaded.lm_head.weight is loaded.model.embed_tokens.weight
    torch.testing.assert_close(logits(loaded), logits(model), rtol=0, atol=1e-4)
    rounded = load_model(str(tmp_path / "tiny.gguf"), quantize="int8").model
    assert_packed(rounded, "q4_1", "q8")


def test_a_float_gguf_file_is_rounded(cache: Path, tmp_path: Path) -> None:
    model = tiny_family("llama")
    write_gguf(tmp_path / "tiny.gguf", "llama", model, Type.F16)
    assert not any(map(is_packed, load_model(str(tmp_path / "tiny.gguf")).model.modules()))
    loaded = load_model(str(tmp_path / "tiny.gguf"), quantize="int4", activations="fp32")
    assert_packed(loaded.model, "q4_1", "q8")
    expected = logits(rounded_like(model, "int4"))
    torch.testing.assert_close(logits(loaded.model), expected, rtol=0, atol=1e-4)


def test_tensors_of_other_names_are_renamed_by_transformers(cache: Path, tmp_path: Path) -> None:
    """Checkpoints of the bare decoder have no "model." before their names."""
    model = tiny_family("qwen3", tie_word_embeddings=True)
    model.save_pretrained(tmp_path / "m")
    weights = tmp_path / "m" / "model.safetensors"
    renamed = {name.removeprefix("model."): value for name, value in load_file(weights).items()}
    save_file(renamed, weights, metadata={"format": "pt"})
    loaded = load_model(str(tmp_path / "m"), quantize="int8", activations="fp32")
    expected = logits(rounded_like(model, "int8"))
    torch.testing.assert_close(logits(loaded.model), expected, rtol=0, atol=1e-4)


def gguf_file(folder: Path) -> Callable[..., LoadedModel]:
    write_gguf(folder / "tiny.gguf", "qwen3", tiny_family("qwen3"), Type.Q4_1)
    return lambda **settings: load_model(str(folder / "tiny.gguf"), **settings)


def float_folder(folder: Path) -> Callable[..., LoadedModel]:
    tiny_family("qwen3").save_pretrained(folder)
    return lambda **settings: load_model(str(folder), quantize="int4", **settings)


@pytest.mark.parametrize("source", [gguf_file, float_folder])
def test_packing_is_done_once_and_again_when_the_model_changes(
    source: Callable[[Path], Callable[..., LoadedModel]], cache: Path, tmp_path: Path
) -> None:
    load = source(tmp_path)
    stages: list[str] = []

    def progress(stage: str, done_bytes: int, total_bytes: int) -> None:
        stages.append(stage)

    first = logits(load(progress=progress).model)
    assert set(stages) == {"pack", "load"}
    stages.clear()
    assert torch.equal(logits(load(progress=progress).model), first)
    assert set(stages) == {"load"}
    for path in [*tmp_path.glob("*.gguf"), *tmp_path.glob("*.safetensors")]:
        path.write_bytes(path.read_bytes())
    load(progress=progress)
    assert "pack" in stages
    assert len(list((cache / "packed").glob("[!.]*"))) == 2


@pytest.mark.parametrize("source", [gguf_file, float_folder])
def test_a_damaged_file_in_the_cache_is_made_again(
    source: Callable[[Path], Callable[..., LoadedModel]],
    cache: Path,
    tmp_path: Path,
    caplog: pytest.LogCaptureFixture,
) -> None:
    load = source(tmp_path)
    first = logits(load().model)
    (packed,) = (cache / "packed").glob("*/packed.safetensors")
    packed.write_bytes(packed.read_bytes()[:-1])
    with caplog.at_level(logging.WARNING):
        assert torch.equal(logits(load().model), first)
    assert "packed weights are made again" in caplog.text
    caplog.clear()
    load()
    assert not caplog.text


def test_a_quantised_file_is_not_quantised_again(cache: Path, tmp_path: Path) -> None:
    load = gguf_file(tmp_path)
    with pytest.raises(ModelLoadError, match=r"is quantised already \(Q4_1\)\. Leave it out"):
        load(quantize="int8")


def test_other_devices_are_refused(cache: Path, tmp_path: Path) -> None:
    with pytest.raises(ModelLoadError, match="device is cuda:0: weights are packed for CPUs alone"):
        load_model(str(tmp_path), device="cuda:0", quantize="int8")


def test_weights_that_cannot_be_rounded_are_named(cache: Path, tmp_path: Path) -> None:
    model = tiny_family("qwen3")
    model.model.layers[1].mlp.up_proj.weight[3, 5] = torch.inf
    model.save_pretrained(tmp_path / "m")
    with pytest.raises(ModelLoadError, match=r"layers\.1\.mlp\.up_proj\.weight of .* cannot be"):
        load_model(str(tmp_path / "m"), quantize="int8")


def test_a_checkpoint_that_lacks_weights_is_refused(cache: Path, tmp_path: Path) -> None:
    tiny_family("qwen3").save_pretrained(tmp_path / "m")
    weights = tmp_path / "m" / "model.safetensors"
    tensors = load_file(weights)
    tensors.pop("model.layers.1.mlp.up_proj.weight")
    save_file(tensors, weights, metadata={"format": "pt"})
    with pytest.raises(ModelLoadError, match="lacks 1 of the model's weights"):
        load_model(str(tmp_path / "m"), quantize="int8")


def test_a_tied_head_of_its_own_is_refused(cache: Path, tmp_path: Path) -> None:
    """transformers would not tie it; as it would not, neither may the embedding take its place."""
    tiny_family("qwen3", tie_word_embeddings=True).save_pretrained(tmp_path / "m")
    weights = tmp_path / "m" / "model.safetensors"
    tensors = load_file(weights)
    embedding = tensors["model.embed_tokens.weight"]
    for head, is_refused in ((embedding.clone(), False), (embedding + 1, True)):
        save_file({**tensors, "lm_head.weight": head}, weights, metadata={"format": "pt"})
        if is_refused:
            with pytest.raises(ModelLoadError, match=r"lm_head\.weight is another matrix"):
                load_model(str(tmp_path / "m"), quantize="int8")
        else:
            load_model(str(tmp_path / "m"), quantize="int8")


MOE: dict[str, tuple[type[PreTrainedConfig], dict[str, Any]]] = {
    "mixtral": (MixtralConfig, {"num_local_experts": 4}),
    "qwen3_moe": (
        Qwen3MoeConfig,
        {"num_experts": 4, "num_experts_per_tok": 2, "moe_intermediate_size": 32},
    ),
}


@pytest.mark.parametrize(("config_type", "sizes"), MOE.values(), ids=MOE)
def test_experts_stay_floats(
    config_type: type[PreTrainedConfig], sizes: dict[str, Any], cache: Path, tmp_path: Path
) -> None:
    """Their checkpoints name experts one by one; transformers makes one tensor of them."""
    small = {"hidden_size": 64, "intermediate_size": 96, "num_hidden_layers": 2, "head_dim": 16}
    heads = {"num_attention_heads": 4, "num_key_value_heads": 2, "initializer_range": 0.1}
    config = config_type(vocab_size=67, **small, **heads, **sizes)
    with torch.random.fork_rng():
        torch.manual_seed(0)
        model = AutoModelForCausalLM.from_config(config).eval().requires_grad_(False)
    model.save_pretrained(tmp_path / "m")
    loaded = load_model(str(tmp_path / "m"), quantize="int8", activations="fp32").model
    packed = {f"{name}.weight" for name, each in loaded.named_modules() if is_packed(each)}
    assert len(packed) == 2 * 4 + 2
    for name in packed:
        value = model.get_parameter(name)
        value.copy_(unpack(pack(value.clone(), "q8")))
    torch.testing.assert_close(logits(loaded), logits(model), rtol=0, atol=1e-4)


def test_end_ids_are_the_generation_configs(cache: Path, tmp_path: Path) -> None:
    tiny_family("qwen3").save_pretrained(tmp_path / "m")
    path = tmp_path / "m" / "generation_config.json"
    path.write_text(json.dumps({"eos_token_id": [5, 7]}))
    assert load_model(str(tmp_path / "m"), quantize="int8").eos_token_ids == (5, 7)
