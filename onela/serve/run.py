"""A process that serves, and leaves in good order."""

from __future__ import annotations

import asyncio
import errno
import gc
import socket
import sys

import uvicorn
from fastapi import FastAPI

from onela.config import ServerConfig
from onela.errors import ConfigError

KEEP_ALIVE_S = 75
"""A connection without requests is shut after so long."""


def spare_the_loaded() -> None:
    """Tell Python's garbage collector that what is there by now stays, so that it never looks through it again."""
    gc.collect()
    gc.freeze()


def share_the_interpreter() -> None:
    """Let a thread that waits for the interpreter have it after a tenth of a millisecond, not after five.

    The engine's thread gives it up at every launch, and while it waits to have it back a GPU stands still.
    """
    sys.setswitchinterval(0.0001)


def check_address(config: ServerConfig) -> None:
    """Bind to the address and let it go, before time is spent on a model that nobody could reach.

    Raises:
        ConfigError: names host or port, and what the system says.
    """

    async def bind() -> None:
        loop = asyncio.get_running_loop()
        server = await loop.create_server(asyncio.Protocol, config.host, config.port, start_serving=False)
        server.close()

    try:
        asyncio.run(bind())
    except (OSError, UnicodeError) as error:
        taken = isinstance(error, OSError) and error.errno in (errno.EADDRINUSE, errno.EACCES)
        option, value = ("port", config.port) if taken else ("host", config.host)
        raise ConfigError(f"{option}: cannot listen on {value!r} ({error})") from None


class DrainingServer(uvicorn.Server):
    """uvicorn, with the server told to drain as soon as the process shall end, not when all connections are closed.

    Args:
        app: what `create_app` made. config: its options.
    """

    def __init__(self, app: FastAPI, config: ServerConfig, *, log_level: str = "info") -> None:
        self.served = app.state.server
        super().__init__(
            uvicorn.Config(
                app,
                host=config.host,
                port=config.port,
                log_level=log_level,
                access_log=False,
                # Longer than proxies keep theirs: one that is shut while a request is on its way loses it.
                timeout_keep_alive=KEEP_ALIVE_S,
                # Requests that the engine gives up after `drain_s` still get their answer.
                timeout_graceful_shutdown=config.drain_s + 5,
            )
        )

    async def shutdown(self, sockets: list[socket.socket] | None = None) -> None:
        stopping = asyncio.ensure_future(self.served.stop())
        await super().shutdown(sockets)
        await stopping

    async def serve(self, sockets: list[socket.socket] | None = None) -> None:
        spare_the_loaded()
        share_the_interpreter()
        await super().serve(sockets)
