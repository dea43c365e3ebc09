"""Safetensors folders load as transformers loads them, or say why they cannot."""

import json
from collections.abc import Callable
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file, save_file
from transformers import AutoModelForCausalLM, BertConfig, BertModel

from headway.engine.errors import ModelLoadError
from headway.engine.models import load
from headway.engine.models.load import load_model
from tiny import EOS_ID, VOCAB_SIZE, tiny_model
from tiny_gguf import FAMILIES, TOKENS, tiny_family


@pytest.mark.parametrize(
    ("family", "dtype"),
    [
        *((family, torch.float32) for family in FAMILIES),
        ("llama", torch.bfloat16),
        ("llama", torch.float16),
    ],
    ids=str,
)
def test_logits_are_those_of_transformers(family: str, dtype: torch.dtype, tmp_path: Path) -> None:
    tiny_family(family).to(dtype).save_pretrained(tmp_path)
    theirs = AutoModelForCausalLM.from_pretrained(tmp_path, dtype=torch.float32).eval()
    loaded = load_model(str(tmp_path), attention="eager")
    with torch.inference_mode():
        torch.testing.assert_close(
            loaded.model(TOKENS).logits, theirs(TOKENS).logits, rtol=0, atol=1e-4
        )


def test_shards_load_and_the_dtype_is_the_one_asked_for(tmp_path: Path) -> None:
    model = tiny_model()
    model.save_pretrained(tmp_path, max_shard_size="20KB")
    assert len(list(tmp_path.glob("*.safetensors"))) > 1
    loaded = load_model(str(tmp_path), torch.bfloat16)
    assert {value.dtype for value in loaded.model.parameters()} == {torch.bfloat16}
    assert torch.equal(loaded.model.lm_head.weight, model.lm_head.weight.bfloat16())


def test_a_loaded_model_says_what_it_is(tmp_path: Path) -> None:
    tiny_model().save_pretrained(tmp_path)
    stages: list[tuple[str, int, int]] = []
    loaded = load_model(str(tmp_path), progress=lambda *stage: stages.append(stage))
    assert (loaded.name, loaded.path) == (str(tmp_path), tmp_path)
    assert loaded.vocab_size == VOCAB_SIZE
    assert loaded.eos_token_ids == (EOS_ID,)
    assert loaded.model.dtype == torch.float32
    assert not loaded.model.training
    assert not any(value.requires_grad for value in loaded.model.parameters())
    num_bytes = 4 * sum(value.numel() for value in loaded.model.parameters())
    assert stages == [("load", 0, num_bytes), ("load", num_bytes, num_bytes)]


@pytest.mark.parametrize(
    ("config", "generation", "expected"),
    [(2, 5, (5,)), (2, [5, 7], (5, 7)), ([2, 3], None, (2, 3)), (None, None, ())],
)
def test_end_ids_are_the_generation_configs_before_the_configs(
    config: object, generation: object, expected: tuple[int, ...], tmp_path: Path
) -> None:
    tiny_model().save_pretrained(tmp_path)
    _edit(tmp_path / "config.json", eos_token_id=config)
    if generation is None:
        (tmp_path / "generation_config.json").unlink()
    else:
        _edit(tmp_path / "generation_config.json", eos_token_id=generation)
    assert load_model(str(tmp_path)).eos_token_ids == expected


def _edit(path: Path, **changes: object) -> None:
    path.write_text(json.dumps({**json.loads(path.read_text()), **changes}))


def _weights(change: Callable[[dict[str, torch.Tensor]], object]) -> Callable[[Path], None]:
    def damage(folder: Path) -> None:
        tensors = load_file(folder / "model.safetensors")
        change(tensors)
        save_file(tensors, folder / "model.safetensors", metadata={"format": "pt"})

    return damage


def _bytes(change: Callable[[bytes], bytes]) -> Callable[[Path], None]:
    def damage(folder: Path) -> None:
        path = folder / "model.safetensors"
        path.write_bytes(change(path.read_bytes()))

    return damage


def _bert(folder: Path) -> None:
    small = {"num_hidden_layers": 1, "hidden_size": 8, "num_attention_heads": 1}
    BertModel(BertConfig(vocab_size=9, intermediate_size=8, **small)).save_pretrained(folder)
    _edit(folder / "config.json", model_type="clip_text_model")


def _pickle(folder: Path) -> None:
    torch.save({}, folder / "pytorch_model.bin")
    (folder / "model.safetensors").unlink()


BAD: dict[str, tuple[Callable[[Path], None], str]] = {
    "no config": (lambda folder: (folder / "config.json").unlink(), "has no config.json"),
    "config is not json": (
        lambda folder: (folder / "config.json").write_text("{") and None,
        "config.json cannot be used",
    ),
    "unknown type": (
        lambda folder: _edit(folder / "config.json", model_type="hal9000"),
        "config.json cannot be used: .*hal9000",
    ),
    "not a language model": (_bert, "does not generate text"),
    "own code": (
        lambda folder: _edit(
            folder / "config.json",
            model_type="own",
            auto_map={"AutoConfig": "own.Config", "AutoModelForCausalLM": "own.Model"},
        ),
        "config.json cannot be used",
    ),
    # What transformers makes of these is no ValueError.
    "heads of no size": (
        lambda folder: _edit(folder / "config.json", num_attention_heads=0),
        "config.json cannot be used",
    ),
    "heads that share nothing": (
        lambda folder: _edit(folder / "config.json", num_key_value_heads=0),
        "cannot be loaded with dtype",
    ),
    "a number as text": (
        lambda folder: _edit(folder / "config.json", vocab_size="64"),
        "config.json cannot be used: .*vocab_size",
    ),
    "a dtype that is none": (
        lambda folder: _edit(folder / "config.json", dtype="float3"),
        "config.json cannot be used: .*float3",
    ),
    "an end that is text": (
        lambda folder: _edit(folder / "generation_config.json", eos_token_id="</s>"),
        "eos_token_id in .* is '</s>'; a token id or a list",
    ),
    "pickle": (_pickle, "no .safetensors file"),
    "cut short": (_bytes(lambda data: data[:-100]), "not a whole safetensors file"),
    "cut in the header": (_bytes(lambda data: data[:50]), "not a whole safetensors file"),
    "empty": (_bytes(lambda data: b""), "not a whole safetensors file"),
    "foreign": (_bytes(lambda data: b"GGUF" + data), "not a whole safetensors file"),
    "missing weight": (
        _weights(lambda tensors: tensors.pop("model.layers.1.mlp.up_proj.weight")),
        r"lacks 1 of the model's weights, among them \['model.layers.1.mlp.up_proj.weight'\]",
    ),
    "wrong shape": (
        _weights(lambda tensors: tensors.update({"lm_head.weight": torch.zeros(64, 31)})),
        r"1 weights of another shape .* lm_head.weight: \(64, 31\), not \(64, 32\)",
    ),
    "config of another size": (
        lambda folder: _edit(folder / "config.json", num_hidden_layers=3),
        "lacks 9 of the model's weights",
    ),
    "config of fewer layers": (
        lambda folder: _edit(folder / "config.json", num_hidden_layers=1),
        "9 weights of layers for which its config.json has no place",
    ),
    "no layers": (
        lambda folder: _edit(folder / "config.json", num_hidden_layers=-1),
        "num_hidden_layers in .* is -1; it must be at least 1",
    ),
}


@pytest.mark.parametrize(("damage", "message"), BAD.values(), ids=BAD)
def test_a_folder_that_is_not_a_model_is_refused(
    damage: Callable[[Path], None], message: str, tmp_path: Path
) -> None:
    tiny_model().save_pretrained(tmp_path)
    damage(tmp_path)
    with pytest.raises(ModelLoadError, match=message):
        load_model(str(tmp_path))


def test_a_model_larger_than_memory_is_refused(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    tiny_model().save_pretrained(tmp_path)
    monkeypatch.setattr(load, "free_bytes", lambda device: 1000)
    with pytest.raises(ModelLoadError, match=r"need 0.0 GB on cpu .* smaller model"):
        load_model(str(tmp_path))


def test_weights_without_a_place_are_reported(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    tiny_model().save_pretrained(tmp_path)
    _weights(lambda tensors: tensors.update({"vision.weight": torch.zeros(2)}))(tmp_path)
    load_model(str(tmp_path))
    assert "vision.weight" in caplog.text
