"""The default model itself: drafts change no token, and greedy text is transformers' own."""

from collections.abc import Sequence as Seq
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
from headway.engine.logits import Context, process
from headway.engine.models.attention import ATTENTION
from headway.engine.models.load import LoadedModel, load_model
from headway.engine.models.tokenizer import load_tokenizer, render_chat
from headway.engine.noise import gumbel
from headway.engine.request import Request, SamplingParams, StoppingParams
from headway.engine.sequence import Sequence
from headway.engine.stats import EngineCounters
from headway.engine.suffix import SuffixDrafter
from headway.engine.tree import Drafter
from headway.server.engine_bench import read_prompts
from tiny_engine import Answer, run

pytestmark = [pytest.mark.real_model, pytest.mark.timeout(400)]

CONFIG = EngineConfig(kv_cache_bytes=256 << 20, max_draft_tokens=4)
ROUNDING = 2e-3
"""Two scores this close may change places between one matrix product and another."""

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
    # Expanded: module by module, packed weights take minutes.
    return load_model("smollm2-135m", attention=ATTENTION, keep_packed=False)


@pytest.fixture(scope="module")
def requests(loaded: LoadedModel) -> list[Request]:
    """A prompt or two for each law, as chats of different lengths."""
    tokenizer = load_tokenizer(loaded.path)
    made = []
    for index, prompt in enumerate(read_prompts(None)[:8]):
        name, law = list(LAWS.items())[index % len(LAWS)]
        text = render_chat(tokenizer, [{"role": "user", "content": prompt.prompt}])
        ids = tuple(tokenizer(text, add_special_tokens=False).input_ids)
        made.append(Request(f"{name}-{index}", ids, StoppingParams(16), law))
    return made


Plain = dict[str, Answer]


@pytest.fixture(scope="module")
def plain(loaded: LoadedModel, requests: list[Request]) -> Plain:
    """Every request alone and without drafts."""
    return serve(loaded, requests, None, batch=1)[0]


def wrong_heads(loaded: LoadedModel) -> HydraDrafter:
    """Heads with random weights: what they draft is never what the model says."""
    hidden_size: int = loaded.config.hidden_size
    config = HydraConfig(hidden_size, loaded.vocab_size, 4, TreeShape.chain(4))
    heads = HydraHeads(config, TargetEnds.of(loaded.model)).requires_grad_(False)
    generator = torch.Generator().manual_seed(1)
    for parameter in heads.parameters():
        parameter.normal_(0, 0.3, generator=generator)
    return HydraDrafter(heads)


def serve(
    loaded: LoadedModel, requests: Seq[Request], drafter: Drafter | None, batch: int
) -> tuple[dict[str, Answer], EngineCounters]:
    config = replace(CONFIG, max_running_requests=batch)
    engine = build_engine(loaded.model, loaded.eos_token_ids, config, drafter)
    return run(engine, requests, join_every=2), engine.counters


def assert_same_but_for_rounding(
    loaded: LoadedModel, request: Request, ours: Seq[int], theirs: Seq[int]
) -> None:
    """Teacher forcing: where two answers part, the model must find both tokens equally good."""
    parted = [at for at, (a, b) in enumerate(zip(ours, theirs, strict=False)) if a != b]
    if not parted:
        assert len(ours) == len(theirs)
        return
    at = parted[0]
    sequence = Sequence(request, arrived=0.0)
    sequence.extend(ours[:at], ())
    with torch.inference_mode():
        whole: Any = AutoModelForCausalLM.from_config(loaded.config, attn_implementation="sdpa")
        whole.load_state_dict(loaded.model.state_dict())
        logits = whole.eval()(torch.tensor([sequence.tokens])).logits[0, -1]
    context = Context(sequence)
    law = process(logits, context, loaded.eos_token_ids)
    scores = torch.full((loaded.vocab_size,), -torch.inf)
    scores[slice(None) if law.token_ids is None else law.token_ids] = law.log_weights
    if request.sampling.temperature:
        seed, size = request.sampling.seed, loaded.vocab_size
        scores += gumbel([seed], [context.position], size, scores.device)[0]
    best = scores.max().item()
    for token in (ours[at], theirs[at]):
        assert scores[token].item() == pytest.approx(best, abs=ROUNDING), request.request_id


@pytest.mark.parametrize("batch", [1, 8])
@pytest.mark.parametrize("drafts", ["suffix", "wrong_heads"])
def test_drafts_change_no_token(
    loaded: LoadedModel, requests: list[Request], plain: Plain, drafts: str, batch: int
) -> None:
    drafter = SuffixDrafter() if drafts == "suffix" else wrong_heads(loaded)
    chosen = requests if batch == 8 else requests[::3]
    answers, counters = serve(loaded, chosen, drafter, batch)
    assert counters.spec_drafted_tokens > 20
    if drafts == "wrong_heads":
        assert counters.spec_accepted_tokens <= counters.spec_drafted_tokens / 50
    else:
        assert counters.spec_accepted_tokens > 0
    for request in chosen:
        name = request.request_id
        assert_same_but_for_rounding(
            loaded, request, plain[name].token_ids, answers[name].token_ids
        )


def test_greedy_text_is_transformers_own(
    loaded: LoadedModel, requests: list[Request], plain: Plain
) -> None:
    whole: Any = AutoModelForCausalLM.from_pretrained(
        loaded.path, dtype=torch.float32, attn_implementation="sdpa"
    )
    for request in requests:
        if request.sampling != LAWS["greedy"]:
            continue
        ids = torch.tensor([request.prompt_ids])
        whole_answer = whole.generate(
            ids, attention_mask=torch.ones_like(ids), max_new_tokens=16, do_sample=False
        )[0, ids.shape[1] :].tolist()
        ours = plain[request.request_id].token_ids
        assert_same_but_for_rounding(loaded, request, ours, whole_answer)
