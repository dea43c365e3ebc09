"""Every tested family, tiny and random, through the paged engine: equal to transformers' generate."""

from collections.abc import Callable

import pytest
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
)

from headway.engine.build import build_engine
from headway.engine.models.attention import ATTENTION
from headway.engine.request import SamplingParams
from tiny_engine import SMALL, ScriptedDrafter, prompt, request, run

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


@pytest.mark.parametrize("family", FAMILIES)
def test_greedy_equals_transformers_with_and_without_drafts(family: str) -> None:
    config = FAMILIES[family]()
    prompts = {str(length): prompt(length) for length in (1, 6, 23, 40)}
    expected: dict[str, list[int]] = {}
    for name, ids in prompts.items():
        tokens = torch.tensor([ids])
        whole = model(config, "eager").generate(  # type: ignore[operator]
            tokens,
            attention_mask=torch.ones_like(tokens),
            max_new_tokens=20,
            do_sample=False,
            eos_token_id=None,
        )
        expected[name] = whole[0, len(ids) :].tolist()
    drafter = ScriptedDrafter({ids: expected[name] for name, ids in prompts.items()}, 0.9)
    for each in (None, drafter):
        engine = build_engine(model(config, ATTENTION), (), SMALL, each)
        greedy = SamplingParams(temperature=0.0)
        requests = [request(name, ids, 20, sampling=greedy) for name, ids in prompts.items()]
        answers = run(engine, requests)
        assert {name: answer.token_ids for name, answer in answers.items()} == expected
    assert engine.counters.spec_accepted_tokens > 10
