"""One of the n answers of a request: engine outputs in, events of the stream out."""

import time
from collections import deque
from collections.abc import Iterator
from dataclasses import replace

from headway.engine.request import Finish, FinishReason, Output, TokenLogprobs
from headway.protos import text_generation_pb2 as pb
from headway.server import convert
from headway.server.convert import Generation
from headway.server.detokenizer import Detokenizer, Piece, TokenBytes

MAX_DELTA_TOKENS = 256
"""Most tokens of one message, so that what a slow client has not read yet never makes a huge one."""


class Answer:
    """Grows with the engine's outputs and gives out only what is settled.

    A slow client costs no more than its answer's tokens: they wait here and leave together.
    """

    def __init__(self, generation: Generation, index: int, token_bytes: TokenBytes) -> None:
        request = generation.requests[index]
        self.index = index
        self.request_id = request.request_id
        self.is_released = False
        """Whether the Finished event has been given out."""
        self.detokenize_seconds = 0.0
        """Time spent on turning tokens into text so far."""
        self._num_prompt_tokens = len(request.prompt_ids)
        self._num_cached_tokens = 0
        self._include_stop = generation.include_stop
        self._text = Detokenizer(
            token_bytes,
            request.prompt_ids,
            stop_strings=generation.stop_strings,
            include_stop=generation.include_stop,
            skip_special_tokens=generation.skip_special_tokens,
            min_new_tokens=request.stopping.min_new_tokens,
        )
        self._token_ids: deque[int] = deque()  # read, not given out
        self._logprobs: deque[TokenLogprobs] = deque()
        self._prompt_logprobs: list[TokenLogprobs] = []
        self._pieces: list[Piece] = []
        self._finish: Finish | None = None

    @property
    def found_stop(self) -> bool:
        """Whether a stop string ended the text, so that the engine need not go on."""
        return self._text.stop_string is not None

    @property
    def num_new_tokens(self) -> int:
        """Tokens of the answer so far; those after a stop string do not count."""
        return self._text.num_tokens

    @property
    def finish(self) -> Finish | None:
        """How the answer ended. A stop string outranks what the engine ended for in the same step."""
        if self._finish is None or not self.found_stop:
            return self._finish
        return replace(self._finish, reason=FinishReason.STOP_STRING, stop_token_id=None)

    def read(self, output: Output) -> None:
        """Detokenise what one step did and keep it until it is released."""
        self._num_cached_tokens = max(self._num_cached_tokens, output.num_cached_tokens)
        self._prompt_logprobs += output.prompt_logprobs
        if not self.found_stop:
            self._token_ids.extend(output.token_ids)
            self._logprobs.extend(output.logprobs)
        started = time.perf_counter()
        self._detokenize(output.token_ids, output.finish)
        self.detokenize_seconds += time.perf_counter() - started
        self._finish = output.finish

    def release(self) -> list[pb.GenerateStreamResponse]:
        """Return what has been settled since the last release, in as few messages as fit.

        A list and no generator: outputs that arrive while the client reads the messages belong to
        the next release.
        """
        events = [
            convert.prompt_logprobs(self._prompt_logprobs[start : start + MAX_DELTA_TOKENS])
            for start in range(0, len(self._prompt_logprobs), MAX_DELTA_TOKENS)
        ]
        self._prompt_logprobs.clear()
        events += self._deltas()
        if self.finish is not None and not self.is_released:
            self.is_released = True
            usage = self._usage()
            events.append(convert.finished(self.index, self.finish, self._text.stop_string, usage))
        return events

    def _detokenize(self, token_ids: tuple[int, ...], finish: Finish | None) -> None:
        num_shown = len(token_ids) - self._num_hidden(finish)
        for start in range(0, num_shown, MAX_DELTA_TOKENS):
            end = min(start + MAX_DELTA_TOKENS, num_shown)
            self._pieces.append(self._text.push(token_ids[start:end]))
        if finish is not None:
            self._pieces.append(self._text.push(token_ids[num_shown:], hidden=True))
            self._pieces.append(self._text.finish())

    def _num_hidden(self, finish: Finish | None) -> int:
        """Count the tokens at the end that ended the answer and are not part of its text."""
        ends = finish is not None and finish.reason in (FinishReason.EOS, FinishReason.STOP_TOKEN)
        return 1 if ends and not self._include_stop else 0

    def _deltas(self) -> Iterator[pb.GenerateStreamResponse]:
        """Merge pieces into messages of at most MAX_DELTA_TOKENS tokens, or one piece."""
        text, num_tokens = "", 0
        for piece in self._pieces:
            if text and num_tokens + piece.num_tokens > MAX_DELTA_TOKENS:
                yield self._delta(text, num_tokens)
                text, num_tokens = "", 0
            text += piece.text
            num_tokens += piece.num_tokens
        self._pieces.clear()
        if text or num_tokens:
            yield self._delta(text, num_tokens)

    def _delta(self, text: str, num_tokens: int) -> pb.GenerateStreamResponse:
        token_ids = [self._token_ids.popleft() for _ in range(num_tokens)]
        logprobs = [self._logprobs.popleft() for _ in range(min(num_tokens, len(self._logprobs)))]
        return pb.GenerateStreamResponse(
            delta=pb.Delta(
                index=self.index,
                text=text,
                token_ids=token_ids,
                logprobs=convert.token_logprobs(logprobs),
            )
        )

    def _usage(self) -> pb.Usage:
        return pb.Usage(
            num_prompt_tokens=self._num_prompt_tokens,
            num_cached_tokens=self._num_cached_tokens,
            num_new_tokens=self.num_new_tokens,
        )
