"""The answers to one client's request, between the engine that makes them and the call that reads."""

import asyncio
from collections.abc import AsyncIterator

from headway.engine.request import FinishReason, Output
from headway.protos import text_generation_pb2 as pb
from headway.server.answer import Answer
from headway.server.convert import Generation
from headway.server.detokenizer import TokenBytes
from headway.server.errors import AnswerFailed


class Stream:
    """Lives on the event loop: LiveRequests puts outputs in, one call takes events out."""

    def __init__(self, generation: Generation, token_bytes: TokenBytes) -> None:
        self.generation = generation
        self.num_unfinished = 0
        """Answers that the engine works on."""
        self._answers = {
            request.request_id: Answer(generation, index, token_bytes)
            for index, request in enumerate(generation.requests)
        }
        self._news = asyncio.Event()
        self._failure: Exception | None = None

    @property
    def is_late(self) -> bool:
        """Whether a deadline ended one of the answers."""
        finishes = [answer.finish for answer in self._answers.values()]
        return any(f is not None and f.reason is FinishReason.DEADLINE for f in finishes)

    def answer(self, request_id: str) -> Answer:
        """The answer that the engine knows by this id."""
        return self._answers[request_id]

    def read(self, output: Output) -> Answer:
        """Add one output to its answer and return that answer."""
        answer = self._answers[output.request_id]
        answer.read(output)
        self._news.set()
        return answer

    def fail(self, error: Exception) -> None:
        """Make the call end with an error once it has read what is there."""
        self._failure = self._failure or error
        self._news.set()

    async def events(self) -> AsyncIterator[pb.GenerateStreamResponse]:
        """Yield events until every answer has finished, or raise what ended the stream early.

        An answer that failed has its Finished event and then raises: it is never cut silently.
        """
        while not all(answer.is_released for answer in self._answers.values()):
            await self._news.wait()
            self._news.clear()
            for answer in self._answers.values():
                for event in answer.release():
                    yield event
            if self._failure is not None:
                raise self._failure
        for answer in self._answers.values():
            if answer.finish is not None and answer.finish.reason is FinishReason.ERROR:
                raise AnswerFailed(answer.finish.message)
