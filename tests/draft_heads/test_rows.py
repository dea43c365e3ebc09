from collections.abc import Callable

import pytest
import torch
from torch.nn import functional as F
from transformers import LlamaForCausalLM

from headway.draft_heads import rows as rows_module
from headway.draft_heads.data import IGNORED, Example
from headway.draft_heads.drafter import HydraDrafter
from headway.draft_heads.hydra import HydraHeads
from headway.draft_heads.rows import (
    HeadRows,
    backward,
    compute_rows,
    frontiers,
    measure_acceptance,
    num_left_out,
)
from headway.engine.request import Request, StoppingParams
from headway.engine.sequence import Sequence
from headway.engine.tree import Commit
from tiny import VOCAB_SIZE

MakeHeads = Callable[..., HydraHeads]


def random_example(seed: int, length: int, num_prompt: int = 3) -> Example:
    generator = torch.Generator().manual_seed(seed)
    ids = torch.randint(6, VOCAB_SIZE, (length,), generator=generator).tolist()
    return Example(tuple(ids), tuple(i >= num_prompt for i in range(length)))


EXAMPLES = [random_example(1, 9), random_example(2, 17), random_example(3, 5)]


def test_rows_hold_the_states_after_the_final_norm(model: LlamaForCausalLM) -> None:
    rows = compute_rows(model, EXAMPLES, 3)
    start = 0
    for example in EXAMPLES:
        ids = torch.tensor([example.ids])
        states = model(ids, output_hidden_states=True).hidden_states[-1][0]
        num_rows = len(example.ids) - 2 - 2
        mine = slice(start, start + num_rows)
        torch.testing.assert_close(rows.hidden[mine], states[2 : 2 + num_rows])
        torch.testing.assert_close(rows.teacher[mine, 0], states[3 : 3 + num_rows])
        torch.testing.assert_close(rows.teacher[mine, 2][:-2], states[5 : 3 + num_rows])
        # The target predicts a label from the very state that stands in its teacher row.
        torch.testing.assert_close(model.lm_head(rows.teacher[mine, 0]), model(ids).logits[0, 3:-1])
        start += num_rows
    assert start == len(rows.hidden)


def test_no_head_sees_its_label(make_heads: MakeHeads, model: LlamaForCausalLM) -> None:
    """The leak test: head k's logits at t move with x_t+1+k and stay with all that follows."""
    heads, example = make_heads(3), random_example(4, 12)
    position, row = 5, 3
    for changed in range(position, len(example.ids)):
        ids = list(example.ids)
        ids[changed] = 6 + (ids[changed] - 5) % (VOCAB_SIZE - 6)
        both = [
            [heads.logits(f)[row] for f in frontiers(heads, compute_rows(model, [e], 3))]
            for e in (example, Example(tuple(ids), example.learnt))
        ]
        for level, (before, after) in enumerate(zip(*both, strict=True)):
            moved = not torch.equal(before, after)
            assert moved == (changed <= position + 1 + level), (changed, level)


def literal_loss(
    heads: HydraHeads, rows: HeadRows, model: LlamaForCausalLM, loss: str
) -> list[torch.Tensor]:
    losses = []
    ids = list(range(VOCAB_SIZE)) if heads.draft_ids is None else heads.draft_ids.tolist()
    for frontier in frontiers(heads, rows):
        labels = rows.labels[:, frontier.level]
        kept = torch.tensor([label in ids for label in labels.tolist()])
        logs = heads.logits(frontier)[kept].log_softmax(-1)
        if loss == "hard":
            places = torch.tensor([ids.index(label) for label in labels[kept].tolist()])
            losses.append(F.nll_loss(logs, places))
        else:
            p = model.lm_head(rows.teacher[kept, frontier.level])[:, ids].softmax(-1)
            losses.append(-(p * logs).sum(-1).mean())
    return losses


@pytest.mark.parametrize("draft_ids", [None, range(2, 49, 2)])
@pytest.mark.parametrize("own_output_heads", [False, True])
@pytest.mark.parametrize("loss", ["hard", "soft"])
def test_loss_and_gradient_equal_the_plain_ones(
    make_heads: MakeHeads,
    model: LlamaForCausalLM,
    monkeypatch: pytest.MonkeyPatch,
    loss: str,
    own_output_heads: bool,
    draft_ids: range | None,
) -> None:
    monkeypatch.setattr(rows_module, "CHUNK_BYTES", 5 * 4 * VOCAB_SIZE)
    heads = make_heads(3, own_output_heads=own_output_heads, draft_ids=draft_ids)
    heads.requires_grad_(True)
    rows = compute_rows(model, EXAMPLES, 3)
    expected = literal_loss(heads, rows, model, loss)
    torch.stack(expected).sum().backward()
    gradients = [parameter.grad for parameter in heads.parameters()]
    heads.zero_grad(set_to_none=True)

    assert backward(heads, rows, loss) == pytest.approx([value.item() for value in expected])
    for parameter, gradient in zip(heads.parameters(), gradients, strict=True):
        torch.testing.assert_close(parameter.grad, gradient, rtol=1e-4, atol=1e-5)


def test_labels_that_cannot_be_drafted_are_counted(
    make_heads: MakeHeads, model: LlamaForCausalLM
) -> None:
    rows = compute_rows(model, EXAMPLES, 3)
    labels = [label for label in rows.labels.flatten().tolist() if label != IGNORED]
    expected = sum(label % 2 or label > 48 for label in labels)
    assert num_left_out(make_heads(3, draft_ids=range(2, 49, 2)), rows) == expected > 5
    assert num_left_out(make_heads(3), rows) == 0


def test_a_level_without_labels_costs_nothing(
    make_heads: MakeHeads, model: LlamaForCausalLM
) -> None:
    heads = make_heads(4).requires_grad_(True)
    losses = backward(heads, compute_rows(model, [random_example(5, 6)], 4), "hard")
    assert losses[0] > 0
    assert losses[2:] == [0.0, 0.0]
    assert torch.count_nonzero(heads.inputs[4].weight.grad or torch.zeros(1)) == 0


def draft(drafter: HydraDrafter, tokens: list[int], states: torch.Tensor) -> list[int]:
    """The chain that the drafter proposes after `tokens`, driven as the engine drives it."""
    sequence = Sequence(Request("r", tuple(tokens), StoppingParams(8)), arrived=0.0)
    sequence.num_computed = len(tokens) - 1
    drafter.observe([Commit(sequence, states[: sequence.num_computed])])
    [tree] = drafter.propose([sequence], [8])
    return list(tree.token_ids[1:])


def accepted_in_serving(heads: HydraHeads, model: LlamaForCausalLM, example: Example) -> list[int]:
    """How many drafts are right at each position whose root is a learnt token."""
    drafter, accepted = HydraDrafter(heads), []
    states = model.base_model(torch.tensor([example.ids])).last_hidden_state[0]
    for num_tokens in range(4, len(example.ids)):
        drafts = draft(drafter, list(example.ids[:num_tokens]), states[: num_tokens - 1])
        right = [a == b for a, b in zip(drafts, example.ids[num_tokens:], strict=False)]
        accepted.append([*right, False].index(False))
    return accepted


@pytest.mark.parametrize("draft_ids", [None, range(2, 49, 2)])
def test_acceptance_is_what_serving_sees(
    make_heads: MakeHeads, model: LlamaForCausalLM, draft_ids: range | None
) -> None:
    """The mismatch test, on text that random heads are often right about: their own drafts."""
    heads, num_heads = make_heads(3, draft_ids=draft_ids), 3
    drafter, tokens = HydraDrafter(heads), list(random_example(6, 4).ids)
    for num_kept in [0, 3, 1, 2, 3, 0, 2, 3, 1, 3, 0, 2, 1]:
        states = model.base_model(torch.tensor([tokens])).last_hidden_state[0]
        tokens += [*draft(drafter, tokens, states)[:num_kept], 6 + len(tokens)]
    tokens.pop()  # end with a right draft, after which deeper heads have no label
    example = Example(tuple(tokens), (False, False, False, *[True] * (len(tokens) - 3)))

    found = measure_acceptance(heads, model, [[example]])
    served = torch.tensor(accepted_in_serving(heads, model, example))
    # Positions from which no draft of this depth can be checked count for no depth beyond.
    room = torch.tensor([len(tokens) - n for n in range(4, len(tokens))])
    tau, product = 1.0, 1.0
    for depth in range(1, num_heads + 1):
        reached = (served >= depth - 1) & (room >= depth)
        product *= float((served[reached] >= depth).double().mean())
        tau += product
    assert found.tau == pytest.approx(tau)
    assert 1.5 < found.tau < 4
    assert found.accuracy[0] == pytest.approx(float((served >= 1).double().mean()))
