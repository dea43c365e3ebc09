"""A tiny model, seeded, that every room's tests can build in milliseconds."""

import torch
from transformers import LlamaConfig, LlamaForCausalLM

VOCAB_SIZE = 64
EOS_ID = 2


def tiny_config(**changes: object) -> LlamaConfig:
    """A two-layer Llama with grouped queries: hidden 32, 4 heads, 2 key-value heads, 64 tokens."""
    values: dict[str, object] = {
        "vocab_size": VOCAB_SIZE,
        "hidden_size": 32,
        "intermediate_size": 64,
        "num_hidden_layers": 2,
        "num_attention_heads": 4,
        "num_key_value_heads": 2,
        "max_position_embeddings": 512,
        "bos_token_id": 1,
        "eos_token_id": EOS_ID,
        "pad_token_id": 0,
        "tie_word_embeddings": False,
        "initializer_range": 0.3,
    }
    return LlamaConfig(**{**values, **changes})


def tiny_model(seed: int = 0, **changes: object) -> LlamaForCausalLM:
    """The tiny model in float32 with random weights; the same seed gives the same weights."""
    with torch.random.fork_rng():
        torch.manual_seed(seed)
        model = LlamaForCausalLM(tiny_config(**changes))
    return model.eval().requires_grad_(False)
