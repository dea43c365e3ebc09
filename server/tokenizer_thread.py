"""One thread for all work with the tokenizer, which may not be used by two at once."""

import queue
import threading
from collections.abc import Callable
from concurrent.futures import Executor, Future
from functools import partial
from typing import Any


class TokenizerThread(Executor):
    """Runs what is submitted, in order, on a daemon thread.

    Python waits for a ThreadPoolExecutor's threads when it ends, and a chat template may loop for ever:
    the process would never end.
    """

    def __init__(self) -> None:
        self._work: queue.SimpleQueue[Callable[[], None] | None] = queue.SimpleQueue()
        threading.Thread(target=self._run, name="tokenize", daemon=True).start()

    def submit(self, fn: Callable[..., Any], /, *args: Any, **kwargs: Any) -> Future[Any]:
        """Queue a call; work whose future is cancelled in time is skipped."""
        future: Future[Any] = Future()
        self._work.put(partial(_settle, future, partial(fn, *args, **kwargs)))
        return future

    def shutdown(self, wait: bool = True, *, cancel_futures: bool = False) -> None:
        """End the thread after what is queued. Never waits."""
        self._work.put(None)

    def _run(self) -> None:
        while (work := self._work.get()) is not None:
            work()


def _settle(future: Future[Any], call: Callable[[], Any]) -> None:
    if not future.set_running_or_notify_cancel():
        return
    try:
        result = call()
    except BaseException as error:  # whoever waits must hear of it, whatever it is
        future.set_exception(error)
    else:
        future.set_result(result)
