"""The models that Headway can pull: their logits, their tokens, and how fast they are here again.

Token ids below are llama.cpp's (llama-cpp-python 0.3.36) for the same files.
"""

import subprocess
import sys
import time
from pathlib import Path

import pytest
import torch
from transformers import AutoModelForCausalLM, PreTrainedModel

from headway.engine.models.convert import convert_gguf
from headway.engine.models.load import load_model
from headway.engine.models.pack_model import pack_gguf
from headway.engine.models.packed_modules import PackedEmbedding, PackedLinear
from headway.engine.models.tokenizer import load_tokenizer, render_chat
from headway.kernels.pack import unpack

TEXT = "Hello 12345, it's   2024!\n\n\tdef f(x):"


def assert_same_logits(ours: PreTrainedModel, path: Path, tokens: torch.Tensor) -> None:
    theirs = AutoModelForCausalLM.from_pretrained(
        path.parent, gguf_file=path.name, dtype=torch.float32
    )
    with torch.inference_mode():
        expected = theirs(tokens).logits
        torch.testing.assert_close(ours(tokens).logits, expected, rtol=0, atol=1e-4)


def assert_same_state(packed: PreTrainedModel, expanded: PreTrainedModel) -> None:
    """Every weight and buffer is the same to the bit, packed ones too."""
    expected = dict(expanded.named_parameters(remove_duplicate=False))
    expected |= dict(expanded.named_buffers())
    found: dict[str, torch.Tensor] = dict(packed.named_parameters(remove_duplicate=False))
    for name, module in packed.named_modules():
        if isinstance(module, PackedLinear | PackedEmbedding):
            found[f"{name}.weight"] = unpack(module.weight)
        else:
            found |= {f"{name}.{leaf}": each for leaf, each in module.named_buffers(recurse=False)}
    expected.pop("model.embed_tokens.embed_scale", None)  # a number in PackedEmbedding
    assert found.keys() == expected.keys()
    assert all(torch.equal(value, expected[name]) for name, value in found.items())


@pytest.mark.slow
@pytest.mark.real_model
def test_smollm2_has_the_logits_of_transformers_own_loader(smollm2: Path) -> None:
    loaded = load_model("smollm2-135m", activations="fp32")
    assert loaded.vocab_size == 49152
    assert loaded.config.max_position_embeddings == 8192
    assert_same_logits(loaded.model, smollm2, torch.arange(100, 148)[None])
    assert_same_state(loaded.model, load_model("smollm2-135m", keep_packed=False).model)


@pytest.mark.slow
@pytest.mark.real_model
@pytest.mark.timeout(300)
def test_gemma3_has_the_logits_of_transformers_own_loader(gemma3: Path) -> None:
    loaded = load_model("gemma3-270m", keep_packed=False)
    assert loaded.eos_token_ids == (1, 106)
    past_the_window = torch.arange(1000, 1000 + 530)[None]
    assert_same_logits(loaded.model, gemma3, past_the_window)
    packed = load_model("gemma3-270m", activations="fp32")
    assert packed.eos_token_ids == (1, 106)
    assert_same_state(packed.model, loaded.model)
    with torch.inference_mode():
        ours, expanded = (each.model(past_the_window[:, :64]).logits for each in (packed, loaded))
        # Sums of 640 to 2048 products in another order; both differ as much from float64.
        torch.testing.assert_close(ours, expanded, rtol=0, atol=1e-3)


@pytest.mark.real_model
def test_smollm2_is_here_again_in_about_a_second(smollm2: Path) -> None:
    pack_gguf(smollm2)
    begin = time.perf_counter()
    loaded = load_model("smollm2-135m")
    seconds = time.perf_counter() - begin
    print(f"second load of smollm2-135m: {seconds:.2f} s")  # noqa: T201
    assert seconds < 2
    assert loaded.eos_token_ids == (2, 0)


MEMORY = """
import re
from pathlib import Path
import transformers.models.llama.modeling_llama
from headway.engine.models.load import load_model

def peak() -> int:
    return int(re.search(r"VmHWM:\\s+(\\d+) kB", Path("/proc/self/status").read_text())[1])

before = peak()
model = load_model("smollm2-135m").model
for buffer in model.buffers():
    buffer.flatten()[::1024].sum()  # a place of every page
print((peak() - before) * 1024)
"""


@pytest.mark.slow
@pytest.mark.real_model
def test_smollm2_takes_no_more_memory_than_its_packed_weights(
    smollm2: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The first time, when it is packed, and later: expanded, it would take 540 MB."""
    (tmp_path / "models").symlink_to(smollm2.parent.parent)
    monkeypatch.setenv("HEADWAY_CACHE_DIR", str(tmp_path))
    monkeypatch.setenv("PYTHONPATH", ":".join(sys.path))
    for most_megabytes in (170, 130):
        command = [sys.executable, "-c", MEMORY]
        result = subprocess.run(command, capture_output=True, text=True, check=True)
        num_bytes = int(result.stdout)
        print(f"smollm2-135m: {num_bytes / 1e6:.0f} MB over the imports")  # noqa: T201
        assert num_bytes < most_megabytes * 1e6
    assert num_bytes > 90e6, "the weights were touched"


@pytest.mark.real_model
def test_smollm2_tokens_are_llama_cpps(smollm2: Path) -> None:
    tokenizer = load_tokenizer(convert_gguf(smollm2))
    ids = [19556, 216, 33, 34, 35, 36, 37, 28, 357, 506, 333, 34, 32, 34, 36, 17, 1116, 197, 1604]
    assert tokenizer(TEXT).input_ids == [*ids, 275, 24, 104, 727]
    assert tokenizer.decode(tokenizer(TEXT).input_ids) == TEXT
    prompt = render_chat(tokenizer, [{"role": "user", "content": "hi"}])
    assert prompt.endswith("<|im_start|>user\nhi<|im_end|>\n<|im_start|>assistant\n")
    assert tokenizer(prompt, add_special_tokens=False).input_ids[0] == 1


@pytest.mark.slow
@pytest.mark.real_model
def test_gemma3_tokens_are_llama_cpps(gemma3: Path) -> None:
    tokenizer = load_tokenizer(convert_gguf(gemma3))
    ids = [9259, 236743, 236770, 236778, 236800, 236812, 236810, 236764, 625, 236789, 236751, 139]
    rest = [236778, 236771, 236778, 236812, 236888, 108, 255968, 2063, 517, 236769, 236781, 1473]
    assert tokenizer(TEXT).input_ids == [2, *ids, *rest]
    turn = "a<end_of_turn>\n<start_of_turn>model\nhi"
    plain = tokenizer(turn, add_special_tokens=False).input_ids
    assert plain == [236746, 106, 107, 105, 4368, 107, 2202]
    assert tokenizer.decode(plain) == turn
