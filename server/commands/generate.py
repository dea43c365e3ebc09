"""`headway generate`: one prompt, from a server or in this process. Text to stdout, figures to stderr."""

import json
import sys
import time
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager
from dataclasses import asdict, dataclass, field
from typing import Annotated, Any

import grpc
from google.protobuf import json_format
from rich.console import Console

from headway.engine.config import EngineConfig
from headway.engine.errors import UsageError
from headway.engine.models.store import DEFAULT_MODEL
from headway.engine.request import tau
from headway.protos import text_generation_pb2 as pb
from headway.server.assembly import ModelSettings, assemble
from headway.server.client import Client, Prompt
from headway.server.commands.progress import progress_bars
from headway.server.convert import to_response
from headway.server.local import local_server
from headway.server.settings import FLAT, POSITIONAL, REPEATED


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
    """What to answer; read from stdin, less a newline at its end, when not given."""
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

    def __post_init__(self) -> None:
        if self.raw and self.system is not None:
            raise ValueError("system is part of a chat and raw text is none; leave one of them out")
        own = self.model
        if self.server is not None and (
            own.engine != EngineConfig() or own.heads or own.speculation not in ("auto", "off")
        ):
            raise ValueError(
                "heads, engine settings and what drafts are the server's own; with --server leave them "
                "out (--speculation off switches drafting off for the request)"
            )


def generate(config: GenerateConfig) -> int:
    """Stream the answer to stdout and tell the figures on stderr."""
    prompt = _read_prompt(config)
    with ExitStack() as stack:
        server = config.server or stack.enter_context(_own_server(config))
        client = stack.enter_context(Client(server))
        started = time.perf_counter()
        try:
            response = _receive(config, client, prompt)
        except grpc.RpcError as error:
            # A failed call is a Call too, which the types do not say.
            call: Any = error
            hint = ""
            if call.code() == grpc.StatusCode.UNAVAILABLE:
                hint = f"; is `headway serve` running at {server}?"
            print(f"headway: {server}: {call.code().name}: {call.details()}{hint}", file=sys.stderr)
            return 1
        seconds = time.perf_counter() - started
    if config.json:
        shown = json_format.MessageToDict(response, preserving_proto_field_name=True)
        print(json.dumps({**shown, "seconds": seconds}, indent=2, ensure_ascii=False))
    else:
        _print_answers(response, seconds)
    return 0


def _read_prompt(config: GenerateConfig) -> str:
    """Return the prompt of the command line or of stdin. UsageError for bytes that are no text."""
    try:
        # echo and editors end what they write with a newline that nobody means as part of a message.
        prompt = sys.stdin.read().removesuffix("\n") if config.prompt is None else config.prompt
        flags = (*config.stopping.stop_strings, *config.sampling.bad_words)
        for text in (prompt, config.system or "", *flags):
            text.encode()
    except UnicodeError as error:
        raise UsageError(f"the prompt or a flag is not UTF-8: {error}") from error
    return prompt


def client_options(config: GenerateConfig) -> dict[str, object]:
    """Return the flags that are fields of a request, by name; what is unset stays unset."""
    options = {
        **asdict(config.sampling),
        **asdict(config.stopping),
        "logit_bias": dict(config.sampling.logit_bias),
        "n": config.n,
        "num_logprobs": config.num_logprobs,
        "enabled": config.model.speculation != "off",
        "max_draft_tokens": config.max_draft_tokens,
    }
    if config.server is not None and config.model.model != DEFAULT_MODEL:
        options["model"] = config.model.model
    return {name: value for name, value in options.items() if value is not None}


def client_prompt(config: GenerateConfig, text: str) -> Prompt:
    """Return the prompt as text or as a chat."""
    if config.raw:
        return text
    system = [] if config.system is None else [{"role": "system", "content": config.system}]
    return [*system, {"role": "user", "content": text}]


@contextmanager
def _own_server(config: GenerateConfig) -> Iterator[str]:
    with progress_bars(Console(stderr=True)) as report:
        assembled = assemble(config.model, report)
    with local_server(assembled) as address:
        yield address


def _receive(config: GenerateConfig, client: Client, prompt: str) -> pb.GenerateResponse:
    """Collect the answer; a single one for people to read is printed as it comes."""
    events = []
    for event in client.stream(
        client_prompt(config, prompt),
        timeout_seconds=config.timeout_seconds,
        **client_options(config),
    ):
        events.append(event)
        if config.n == 1 and not config.json:
            print(event.delta.text, end="", flush=True)
    return to_response(events)


def _print_answers(response: pb.GenerateResponse, seconds: float) -> None:
    """Print what was not streamed, then what it took."""
    is_streamed = len(response.answers) == 1
    for answer in response.answers:
        print("" if is_streamed else f"--- answer {answer.index} ---\n{answer.text}")
        stats, reason = answer.speculation, pb.FinishReason.Name(answer.finish_reason)
        print(
            f"num_new_tokens={answer.usage.num_new_tokens} "
            f"tau={tau(stats.num_emitted, stats.num_steps):.2f} "
            f"num_drafted={stats.num_drafted} num_accepted={stats.num_accepted} "
            f"finish_reason={reason.removeprefix('FINISH_REASON_').lower()}",
            file=sys.stderr,
        )
    num_tokens = sum(answer.usage.num_new_tokens for answer in response.answers)
    print(
        f"seconds={seconds:.2f} tokens_per_second={num_tokens / seconds:.1f} seed={response.seed}",
        file=sys.stderr,
    )
