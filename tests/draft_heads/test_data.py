import json
from pathlib import Path

import pytest
import torch
from transformers import PreTrainedTokenizerFast

from headway.draft_heads.data import IGNORED, Example, align, batches, read_examples, split
from headway.engine.errors import UsageError

END, USER, ANSWER, NEWLINE = 2, 3, 4, 5


def read(
    path: Path, tokenizer: PreTrainedTokenizerFast, *records: object, limit: int = 99
) -> list[Example]:
    path.write_text("".join(json.dumps(record) + "\n" for record in records))
    return list(read_examples(path, tokenizer, {END}, limit))


def chat(*texts: str) -> dict[str, object]:
    """Turns of user and assistant."""
    roles = ["user", "assistant"] * len(texts)
    return {"messages": [{"role": r, "content": t} for r, t in zip(roles, texts, strict=False)]}


def test_the_assistant_s_tokens_and_its_end_of_turn_are_learnt(
    tmp_path: Path, tokenizer: PreTrainedTokenizerFast
) -> None:
    [example] = read(tmp_path / "d", tokenizer, chat("w10", "w20 w21", "w11", "w22"))
    expected = [
        (USER, False), (10, False), (END, False), (NEWLINE, False), (ANSWER, False),
        (20, True), (21, True), (END, True), (NEWLINE, False),
        (USER, False), (11, False), (END, False), (NEWLINE, False), (ANSWER, False),
        (22, True), (END, True), (NEWLINE, False),
    ]  # fmt: skip
    assert list(zip(example.ids, example.learnt, strict=True)) == expected


def test_any_end_of_turn_ends_what_is_learnt(
    tmp_path: Path, tokenizer: PreTrainedTokenizerFast
) -> None:
    path = tmp_path / "d"
    path.write_text(json.dumps(chat("w10", "w20 w21 w22")))
    [example] = read_examples(path, tokenizer, {END, 21}, 99)
    assert [i for i, learnt in zip(example.ids, example.learnt, strict=True) if learnt] == [20, 21]


def test_a_model_without_a_template_learns_from_text_alone(
    tmp_path: Path, tokenizer: PreTrainedTokenizerFast
) -> None:
    tokenizer.chat_template = None
    assert len(read(tmp_path / "d", tokenizer, {"text": "w10 w11"})) == 1
    with pytest.raises(UsageError, match=r"line 1: .*has no chat template"):
        read(tmp_path / "d", tokenizer, chat("w10", "w20"))


def test_sharegpt_reads_as_openai_does(tmp_path: Path, tokenizer: PreTrainedTokenizerFast) -> None:
    share = {"conversations": [{"from": "human", "value": "w10"}, {"from": "gpt", "value": "w20"}]}
    [first, second] = read(tmp_path / "d", tokenizer, chat("w10", "w20"), share)
    assert first == second


def test_plain_text_is_learnt_whole(tmp_path: Path, tokenizer: PreTrainedTokenizerFast) -> None:
    [example] = read(tmp_path / "d", tokenizer, {"text": "w10 w11 w12"})
    assert example == Example((10, 11, 12), (True, True, True))


def test_long_chats_are_cut(tmp_path: Path, tokenizer: PreTrainedTokenizerFast) -> None:
    [example] = read(tmp_path / "d", tokenizer, chat("w10", "w20 w21 w22"), limit=6)
    assert example == Example((USER, 10, END, NEWLINE, ANSWER, 20), (*[False] * 5, True))


def test_a_template_that_rewrites_earlier_turns_starts_a_new_example(
    tmp_path: Path, tokenizer: PreTrainedTokenizerFast
) -> None:
    # The answer is marked with w9 while it is the last message, as reasoning models do.
    tokenizer.chat_template = (
        "{% for m in messages %}<u> {% if loop.last and m['role'] == 'assistant' %}w9 {% endif %}"
        "{{ m['content'] }} <end> {% endfor %}{% if add_generation_prompt %}<u> {% endif %}"
    )
    first, second = read(tmp_path / "d", tokenizer, chat("w10", "w20", "w11", "w21"))
    assert first == Example((USER, 10, END, USER, 9, 20, END), (*[False] * 4, True, True, True))
    assert second.ids == (USER, 10, END, USER, 20, END, USER, 11, END, USER, 9, 21, END)
    assert second.learnt == (*[False] * 10, True, True, True)


GOOD = json.dumps(chat("w10", "w20"))


@pytest.mark.parametrize(
    ("line", "message"),
    [
        ("{", "line 2: Expecting"),
        ("[1]", "line 2: got list, not an object"),
        ('{"prompt": "w10"}', r"line 2: has the keys \['prompt'\]"),
        ('{"text": ""}', r"line 2: has the keys \['text'\]"),
        ('{"messages": []}', "line 2: the chat is not a list of messages"),
        ('{"messages": [{"role": "user"}]}', 'line 2: message 0 is not {"role", "content"}'),
        ('{"messages": [{"from": "gpt", "value": "w9"}]}', "line 2: message 0 is not"),
        ('{"messages": [{"role": "tool", "content": "w9"}]}', "role 'tool'; allowed: .*'user'"),
        ('{"messages": [{"role": "user", "content": ["w9"]}]}', "content that is no string"),
        ('{"messages": [{"role": "user", "content": "w9"}]}', "no message of the assistant"),
        ('{"messages": [{"role": [], "content": "w9"}]}', r"message 0 has role \[\]; allowed"),
        ('{"text": "\\ud800"}', "line 2: 'utf-8' codec can't encode .* surrogates"),
        ('{"messages": [{"role": "assistant", "content": "\\ud800"}]}', "line 2: .* surrogates"),
        pytest.param("[" * 10_000, "line 2: maximum recursion depth", id="deep"),
        (json.dumps(chat("w9", "w9")).replace('"user"', '"system"'), "refuses .*: no system role"),
    ],
)
def test_a_bad_line_is_named(
    tmp_path: Path, tokenizer: PreTrainedTokenizerFast, line: str, message: str
) -> None:
    path = tmp_path / "chats.jsonl"
    path.write_text(f"{GOOD}\n{line}\n")
    with pytest.raises(UsageError, match=message) as error:
        list(read_examples(path, tokenizer, {END}, 99))
    assert str(path) in str(error.value)
    assert '"messages"' in str(error.value)


@pytest.mark.parametrize("content", [None, b"\xff\xfe\n"])
def test_an_unreadable_file_is_named(
    tmp_path: Path, tokenizer: PreTrainedTokenizerFast, content: bytes | None
) -> None:
    path = tmp_path / "chats.jsonl"
    if content:
        path.write_bytes(content)
    with pytest.raises(UsageError, match=r"chats\.jsonl cannot be read"):
        list(read_examples(path, tokenizer, {END}, 99))


def test_alignment_of_the_docstring() -> None:
    example = Example((10, 11, 12, 13, 14), (False, True, True, True, True))
    positions, given, labels = align(example, 2)
    assert positions.tolist() == [0, 1, 2]
    assert given.tolist() == [[11, 12], [12, 13], [13, 14]]
    assert labels.tolist() == [[12, 13], [13, 14], [14, IGNORED]]


def test_alignment_never_crosses_a_turn() -> None:
    #        0   1   2   3   4    5   6   7   8
    ids = (90, 91, 20, 21, 22, 92, 93, 30, 31)
    learnt = (False, False, True, True, True, False, False, True, True)
    positions, given, labels = align(Example(ids, learnt), 3)
    assert positions.tolist() == [1, 2, 6]
    assert given[:, 0].tolist() == [20, 21, 30]
    assert labels.tolist() == [[21, 22, IGNORED], [22, IGNORED, IGNORED], [31, IGNORED, IGNORED]]


@pytest.mark.parametrize("length", [1, 2, 3, 5, 9])
@pytest.mark.parametrize("num_heads", [1, 2, 4])
def test_alignment_equals_its_definition(length: int, num_heads: int) -> None:
    generator = torch.Generator().manual_seed(length * 10 + num_heads)
    ids = tuple(range(100, 100 + length))
    learnt = tuple((torch.rand(length, generator=generator) < 0.7).tolist())
    rows = {}
    for t in range(length):
        labels = [
            ids[t + 2 + k] if t + 2 + k < length and all(learnt[t + 1 : t + 3 + k]) else IGNORED
            for k in range(num_heads)
        ]
        if labels[0] != IGNORED:
            rows[t] = labels
    positions, given, labels = align(Example(ids, learnt), num_heads)
    assert dict(zip(positions.tolist(), labels.tolist(), strict=True)) == rows
    for t, tokens in zip(positions.tolist(), given.tolist(), strict=True):
        known = list(ids[t + 1 : t + 1 + num_heads])
        assert tokens[: len(known)] == known


def test_split_holds_out_one_at_least_and_loses_none() -> None:
    examples = [Example((i,), (True,)) for i in range(10)]
    for fraction, num_eval in [(0.01, 1), (0.3, 3)]:
        train, held_out = split(examples, fraction, seed=1)
        assert len(held_out) == num_eval
        assert sorted(e.ids[0] for e in train + held_out) == list(range(10))
    assert split(examples, 0.3, seed=1) == split(examples, 0.3, seed=1)
    assert split(examples, 0.3, seed=1) != split(examples, 0.3, seed=2)


def test_batches_bound_the_padded_size() -> None:
    lengths = [3, 9, 2, 2, 2, 7, 10, 1]
    examples = [Example((0,) * length, (True,) * length) for length in lengths]
    groups = batches(examples, 20)
    assert [e for group in groups for e in group] == examples
    assert [len(group) for group in groups] == [2, 3, 2, 1]
    assert all(len(g) * max(len(e.ids) for e in g) <= 20 for g in groups)
