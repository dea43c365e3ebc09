"""The handlers of headway.v1.TextGeneration: read the request, submit it, hand on what comes."""

import asyncio
import time
from collections.abc import AsyncGenerator, AsyncIterator, Callable
from contextlib import aclosing
from typing import Any, TypeVar

from headway.engine.errors import EngineStopped, InvalidRequest
from headway.protos import text_generation_pb2 as pb
from headway.protos import text_generation_pb2_grpc as pb_grpc
from headway.server import convert, prompt
from headway.server.config import ServeConfig
from headway.server.convert import GenerateMessage, Generation, PromptMessage
from headway.server.detokenizer import TokenBytes
from headway.server.engine_door import ServedModel
from headway.server.errors import DeadlinePassed
from headway.server.live import LiveRequests
from headway.server.metrics import Metrics
from headway.server.tokenizer_thread import TokenizerThread

T = TypeVar("T")


class TextGeneration(pb_grpc.TextGenerationServicer):
    """Serves from the moment it is opened with a model; before, calls end with EngineStopped."""

    def __init__(self, config: ServeConfig, metrics: Metrics) -> None:
        self._config = config
        self._metrics = metrics
        self._model: ServedModel | None = None
        self._live: LiveRequests | None = None
        self._tokenizing = TokenizerThread()

    def open(self, model: ServedModel) -> LiveRequests:
        """Begin to serve a model and return its live requests."""
        self._model = model
        self._live = LiveRequests(model.engine, TokenBytes(model.tokenizer), self._metrics)
        return self._live

    def close(self) -> None:
        """Let the tokenizer's thread end."""
        self._tokenizing.shutdown()

    async def Generate(self, request: pb.GenerateRequest, context: Any) -> pb.GenerateResponse:
        generation = await self._read_generate(request, context)
        events = [event async for event in self._events(generation, context)]
        return convert.to_response(events)

    async def GenerateStream(
        self, request: pb.GenerateStreamRequest, context: Any
    ) -> AsyncIterator[pb.GenerateStreamResponse]:
        generation = await self._read_generate(request, context)
        async with aclosing(self._events(generation, context)) as events:
            async for event in events:
                yield event

    async def Score(self, request: pb.ScoreRequest, context: Any) -> pb.ScoreResponse:
        convert.check_score(request, self._config.max_prompt_bytes)
        prompt_ids = await self._read_prompt(request)
        generation = convert.to_score(request, prompt_ids, self._deadline(context))
        events = [event async for event in self._events(generation, context)]
        logprobs = convert.to_response(events).prompt_logprobs
        return pb.ScoreResponse(
            request_id=request.request_id, token_ids=prompt_ids, logprobs=logprobs
        )

    async def Tokenize(self, request: pb.TokenizeRequest, context: Any) -> pb.TokenizeResponse:
        self._check(request)
        return pb.TokenizeResponse(token_ids=await self._read_prompt(request))

    async def CountTokens(
        self, request: pb.CountTokensRequest, context: Any
    ) -> pb.CountTokensResponse:
        self._check(request)
        return pb.CountTokensResponse(num_tokens=len(await self._read_prompt(request)))

    async def Detokenize(
        self, request: pb.DetokenizeRequest, context: Any
    ) -> pb.DetokenizeResponse:
        model, _ = self._served(request.model)
        convert.check_detokenize(request, model.engine.limits)
        text = await self._in_tokenizer(
            lambda: model.tokenizer.decode(
                list(request.token_ids),
                skip_special_tokens=request.skip_special_tokens,
                clean_up_tokenization_spaces=False,
            ),
            self._metrics.detokenized,
        )
        return pb.DetokenizeResponse(text=text)

    async def Abort(self, request: pb.AbortRequest, context: Any) -> pb.AbortResponse:
        convert.check_abort(request)
        _, live = self._served("")
        for request_id in request.request_ids:
            live.abort(request_id)
        return pb.AbortResponse()

    async def GetModelInfo(
        self, request: pb.GetModelInfoRequest, context: Any
    ) -> pb.GetModelInfoResponse:
        model, _ = self._served("")
        limits = model.engine.limits
        return pb.GetModelInfoResponse(
            model=model.engine.model_name,
            vocab_size=limits.vocab_size,
            max_context_tokens=limits.max_context_tokens,
            max_cache_tokens=limits.max_cache_tokens,
            default_max_new_tokens=self._config.default_max_new_tokens,
        )

    async def _events(
        self, generation: Generation, context: Any
    ) -> AsyncGenerator[pb.GenerateStreamResponse, None]:
        """Submit a generation and yield its events; leaving early aborts it."""
        model, live = self._served("")
        with live.submitted(generation) as stream:
            yield convert.started(generation, model.engine.model_name)
            async for event in stream.events():
                yield event
        if stream.is_late and context.time_remaining() is not None:
            raise DeadlinePassed(
                "the deadline of the call has passed; allow more time or ask for less"
            )

    async def _read_generate(self, request: GenerateMessage, context: Any) -> Generation:
        """Check the request, tokenise its prompt and put it into the engine's words."""
        convert.check_generate(request, self._config.max_prompt_bytes)
        deadline = self._deadline(context)
        prompt_ids = await self._read_prompt(request)
        words = tuple(request.sampling.bad_words)
        return convert.to_generation(
            request,
            prompt_ids,
            await self._read_bad_words(words) if words else (),
            default_max_new_tokens=self._config.default_max_new_tokens,
            deadline=deadline,
        )

    async def _read_prompt(self, request: PromptMessage) -> tuple[int, ...]:
        model, _ = self._served(request.model)
        return await self._in_tokenizer(
            lambda: prompt.read_prompt(model.tokenizer, request), self._metrics.tokenized
        )

    async def _read_bad_words(self, words: tuple[str, ...]) -> tuple[tuple[int, ...], ...]:
        model, _ = self._served("")
        return await self._in_tokenizer(
            lambda: prompt.read_bad_words(model.tokenizer, words), self._metrics.tokenized
        )

    async def _in_tokenizer(self, work: Callable[[], T], observe: Callable[[float], None]) -> T:
        """Run work on the tokenizer's thread; `observe` is told how long it took with its wait."""
        started = time.perf_counter()
        result = await asyncio.get_running_loop().run_in_executor(self._tokenizing, work)
        observe(time.perf_counter() - started)
        return result

    def _check(self, request: pb.TokenizeRequest | pb.CountTokensRequest) -> None:
        if found := convert.check_prompt(request, self._config.max_prompt_bytes):
            raise InvalidRequest(*found)

    def _served(self, model_name: str) -> tuple[ServedModel, LiveRequests]:
        """Return the model if it is loaded and the client means it."""
        if self._model is None or self._live is None:
            raise EngineStopped("the model is still loading; try again when health says SERVING")
        convert.check_model(model_name, self._model.engine.model_name)
        return self._model, self._live

    def _deadline(self, context: Any) -> float | None:
        """Return the call's deadline on the engine's clock, or the server's own when it has none."""
        remaining = context.time_remaining()
        if remaining is None and self._config.max_request_seconds:
            remaining = self._config.max_request_seconds
        return None if remaining is None else time.monotonic() + float(remaining)
