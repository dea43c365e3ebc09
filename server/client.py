"""A small Python client: options by their plain names, errors as Headway's own classes."""

from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from difflib import get_close_matches
from types import TracebackType
from typing import Any, Self

import grpc
from google.protobuf.message import Message

from headway.protos import text_generation_pb2 as pb
from headway.protos import text_generation_pb2_grpc as pb_grpc
from headway.server.convert import field_paths
from headway.server.errors import from_rpc_error

Prompt = str | Sequence[int] | Sequence[Mapping[str, str]]
"""Text, token ids, or a chat as messages with "role" and "content"."""

MAX_MESSAGE_BYTES = 64 * 2**20
"""gRPC clients read 4 MiB by default, less than the log probabilities of a long prompt."""


class Client:
    """A connection to one server.

    Every call takes `timeout_seconds`, its deadline. Calls raise InvalidRequest, UnknownModel, Overloaded or
    EngineStopped as the server did, and grpc.RpcError for what gRPC itself raises, such as a
    deadline that has passed or a server that cannot be reached.
    """

    def __init__(
        self, target: str = "127.0.0.1:50051", *, max_message_bytes: int = MAX_MESSAGE_BYTES
    ) -> None:
        self._channel = grpc.insecure_channel(
            target,
            options=[
                ("grpc.max_receive_message_length", max_message_bytes),
                ("grpc.keepalive_time_ms", 30_000),
                ("grpc.enable_http_proxy", int(not is_loopback(target))),
            ],
        )
        self._stub = pb_grpc.TextGenerationStub(self._channel)

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        traceback: TracebackType | None,
    ) -> None:
        self.close()

    def close(self) -> None:
        """Close the connection; calls that run are cancelled."""
        self._channel.close()

    def generate(
        self, prompt: Prompt, *, timeout_seconds: float | None = None, **options: object
    ) -> pb.GenerateResponse:
        """Return the whole answer. `options` are fields of GenerateRequest and its parts by name.

        Example: generate("Once", max_new_tokens=16, temperature=0.7, stop_strings=["."], n=2).
        """
        request = pb.GenerateRequest()
        _fill(request, prompt, options)
        with _translated():
            return self._stub.Generate(request, timeout=timeout_seconds)

    def stream(
        self, prompt: Prompt, *, timeout_seconds: float | None = None, **options: object
    ) -> Iterator[pb.GenerateStreamResponse]:
        """Yield the answer's events as they come; leaving the loop cancels the request."""
        request = pb.GenerateStreamRequest()
        _fill(request, prompt, options)
        call = self._stub.GenerateStream(request, timeout=timeout_seconds)
        try:
            with _translated():
                yield from call
        finally:
            call.cancel()

    def tokenize(
        self, prompt: str | Sequence[Mapping[str, str]], *, timeout_seconds: float | None = None
    ) -> list[int]:
        """Return the token ids of a text or a chat, as `generate` would read it."""
        request = pb.TokenizeRequest()
        _fill(request, prompt, {})
        with _translated():
            return list(self._stub.Tokenize(request, timeout=timeout_seconds).token_ids)

    def count_tokens(
        self, prompt: str | Sequence[Mapping[str, str]], *, timeout_seconds: float | None = None
    ) -> int:
        """Return how many tokens a text or a chat takes."""
        request = pb.CountTokensRequest()
        _fill(request, prompt, {})
        with _translated():
            return self._stub.CountTokens(request, timeout=timeout_seconds).num_tokens

    def detokenize(self, token_ids: Sequence[int], *, timeout_seconds: float | None = None) -> str:
        """Return the text of token ids, marks such as <|im_end|> included."""
        request = pb.DetokenizeRequest(token_ids=token_ids)
        with _translated():
            return self._stub.Detokenize(request, timeout=timeout_seconds).text

    def score(
        self,
        prompt: Prompt,
        *,
        num_prompt_logprobs: int = 0,
        timeout_seconds: float | None = None,
    ) -> pb.ScoreResponse:
        """Return the log probability of each token of a prompt but the first."""
        request = pb.ScoreRequest()
        _fill(request, prompt, {"num_prompt_logprobs": num_prompt_logprobs})
        with _translated():
            return self._stub.Score(request, timeout=timeout_seconds)

    def abort(self, *request_ids: str, timeout_seconds: float | None = None) -> None:
        """End requests; unknown ids are no error."""
        with _translated():
            self._stub.Abort(pb.AbortRequest(request_ids=request_ids), timeout=timeout_seconds)

    def model_info(self, *, timeout_seconds: float | None = None) -> pb.GetModelInfoResponse:
        """Return the model's name and limits."""
        with _translated():
            return self._stub.GetModelInfo(pb.GetModelInfoRequest(), timeout=timeout_seconds)


def is_loopback(target: str) -> bool:
    """Whether a target is this machine, which no proxy of the environment can reach."""
    return target.startswith(("127.", "localhost", "[::1]"))


def _fill(request: Any, prompt: Prompt, options: Mapping[str, object]) -> None:
    if isinstance(prompt, str):
        request.text = prompt
    else:
        kind = request.chat if prompt and isinstance(prompt[0], Mapping) else request.token_ids
        kind.SetInParent()  # an empty prompt is sent as one, for the server to refuse
        for item in prompt:
            if isinstance(item, Mapping):
                kind.messages.add(**item)
            else:
                kind.ids.append(item)
    paths = field_paths(request)
    for name, value in options.items():
        if name not in paths:
            near = get_close_matches(name, paths)
            raise TypeError(f"no option {name!r}; near ones: {', '.join(near) or 'none'}")
        _set(request, paths[name], value)


def _set(request: Message, path: str, value: object) -> None:
    section, _, name = path.rpartition(".")
    target: Any = getattr(request, section) if section else request
    if isinstance(value, Mapping):
        getattr(target, name).update(value)
    elif isinstance(value, Sequence) and not isinstance(value, str):
        getattr(target, name).extend(value)
    else:
        setattr(target, name, value)


@contextmanager
def _translated() -> Iterator[None]:
    try:
        yield
    except grpc.RpcError as error:
        ours = from_rpc_error(error)
        if ours is error:
            raise
        raise ours from error
