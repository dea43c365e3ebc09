"""Training text: JSONL of chats to token ids with a loss mask, and those to aligned rows.

Knows the tokenizer and its chat template, nothing of models or losses.
"""

import json
from collections.abc import Collection, Iterator
from dataclasses import dataclass
from pathlib import Path
from random import Random

import torch
from torch import Tensor
from transformers import PreTrainedTokenizerBase

from headway.engine.errors import InvalidRequest, UsageError
from headway.engine.models.tokenizer import render_chat

Message = dict[str, str]

IGNORED = -100
"""A label that is not learnt."""

ROLES = {
    "system": "system",
    "user": "user",
    "human": "user",
    "assistant": "assistant",
    "gpt": "assistant",
}
FORMS = (
    'a line is {"messages": [{"role": "user", "content": "..."}, ...]}, '
    '{"conversations": [{"from": "human", "value": "..."}, ...]} or {"text": "..."}'
)


@dataclass(frozen=True, slots=True)
class Example:
    """Tokens of one chat; `learnt` marks those that the model itself writes in serving.

    Example, with one token for each piece of the template:

        ids     <user> hi  <end> <assistant> hello you <end> <user> ...
        learnt    -    -     -       -         x    x    x     -
    """

    ids: tuple[int, ...]
    learnt: tuple[bool, ...]


def read_examples(
    path: Path,
    tokenizer: PreTrainedTokenizerBase,
    end_ids: Collection[int],
    max_chat_tokens: int,
) -> Iterator[Example]:
    """Read a JSONL file, each chat cut to `max_chat_tokens`; blank lines are passed over.

    `end_ids` are the tokens that end an answer of the model.
    Raises UsageError naming the file, the line, what is wrong and what is allowed.
    """
    try:
        with path.open(encoding="utf-8") as lines:
            for number, line in enumerate(lines, 1):
                if not line.strip():
                    continue
                try:
                    examples = _examples_of(json.loads(line), tokenizer, end_ids)
                except (ValueError, RecursionError, UsageError, InvalidRequest) as error:
                    raise UsageError(f"{path}, line {number}: {error}; {FORMS}") from error
                for ids, learnt in examples:
                    yield Example(tuple(ids[:max_chat_tokens]), tuple(learnt[:max_chat_tokens]))
    except (OSError, UnicodeDecodeError) as error:
        raise UsageError(f"data: {path} cannot be read as UTF-8 text: {error}") from error


def _examples_of(
    record: object, tokenizer: PreTrainedTokenizerBase, end_ids: Collection[int]
) -> list[tuple[list[int], list[bool]]]:
    if not isinstance(record, dict):
        raise UsageError(f"got {type(record).__name__}, not an object")
    if "messages" in record:
        return tokenize_chat(_messages(record["messages"], "role", "content"), tokenizer, end_ids)
    if "conversations" in record:
        return tokenize_chat(
            _messages(record["conversations"], "from", "value"), tokenizer, end_ids
        )
    if isinstance(record.get("text"), str) and record["text"]:
        _check_unicode(record["text"])
        ids = tokenizer(record["text"])["input_ids"]
        return [(ids, [True] * len(ids))]
    raise UsageError(f"has the keys {sorted(record)} but no chat and no text")


def _messages(turns: object, role_key: str, text_key: str) -> list[Message]:
    if not isinstance(turns, list) or not turns:
        raise UsageError("the chat is not a list of messages")
    messages = []
    for index, turn in enumerate(turns):
        if not isinstance(turn, dict) or not {role_key, text_key} <= turn.keys():
            raise UsageError(f'message {index} is not {{"{role_key}", "{text_key}"}}')
        role, text = turn[role_key], turn[text_key]
        if not isinstance(role, str) or role not in ROLES:
            raise UsageError(f"message {index} has {role_key} {role!r}; allowed: {list(ROLES)}")
        if not isinstance(text, str):
            raise UsageError(f"message {index} has a {text_key} that is no string")
        _check_unicode(text)
        messages.append({"role": ROLES[role], "content": text})
    if all(message["role"] != "assistant" for message in messages):
        raise UsageError("the chat has no message of the assistant, so nothing to learn")
    return messages


def _check_unicode(text: str) -> None:
    """Raise ValueError for half a surrogate pair: JSON can spell it, and tokenizers cannot read it."""
    text.encode()


def tokenize_chat(
    messages: list[Message], tokenizer: PreTrainedTokenizerBase, end_ids: Collection[int]
) -> list[tuple[list[int], list[bool]]]:
    """Render a chat and mark what the assistant writes: its text and the token that ends its turn.

    The template is rendered up to each answer, without and with it, and the two pieces are
    tokenised apart, as in serving, where the prompt is tokens before the answer exists. Templates
    that rewrite earlier turns (they drop old reasoning) start a new example where a render is no
    continuation of the last one.
    """
    examples: list[tuple[list[int], list[bool]]] = []
    text = ""
    for index, message in enumerate(messages):
        if message["role"] != "assistant":
            continue
        prompt = render_chat(tokenizer, messages[:index])
        whole = render_chat(tokenizer, messages[: index + 1], add_generation_prompt=False)
        if not whole.startswith(prompt):
            raise UsageError(
                f"message {index}: the chat template does not render the answer after its prompt"
            )
        if not examples or not prompt.startswith(text):
            examples.append(([], []))
            text = ""
        ids, learnt = examples[-1]
        _append(ids, learnt, _tokens(tokenizer, prompt[len(text) :]), 0)
        answer = _tokens(tokenizer, whole[len(prompt) :])
        ends = [place for place, token_id in enumerate(answer, 1) if token_id in end_ids]
        _append(ids, learnt, answer, ends[0] if ends else len(answer))
        text = whole
    return examples


def _append(ids: list[int], learnt: list[bool], piece: list[int], num_learnt: int) -> None:
    ids += piece
    learnt += [i < num_learnt for i in range(len(piece))]


def _tokens(tokenizer: PreTrainedTokenizerBase, text: str) -> list[int]:
    ids: list[int] = tokenizer(text, add_special_tokens=False)["input_ids"] if text else []
    return ids


def align(example: Example, num_heads: int) -> tuple[Tensor, Tensor, Tensor]:
    """List the positions of an example to learn from, with what each head is given and must say.

    Head k at position t starts from the hidden state h_t, is given x_t+1 .. x_t+1+k and must say
    x_t+2+k. All of x_t+1 .. x_t+2+k have to be learnt tokens: in serving the root is already one,
    and no draft reaches past the end of a turn.

    Returns positions [N], given [N, K] (x_t+1 .. x_t+K) and labels [N, K] (x_t+2 .. x_t+1+K,
    IGNORED where there is none), all int64; rows without a single label are left out.

    Example, K = 2, ids 10 11 12 13 14, learnt from 11 on:

        t   given    labels
        0   11 12    12 13
        1   12 13    13 14
        2   13 14    14 IGNORED
    """
    length = len(example.ids)
    ids = torch.tensor([*example.ids, *[0] * (num_heads + 1)])
    learnt = torch.tensor([*example.learnt, *[False] * (num_heads + 1)])
    windows = ids.unfold(0, num_heads + 1, 1)[1:length]  # [length - 1, K + 1], x_t+1 .. x_t+1+K
    reached = learnt.unfold(0, num_heads + 1, 1)[1:length].long().cumprod(1)[:, 1:].bool()
    labels = windows[:, 1:].masked_fill(~reached, IGNORED)
    positions = reached[:, 0].nonzero()[:, 0]
    return positions, windows[positions, :-1], labels[positions]


def split(
    examples: list[Example], eval_fraction: float, seed: int
) -> tuple[list[Example], list[Example]]:
    """Shuffle and hold out a part, one example at least: (train, eval)."""
    shuffled = list(examples)
    Random(seed).shuffle(shuffled)
    num_eval = max(1, round(len(shuffled) * eval_fraction))
    return shuffled[num_eval:], shuffled[:num_eval]


def batches(examples: list[Example], batch_tokens: int) -> list[list[Example]]:
    """Group examples, in order: padded to its longest, a group has at most `batch_tokens`."""
    groups: list[list[Example]] = []
    longest = 0
    for example in examples:
        longest = max(longest, len(example.ids))
        if groups and longest * (len(groups[-1]) + 1) <= batch_tokens:
            groups[-1].append(example)
        else:
            groups.append([example])
            longest = len(example.ids)
    return groups
