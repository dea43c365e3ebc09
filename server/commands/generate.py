"""`headway generate`: one prompt, from a server or in this process. Text to stdout, figures to stderr."""

import asyncio
import json
import sys
import time
from collections.abc import AsyncIterator
from contextlib import aclosing
from dataclasses import dataclass, field
from typing import Annotated

from google.protobuf import json_format
from rich.console import Console

from headway.protos import text_generation_pb2 as pb
from headway.server import convert
from headway.server.assembly import ModelSettings, assemble, make_served
from headway.server.client import AsyncClient
from headway.server.commands.progress import progress_bars
from headway.server.in_process import stream_in_process
from headway.server.settings import FLAT, POSITIONAL, REPEATED, SettingsError

type Events = AsyncIterator[pb.GenerateStreamResponse]


@dataclass(frozen=True, slots=True)
class SamplingFlags:
    """The law that each next token is drawn from, applied in this order."""

    logit_bias: Annotated[tuple[tuple[int, float], ...], REPEATED] = ()
    """A token id and what is added to its logit, -100 to 100."""
    allowed_token_ids: Annotated[tuple[int, ...], REPEATED] = ()
    """Only these may be generated."""
    bad_words: Annotated[tuple[str, ...], REPEATED] = ()
    """A word that may not appear."""
    repetition_penalty: float = 1.0
    """Above 0, 10 at most; 1 is off. Counts prompt and answer."""
    presence_penalty: float = 0.0
    """-2 to 2; counts the answer alone."""
    frequency_penalty: float = 0.0
    """-2 to 2; counts the answer alone."""
    temperature: float = 1.0
    """0 is greedy, else 0.01 to 100."""
    top_k: int = 0
    """Keeps the likeliest k tokens; 0 keeps all."""
    top_p: float = 1.0
    """Keeps the likeliest tokens that together have this probability."""
    min_p: float = 0.0
    """Drops tokens less likely than this share of the likeliest."""
    typical_p: float = 1.0
    """Keeps tokens near the expected information."""
    seed: int | None = None
    """The same seed gives the same answer; random when not given, and told at the end."""


@dataclass(frozen=True, slots=True)
class StoppingFlags:
    """When the answer ends."""

    max_new_tokens: int | None = None
    """Tokens at most; the server has a default."""
    min_new_tokens: int = 0
    """Nothing ends the answer before this many tokens."""
    stop_strings: Annotated[tuple[str, ...], REPEATED] = ()
    """The answer ends where this text is complete."""
    stop_token_ids: Annotated[tuple[int, ...], REPEATED] = ()
    """The answer ends with this token."""
    include_stop: bool = False
    """Keep the stop string, or the text of the stop token."""
    ignore_eos: bool = False
    """Go on after the model's end of sequence."""


@dataclass(frozen=True, slots=True)
class GenerateConfig:
    """Continue a prompt and print the text.

    With --server the answer comes from there; without, the model is loaded into this process.
    """

    prompt: Annotated[str | None, POSITIONAL] = None
    """What to answer; read from stdin when not given."""
    server: str | None = None
    """host:port of a running server."""
    timeout_seconds: float | None = None
    """Deadline of a call to the server."""
    raw: bool = False
    """Continue the prompt as plain text instead of answering it as a chat message."""
    system: str | None = None
    """System message of the chat."""
    json: bool = False
    """Print one JSON object at the end: texts, token ids, logprobs, statistics."""
    n: int = 1
    """Answers to make from the prompt."""
    num_logprobs: int | None = None
    """With --json: likeliest alternatives to report for each token."""
    max_draft_tokens: int | None = None
    """Drafted tokens a step at most, for this request."""
    sampling: Annotated[SamplingFlags, FLAT] = field(default_factory=SamplingFlags)
    stopping: Annotated[StoppingFlags, FLAT] = field(default_factory=StoppingFlags)
    model: Annotated[ModelSettings, FLAT] = field(default_factory=ModelSettings)


def generate(config: GenerateConfig) -> int:
    """Stream the answer to stdout and tell the figures on stderr."""
    prompt = sys.stdin.read() if config.prompt is None else config.prompt
    request = to_request(config, prompt)
    started = time.perf_counter()
    response = asyncio.run(_print(_events(config, request), is_streamed=_is_streamed(config)))
    seconds = time.perf_counter() - started
    if config.json:
        shown = json_format.MessageToDict(response, preserving_proto_field_name=True)
        print(json.dumps({**shown, "seconds": seconds}, indent=2, ensure_ascii=False))
        return 0
    for answer in response.answers:
        if config.n > 1:
            print(f"--- {answer.index} ---\n{answer.text}")
        print(_figures(answer, seconds), file=sys.stderr)
    print(f"seed {response.seed}", file=sys.stderr)
    return 0


def to_request(config: GenerateConfig, prompt: str) -> pb.GenerateStreamRequest:
    """Put the flags into the message that a server reads."""
    if config.raw and config.system is not None:
        raise SettingsError("--system is part of a chat; leave it or --raw out")
    law, stop = config.sampling, config.stopping
    request = pb.GenerateStreamRequest(
        n=config.n,
        sampling=pb.Sampling(
            logit_bias=dict(law.logit_bias),
            allowed_token_ids=law.allowed_token_ids,
            bad_words=law.bad_words,
            repetition_penalty=law.repetition_penalty,
            presence_penalty=law.presence_penalty,
            frequency_penalty=law.frequency_penalty,
            temperature=law.temperature,
            top_k=law.top_k,
            top_p=law.top_p,
            min_p=law.min_p,
            typical_p=law.typical_p,
            seed=law.seed,
        ),
        stopping=pb.Stopping(
            max_new_tokens=stop.max_new_tokens,
            min_new_tokens=stop.min_new_tokens,
            stop_strings=stop.stop_strings,
            stop_token_ids=stop.stop_token_ids,
            include_stop=stop.include_stop,
            ignore_eos=stop.ignore_eos,
        ),
        speculation=pb.Speculation(
            enabled=config.model.speculation != "off", max_draft_tokens=config.max_draft_tokens
        ),
        response=pb.ResponseOptions(num_logprobs=config.num_logprobs),
    )
    if config.raw:
        request.text = prompt
    else:
        if config.system is not None:
            request.chat.messages.add(role="system", content=config.system)
        request.chat.messages.add(role="user", content=prompt)
    return request


def _is_streamed(config: GenerateConfig) -> bool:
    return config.n == 1 and not config.json
