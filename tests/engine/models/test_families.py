"""Every tested family, tiny and random, through the paged engine: equal to transformers' generate."""

import pytest
import torch

from headway.engine.build import build_engine
from headway.engine.models.attention import ATTENTION
from headway.engine.request import SamplingParams
from tiny_engine import SMALL, ScriptedDrafter, prompt, request, run
from tiny_families import FAMILIES, model


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
