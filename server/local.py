"""A real server inside this process, for commands that need one for a moment."""

import asyncio
import threading
from collections.abc import Iterator
from contextlib import contextmanager

from headway.server.app import App
from headway.server.assembly import Assembled, make_served
from headway.server.config import ServeConfig
from headway.server.engine_door import ServedModel

LOOPBACK = ServeConfig(host="127.0.0.1", port=0, metrics_port=-1, max_request_seconds=0)


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


async def _start(model_name: str, served: ServedModel) -> App:
    app = App(LOOPBACK, model_name)
    await app.start()
    app.open(served)
    await app.health.refresh()
    return app
