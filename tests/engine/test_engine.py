"""Engine on the tiny model: what drafts, batches, chunks and preemption may never change."""

import time
from dataclasses import replace

import pytest
import torch
from scipy.stats import chisquare

from headway.engine.batch import Batch, Scheduled, build_input
from headway.engine.config import EngineConfig
from headway.engine.draft_budget import DraftBudget
from headway.engine.engine import Engine
from headway.engine.request import (
    FinishReason,
    Request,
    SamplingParams,
    SpeculationParams,
    StoppingParams,
)
from headway.engine.sampler import Accepted
from headway.engine.sequence import Sequence
from headway.engine.suffix import SuffixDrafter
from headway.engine.tree import Drafter, DraftTree
from tiny import tiny_model
from tiny_engine import (
    SMALL,
    Answer,
    FixedTimes,
    ScriptedDrafter,
    prompt,
    request,
    run,
    tiny_engine,
)

LAWS = {
    "greedy": SamplingParams(temperature=0.0),
    "t0.7": SamplingParams(temperature=0.7, seed=11),
    "t1": SamplingParams(temperature=1.0, seed=2**63 + 5),
    "penalties": SamplingParams(
        temperature=0.7,
        seed=3,
        repetition_penalty=1.3,
        presence_penalty=0.5,
        frequency_penalty=0.7,
    ),
    "greedy_penalties": SamplingParams(temperature=0.0, frequency_penalty=1.5),
    "bias": SamplingParams(temperature=1.0, seed=4, logit_bias={7: 4.0, 9: -100.0}),
    "min_p": SamplingParams(temperature=1.0, seed=5, min_p=0.05),
    "filters": SamplingParams(temperature=1.0, seed=6, top_k=9, top_p=0.8, typical_p=0.9),
    "words": SamplingParams(temperature=1.0, seed=7, bad_words=((5,), (8, 9)), top_p=0.95),
}
LENGTHS = (1, 3, 17, 50, 33, 16, 7, 64, 20)
TIGHT = replace(SMALL, kv_cache_bytes=32 << 10, max_chunk_tokens=7, max_batch_tokens=37)


def mixed_requests() -> list[Request]:
    """One request for each law, prompts of odd lengths."""
    return [
        request(name, prompt(length), sampling=law, num_logprobs=2 if index % 3 == 0 else None)
        for index, ((name, law), length) in enumerate(zip(LAWS.items(), LENGTHS, strict=True))
    ]


@pytest.fixture(scope="module")
def plain() -> dict[str, Answer]:
    """Every request alone, without a drafter: the truth."""
    answers: dict[str, Answer] = {}
    for each in mixed_requests():
        answers |= run(tiny_engine(), [each])
    return answers


def scripted(plain: dict[str, Answer], hits: float) -> ScriptedDrafter:
    return ScriptedDrafter(
        {each.prompt_ids: plain[each.request_id].token_ids for each in mixed_requests()}, hits
    )


def assert_same(answers: dict[str, Answer], expected: dict[str, Answer]) -> None:
    for name, answer in answers.items():
        assert answer.token_ids == expected[name].token_ids, name
        assert answer.finish is not None
        assert answer.finish.reason == expected[name].finish.reason  # type: ignore[union-attr]
        for ours, theirs in zip(answer.logprobs, expected[name].logprobs, strict=True):
            assert (ours.token_id, ours.rank) == (theirs.token_id, theirs.rank)
            assert ours.logprob == pytest.approx(theirs.logprob, abs=1e-4)


def test_greedy_equals_transformers(plain: dict[str, Answer]) -> None:
    ids = torch.tensor([prompt(LENGTHS[0])])
    expected = tiny_model().generate(
        ids,
        attention_mask=torch.ones_like(ids),
        max_new_tokens=24,
        do_sample=False,
        eos_token_id=None,
        pad_token_id=0,
    )
    assert plain["greedy"].token_ids == expected[0, ids.shape[1] :].tolist()


@pytest.mark.parametrize("hits", [None, 0.0, 0.9], ids=["off", "wrong", "right"])
@pytest.mark.parametrize("config", [SMALL, TIGHT], ids=["roomy", "tight"])
@pytest.mark.parametrize("join_every", [0, 3], ids=["together", "joining"])
def test_output_depends_on_the_request_alone(
    plain: dict[str, Answer], hits: float | None, config: EngineConfig, join_every: int
) -> None:
    drafter = None if hits is None else scripted(plain, hits)
    engine = tiny_engine(drafter, config)
    assert_same(run(engine, mixed_requests(), join_every), plain)
    counters = engine.counters
    if config is TIGHT:
        assert counters.preemptions > 0
    assert (counters.recomputed_tokens > 0) == (counters.preemptions > 0)
    num_prompt_tokens = sum(len(each.prompt_ids) for each in mixed_requests())
    assert counters.prompt_computed_tokens + counters.prompt_cached_tokens == num_prompt_tokens
    if drafter is not None:
        assert engine.counters.spec_drafted_tokens > 0
        assert not drafter.known, "state of ended sequences is kept"
    if hits == 0.9:
        assert engine.counters.spec_accepted_tokens > 40


@pytest.mark.parametrize("hits", [0.0, 0.9], ids=["wrong", "right"])
@pytest.mark.parametrize("config", [SMALL, TIGHT], ids=["roomy", "tight"])
def test_a_budget_for_drafts_changes_nothing_but_speed(
    plain: dict[str, Answer], hits: float, config: EngineConfig
) -> None:
    """Rows cost so much that some drafts are left out, and wrong ones are soon not asked for."""
    budget = DraftBudget(FixedTimes({1: 1.0, 64: 6.0}))
    engine = tiny_engine(scripted(plain, hits), config, budget=budget)
    assert_same(run(engine, mixed_requests(), join_every=2), plain)
    counters = engine.counters
    unlimited = tiny_engine(scripted(plain, hits), config)
    assert_same(run(unlimited, mixed_requests(), join_every=2), plain)
    assert 0 < counters.spec_drafted_tokens < unlimited.counters.spec_drafted_tokens
    if hits == 0.0:
        assert counters.spec_disabled["cost"] > 0
    else:
        assert counters.spec_accepted_tokens > 20


def test_step_times_are_measured_and_kept_up_to_date() -> None:
    engine = tiny_engine(SuffixDrafter(), replace(SMALL, adaptive_drafts=True))
    before = dict(engine.snapshot().step_seconds)
    assert before[1] > 0
    assert list(before.values()) == sorted(before.values())
    assert engine.pool.num_active == 0
    run(engine, [request("x", prompt(5))])
    assert dict(engine.snapshot().step_seconds) != before
    assert tiny_engine(SuffixDrafter()).snapshot().step_seconds == ()


def test_step_times_need_no_more_cache_than_there_is() -> None:
    config = replace(SMALL, adaptive_drafts=True, kv_cache_bytes=4 << 10)
    engine = tiny_engine(SuffixDrafter(), config)
    assert engine.limits.max_cache_tokens < 64
    assert engine.snapshot().step_seconds[0][1] > 0


def test_the_suffix_drafter_changes_nothing_but_speed(plain: dict[str, Answer]) -> None:
    engine = tiny_engine(SuffixDrafter())
    assert_same(run(engine, mixed_requests()), plain)
    assert engine.counters.spec_accepted_tokens > 0


@pytest.mark.parametrize("limit", [0, 1, 3])
def test_speculation_can_be_limited_for_a_request(plain: dict[str, Answer], limit: int) -> None:
    engine = tiny_engine(scripted(plain, 0.9))
    requests = [
        replace(each, speculation=SpeculationParams(max_draft_tokens=limit))
        for each in mixed_requests()
    ]
    answers = run(engine, requests)
    assert_same(answers, plain)
    for answer in answers.values():
        assert answer.finish is not None
        stats = answer.finish.speculation
        assert stats.num_drafted <= limit * stats.num_steps
        assert (stats.num_drafted > 0) == (limit > 0)


def test_speculation_can_be_off_for_one_request(plain: dict[str, Answer]) -> None:
    first, second, *_ = mixed_requests()
    engine = tiny_engine(scripted(plain, 0.9))
    off = replace(first, speculation=SpeculationParams(enabled=False))
    answers = run(engine, [off, second])
    assert answers["greedy"].finish.speculation.num_drafted == 0  # type: ignore[union-attr]
    assert answers["t0.7"].finish.speculation.num_drafted > 0  # type: ignore[union-attr]


def test_statistics_add_up(plain: dict[str, Answer]) -> None:
    engine = tiny_engine(scripted(plain, 0.9))
    answers = run(engine, mixed_requests())
    for answer in answers.values():
        assert answer.finish is not None
        stats = answer.finish.speculation
        assert stats.num_emitted == len(answer.token_ids) == 24
        assert stats.num_emitted == stats.num_accepted + stats.num_steps
        assert sum(stats.accepted_per_position) == stats.num_accepted <= stats.num_drafted
        assert list(stats.accepted_per_position) == sorted(stats.accepted_per_position)[::-1]
        assert stats.tau == 24 / stats.num_steps
    counters = engine.counters
    assert counters.generated_tokens == 24 * len(answers)
    assert sum(counters.spec_accepted_lengths) == counters.spec_steps > 0
    assert counters.spec_accepted_tokens == sum(counters.spec_accepted_per_position)
    assert counters.spec_emitted_tokens == counters.spec_accepted_tokens + counters.spec_steps


@pytest.mark.parametrize("drafts", [0.0, 0.9], ids=["wrong", "right"])
def test_sampled_tokens_follow_the_law(drafts: float) -> None:
    """Chi-square of the second token over 3,000 seeds against the model's own softmax."""
    sampling = SamplingParams(temperature=1.0, top_k=8)
    prompt_ids = (3, 4, 5)
    drafter = ScriptedDrafter({prompt_ids: (7, 7)}, drafts)
    engine = tiny_engine(
        drafter, EngineConfig(kv_cache_bytes=1 << 22, num_threads=1, max_draft_tokens=3)
    )
    requests = [
        request(str(seed), prompt_ids, 2, sampling=replace(sampling, seed=seed))
        for seed in range(3_000)
    ]
    answers = run(engine, requests)
    firsts = [answer.token_ids[0] for answer in answers.values()]
    common = max(set(firsts), key=firsts.count)
    seconds = [a.token_ids[1] for a in answers.values() if a.token_ids[0] == common]
    with torch.inference_mode():
        logits = tiny_model()(torch.tensor([[*prompt_ids, common]])).logits[0, -1]
    top = logits.topk(8)
    expected = torch.softmax(top.values.double(), -1).numpy() * len(seconds)
    observed = [seconds.count(token) for token in top.indices.tolist()]
    assert sum(observed) == len(seconds)
    assert chisquare(observed, expected).pvalue > 1e-3


def _prepared(engine: Engine, tokens: tuple[int, ...], num_computed: int) -> Sequence:
    """A sequence whose first tokens are in the cache."""
    sequence = Sequence(request("x", tokens), arrived=0.0)
    engine.pool.grow(sequence, len(tokens) + 16)
    if num_computed:
        part = Scheduled(sequence, num_computed, 0)
        engine.runner.forward(build_input(Batch((), (part,)), [], engine.cache))
        sequence.num_computed = num_computed
    return sequence


TREE = DraftTree((0, 11, 12, 13, 14, 15, 16), (-1, 0, 0, 1, 1, 3, 4))


@pytest.mark.parametrize("num_computed", [0, 5, 18])
@pytest.mark.parametrize("window", [None, 4])
def test_a_tree_equals_each_of_its_paths_alone(num_computed: int, window: int | None) -> None:
    tokens = prompt(19)
    tree = replace(TREE, token_ids=(tokens[-1], *TREE.token_ids[1:]))
    engine = tiny_engine()
    for layer in engine.runner.model.model.layers:
        layer.self_attn.sliding_window = window
    sequence = _prepared(engine, tokens, num_computed)
    batch = Batch((Scheduled(sequence, sequence.num_pending, tree.num_drafted),), ())
    logits = engine.runner.forward(build_input(batch, [tree], engine.cache)).logits
    for node in range(len(tree.token_ids)):
        path = (*tokens, *tree.branch(node))
        alone = _prepared(engine, path, 0)
        part = Scheduled(alone, len(path), 0)
        chain = DraftTree.root_only(path[-1])
        expected = engine.runner.forward(
            build_input(Batch((part,), ()), [chain], engine.cache)
        ).logits
        torch.testing.assert_close(logits[node], expected[0], atol=1e-4, rtol=1e-4)
        engine.pool.release(alone)


def test_compaction_equals_recomputing() -> None:
    tokens = prompt(19)
    tree = replace(TREE, token_ids=(tokens[-1], *TREE.token_ids[1:]))
    engine = tiny_engine()
    sequence = _prepared(engine, tokens, 18)
    batch = Batch((Scheduled(sequence, 1, tree.num_drafted),), ())
    engine.runner.forward(build_input(batch, [tree], engine.cache))
    path = (0, 1, 4, 6)
    engine.cache.move(engine._moves(batch, [Accepted(path, (11, 14, 16, 1))]))
    again = _prepared(engine, (*tokens, 11, 14, 16), 22)
    for layer in range(2):
        for ours, theirs in zip(engine.cache.data[layer], engine.cache.data[layer], strict=True):
            slots = [
                [run.block_table[i // 4] * 4 + i % 4 for i in range(22)]
                for run in (sequence, again)
            ]
            torch.testing.assert_close(ours[slots[0]], theirs[slots[1]], atol=1e-5, rtol=1e-5)


@pytest.mark.parametrize(("dtype", "tolerance"), [("bfloat16", 0.02), ("int8", 0.05)])
def test_a_small_cache_changes_logprobs_little(dtype: str, tolerance: float) -> None:
    ids = prompt(40)
    exact, rounded = (
        run(tiny_engine(None, config), [request("x", ids, 0, num_prompt_logprobs=0)])["x"]
        for config in (SMALL, replace(SMALL, kv_cache_dtype=dtype))  # type: ignore[arg-type]
    )
    pairs = zip(exact.prompt_logprobs, rounded.prompt_logprobs, strict=True)
    errors = [abs(one.logprob - other.logprob) for one, other in pairs]
    assert 0 < sum(errors) / len(errors) < tolerance


@pytest.mark.parametrize("dtype", ["bfloat16", "int8"])
def test_drafts_change_nothing_with_a_small_cache(dtype: str) -> None:
    """Moving an accepted path moves its scales; a prompt is computed whole, in chunks, after a hit."""
    config = replace(SMALL, kv_cache_dtype=dtype)  # type: ignore[arg-type]
    alone: dict[str, Answer] = {}
    for each in mixed_requests():
        alone |= run(tiny_engine(None, config), [each])
    drafter = scripted(alone, 0.9)
    engine = tiny_engine(drafter, replace(config, max_chunk_tokens=7))
    assert_same(run(engine, mixed_requests(), join_every=3), alone)
    assert engine.counters.spec_accepted_tokens > 40
    assert engine.snapshot().info.cache_dtype == dtype


@pytest.mark.parametrize("law", ["greedy", "t1"])
def test_a_prefix_hit_equals_a_miss(law: str) -> None:
    engine = tiny_engine()
    shared, tail = prompt(40), prompt(9, seed=1)
    run(engine, [request("first", shared)])
    hit = request("hit", shared + tail, sampling=LAWS[law])
    miss = replace(hit, request_id="miss", use_prefix_cache=False)
    answers = run(engine, [hit]) | run(engine, [miss])
    assert answers["hit"].num_cached_tokens == 40
    assert answers["miss"].num_cached_tokens == 0
    assert answers["hit"].token_ids == answers["miss"].token_ids
    assert engine.counters.prefix_hit_tokens == 40


def test_a_salt_keeps_tenants_apart() -> None:
    engine = tiny_engine()
    shared = prompt(40)
    run(engine, [request("a", shared, cache_salt="one")])
    answers = run(engine, [request("b", shared, cache_salt="two")])
    assert answers["b"].num_cached_tokens == 0


@pytest.mark.parametrize("chunk", [5, 64])
@pytest.mark.parametrize("max_new", [0, 6])
def test_prompt_logprobs_equal_one_forward_pass(chunk: int, max_new: int) -> None:
    ids = prompt(150)
    config = replace(SMALL, max_chunk_tokens=chunk)
    engine = tiny_engine(SuffixDrafter(), config)
    scored = request("scored", ids, max_new, num_prompt_logprobs=3)
    answer = run(engine, [scored, request("other", prompt(30))])["scored"]
    with torch.inference_mode():
        expected = tiny_model()(torch.tensor([ids])).logits[0].log_softmax(-1)
    assert [each.token_id for each in answer.prompt_logprobs] == list(ids[1:])
    for position, each in enumerate(answer.prompt_logprobs):
        row = expected[position]
        assert each.logprob == pytest.approx(row[each.token_id].item(), abs=1e-4)
        assert each.rank == 1 + (row > row[each.token_id]).sum().item()
        assert [top[0] for top in each.top] == row.topk(3).indices.tolist()
    assert len(answer.token_ids) == max_new
    assert answer.finish is not None
    assert answer.finish.reason == FinishReason.LENGTH


def test_prompt_logprobs_come_once_when_preempted() -> None:
    requests = [
        request(str(index), prompt(30, seed=index), num_prompt_logprobs=0) for index in range(5)
    ]
    engine = tiny_engine(None, TIGHT)
    answers = run(engine, requests)
    assert engine.counters.preemptions > 0
    for answer in answers.values():
        assert len(answer.prompt_logprobs) == 29


@pytest.fixture(scope="module")
def free() -> list[int]:
    """What the model answers when nothing ends the answer."""
    return run(tiny_engine(), [request("x", prompt(12), 40)])["x"].token_ids


@pytest.mark.parametrize("hits", [None, 0.95], ids=["off", "on"])
class TestEnds:
    """Where an answer ends, with and without a run of accepted drafts that reaches past the end."""

    def serve(self, free: list[int], hits: float | None, stopping: StoppingParams) -> Answer:
        ids = prompt(12)
        drafter: Drafter | None = None if hits is None else ScriptedDrafter({ids: free}, hits)
        engine = tiny_engine(drafter, eos_token_ids=(free[5],))
        return run(engine, [request("x", ids, stopping=stopping)])["x"]

    def test_at_eos(self, free: list[int], hits: float | None) -> None:
        answer = self.serve(free, hits, StoppingParams(40))
        first = free.index(free[5])
        assert answer.token_ids == free[: first + 1]
        assert answer.finish is not None
        assert (answer.finish.reason, answer.finish.stop_token_id) == ("eos", free[5])
        assert answer.finish.speculation.num_emitted == first + 1

    def test_eos_wins_over_length_in_the_same_step(
        self, free: list[int], hits: float | None
    ) -> None:
        answer = self.serve(free, hits, StoppingParams(free.index(free[5]) + 1))
        assert answer.finish is not None
        assert answer.finish.reason == FinishReason.EOS

    def test_ignoring_eos(self, free: list[int], hits: float | None) -> None:
        answer = self.serve(free, hits, StoppingParams(40, ignore_eos=True))
        assert answer.token_ids == free
        assert answer.finish is not None
        assert answer.finish.reason == FinishReason.LENGTH

    def test_at_a_stop_token(self, free: list[int], hits: float | None) -> None:
        stopping = StoppingParams(40, stop_token_ids=(free[3],), ignore_eos=True)
        answer = self.serve(free, hits, stopping)
        assert answer.token_ids == free[: free.index(free[3]) + 1]
        assert answer.finish is not None
        assert answer.finish.reason == FinishReason.STOP_TOKEN

    def test_not_before_the_minimum(self, free: list[int], hits: float | None) -> None:
        answer = self.serve(free, hits, StoppingParams(40, min_new_tokens=20))
        assert free[5] not in answer.token_ids[:20]
        assert len(answer.token_ids) >= 20

    @pytest.mark.parametrize("max_new", [1, 2, 9])
    def test_at_the_limit(self, free: list[int], hits: float | None, max_new: int) -> None:
        answer = self.serve(free, hits, StoppingParams(max_new, ignore_eos=True))
        assert answer.token_ids == free[:max_new]


def test_the_context_clamps_the_answer() -> None:
    engine = tiny_engine(SuffixDrafter(), replace(SMALL, max_context_tokens=32))
    answer = run(engine, [request("x", prompt(30), 1_000)])["x"]
    assert len(answer.token_ids) == 2
    assert answer.finish is not None
    assert answer.finish.reason == FinishReason.LENGTH


def test_a_prompt_as_long_as_the_cache_finishes_and_so_do_those_behind_it() -> None:
    engine = tiny_engine(None, replace(SMALL, kv_cache_bytes=16 << 10))
    capacity = engine.limits.max_cache_tokens
    assert capacity == engine.pool.num_blocks * 4
    requests = [request("big", prompt(capacity - 1)), request("small", prompt(3))]
    answers = run(engine, requests)
    assert len(answers["big"].token_ids) == 1
    assert len(answers["small"].token_ids) == 24


@pytest.mark.parametrize("steps_before", [0, 1, 2, 6])
def test_abort_frees_everything_within_a_step(steps_before: int) -> None:
    drafter = ScriptedDrafter()
    engine = tiny_engine(drafter, replace(SMALL, max_chunk_tokens=8, max_running_requests=1))
    for name in ("running", "waiting"):
        engine.add(request(name, prompt(20)))
    for _ in range(steps_before):
        engine.step()
    for name in ("waiting", "running", "running", "unknown"):
        for output in engine.abort(name, FinishReason.CANCELLED):
            assert output.finish is not None
            assert output.finish.reason == FinishReason.CANCELLED
            assert output.request_id == name
    assert not engine.has_work
    assert engine.pool.num_active == 0
    assert not drafter.known


def test_deadlines_end_queued_and_running_requests() -> None:
    engine = tiny_engine(None, replace(SMALL, max_running_requests=1))
    now = time.monotonic()
    engine.add(request("runs_out", prompt(5), deadline=now + 0.05, max_new=10_000))
    engine.add(request("never_runs", prompt(5), deadline=now - 1))
    engine.add(request("lives", prompt(5), deadline=now + 60))
    outputs = engine.step()
    assert (outputs[0].request_id, outputs[0].finish and outputs[0].finish.reason) == (
        "never_runs",
        FinishReason.DEADLINE,
    )
    time.sleep(0.06)
    reasons = {o.request_id: o.finish.reason for o in engine.step() if o.finish}
    assert reasons == {"runs_out": FinishReason.DEADLINE}
    while engine.has_work:
        reasons |= {o.request_id: o.finish.reason for o in engine.step() if o.finish}
    assert reasons["lives"] == FinishReason.LENGTH


def test_a_request_whose_logits_are_nan_ends_alone(plain: dict[str, Answer]) -> None:
    engine = tiny_engine()
    poison = 63
    with torch.inference_mode():
        engine.runner.model.model.embed_tokens.weight[poison] = float("nan")
    answers = run(
        engine,
        [request("bad", (5, poison), 5), request("canary", prompt(1), sampling=LAWS["greedy"])],
    )
    assert answers["bad"].finish is not None
    assert answers["bad"].finish.reason == FinishReason.ERROR
    assert "not finite" in answers["bad"].finish.message
    assert answers["canary"].token_ids == plain["greedy"].token_ids


def test_a_scored_prompt_with_nan_logits_ends_alone() -> None:
    engine = tiny_engine(None, replace(SMALL, max_chunk_tokens=8))
    with torch.inference_mode():
        engine.runner.model.model.embed_tokens.weight[63] = float("nan")
    scored = request("bad", (*prompt(5), 63, *prompt(20)), num_prompt_logprobs=0)
    answers = run(engine, [scored, request("canary", prompt(9))])
    assert answers["bad"].finish is not None
    assert answers["bad"].finish.reason == FinishReason.ERROR
    assert answers["canary"].finish is not None
    assert answers["canary"].finish.reason == FinishReason.LENGTH


def test_timing_and_snapshot() -> None:
    engine = tiny_engine(None, replace(SMALL, max_running_requests=1))
    engine.add(request("one", prompt(9)))
    engine.add(request("two", prompt(7)))
    (output,) = engine.step()
    timing = output.timing
    assert 0 < timing.arrived <= timing.scheduled <= timing.first_token
    assert timing.finished == 0
    snapshot = engine.snapshot()
    assert (snapshot.num_running, snapshot.num_waiting) == (1, 1)
    assert snapshot.num_queued_prompt_tokens == 7
    assert snapshot.num_active_blocks == 3  # none for drafts that nobody makes
    assert (snapshot.info.drafter, snapshot.info.max_draft_tokens) == ("off", 0)
