"""Prompts to token ids: plain text, ids as they are, or a chat through the model's template.

Runs in the tokenizer's own thread, never on the event loop or the engine's thread.
"""

from typing import Any

from google.protobuf import json_format

from headway.engine.errors import InvalidRequest, Violation
from headway.engine.models.tokenizer import render_chat
from headway.protos import text_generation_pb2 as pb
from headway.server.convert import PromptMessage


def read_prompt(tokenizer: Any, request: PromptMessage) -> tuple[int, ...]:
    """Return the prompt's token ids. InvalidRequest when the chat template refuses the chat."""
    kind = request.WhichOneof("prompt")
    if kind == "chat":
        # The template writes BOS and the like itself, so the tokenizer must not.
        return _encode(tokenizer, _render(tokenizer, request.chat), add_special_tokens=False)
    if kind == "text":
        added = request.add_special_tokens if request.HasField("add_special_tokens") else True
        return _encode(tokenizer, request.text, add_special_tokens=added)
    assert not isinstance(request, pb.TokenizeRequest | pb.CountTokensRequest)
    return tuple(request.token_ids.ids)


def read_bad_words(tokenizer: Any, words: tuple[str, ...]) -> tuple[tuple[int, ...], ...]:
    """Return the token runs that spell each word, at the start of a line and after a space."""
    runs = {
        _encode(tokenizer, prefix + word, add_special_tokens=False)
        for word in words
        for prefix in ("", " ")
    }
    return tuple(sorted(run for run in runs if run))


def _render(tokenizer: Any, chat: pb.Chat) -> str:
    """Return the chat as the text that the model's template makes of it."""
    continued = chat.continue_final_message
    try:
        variables = json_format.MessageToDict(chat.template_kwargs)
    except ValueError as error:  # a number that JSON does not have
        message = f"cannot be read: {error}. Send finite numbers."
        raise InvalidRequest(Violation("chat.template_kwargs", message)) from error
    opened = chat.add_generation_prompt if chat.HasField("add_generation_prompt") else not continued
    return render_chat(
        tokenizer,
        [{"role": message.role, "content": message.content} for message in chat.messages],
        add_generation_prompt=opened,
        continue_final_message=continued,
        variables=variables,
    )


def _encode(tokenizer: Any, text: str, *, add_special_tokens: bool) -> tuple[int, ...]:
    return tuple(tokenizer.encode(text, add_special_tokens=add_special_tokens, verbose=False))
