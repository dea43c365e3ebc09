"""EngineLoop: the engine thread, its door, its queue limits and its death."""

import threading
import time
from collections.abc import Callable, Iterator
from dataclasses import replace

import pytest

from headway.engine.config import EngineConfig
from headway.engine.errors import EngineStopped, InvalidRequest, Overloaded
from headway.engine.loop import EngineLoop
from headway.engine.request import FinishReason, Output, Request
from headway.engine.suffix import SuffixDrafter
from tiny_engine import SMALL, Answer, prompt, request, run, tiny_engine


class Inbox:
    """Collects a request's outputs and says when the last one came."""

    def __init__(self) -> None:
        self.answer = Answer()
        self.done = threading.Event()

    def __call__(self, output: Output) -> None:
        self.answer.take(output)
        if output.finish is not None:
            self.done.set()

    def wait(self) -> Answer:
        assert self.done.wait(20), "no last output"
        return self.answer

    @property
    def reason(self) -> FinishReason | None:
        return self.answer.finish and self.answer.finish.reason


@pytest.fixture
def make_loop() -> Iterator[Callable[..., EngineLoop]]:
    loops: list[EngineLoop] = []

    def make(config: EngineConfig = SMALL, start: bool = True) -> EngineLoop:
        engine = tiny_engine(SuffixDrafter(), config)
        loop = EngineLoop(engine, "tiny")
        loops.append(loop)
        if start:
            loop.start()
        return loop

    yield make
    for loop in loops:
        loop.stop()


def submit(loop: EngineLoop, each: Request) -> Inbox:
    inbox = Inbox()
    loop.submit(each, inbox)
    return inbox


def test_many_threads_get_the_answers_they_asked_for(make_loop: Callable[..., EngineLoop]) -> None:
    loop = make_loop()
    requests = [request(str(index), prompt(5 + index), 12) for index in range(12)]
    expected = run(tiny_engine(), requests)
    inboxes = {each.request_id: Inbox() for each in requests}
    threads = [
        threading.Thread(target=loop.submit, args=(each, inboxes[each.request_id]))
        for each in requests
    ]
    for thread in threads:
        thread.start()
    for name, inbox in inboxes.items():
        assert inbox.wait().token_ids == expected[name].token_ids
    assert loop.num_requests == 0
    assert loop.snapshot().num_active_blocks == 0


def test_a_bad_request_is_refused_and_leaves_nothing(make_loop: Callable[..., EngineLoop]) -> None:
    loop = make_loop(start=False)
    with pytest.raises(InvalidRequest):
        submit(loop, request("empty", ()))
    assert loop.num_requests == 0


def test_an_id_in_use_is_refused(make_loop: Callable[..., EngineLoop]) -> None:
    loop = make_loop(start=False)
    submit(loop, request("same", prompt(3)))
    with pytest.raises(InvalidRequest, match="request_id: 'same' is in use"):
        submit(loop, request("same", prompt(4)))


def test_the_queue_is_bounded_by_requests(make_loop: Callable[..., EngineLoop]) -> None:
    loop = make_loop(replace(SMALL, max_queued_requests=2), start=False)
    inboxes = [submit(loop, request(str(index), prompt(3))) for index in range(2)]
    with pytest.raises(Overloaded, match="max_queued_requests") as caught:
        submit(loop, request("third", prompt(3)))
    assert caught.value.reason == "requests"
    assert caught.value.retry_seconds > 0
    loop.start()
    for inbox in inboxes:
        inbox.wait()
    submit(loop, request("third", prompt(3))).wait()


def test_the_queue_is_bounded_by_prompt_tokens(make_loop: Callable[..., EngineLoop]) -> None:
    loop = make_loop(replace(SMALL, max_queued_prompt_tokens=10), start=False)
    submit(loop, request("large", prompt(30)))
    with pytest.raises(Overloaded, match="max_queued_prompt_tokens"):
        submit(loop, request("small", prompt(3)))


def test_an_aborted_request_leaves_the_queue_limits(make_loop: Callable[..., EngineLoop]) -> None:
    loop = make_loop(replace(SMALL, max_queued_requests=1), start=False)
    inbox = submit(loop, request("one", prompt(3)))
    loop.abort("one")
    loop.start()
    inbox.wait()
    assert inbox.reason == FinishReason.CANCELLED
    submit(loop, request("two", prompt(3))).wait()


def test_abort_is_idempotent_and_keeps_the_reason(make_loop: Callable[..., EngineLoop]) -> None:
    loop = make_loop(start=False)
    inbox = submit(loop, request("x", prompt(3), 400))
    loop.abort("x", FinishReason.STOP_STRING)
    loop.abort("x")
    loop.abort("nobody")
    loop.start()
    inbox.wait()
    assert inbox.reason == FinishReason.STOP_STRING
    submit(loop, request("x", prompt(3))).wait()


def test_draining_refuses_the_new_and_finishes_the_old(
    make_loop: Callable[..., EngineLoop],
) -> None:
    loop = make_loop()
    inbox = submit(loop, request("old", prompt(3), 200))
    loop.drain()
    with pytest.raises(EngineStopped):
        submit(loop, request("new", prompt(3)))
    assert len(inbox.wait().token_ids) == 200


def test_stopping_ends_what_is_left(make_loop: Callable[..., EngineLoop]) -> None:
    loop = make_loop()
    inbox = submit(loop, request("x", prompt(3), 480))
    loop.stop()
    inbox.wait()
    assert inbox.reason in (FinishReason.CANCELLED, FinishReason.LENGTH)
    assert not loop.ready


def test_a_dead_engine_tells_everyone(
    make_loop: Callable[..., EngineLoop], monkeypatch: pytest.MonkeyPatch
) -> None:
    loop = make_loop(start=False)
    inboxes = [submit(loop, request(str(index), prompt(3))) for index in range(3)]
    monkeypatch.setattr(loop.engine.runner, "forward", lambda _: 1 / 0)
    loop.start()
    for inbox in inboxes:
        inbox.wait()
        assert inbox.reason == FinishReason.ERROR
    assert loop.failure is not None
    assert "ZeroDivisionError" in loop.failure
    assert not loop.ready
    with pytest.raises(EngineStopped, match="ZeroDivisionError"):
        submit(loop, request("late", prompt(3)))


def test_a_receiver_that_raises_harms_nobody(
    make_loop: Callable[..., EngineLoop], caplog: pytest.LogCaptureFixture
) -> None:
    loop = make_loop(start=False)

    def broken(output: Output) -> None:
        raise RuntimeError("closed")

    loop.submit(request("broken", prompt(3)), broken)
    inbox = submit(loop, request("fine", prompt(3)))
    loop.start()
    assert len(inbox.wait().token_ids) == 24
    assert "was not taken" in caplog.text


def test_the_heartbeat_goes_on_while_idle(
    make_loop: Callable[..., EngineLoop], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("headway.engine.loop.IDLE_TICK_SECONDS", 0.02)
    loop = make_loop()
    before = loop.last_step_monotonic
    time.sleep(0.2)
    assert loop.last_step_monotonic > before
