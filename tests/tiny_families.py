"""Every tested family as a tiny model with random weights."""

from collections.abc import Callable

import torch
from transformers import (
    AutoModelForCausalLM,
    Gemma2Config,
    Gemma3TextConfig,
    LlamaConfig,
    MistralConfig,
    PretrainedConfig,
    PreTrainedModel,
    Qwen2Config,
    Qwen3Config,
    Starcoder2Config,
)

SIZES = {
    "vocab_size": 64,
    "hidden_size": 32,
    "intermediate_size": 48,
    "num_hidden_layers": 4,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "max_position_embeddings": 256,
    "initializer_range": 0.3,
    "pad_token_id": 0,
    "bos_token_id": 1,
    "eos_token_id": 2,
}
SLIDING = ["sliding_attention", "sliding_attention", "sliding_attention", "full_attention"]

FAMILIES: dict[str, Callable[[], PretrainedConfig]] = {
    "llama": lambda: LlamaConfig(**SIZES, tie_word_embeddings=True),
    "llama_head_dim": lambda: LlamaConfig(**SIZES, head_dim=12),
    "llama3_rope": lambda: LlamaConfig(
        **SIZES,
        rope_parameters={
            "rope_type": "llama3",
            "rope_theta": 10_000.0,
            "factor": 4.0,
            "low_freq_factor": 1.0,
            "high_freq_factor": 4.0,
            "original_max_position_embeddings": 64,
        },
    ),
    "mistral_sliding": lambda: MistralConfig(**SIZES, sliding_window=7),
    "qwen2": lambda: Qwen2Config(**SIZES),
    "qwen2_sliding": lambda: Qwen2Config(
        **SIZES, use_sliding_window=True, sliding_window=9, layer_types=SLIDING
    ),
    "qwen3": lambda: Qwen3Config(**SIZES, head_dim=16),
    "starcoder2_layer_norm": lambda: Starcoder2Config(**SIZES, sliding_window=None),
    "gemma2_softcaps": lambda: Gemma2Config(
        **SIZES,
        head_dim=8,
        query_pre_attn_scalar=16,
        sliding_window=6,
        layer_types=SLIDING,
        attn_logit_softcapping=5.0,
        final_logit_softcapping=3.0,
    ),
    "gemma3": lambda: Gemma3TextConfig(
        **SIZES, head_dim=16, query_pre_attn_scalar=16, sliding_window=8, layer_types=SLIDING
    ),
}


def model(config: PretrainedConfig, attention: str) -> PreTrainedModel:
    with torch.random.fork_rng():
        torch.manual_seed(3)
        made: PreTrainedModel = AutoModelForCausalLM.from_config(
            config, attn_implementation=attention
        )
    return made.eval().requires_grad_(False)
