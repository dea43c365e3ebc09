"""What a GGUF file's metadata and tensors mean in transformers' terms, one row per architecture.

Reads no weights: convert.py applies what is said here.
"""

from collections.abc import Mapping
from dataclasses import dataclass
from types import MappingProxyType
from typing import Any, TypeVar

import gguf
import numpy as np
import numpy.typing as npt
import torch
from transformers import AutoConfig, AutoModelForCausalLM, PreTrainedConfig

from headway.engine.errors import ModelLoadError
from headway.engine.models.gguf_file import GGUFFile, read_tensor


@dataclass(frozen=True, slots=True)
class Architecture:
    """How one of llama.cpp's architectures differs from transformers' class for it."""

    model_type: str
    model_class: str
    tensor_names: gguf.MODEL_ARCH
    """Whose names the file's tensors have."""
    permutes_query_key: bool = False
    """llama.cpp pairs rotary dimensions (2i, 2i+1); transformers pairs (i, i + head_dim / 2)."""
    norm_offset: float = 0.0
    """Gemma's norms multiply by 1 + weight; its GGUF files hold 1 + weight."""
    default_rope_theta: float = 10_000.0


ARCHITECTURES: Mapping[str, Architecture] = MappingProxyType(
    {
        "llama": Architecture(
            "llama", "LlamaForCausalLM", gguf.MODEL_ARCH.LLAMA, permutes_query_key=True
        ),
        "qwen2": Architecture("qwen2", "Qwen2ForCausalLM", gguf.MODEL_ARCH.QWEN2),
        "qwen3": Architecture("qwen3", "Qwen3ForCausalLM", gguf.MODEL_ARCH.QWEN3),
        "gemma3": Architecture(
            "gemma3_text",
            "Gemma3ForCausalLM",
            gguf.MODEL_ARCH.GEMMA3,
            norm_offset=1.0,
            default_rope_theta=1_000_000.0,
        ),
    }
)

# transformers' config field <- metadata key, after the architecture's name; every file has these
_FIELDS = MappingProxyType(
    {
        "hidden_size": "embedding_length",
        "intermediate_size": "feed_forward_length",
        "num_hidden_layers": "block_count",
        "num_attention_heads": "attention.head_count",
        "rms_norm_eps": "attention.layer_norm_rms_epsilon",
        "max_position_embeddings": "context_length",
    }
)

# transformers' rope_type -> {its field: metadata key}; all optional but the factor
_ROPE_SCALING: Mapping[str, Mapping[str, str]] = MappingProxyType(
    {
        "linear": {"factor": "rope.scaling.factor"},
        "yarn": {
            "factor": "rope.scaling.factor",
            "original_max_position_embeddings": "rope.scaling.original_context_length",
            "beta_fast": "rope.scaling.yarn_beta_fast",
            "beta_slow": "rope.scaling.yarn_beta_slow",
        },
    }
)

# Control tokens that end a turn or a text, by the families' own spelling.
_END_TOKENS = frozenset(
    ["<|im_end|>", "<|endoftext|>", "<|eot_id|>", "<|eom_id|>", "<|end_of_text|>", "<end_of_turn>"]
)

_GEMMA3_PATTERN = 6
_GEMMA3_LOCAL_ROPE_THETA = 10_000.0
_GEMMA3_27B_LAYERS = 62

# Of every released Llama 3.1 and 3.2.
_LLAMA3: Mapping[str, float] = MappingProxyType(
    {"low_freq_factor": 1.0, "high_freq_factor": 4.0, "original_max_position_embeddings": 8192}
)

# Tensors that a file may have and the model's class does not: they are read into the config.
_CONFIG_TENSORS = frozenset({"rope_freqs.weight"})


def architecture_of(file: GGUFFile) -> Architecture:
    """Return the row of the table for this file.

    Raises:
        ModelLoadError: the architecture is not in the table, or the file is one of several.
    """
    name = str(file.metadata.get("general.architecture"))
    if name not in ARCHITECTURES:
        raise ModelLoadError(
            f"{file.path} holds a model of architecture {name!r}; GGUF files of "
            f"{', '.join(ARCHITECTURES)} can be loaded. Give the model as a Hugging Face folder."
        )
    if file.metadata.get("split.count", 1) > 1:
        raise ModelLoadError(
            f"{file.path} is one of {file.metadata['split.count']} parts. Join them first "
            "(llama-gguf-split --merge)."
        )
    return ARCHITECTURES[name]


def build_config(file: GGUFFile) -> PreTrainedConfig:
    """Return transformers' config for the model in the file.

    Raises:
        ModelLoadError: a key is missing, or says something that the model's class cannot do.
    """
    architecture = architecture_of(file)
    keys = _Keys(file)
    values: dict[str, Any] = {field: keys.number(key) for field, key in _FIELDS.items()}
    if values["num_hidden_layers"] > len(file.tensors):
        # Before anything is made for each of what may be billions of layers.
        raise _bad_tensor(
            file, f"has {len(file.tensors)} tensors for {values['num_hidden_layers']:,} layers"
        )
    num_heads = values["num_attention_heads"]
    head_dim = keys.number("attention.key_length", values["hidden_size"] // num_heads)
    if keys.number("rope.dimension_count", head_dim) != head_dim:
        raise keys.unsupported("rope.dimension_count", f"{head_dim}, the size of a head")
    if keys.number("attention.value_length", head_dim) != head_dim:
        raise keys.unsupported("attention.value_length", f"{head_dim}, the size of a head")
    values["head_dim"] = head_dim
    values["num_key_value_heads"] = keys.number("attention.head_count_kv", num_heads)
    values["vocab_size"] = _embedding_rows(file)
    values["tie_word_embeddings"] = "output.weight" not in file.tensors
    values["rope_parameters"] = _rope(keys, architecture, head_dim)
    if architecture.model_type == "gemma3_text":
        values |= _gemma3(keys, values)
    if "blk.0.attn_q.bias" in file.tensors and architecture.model_type != "qwen2":
        values["attention_bias"] = True
    ids = {
        name: file.metadata.get(f"tokenizer.ggml.{name}_token_id") for name in ("bos", "padding")
    }
    try:
        return AutoConfig.for_model(
            architecture.model_type,
            architectures=[architecture.model_class],
            bos_token_id=ids["bos"],
            pad_token_id=ids["padding"],
            eos_token_id=list(end_token_ids(file)) or None,
            **values,
        )
    except Exception as error:  # transformers divides by what the metadata says
        raise _refused(file, error) from error


def end_token_ids(file: GGUFFile) -> tuple[int, ...]:
    """Return the ids that end an answer: those the metadata names, and end-of-turn tokens.

    A chat model's file often names one of them only: Gemma's says <eos>, while its turns end with
    <end_of_turn>.
    """
    keys = ("eos_token_id", "eot_token_id", "eom_token_id")
    named = [file.metadata.get(f"tokenizer.ggml.{key}") for key in keys]
    tokens = file.metadata.get("tokenizer.ggml.tokens", [])
    kinds = file.metadata.get("tokenizer.ggml.token_type", [])
    found = [
        index
        for index, (token, kind) in enumerate(zip(tokens, kinds, strict=False))
        if kind == gguf.TokenType.CONTROL and token in _END_TOKENS
    ]
    return tuple(dict.fromkeys(token_id for token_id in [*named, *found] if token_id is not None))


def match_tensors(file: GGUFFile, config: PreTrainedConfig) -> dict[str, str]:
    """Return {parameter of transformers' model: tensor of the file}, with every shape checked.

    Raises:
        ModelLoadError: the file lacks a tensor, has one of another shape, or has one that the
            model's class has no place for.
    """
    names = gguf.get_tensor_name_map(architecture_of(file).tensor_names, config.num_hidden_layers)
    try:
        with torch.device("meta"):
            model = AutoModelForCausalLM.from_config(config)  # type: ignore[no-untyped-call]  # transformers
    except Exception as error:  # as above
        raise _refused(file, error) from error
    expected = model.state_dict()
    if config.tie_word_embeddings:
        expected.pop("lm_head.weight", None)
    matched: dict[str, str] = {}
    for parameter, value in expected.items():
        name = names.get_name(parameter, try_suffixes=(".weight", ".bias"))
        tensor = file.tensors.get(name or "")
        if tensor is None:
            raise _bad_tensor(file, f"has no tensor {name} (for {parameter})")
        if tensor.shape != tuple(value.shape):
            raise _bad_tensor(
                file, f"has tensor {name} of shape {tensor.shape}, not {tuple(value.shape)}"
            )
        matched[parameter] = tensor.name
    if unknown := sorted(file.tensors.keys() - set(matched.values()) - _CONFIG_TENSORS):
        raise _bad_tensor(file, f"has tensors that the model has no place for: {unknown[:3]}")
    return matched


def read_parameter(
    file: GGUFFile, config: PreTrainedConfig, parameter: str, name: str
) -> torch.Tensor:
    """Return tensor `name` as transformers' `parameter` has it, exact."""
    architecture = architecture_of(file)
    value = read_tensor(file.tensors[name])
    if architecture.norm_offset and name.endswith("norm.weight"):
        return value.float() - architecture.norm_offset
    num_heads = _num_permuted_heads(architecture, config, parameter)
    return value if num_heads is None else _unpermute(value, num_heads)


def read_blocks(
    file: GGUFFile, config: PreTrainedConfig, parameter: str, name: str
) -> npt.NDArray[np.uint8]:
    """Return the rows of tensor `name` in the order of transformers' `parameter`, still in blocks."""
    rows = file.tensors[name].blocks
    num_heads = _num_permuted_heads(architecture_of(file), config, parameter)
    return rows if num_heads is None else _unpermute(rows, num_heads)


def _num_permuted_heads(
    architecture: Architecture, config: PreTrainedConfig, parameter: str
) -> int | None:
    """How many heads' rows are in llama.cpp's order; None if the parameter's are in transformers'."""
    if architecture.permutes_query_key and ".self_attn.q_proj." in parameter:
        return int(config.num_attention_heads)
    if architecture.permutes_query_key and ".self_attn.k_proj." in parameter:
        return int(config.num_key_value_heads)
    return None


Rows = TypeVar("Rows", torch.Tensor, npt.NDArray[np.uint8])


def _unpermute(value: Rows, num_heads: int) -> Rows:
    """Put the rows of each head back in transformers' order.

    With head_dim 6 the file's rows are 0 3 1 4 2 5 of transformers': pairs that rotate together lie
    together. value: [num_heads * head_dim, ...]
    """
    pairs = value.reshape(num_heads, value.shape[0] // num_heads // 2, 2, *value.shape[1:])
    return pairs.swapaxes(1, 2).reshape(value.shape)


class _Keys:
    """Reads the metadata of one architecture and says what is wrong with it."""

    def __init__(self, file: GGUFFile) -> None:
        self.file = file
        self.prefix = file.metadata["general.architecture"]

    def get(self, key: str) -> Any:
        return self.file.metadata.get(f"{self.prefix}.{key}")

    def number(self, key: str, default: float | None = None) -> Any:
        """Return a number; a list of equal numbers, one per layer, counts as one."""
        value = self.get(key)
        if isinstance(value, list) and len(set(value)) == 1:
            value = value[0]
        if value is None and default is not None:
            return default
        if isinstance(value, bool) or not isinstance(value, int | float) or value <= 0:
            raise self.unsupported(key, "one positive number")
        return value

    def unsupported(self, key: str, allowed: str) -> ModelLoadError:
        return ModelLoadError(
            f"{self.file.path}: {self.prefix}.{key} is {self.get(key)!r}; it must be {allowed}. "
            "Convert the model anew, or give it as a Hugging Face folder."
        )


def _embedding_rows(file: GGUFFile) -> int:
    embedding = file.tensors.get("token_embd.weight")
    if embedding is None:
        raise _bad_tensor(file, "has no tensor token_embd.weight")
    return embedding.shape[0]


def _rope(keys: _Keys, architecture: Architecture, head_dim: int) -> dict[str, Any]:
    base = {"rope_theta": float(keys.number("rope.freq_base", architecture.default_rope_theta))}
    freqs = keys.file.tensors.get("rope_freqs.weight")
    kind = keys.get("rope.scaling.type") or (
        "linear" if keys.get("rope.scaling.factor") else "none"
    )
    if freqs is not None:
        factors = read_tensor(freqs).float()
        if factors.shape != (head_dim // 2,):
            raise _bad_tensor(
                keys.file, f"has rope_freqs.weight of shape {freqs.shape}, not ({head_dim // 2},)"
            )
        return base | _rope_from_factors(base["rope_theta"], factors, keys)
    if kind == "none":
        return base | {"rope_type": "default"}
    if kind not in _ROPE_SCALING:
        raise keys.unsupported("rope.scaling.type", "none, linear or yarn")
    keys.number("rope.scaling.factor")
    fields = {field: keys.get(key) for field, key in _ROPE_SCALING[kind].items()}
    return base | {"rope_type": kind} | {f: v for f, v in fields.items() if v is not None}


def _rope_from_factors(theta: float, factors: torch.Tensor, keys: _Keys) -> dict[str, Any]:
    """Return rope parameters that divide the frequency of pair i by factors[i].

    The files of Llama 3.1 and 3.2 hold factors in place of the four numbers of its formula, whose
    last three are the same in every released model; with them transformers' rotary table is static.
    Factors of another origin go in as "longrope", which takes any and looks at the positions.
    factors: [head_dim / 2] float32
    """
    largest = float(factors.max())
    pairs = torch.arange(len(factors), dtype=torch.float32)
    turns = _LLAMA3["original_max_position_embeddings"] / (
        2 * torch.pi * theta ** (pairs / len(factors))
    )
    low, high = _LLAMA3["low_freq_factor"], _LLAMA3["high_freq_factor"]
    kept = ((turns - low) / (high - low)).clamp(0, 1)
    if torch.allclose(1 / ((1 - kept) / largest + kept), factors, rtol=1e-5):
        return {"rope_type": "llama3", "factor": largest, **_LLAMA3}
    return {
        "rope_type": "longrope",
        "factor": 1.0,
        "short_factor": factors.tolist(),
        "long_factor": factors.tolist(),
        "attention_factor": 1.0,
        "original_max_position_embeddings": keys.number("context_length"),
    }


def _gemma3(keys: _Keys, values: Mapping[str, Any]) -> dict[str, Any]:
    """Return what only Gemma 3 has: sliding layers with their own rope, and a query scale."""
    num_layers = values["num_hidden_layers"]
    pattern = keys.get("attention.sliding_window_pattern") or _GEMMA3_PATTERN
    if isinstance(pattern, int):
        pattern = [(layer + 1) % pattern != 0 for layer in range(num_layers)]
    if len(pattern) != num_layers:
        raise keys.unsupported("attention.sliding_window_pattern", f"{num_layers} values")
    local_theta = keys.number("rope.freq_base_swa", _GEMMA3_LOCAL_ROPE_THETA)
    # Only the 27B model, known by its depth, scales queries by something else than its head size.
    is_27b = num_layers == _GEMMA3_27B_LAYERS
    scale = values["hidden_size"] // values["num_attention_heads"] if is_27b else values["head_dim"]
    return {
        "sliding_window": keys.number("attention.sliding_window"),
        "layer_types": ["sliding_attention" if s else "full_attention" for s in pattern],
        "query_pre_attn_scalar": scale,
        "rope_parameters": {
            "full_attention": values["rope_parameters"],
            "sliding_attention": {"rope_type": "default", "rope_theta": float(local_theta)},
        },
    }


def _refused(file: GGUFFile, error: Exception) -> ModelLoadError:
    reason = " ".join(str(error).split()).rstrip(".")
    return ModelLoadError(
        f"{file.path}: transformers refuses the config in its metadata: {reason}. Convert the model "
        "anew, or give it as a Hugging Face folder."
    )


def _bad_tensor(file: GGUFFile, problem: str) -> ModelLoadError:
    return ModelLoadError(
        f"{file.path} {problem}. It is not a whole {file.metadata['general.architecture']} model: "
        "download or convert it again, or give the model as a Hugging Face folder."
    )
