"""The compiled pass: equal to the model's own modules, the same bits whatever else is in the step."""

import logging
from dataclasses import replace

import pytest
import torch
from transformers import MixtralConfig, PreTrainedModel

from headway.engine.batch import ForwardInput
from headway.engine.build import build_engine
from headway.engine.compiled import CompiledStep
from headway.engine.kv_cache import KVCache
from headway.engine.models.attention import ATTENTION
from headway.engine.request import SamplingParams
from headway.engine.runner import ModelRunner
from headway.kernels.cpu.library import Team
from tiny_engine import SMALL, Answer, ScriptedDrafter, prompt, request, run
from tiny_families import FAMILIES, SIZES, model

BLOCK = 4


def cache_of(under_test: PreTrainedModel) -> KVCache:
    cache = KVCache(under_test.config, 32, BLOCK, torch.float32, torch.device("cpu"))
    cache.data.fill_(torch.nan)
    return cache


def spans(cache: KVCache, *lengths: int) -> ForwardInput:
    """Fresh sequences of these lengths in one step; every row's logits are wanted."""
    starts = [0]
    tables: list[list[int]] = []
    for length in lengths:
        first = tables[-1][-1] + 1 if tables else 0
        tables.append(list(range(first, first - -length // BLOCK)))
        starts.append(starts[-1] + length)
    width = max(map(len, tables))
    rows = [
        (table, position) for table, n in zip(tables, lengths, strict=True) for position in range(n)
    ]
    return ForwardInput(
        token_ids=torch.tensor([3 + (7 * position) % 60 for _, position in rows]),
        positions=torch.tensor([position for _, position in rows]),
        slots=torch.tensor([t[p // BLOCK] * BLOCK + p % BLOCK for t, p in rows]),
        tree_masks=torch.zeros(len(rows), dtype=torch.int64),
        cu_lengths=torch.tensor(starts, dtype=torch.int32),
        context_lengths=torch.zeros(len(lengths), dtype=torch.int32),
        span_lengths=torch.tensor(lengths, dtype=torch.int32),
        block_tables=torch.tensor([t + [0] * (width - len(t)) for t in tables], dtype=torch.int32),
        logit_rows=torch.arange(len(rows)),
        needs_logits=True,
        cache=cache,
    )


@pytest.mark.parametrize("family", FAMILIES)
def test_every_family_computes_what_its_modules_compute(family: str, native_team: Team) -> None:
    under_test = model(FAMILIES[family](), ATTENTION)
    cache = cache_of(under_test)
    compiled = CompiledStep(under_test, cache, SMALL, native_team)
    for lengths in [(1,), (3,), (17, 1, 2), (40,)]:
        eager = ModelRunner(under_test).forward(spans(cache, *lengths))
        keys_and_values = cache.data.clone()
        cache.data.fill_(torch.nan)
        ours = compiled.forward(spans(cache, *lengths))
        torch.testing.assert_close(ours.hidden, eager.hidden, rtol=1e-4, atol=1e-4)
        torch.testing.assert_close(ours.logits, eager.logits, rtol=1e-4, atol=1e-4)
        torch.testing.assert_close(
            cache.data, keys_and_values, rtol=1e-4, atol=1e-4, equal_nan=True
        )
        best = ours.logits.max(-1)  # type: ignore[union-attr]
        assert torch.equal(ours.best_ids, best.indices)
        assert torch.equal(ours.best_values, best.values)


def test_a_row_has_the_same_bits_alone_and_among_others(native_team: Team) -> None:
    under_test = model(FAMILIES["qwen3"](), ATTENTION)
    cache = cache_of(under_test)
    compiled = CompiledStep(under_test, cache, SMALL, native_team)
    together = compiled.forward(spans(cache, 9, 30, 1)).hidden.clone()
    alone = compiled.forward(spans(cache, 9)).hidden
    assert torch.equal(alone, together[:9])
    assert torch.equal(compiled.forward(spans(cache, 1)).hidden, together[:1])


def test_logits_are_not_stored_unless_they_are_wanted(native_team: Team) -> None:
    under_test = model(FAMILIES["llama"](), ATTENTION)
    cache = cache_of(under_test)
    compiled = CompiledStep(under_test, cache, SMALL, native_team)
    full = compiled.forward(spans(cache, 5))
    best = full.best_ids.clone()
    short = compiled.forward(spans(cache, 5)._replace(needs_logits=False))
    assert short.logits is None
    assert torch.equal(short.best_ids, best)


def test_more_rows_than_memory_was_planned_for_are_refused(native_team: Team) -> None:
    under_test = model(FAMILIES["llama"](), ATTENTION)
    cache = cache_of(under_test)
    small = replace(SMALL, max_batch_tokens=66, max_running_requests=1)
    compiled = CompiledStep(under_test, cache, small, native_team)
    assert compiled.forward(spans(cache, 66)).hidden.shape == (66, 32)
    with pytest.raises(ValueError, match="T is 67"):
        compiled.forward(spans(cache, 67))


def answers(
    team: Team | None, drafter: ScriptedDrafter | None, **config: object
) -> dict[str, Answer]:
    under_test = model(FAMILIES["gemma3"](), ATTENTION)
    settings = replace(SMALL, **config)  # type: ignore[arg-type]
    engine = build_engine(under_test, (), settings, drafter, team=team)
    assert (engine.runner.compiled is not None) == (team is not None)
    requests = [
        request(
            str(length),
            prompt(length),
            24,
            sampling=SamplingParams(temperature=length % 2, seed=length),
            num_logprobs=2,
        )
        for length in (1, 6, 23, 40)
    ]
    return run(engine, requests)


@pytest.mark.parametrize("config", [{}, {"max_chunk_tokens": 5, "block_size": 1}], ids=str)
def test_drafts_chunks_and_batches_change_no_bit(config: dict[str, int], native_team: Team) -> None:
    plain = answers(native_team, None)
    script = {prompt(int(name)): answer.token_ids for name, answer in plain.items()}
    drafter = ScriptedDrafter(script, 0.7)
    drafted = answers(native_team, drafter, **config)
    assert drafted == plain or {
        name: (answer.token_ids, answer.logprobs) for name, answer in drafted.items()
    } == {name: (answer.token_ids, answer.logprobs) for name, answer in plain.items()}
    eager = answers(None, None)
    assert {n: a.token_ids for n, a in eager.items()} == {n: a.token_ids for n, a in plain.items()}


@pytest.mark.parametrize("adaptive_drafts", [False, True])
def test_warming_up_has_room_where_steps_are_small(
    adaptive_drafts: bool, native_team: Team
) -> None:
    config = {"max_batch_tokens": 2, "max_running_requests": 1, "adaptive_drafts": adaptive_drafts}
    few = answers(native_team, ScriptedDrafter(), **config)
    assert {n: a.token_ids for n, a in few.items()} == {
        n: a.token_ids for n, a in answers(native_team, None).items()
    }


def test_more_rows_than_there_is_room_for_are_refused(native_team: Team) -> None:
    under_test = model(FAMILIES["llama"](), ATTENTION)
    cache = cache_of(under_test)
    compiled = CompiledStep(under_test, cache, replace(SMALL, max_batch_tokens=70), native_team)
    compiled.forward(spans(cache, 70))
    with pytest.raises(ValueError, match="T is 71; the program has room for 70"):
        compiled.forward(spans(cache, 71))


def test_a_model_that_cannot_be_compiled_runs_eagerly_and_says_so_once(
    native_team: Team, caplog: pytest.LogCaptureFixture
) -> None:
    experts = MixtralConfig(**SIZES, num_local_experts=4)
    with caplog.at_level(logging.WARNING):
        engine = build_engine(model(experts, ATTENTION), (), SMALL, team=native_team)
    assert engine.runner.compiled is None
    assert [record.levelname for record in caplog.records] == ["WARNING"]
    assert "compile=off" in caplog.text
    assert len(run(engine, [request("r", prompt(9), 8)])["r"].token_ids) == 8


@pytest.mark.parametrize(
    ("dtype", "compiles"), [("bfloat16", True), ("float16", False)], ids=["bfloat16", "float16"]
)
@pytest.mark.parametrize("family", ["llama", "qwen3"])
def test_models_of_16_bits_are_served(
    family: str, dtype: str, compiles: bool, native_team: Team
) -> None:
    under_test = model(FAMILIES[family](), ATTENTION).to(getattr(torch, dtype))
    config = replace(SMALL, dtype=dtype)  # type: ignore[arg-type]  # a name from the table
    engine = build_engine(under_test, (), config, team=native_team)
    assert (engine.runner.compiled is not None) == compiles
    assert len(run(engine, [request("r", prompt(9), 8)])["r"].token_ids) == 8


def test_compile_off_runs_the_modules(native_team: Team) -> None:
    under_test = model(FAMILIES["llama"](), ATTENTION)
    engine = build_engine(under_test, (), replace(SMALL, compile="off"), team=native_team)
    assert engine.runner.compiled is None


def test_logits_that_are_far_from_the_modules_are_not_served(
    native_team: Team, caplog: pytest.LogCaptureFixture, monkeypatch: pytest.MonkeyPatch
) -> None:
    forward = CompiledStep.forward

    def wrong(self: CompiledStep, forward_input: ForwardInput) -> object:
        output = forward(self, forward_input)
        return output._replace(logits=None if output.logits is None else output.logits.flip(0))

    monkeypatch.setattr(CompiledStep, "forward", wrong)
    with caplog.at_level(logging.WARNING):
        engine = build_engine(model(FAMILIES["llama"](), ATTENTION), (), SMALL, team=native_team)
    assert engine.runner.compiled is None
    assert "compiled logits" in caplog.text
