"""Tokenizers out of GGUF metadata cut text as their models were trained; templates may refuse."""

from pathlib import Path
from typing import Any

import gguf
import pytest
from transformers import PreTrainedTokenizerBase
from transformers.convert_slow_tokenizer import bytes_to_unicode

from headway.engine.errors import InvalidRequest, ModelLoadError
from headway.engine.models.gguf_file import open_gguf
from headway.engine.models.tokenizer import load_tokenizer, render_chat, save_gguf_tokenizer

CONTROL = ["<|endoftext|>", "<|im_start|>", "<|im_end|>"]
MERGED = ["\u0120\u0120", "\u0120\u0120\u0120", "20", "\u01202"]
TEMPLATE = (
    "{% for m in messages %}{% if m.role == 'system' %}"
    "{{ raise_exception('System role not supported') }}{% endif %}"
    "<|im_start|>{{ m.role }}\n{{ m.content }}<|im_end|>\n{% endfor %}"
    "{% if add_generation_prompt %}<|im_start|>assistant\n{% if think %}Hm{% endif %}{% endif %}"
)


def write_byte_level(path: Path, cut: str, **changes: Any) -> None:
    """A GGUF file with no weights and a byte-level vocabulary that knows four merges."""
    tokens = [*CONTROL, *sorted(bytes_to_unicode().values()), *MERGED]
    kinds = [gguf.TokenType.CONTROL] * len(CONTROL)
    kinds += [gguf.TokenType.NORMAL] * (len(tokens) - len(CONTROL))
    writer = gguf.GGUFWriter(path, "llama")
    writer.add_tokenizer_model(changes.get("model", "gpt2"))
    writer.add_tokenizer_pre(cut)
    writer.add_token_list(tokens)
    writer.add_token_types(kinds)
    writer.add_token_merges(["\u0120 \u0120", "\u0120\u0120 \u0120", "2 0", "\u0120 2"])
    writer.add_bos_token_id(1)
    writer.add_eos_token_id(2)
    writer.add_add_bos_token(False)
    if "template" in changes:
        writer.add_chat_template(changes["template"])
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()


def from_gguf(folder: Path, cut: str, **changes: Any) -> PreTrainedTokenizerBase:
    write_byte_level(folder / "tiny.gguf", cut, **changes)
    save_gguf_tokenizer(open_gguf(folder / "tiny.gguf"), folder)
    return load_tokenizer(folder)


@pytest.mark.parametrize(
    ("cut", "expected"),
    [
        ("smollm", ["a", "\u0120\u0120\u0120", "2", "0", "2", "4"]),
        ("gpt-2", ["a", "\u0120\u0120", "\u0120", "20", "2", "4"]),
        ("qwen2", ["a", "\u0120\u0120", "\u0120", "2", "0", "2", "4"]),
        ("llama-bpe", ["a", "\u0120\u0120", "\u0120", "20", "2", "4"]),
    ],
)
def test_text_is_cut_as_the_vocabulary_was_learned(
    cut: str, expected: list[str], tmp_path: Path
) -> None:
    assert from_gguf(tmp_path, cut).tokenize("a   2024") == expected


def test_text_survives_and_control_tokens_stay_whole(tmp_path: Path) -> None:
    tokenizer = from_gguf(tmp_path, "smollm")
    for text in [
        "",
        " a",
        "\n\n\tx  ",
        "na\u00efve \u65e5\u672c \U0001f642\u200d e\u0301",
        "a  2,0",
    ]:
        ids = tokenizer(text).input_ids
        assert tokenizer.decode(ids) == text
    assert tokenizer("<|im_start|>a<|im_end|>").input_ids[::2] == [1, 2]
    assert tokenizer.decode([1, 40, 2], skip_special_tokens=True) == tokenizer.decode([40])
    assert (tokenizer.bos_token, tokenizer.eos_token) == ("<|im_start|>", "<|im_end|>")


@pytest.mark.parametrize(("cut", "model"), [("klingon", "gpt2"), ("default", "rwkv")])
def test_a_cut_that_cannot_be_made_is_refused(cut: str, model: str, tmp_path: Path) -> None:
    with pytest.raises(ModelLoadError, match=f"kind '{model}', '{cut}'; llama, and gpt2 with"):
        from_gguf(tmp_path, cut, model=model)


def test_a_folder_without_a_tokenizer_is_refused(tmp_path: Path) -> None:
    (tmp_path / "config.json").write_text('{"model_type": "llama"}')
    with pytest.raises(ModelLoadError, match=r"no tokenizer that can be read.*tokenizer\.json"):
        load_tokenizer(tmp_path)


def test_a_tokenizer_config_of_another_shape_is_refused(tmp_path: Path) -> None:
    from_gguf(tmp_path, "smollm").save_pretrained(tmp_path)
    (tmp_path / "config.json").write_text('{"model_type": "llama"}')
    (tmp_path / "tokenizer_config.json").write_text("[]")
    with pytest.raises(ModelLoadError, match="no tokenizer that can be read"):
        load_tokenizer(tmp_path)


def test_a_chat_becomes_the_templates_text(tmp_path: Path) -> None:
    tokenizer = from_gguf(tmp_path, "smollm", template=TEMPLATE)
    messages = [{"role": "user", "content": "hi"}]
    asked = "<|im_start|>user\nhi<|im_end|>\n"
    assert render_chat(tokenizer, messages) == asked + "<|im_start|>assistant\n"
    assert render_chat(tokenizer, messages, add_generation_prompt=False) == asked
    thinking = render_chat(tokenizer, messages, variables={"think": True})
    assert thinking == asked + "<|im_start|>assistant\nHm"


@pytest.mark.parametrize(
    ("template", "messages", "said"),
    [
        (TEMPLATE, [{"role": "system", "content": "be kind"}], "System role not supported"),
        ("{{ messages[0].content + 1 }}", [{"role": "user", "content": "hi"}], "concatenate"),
        ("{% if %}", [{"role": "user", "content": "hi"}], "Expected an expression"),
    ],
)
def test_a_template_that_raises_refuses_the_request_in_its_own_words(
    template: str, messages: list[dict[str, str]], said: str, tmp_path: Path
) -> None:
    tokenizer = from_gguf(tmp_path, "smollm", template=template)
    with pytest.raises(
        InvalidRequest, match=f"template refuses these messages: .*{said}"
    ) as caught:
        render_chat(tokenizer, messages)
    assert [violation.field for violation in caught.value.violations] == ["chat"]


def test_a_model_without_a_template_takes_no_messages(tmp_path: Path) -> None:
    tokenizer = from_gguf(tmp_path, "smollm")
    with pytest.raises(InvalidRequest, match=r"no chat template\. Send text or token ids"):
        render_chat(tokenizer, [{"role": "user", "content": "hi"}])
