"""Heads in the engine: the tokens stay the same, and heads that learnt the language save steps."""

from collections.abc import Callable, Sequence
from dataclasses import replace

import pytest
from transformers import LlamaForCausalLM

from headway.draft_heads.drafter import HydraDrafter
from headway.draft_heads.hydra import HydraHeads
from headway.draft_heads.tree_shape import EIGHT_NODES, TreeShape
from headway.engine.build import build_engine
from headway.engine.models.attention import ATTENTION
from headway.engine.request import Request, SamplingParams
from headway.kernels.cpu.library import Team
from tiny import EOS_ID
from tiny_engine import SMALL, prompt, request, run

MakeHeads = Callable[..., HydraHeads]


def requests(temperature: float) -> list[Request]:
    """Eight requests of odd lengths, each with its own seed."""
    return [
        request(
            f"r{i}", prompt(3 + 4 * i, i), 17 + i,
            sampling=SamplingParams(temperature=temperature, seed=i),
        )
        for i in range(8)
    ]  # fmt: skip


@pytest.mark.parametrize("temperature", [0.0, 0.7])
@pytest.mark.parametrize("shape", [TreeShape.chain(5), EIGHT_NODES])
def test_heads_never_change_a_token(
    model: LlamaForCausalLM, make_heads: MakeHeads, shape: TreeShape, temperature: float
) -> None:
    model.set_attn_implementation(ATTENTION)
    drafter, settings = HydraDrafter(make_heads(5, shape)), replace(SMALL, num_threads=1)
    plain = run(build_engine(model, (EOS_ID,), settings), requests(temperature), join_every=2)
    engine = build_engine(model, (EOS_ID,), settings, drafter)
    drafted = run(engine, requests(temperature), join_every=2)
    for name, answer in drafted.items():
        assert answer.token_ids == plain[name].token_ids
        assert answer.finish is not None
        assert answer.finish.speculation.num_drafted > 0
    assert not drafter._hidden  # every sequence was forgotten


@pytest.mark.parametrize("draft_ids", [None, range(2, 40)])
def test_native_heads_never_change_a_token(
    model: LlamaForCausalLM,
    make_heads: MakeHeads,
    native_team: Team,
    draft_ids: Sequence[int] | None,
) -> None:
    model.set_attn_implementation(ATTENTION)
    settings = replace(SMALL, num_threads=1)
    drafter = HydraDrafter(make_heads(5, EIGHT_NODES, draft_ids=draft_ids), native_team)
    plain = run(
        build_engine(model, (EOS_ID,), settings, team=native_team), requests(0.7), join_every=2
    )
    engine = build_engine(model, (EOS_ID,), settings, drafter, team=native_team)
    drafted = run(engine, requests(0.7), join_every=2)
    assert [a.token_ids for a in drafted.values()] == [a.token_ids for a in plain.values()]
    assert engine.counters.spec_drafted_tokens > 100
