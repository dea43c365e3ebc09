"""Tokenizers and chat templates: from a folder, or from the metadata of a GGUF file.

Knows no weights and no requests; streaming text back out of tokens is the server's business.
"""

import inspect
from collections.abc import Mapping, Sequence
from pathlib import Path
from types import MappingProxyType
from typing import Any

from tokenizers import pre_tokenizers
from transformers import AutoTokenizer, PreTrainedTokenizerBase, PreTrainedTokenizerFast

from headway.engine.errors import InvalidRequest, ModelLoadError, Violation, first_line
from headway.engine.models.gguf_file import GGUFFile

# How byte-level vocabularies cut text before merging, by tokenizer.ggml.pre. transformers knows all
# but "smollm", which it reads like GPT-2's: then "a   2024" comes out as other tokens than the
# model was trained on.
_READABLE_CUTS = frozenset(
    ["default", "gpt-2", "smollm", "llama3", "llama-bpe", "smaug-bpe", "tekken", "qwen2"]
)

# What apply_chat_template takes itself: as variables they would change how it works, up to bringing
# another template.
_NO_VARIABLES = frozenset(
    inspect.signature(PreTrainedTokenizerBase.apply_chat_template).parameters
) - {"tools", "documents", "kwargs"}


def load_tokenizer(folder: Path) -> PreTrainedTokenizerBase:
    """Return the tokenizer in a Hugging Face folder.

    Raises:
        ModelLoadError: the folder has none, or one that cannot be read.
    """
    try:
        tokenizer: PreTrainedTokenizerBase = AutoTokenizer.from_pretrained(
            folder, local_files_only=True, trust_remote_code=False
        )
    except Exception as error:  # transformers looks up what the files say without checking it
        raise ModelLoadError(
            f"{folder} has no tokenizer that can be read: {first_line(error)} Put the model's "
            "tokenizer.json and tokenizer_config.json beside its config.json."
        ) from error
    return tokenizer


def render_chat(
    tokenizer: PreTrainedTokenizerBase,
    messages: Sequence[Mapping[str, str]],
    *,
    add_generation_prompt: bool = True,
    continue_final_message: bool = False,
    variables: Mapping[str, Any] = MappingProxyType({}),
) -> str:
    """Return the prompt that the model's own template makes of the messages.

    The text holds the template's special tokens, so tokenize it with add_special_tokens=False.
    `variables` are further ones of the template, such as enable_thinking.

    Raises:
        InvalidRequest: the model has no template, or its template refuses these messages.
    """
    if reserved := _NO_VARIABLES & variables.keys():
        raise InvalidRequest(
            Violation(
                "chat.template_kwargs",
                f"sets {sorted(reserved)}, which the server sets itself. Leave them out.",
            )
        )
    if not tokenizer.chat_template:
        raise InvalidRequest(
            Violation(
                "chat",
                "this model has no chat template. Send text or token ids instead of messages.",
            )
        )
    try:
        text = tokenizer.apply_chat_template(
            [dict(message) for message in messages],
            tokenize=False,
            add_generation_prompt=add_generation_prompt,
            continue_final_message=continue_final_message,
            **variables,
        )
    except Exception as error:  # the template is the model's code: it may raise anything
        raise InvalidRequest(
            Violation("chat", f"the model's chat template refuses these messages: {error}")
        ) from error
    return str(text)


def save_gguf_tokenizer(file: GGUFFile, folder: Path) -> None:
    """Write the tokenizer that a GGUF file's metadata describes, with its chat template.

    Raises:
        ModelLoadError: it is of a kind that would not cut text as the model was trained.
    """
    kind = file.metadata["tokenizer.ggml.model"]
    cut = file.metadata.get("tokenizer.ggml.pre", "default")
    if kind not in ("llama", "gpt2") or (kind == "gpt2" and cut not in _READABLE_CUTS):
        raise ModelLoadError(
            f"{file.path} has a tokenizer of kind {kind!r}, {cut!r}; llama, and gpt2 with "
            f"{', '.join(sorted(_READABLE_CUTS))} can be read. Give the model as a Hugging Face "
            "folder."
        )
    try:
        # Not AutoTokenizer: on its way to the class it reads every token with a slow reader, 36
        # seconds for Gemma's; both end in the same tokenizer.
        tokenizer = PreTrainedTokenizerFast.from_pretrained(
            str(file.path.parent), gguf_file=file.path.name, local_files_only=True
        )
    except Exception as error:  # as above
        raise ModelLoadError(
            f"{file.path} has a tokenizer that cannot be read: {error}. Convert the model anew, or "
            "give it as a Hugging Face folder."
        ) from error
    if kind == "gpt2" and cut == "smollm":
        tokenizer.backend_tokenizer.pre_tokenizer = pre_tokenizers.Sequence(
            [
                pre_tokenizers.Digits(individual_digits=True),
                pre_tokenizers.ByteLevel(add_prefix_space=False),
            ]
        )
    tokenizer.save_pretrained(folder)
