"""An engine that plays a script on a thread of its own, and a tokenizer with a byte alphabet."""

import threading
import time
from collections.abc import Callable
from functools import cache
from typing import Any

from tokenizers import Tokenizer, decoders, models, pre_tokenizers
from transformers import PreTrainedTokenizerFast

from headway.engine.errors import EngineStopped
from headway.engine.request import (
    Finish,
    FinishReason,
    Output,
    Request,
    SpeculationStats,
    Timing,
    TokenLogprobs,
)
from headway.engine.stats import NO_DRAFTER, EngineCounters, EngineInfo, EngineSnapshot
from headway.engine.validation import Limits
from headway.server.engine_door import EngineDoor, ServedModel

EOS_ID = 260
TEMPLATE = (
    "{% if messages[0].role == 'system' %}{{ raise_exception('System role not supported') }}"
    "{% endif %}{% for m in messages %}<{{ m.role }}>{{ m.content }}{% endfor %}"
    "{% if mood is defined %}({{ mood }}){% endif %}"
    "{% if add_generation_prompt %}<assistant>{% endif %}"
)


@cache
def byte_tokenizer() -> PreTrainedTokenizerFast:
    """Token i is the byte i for i < 256; then four merges and <|im_end|> at 260."""
    chars = sorted(pre_tokenizers.ByteLevel.alphabet(), key=_byte_of)
    vocab = {char: index for index, char in enumerate(chars)}
    merges = [("D", "E"), ("DE", "F"), ("H", "I"), ("\u0120", "a")]
    for left, right in merges:
        vocab[left + right] = len(vocab)
    tokenizer = Tokenizer(models.BPE(vocab, merges))
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False)
    tokenizer.decoder = decoders.ByteLevel()
    return PreTrainedTokenizerFast(
        tokenizer_object=tokenizer, eos_token="<|im_end|>", chat_template=TEMPLATE
    )


def _byte_of(char: str) -> int:
    visible = [*range(0x21, 0x7F), *range(0xA1, 0xAD), *range(0xAE, 0x100)]
    hidden = [byte for byte in range(256) if byte not in visible]
    return ord(char) if ord(char) in visible else hidden[ord(char) - 0x100]


Script = Callable[[Request], list[int]]


def repeat_prompt(request: Request) -> list[int]:
    """Answer with the prompt, over and over."""
    times = 1 + request.stopping.max_new_tokens // len(request.prompt_ids)
    return list(request.prompt_ids) * times


class FakeEngine:
    """Each step gives every request the next `run` tokens of its script.

    `refuse` is raised by submit; `step_seconds` paces it; `die` ends the thread like a bug would.
    """

    model_name = "tiny"

    def __init__(
        self,
        script: Script = repeat_prompt,
        *,
        run: int = 1,
        step_seconds: float = 0.001,
        refuse: Callable[[Request], None] = lambda request: None,
        silent_death: bool = False,
    ) -> None:
        self.limits = Limits(vocab_size=261, max_context_tokens=4096, max_cache_tokens=4096)
        self.ready = False
        self.failure: str | None = None
        self.last_step_monotonic = time.monotonic()
        self.submitted: list[Request] = []
        self.aborted: list[tuple[str, FinishReason]] = []
        self.num_emitted: dict[str, int] = {}
        self._script, self._run_length, self._step_seconds = script, run, step_seconds
        self._refuse, self._silent_death = refuse, silent_death
        self._live: dict[str, Any] = {}
        self._lock = threading.Lock()
        self._stopping = self._draining = False
        self._death: str | None = None
        self._thread = threading.Thread(target=self._run, daemon=True)

    @property
    def num_requests(self) -> int:
        return len(self._live)

    def start(self) -> None:
        self._thread.start()
        self.ready = True

    def stop(self, timeout_seconds: float) -> None:
        self._stopping = True
        if self._thread.is_alive():
            self._thread.join(timeout_seconds)

    def drain(self) -> None:
        self._draining = True

    def die(self, why: str) -> None:
        self._death = why

    def submit(self, request: Request, deliver: Callable[[Output], None]) -> None:
        self._refuse(request)
        if self._draining or self.failure:
            raise EngineStopped(self.failure or "draining")
        with self._lock:
            self.submitted.append(request)
            self.num_emitted[request.request_id] = 0
            tokens = self._script(request)[: request.stopping.max_new_tokens]
            self._live[request.request_id] = (request, deliver, tokens, time.monotonic())

    def abort(self, request_id: str, reason: FinishReason = FinishReason.CANCELLED) -> None:
        with self._lock:
            if request_id in self._live and request_id not in dict(self.aborted):
                self.aborted.append((request_id, reason))

    def snapshot(self) -> EngineSnapshot:
        counters = EngineCounters(generated_tokens=sum(self.num_emitted.values()))
        info = EngineInfo(16, "float32", NO_DRAFTER, 0)
        return EngineSnapshot(len(self._live), 0, 0, 64, len(self._live), 0, 0, counters, info)

    def _run(self) -> None:
        while not self._stopping:
            time.sleep(self._step_seconds)
            with self._lock:
                if self._death is not None:
                    self.failure = self._death
                    if not self._silent_death:
                        self._finish_all(Finish(FinishReason.ERROR, message=self._death))
                    return
                self._step()
            self.last_step_monotonic = time.monotonic()

    def _finish_all(self, finish: Finish) -> None:
        for request, deliver, _, arrived in self._live.values():
            deliver(Output(request.request_id, Timing(arrived), finish=finish))
        self._live.clear()

    def _step(self) -> None:
        aborted = dict(self.aborted)
        for request_id, (request, deliver, tokens, arrived) in list(self._live.items()):
            now = time.monotonic()
            new, left = tuple(tokens[: self._run_length]), tokens[self._run_length :]
            finish, num_before = None, self.num_emitted[request_id]
            prompt_logprobs: tuple[TokenLogprobs, ...] = ()
            if request_id in aborted:
                new, finish = (), Finish(aborted[request_id])
            elif request.deadline is not None and now > request.deadline:
                new, finish = (), Finish(FinishReason.DEADLINE)
            elif EOS_ID in new and not request.stopping.ignore_eos:
                new = new[: new.index(EOS_ID) + 1]
                finish = Finish(FinishReason.EOS, stop_token_id=EOS_ID)
            elif not left:
                finish = Finish(FinishReason.LENGTH)
            if num_before == 0 and request.num_prompt_logprobs is not None:
                prompt_logprobs = _logprobs(request.prompt_ids[1:], request.num_prompt_logprobs)
            self.num_emitted[request_id] += len(new)
            self._live[request_id] = (request, deliver, left, arrived)
            if finish is not None:
                total = self.num_emitted[request_id]
                stats = SpeculationStats(num_steps=max(1, total // 2), num_emitted=total)
                finish = Finish(finish.reason, finish.stop_token_id, finish.message, stats)
                del self._live[request_id]
            deliver(
                Output(
                    request_id,
                    Timing(arrived, arrived, now, now if finish else 0.0),
                    token_ids=new,
                    logprobs=_logprobs(new, request.num_logprobs)
                    if request.num_logprobs is not None
                    else (),
                    prompt_logprobs=prompt_logprobs,
                    finish=finish,
                )
            )


def _logprobs(token_ids: tuple[int, ...], num_top: int) -> tuple[TokenLogprobs, ...]:
    top = tuple((i, -float(i + 1)) for i in range(num_top))
    return tuple(TokenLogprobs(i, -0.5, 1, top) for i in token_ids)


def served(engine: EngineDoor) -> ServedModel:
    return ServedModel(engine, byte_tokenizer())
