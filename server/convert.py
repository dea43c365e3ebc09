"""Protobuf messages to engine requests and back; every limit of the wire is checked here.

Token laws (ranges, ids, the context) are engine/validation.py's; its field names become proto paths here.
"""

import hashlib
import secrets
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from typing import Any, Literal, TypeAlias, get_args

from google.protobuf.message import Message

from headway.engine.errors import InvalidRequest, UnknownModel, Violation
from headway.engine.request import (
    Finish,
    Request,
    SamplingParams,
    SpeculationParams,
    StoppingParams,
    TokenLogprobs,
)
from headway.engine.validation import Limits
from headway.protos import text_generation_pb2 as pb

MAX_ANSWERS = 16
MAX_REQUEST_ID_BYTES = 128
MAX_STOP_STRINGS = 64
MAX_STOP_STRING_BYTES = 1024
MAX_BAD_WORDS = 128  # each is two runs of tokens for the engine
MAX_BAD_WORD_BYTES = 256
MAX_ABORT_IDS = 1024
MAX_PART_BYTES = 256 * 1024
"""Of `sampling` and of `stopping`: beyond what their limits allow, and counted in no time."""

Api = Literal["generate", "generate_stream", "score"]
"""The methods that give the engine work, by the names that metrics use."""
APIS: tuple[Api, ...] = get_args(Api)

GenerateMessage: TypeAlias = pb.GenerateRequest | pb.GenerateStreamRequest
PromptMessage: TypeAlias = (
    GenerateMessage | pb.ScoreRequest | pb.TokenizeRequest | pb.CountTokensRequest
)


@dataclass(frozen=True, slots=True)
class Generation:
    """One client's request in the engine's words: a Request for each of its n answers."""

    api: Api
    request_id: str
    requests: tuple[Request, ...]
    stop_strings: tuple[str, ...] = ()
    include_stop: bool = False
    skip_special_tokens: bool = True

    @property
    def seed(self) -> int:
        return self.requests[0].sampling.seed

    @property
    def prompt_ids(self) -> tuple[int, ...]:
        return self.requests[0].prompt_ids


def check_model(given: str, served: str) -> None:
    """Raise UnknownModel unless the client names the served model, or none."""
    if given not in ("", served):
        raise UnknownModel(
            f"model {given[:128]!r} is not served here; this server serves {served!r}. Send that "
            "name or none."
        )


def check_prompt(request: PromptMessage, max_prompt_bytes: int) -> list[Violation]:
    """List what is wrong with the prompt's form; its tokens are not known yet."""
    kind = request.WhichOneof("prompt")
    if kind is None:
        allowed = ", ".join(f.name for f in request.DESCRIPTOR.oneofs_by_name["prompt"].fields)
        return [Violation("prompt", f"is missing; set one of {allowed}.")]
    if kind == "chat":
        return _check_chat(request.chat, max_prompt_bytes)
    if kind == "text":
        return _check_bytes("text", len(request.text.encode()), max_prompt_bytes)
    return _check_bytes("token_ids", _num_id_bytes(request), max_prompt_bytes)


def check_generate(request: GenerateMessage, max_prompt_bytes: int) -> None:
    """Raise InvalidRequest with every size that is out of bounds, before anything is tokenised."""
    # First, alone: to walk through millions of items would hold up every other call.
    parts = {"sampling": request.sampling, "stopping": request.stopping}
    for name, part in parts.items():
        if found := _check_bytes(name, part.ByteSize(), MAX_PART_BYTES):
            raise InvalidRequest(*found)
    stops, words = request.stopping.stop_strings, request.sampling.bad_words
    found = check_prompt(request, max_prompt_bytes)
    found += _check_bytes("request_id", len(request.request_id.encode()), MAX_REQUEST_ID_BYTES)
    found += _check_strings("stopping.stop_strings", stops, MAX_STOP_STRINGS, MAX_STOP_STRING_BYTES)
    found += _check_strings("sampling.bad_words", words, MAX_BAD_WORDS, MAX_BAD_WORD_BYTES)
    if request.HasField("n") and not 1 <= request.n <= MAX_ANSWERS:
        found.append(Violation("n", f"is {request.n}; 1 to {MAX_ANSWERS} are allowed."))
    if found:
        raise InvalidRequest(*found)


def check_score(request: pb.ScoreRequest, max_prompt_bytes: int) -> None:
    """Raise InvalidRequest with every size of a ScoreRequest that is out of bounds."""
    found = check_prompt(request, max_prompt_bytes)
    found += _check_bytes("request_id", len(request.request_id.encode()), MAX_REQUEST_ID_BYTES)
    if found:
        raise InvalidRequest(*found)


def check_abort(request: pb.AbortRequest) -> None:
    """Raise InvalidRequest when too many ids come at once."""
    if len(request.request_ids) > MAX_ABORT_IDS:
        raise InvalidRequest(
            Violation(
                "request_ids",
                f"has {len(request.request_ids)} ids; at most {MAX_ABORT_IDS}. Send several calls.",
            )
        )


def check_detokenize(request: pb.DetokenizeRequest, limits: Limits) -> None:
    """Raise InvalidRequest unless the ids are of the vocabulary and no more than a context holds."""
    num_ids, most, highest = (
        len(request.token_ids),
        limits.max_context_tokens,
        limits.vocab_size - 1,
    )
    if num_ids > most:
        message = f"has {num_ids:,} ids; at most {most:,} (max_context_tokens). Send several calls."
        raise InvalidRequest(Violation("token_ids", message))
    for index, token_id in enumerate(request.token_ids):
        if not 0 <= token_id <= highest:
            message = f"is {token_id}; 0 to {highest:,} are allowed."
            raise InvalidRequest(Violation(f"token_ids[{index}]", message))


def to_generation(
    request: GenerateMessage,
    prompt_ids: tuple[int, ...],
    bad_words: tuple[tuple[int, ...], ...],
    *,
    default_max_new_tokens: int,
    deadline: float | None,
) -> Generation:
    """Build what the engine is asked for; sizes were checked and the prompt tokenised before."""
    sampling = request.sampling
    seed = sampling.seed if sampling.HasField("seed") else secrets.randbits(64)
    laws = {
        "logit_bias": dict(sampling.logit_bias),
        "allowed_token_ids": tuple(sampling.allowed_token_ids),
        "bad_words": bad_words,
        **_given(sampling, *_SAMPLING_NUMBERS),
    }
    stopping = StoppingParams(
        **{
            "max_new_tokens": default_max_new_tokens,
            "stop_token_ids": tuple(request.stopping.stop_token_ids),
            **_given(request.stopping, "max_new_tokens", "min_new_tokens", "ignore_eos"),
        }
    )
    shared = {
        "prompt_ids": prompt_ids,
        "stopping": stopping,
        "speculation": SpeculationParams(
            **_given(request.speculation, "enabled", "max_draft_tokens")
        ),
        "deadline": deadline,
        "cache_salt": request.cache_salt,
        **_given(request, "priority", "use_prefix_cache"),
        **_given(request.response, "num_logprobs"),
    }
    first_only = _given(request.response, "num_prompt_logprobs")  # the prompt is the same for all
    return Generation(
        api="generate_stream" if isinstance(request, pb.GenerateStreamRequest) else "generate",
        request_id=request.request_id,
        requests=tuple(
            Request(
                request_id=engine_id(request.request_id, index),
                sampling=SamplingParams(seed=derived_seed(seed, index), **laws),
                **shared,
                **(first_only if index == 0 else {}),
            )
            for index in range(request.n if request.HasField("n") else 1)
        ),
        stop_strings=tuple(request.stopping.stop_strings),
        include_stop=request.stopping.include_stop,
        skip_special_tokens=_given(request.response, "skip_special_tokens").get(
            "skip_special_tokens", True
        ),
    )


def to_score(
    request: pb.ScoreRequest, prompt_ids: tuple[int, ...], deadline: float | None
) -> Generation:
    """Build a request that computes the prompt's log probabilities and generates nothing."""
    scored = Request(
        request_id=engine_id(request.request_id, 0),
        prompt_ids=prompt_ids,
        stopping=StoppingParams(max_new_tokens=0),
        num_prompt_logprobs=request.num_prompt_logprobs,
        deadline=deadline,
        **_given(request, "priority"),
    )
    return Generation("score", request.request_id, (scored,))


def engine_id(request_id: str, index: int) -> str:
    """Return the engine's name for answer `index` of a client's request."""
    return f"{request_id}#{index}"


def derived_seed(seed: int, index: int) -> int:
    """Return the seed of answer `index`: the client's own for the first, 64 hashed bits for others."""
    if index == 0:
        return seed
    digest = hashlib.sha256(f"{seed}:{index}".encode()).digest()
    return int.from_bytes(digest[:8], "little")


def to_client_fields(error: InvalidRequest, request: Message) -> InvalidRequest:
    """Rename the engine's fields to the paths that the client wrote them at.

    Example: "temperature" of a GenerateRequest is "sampling.temperature"; "prompt" is "text" when the
    prompt came as text.
    """
    paths = field_paths(request)
    if "prompt" in request.DESCRIPTOR.oneofs_by_name:
        paths["prompt"] = request.WhichOneof("prompt") or "prompt"
    renamed = []
    for violation in error.violations:
        name, bracket, rest = violation.field.partition("[")
        renamed.append(Violation(paths.get(name, name) + bracket + rest, violation.message))
    return InvalidRequest(*renamed)


def started(generation: Generation, model: str) -> pb.GenerateStreamResponse:
    """Return the first event of a stream."""
    return pb.GenerateStreamResponse(
        started=pb.Started(
            request_id=generation.request_id,
            model=model,
            seed=generation.seed,
            num_prompt_tokens=len(generation.prompt_ids),
        )
    )


def prompt_logprobs(items: Iterable[TokenLogprobs]) -> pb.GenerateStreamResponse:
    """Return a piece of the prompt's log probabilities."""
    return pb.GenerateStreamResponse(
        prompt_logprobs=pb.PromptLogprobs(logprobs=token_logprobs(items))
    )


def finished(
    index: int, finish: Finish, stop_string: str | None, usage: pb.Usage
) -> pb.GenerateStreamResponse:
    """Return the last event of one answer."""
    stats = finish.speculation
    event = pb.Finished(
        index=index,
        finish_reason=pb.FinishReason.Value(f"FINISH_REASON_{finish.reason.name}"),
        usage=usage,
        speculation=pb.SpeculationStats(
            num_steps=stats.num_steps,
            num_drafted=stats.num_drafted,
            num_accepted=stats.num_accepted,
            num_emitted=stats.num_emitted,
            accepted_per_position=stats.accepted_per_position,
        ),
        message=finish.message,
    )
    if stop_string is not None:
        event.stop_string = stop_string
    elif finish.stop_token_id is not None:
        event.stop_token_id = finish.stop_token_id
    return pb.GenerateStreamResponse(finished=event)


def token_logprobs(items: Iterable[TokenLogprobs]) -> list[pb.TokenLogprobs]:
    """Return the engine's log probabilities as messages."""
    return [
        pb.TokenLogprobs(
            token_id=item.token_id,
            logprob=item.logprob,
            rank=item.rank,
            top=[pb.TopLogprob(token_id=i, logprob=p) for i, p in item.top],
        )
        for item in items
    ]


def to_response(events: Sequence[pb.GenerateStreamResponse]) -> pb.GenerateResponse:
    """Put the events of a whole stream together, one answer for each index."""
    response = pb.GenerateResponse()
    answers: dict[int, pb.Answer] = {}
    texts: dict[int, list[str]] = {}
    for event in events:
        match event.WhichOneof("event"):
            case "started":
                start = event.started
                response.request_id, response.model = start.request_id, start.model
                response.seed = start.seed
            case "prompt_logprobs":
                response.prompt_logprobs.extend(event.prompt_logprobs.logprobs)
            case "delta":
                delta = event.delta
                answer = answers.setdefault(delta.index, pb.Answer(index=delta.index))
                texts.setdefault(delta.index, []).append(delta.text)
                answer.token_ids.extend(delta.token_ids)
                answer.logprobs.extend(delta.logprobs)
            case "finished":
                index = event.finished.index
                answer = answers.setdefault(index, pb.Answer(index=index))
                _copy_finish(event.finished, answer)
    for index, parts in texts.items():
        answers[index].text = "".join(parts)
    response.answers.extend(answers[index] for index in sorted(answers))
    return response


def _copy_finish(source: pb.Finished, answer: pb.Answer) -> None:
    answer.finish_reason = source.finish_reason
    answer.usage.CopyFrom(source.usage)
    answer.speculation.CopyFrom(source.speculation)
    if source.HasField("stop_string"):
        answer.stop_string = source.stop_string
    elif source.HasField("stop_token_id"):
        answer.stop_token_id = source.stop_token_id


_SAMPLING_NUMBERS = (
    "repetition_penalty",
    "presence_penalty",
    "frequency_penalty",
    "temperature",
    "top_k",
    "top_p",
    "min_p",
    "typical_p",
)


def _given(message: Any, *names: str) -> dict[str, Any]:
    """Return the optional fields that the client set, by name; the rest keep the engine's defaults."""
    return {name: getattr(message, name) for name in names if message.HasField(name)}


def field_paths(request: Message) -> dict[str, str]:
    """Return where a client writes each field: "temperature" is at "sampling.temperature"."""
    paths = {}
    for field in request.DESCRIPTOR.fields:
        paths[field.name] = field.name
        if field.message_type is not None and field.containing_oneof is None:
            paths |= {sub.name: f"{field.name}.{sub.name}" for sub in field.message_type.fields}
    return paths


def _check_chat(chat: pb.Chat, max_bytes: int) -> list[Violation]:
    # First, alone: to walk through millions of messages would hold up every other call.
    if found := _check_bytes("chat", chat.ByteSize(), max_bytes):
        return found
    if not chat.messages:
        return [Violation("chat.messages", "is empty; a chat has at least one message.")]
    nameless = next((i for i, message in enumerate(chat.messages) if not message.role), None)
    if nameless is not None:
        field = f"chat.messages[{nameless}].role"
        found.append(Violation(field, 'is empty; set "user", "assistant" or "system".'))
    if chat.add_generation_prompt and chat.continue_final_message:
        found.append(
            Violation(
                "chat.continue_final_message",
                "excludes add_generation_prompt: a message is continued or answered. Set one.",
            )
        )
    return found


def _check_bytes(field: str, num_bytes: int, limit: int) -> list[Violation]:
    if num_bytes <= limit:
        return []
    return [Violation(field, f"has {num_bytes:,} bytes; at most {limit:,} are read. Shorten it.")]


def _check_strings(
    field: str, values: Sequence[str], max_items: int, max_bytes: int
) -> list[Violation]:
    if len(values) > max_items:
        return [Violation(field, f"has {len(values):,} strings; at most {max_items}. Send fewer.")]
    found = []
    for index, value in enumerate(values):
        if not value:
            found.append(Violation(f"{field}[{index}]", "is empty; leave it out."))
        found += _check_bytes(f"{field}[{index}]", len(value.encode()), max_bytes)
    return found


def _num_id_bytes(request: PromptMessage) -> int:
    """Return the size of a prompt that is neither text nor chat; only some messages have that kind."""
    if isinstance(request, pb.TokenizeRequest | pb.CountTokensRequest):
        return 0
    return request.token_ids.ByteSize()
