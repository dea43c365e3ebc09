"""A real server for commands that need one for a moment: inside this process, or in a child of it."""

import asyncio
import multiprocessing
import threading
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from multiprocessing.connection import Connection

from headway.engine.errors import HeadwayError
from headway.server.app import App
from headway.server.assembly import Assembled, ModelSettings, assemble, make_served
from headway.server.config import ServeConfig
from headway.server.engine_door import ServedModel

LOOPBACK = ServeConfig(host="127.0.0.1", port=0, metrics_port=-1, max_request_seconds=0)
CHILD_STOP_SECONDS = 10.0


@contextmanager
def local_server(assembled: Assembled) -> Iterator[str]:
    """Serve a model on a free port of loopback, from a thread of its own, and yield host:port."""
    served = make_served(assembled)
    loop = asyncio.new_event_loop()
    thread = threading.Thread(target=loop.run_forever, name="server", daemon=True)
    thread.start()
    try:
        starting = _start(assembled.loaded.name, served)
        app = asyncio.run_coroutine_threadsafe(starting, loop).result()
        try:
            yield f"127.0.0.1:{app.port}"
        finally:
            asyncio.run_coroutine_threadsafe(app.stop(), loop).result()
    finally:
        loop.call_soon_threadsafe(loop.stop)
        thread.join()
        loop.close()


@contextmanager
def child_server(settings: ModelSettings) -> Iterator[str]:
    """Load and serve a model in a process of its own, and yield host:port.

    The child's interpreter is its own, so that a client here takes no time from the engine but what
    the cores are short of. Raises what loading raises, and HeadwayError where the child dies of it.
    """
    context = multiprocessing.get_context("spawn")  # nothing forks once grpc is imported
    ours, theirs = context.Pipe()
    child = context.Process(target=_serve_child, args=(settings, theirs), daemon=True)
    child.start()
    theirs.close()
    try:
        try:
            said: str | HeadwayError = ours.recv()
        except EOFError as error:
            raise HeadwayError("the server's process ended before the model was loaded") from error
        if isinstance(said, HeadwayError):
            raise said
        yield said
    finally:
        ours.close()
        child.join(CHILD_STOP_SECONDS)
        child.kill()
        child.join()


def _serve_child(settings: ModelSettings, parent: Connection) -> None:
    """Serve until the parent closes its end, or is gone."""
    try:
        assembled = assemble(settings)
        with local_server(assembled) as address:
            parent.send(address)
            with suppress(EOFError):
                parent.recv()
    except HeadwayError as error:
        parent.send(error)


async def _start(model_name: str, served: ServedModel) -> App:
    app = App(LOOPBACK, model_name)
    await app.start()
    app.open(served)
    await app.health.refresh()
    return app
