"""Prompts to token ids, without a server around them."""

import math

import pytest
from tokenizers import processors
from transformers import PreTrainedTokenizerFast

from fake_engine import byte_tokenizer
from headway.engine.errors import InvalidRequest
from headway.protos import text_generation_pb2 as pb
from headway.server.prompt import read_bad_words, read_prompt

TURNS = [pb.Message(role="user", content="hi"), pb.Message(role="assistant", content="Sure")]


def own_tokenizer(chat_template: str | None = None) -> PreTrainedTokenizerFast:
    """Return a byte tokenizer that opens every text with <|im_end|>, as others do with BOS."""
    backend = byte_tokenizer().backend_tokenizer
    copy = type(backend).from_str(backend.to_str())
    copy.post_processor = processors.TemplateProcessing(
        single="<|im_end|> $A", special_tokens=[("<|im_end|>", 260)]
    )
    return PreTrainedTokenizerFast(tokenizer_object=copy, chat_template=chat_template)


@pytest.mark.parametrize(
    ("fields", "text"),
    [
        ({}, "<user>hi<assistant>Sure<assistant>"),
        ({"add_generation_prompt": False}, "<user>hi<assistant>Sure"),
        ({"continue_final_message": True}, "<user>hi<assistant>Sure"),
    ],
)
def test_a_chat_is_answered_left_or_continued(fields: dict[str, bool], text: str) -> None:
    request = pb.GenerateRequest(chat=pb.Chat(messages=TURNS, **fields))
    assert bytes(read_prompt(byte_tokenizer(), request)).decode() == text


@pytest.mark.parametrize(("added", "ids"), [(None, (260, 97)), (True, (260, 97)), (False, (97,))])
def test_special_tokens_are_added_unless_told_otherwise(
    added: bool | None, ids: tuple[int, ...]
) -> None:
    request = pb.TokenizeRequest(text="a")
    if added is not None:
        request.add_special_tokens = added
    assert read_prompt(own_tokenizer(), request) == ids


def test_templates_write_their_own_special_tokens() -> None:
    tokenizer = own_tokenizer("<|im_end|>{{ messages[0].content }}")
    request = pb.GenerateRequest(chat=pb.Chat(messages=TURNS[:1]))
    assert read_prompt(tokenizer, request) == (260, *b"hi")


def test_model_without_a_template_says_so_at_the_chat() -> None:
    request = pb.GenerateRequest(chat=pb.Chat(messages=TURNS))
    with pytest.raises(InvalidRequest) as caught:
        read_prompt(own_tokenizer(), request)
    (violation,) = caught.value.violations
    assert violation.field == "chat"
    assert "no chat template" in violation.message


@pytest.mark.parametrize("number", [math.nan, math.inf])
def test_template_variables_that_json_does_not_have_are_refused(number: float) -> None:
    request = pb.GenerateRequest(chat=pb.Chat(messages=TURNS, template_kwargs={"x": number}))
    with pytest.raises(InvalidRequest, match=r"^chat\.template_kwargs: cannot be read: .* finite"):
        read_prompt(byte_tokenizer(), request)


def test_token_ids_are_taken_as_they_are() -> None:
    request = pb.ScoreRequest(token_ids=pb.TokenIds(ids=[5, -1, 5]))
    assert read_prompt(own_tokenizer(), request) == (5, -1, 5)


def test_bad_words_are_spelt_at_the_start_and_after_a_space() -> None:
    runs = read_bad_words(byte_tokenizer(), ("a", "HI"))
    assert runs == ((32, 258), (97,), (258,), (259,))
