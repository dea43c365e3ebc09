"""The default model as it is served: drafts change no bit, and greedy text is transformers' own."""

from collections.abc import Sequence as Seq
from copy import deepcopy
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from transformers import AutoModelForCausalLM

from headway.draft_heads.config import HydraConfig
from headway.draft_heads.drafter import HydraDrafter
from headway.draft_heads.hydra import HydraHeads, TargetEnds
from headway.draft_heads.tree_shape import TreeShape
from headway.engine.build import build_engine
from headway.engine.config import EngineConfig
from headway.engine.models.attention import ATTENTION
from headway.engine.models.load import LoadedModel, load_model
from headway.engine.models.tokenizer import load_tokenizer, render_chat
from headway.engine.request import Request, SamplingParams, StoppingParams
from headway.engine.stats import EngineCounters
from headway.engine.suffix import SuffixDrafter
from headway.engine.tree import Drafter
from headway.kernels.cpu.library import Team
from headway.server.engine_bench import read_prompts
from tiny_engine import Answer, run

pytestmark = pytest.mark.real_model

CONFIG = EngineConfig(kv_cache_bytes=256 << 20, max_draft_tokens=4, adaptive_drafts=False)
ROUNDING = 2e-3
"""Two scores this close may change places between one library's products and another's."""

LAWS = {
    "greedy": SamplingParams(temperature=0.0),
    "t0.7": SamplingParams(temperature=0.7, seed=1),
    "t1": SamplingParams(temperature=1.0, seed=2),
    "penalties": SamplingParams(temperature=0.7, seed=3, repetition_penalty=1.2, top_p=0.9),
    "bias_min_p": SamplingParams(temperature=1.0, seed=4, min_p=0.05, logit_bias={28: 2.0}),
    "greedy_frequency": SamplingParams(temperature=0.0, frequency_penalty=0.8),
}


@pytest.fixture(scope="module")
def loaded(smollm2: Path) -> LoadedModel:
    return load_model("smollm2-135m", attention=ATTENTION)


@pytest.fixture(scope="module")
def requests(loaded: LoadedModel) -> list[Request]:
    """A prompt or two for each law, as chats of different lengths."""
    tokenizer = load_tokenizer(loaded.path)
    made = []
    for index, prompt in enumerate(read_prompts(None)[:8]):
        name, law = list(LAWS.items())[index % len(LAWS)]
        text = render_chat(tokenizer, [{"role": "user", "content": prompt.prompt}])
        ids = tuple(tokenizer(text, add_special_tokens=False).input_ids)
        made.append(Request(f"{name}-{index}", ids, StoppingParams(32), law, num_logprobs=2))
    return made


Answers = dict[str, Answer]


def serve(
    loaded: LoadedModel,
    requests: Seq[Request],
    team: Team,
    drafter: Drafter | None = None,
    batch: int = 1,
) -> tuple[Answers, EngineCounters]:
    config = replace(CONFIG, max_running_requests=batch)
    engine = build_engine(loaded.model, loaded.eos_token_ids, config, drafter, team=team)
    assert engine.runner.compiled is not None
    return run(engine, requests, join_every=2), engine.counters


@pytest.fixture(scope="module")
def plain(loaded: LoadedModel, requests: list[Request], native_team: Team) -> Answers:
    """Every request alone and without drafts."""
    return serve(loaded, requests, native_team)[0]


def wrong_heads(loaded: LoadedModel) -> HydraDrafter:
    """Heads with random weights: what they draft is never what the model says."""
    hidden_size: int = loaded.config.hidden_size
    config = HydraConfig(hidden_size, loaded.vocab_size, 4, TreeShape.chain(4))
    heads = HydraHeads(config, TargetEnds.of(loaded.model)).requires_grad_(False)
    generator = torch.Generator().manual_seed(1)
    for parameter in heads.parameters():
        parameter.normal_(0, 0.3, generator=generator)
    return HydraDrafter(heads)


@pytest.mark.parametrize("batch", [1, 8])
@pytest.mark.parametrize("drafts", ["off", "suffix", "wrong_heads"])
def test_drafts_and_batches_change_no_bit(
    loaded: LoadedModel,
    requests: list[Request],
    plain: Answers,
    native_team: Team,
    drafts: str,
    batch: int,
) -> None:
    makers = {
        "off": lambda: None,
        "suffix": SuffixDrafter,
        "wrong_heads": lambda: wrong_heads(loaded),
    }
    answers, counters = serve(loaded, requests, native_team, makers[drafts](), batch)
    for name, answer in answers.items():
        assert answer.token_ids == plain[name].token_ids
        assert answer.logprobs == plain[name].logprobs
    if drafts == "suffix":
        assert counters.spec_accepted_tokens > 20
    if drafts == "wrong_heads":
        assert counters.spec_drafted_tokens > 500
        assert counters.spec_accepted_tokens <= counters.spec_drafted_tokens / 50


def test_greedy_text_of_whole_weights_is_transformers_own(
    smollm2: Path, requests: list[Request], native_team: Team
) -> None:
    expanded = load_model("smollm2-135m", attention=ATTENTION, keep_packed=False)
    config = deepcopy(expanded.config)  # from_config notes the attention in it
    whole: Any = AutoModelForCausalLM.from_config(config, attn_implementation="sdpa")
    whole.load_state_dict(expanded.model.state_dict())
    whole.train(False)
    greedy = [each for each in requests if each.sampling == LAWS["greedy"]]
    answers, _ = serve(expanded, greedy, native_team)
    assert greedy
    for request in greedy:
        ours = answers[request.request_id].token_ids
        ids = torch.tensor([[*request.prompt_ids, *ours]])
        with torch.inference_mode():
            logits = whole(ids).logits[0, len(request.prompt_ids) - 1 : -1]
        chosen = logits.gather(1, torch.tensor(ours)[:, None])[:, 0]
        assert (logits.amax(-1) - chosen).max() < ROUNDING
