"""A process that serves, and leaves in good order."""

from __future__ import annotations

import asyncio
import contextlib
import errno
import gc
import logging
import os
import socket
import sys
from collections.abc import Iterator, Sequence
from typing import Any

import uvicorn
from fastapi import FastAPI

from onela.config import ServerConfig
from onela.errors import ConfigError

logger = logging.getLogger("uvicorn.error")  # where uvicorn says whatever is no access
BACKLOG = 2048
"""Connections that may wait to be accepted; uvicorn's default."""
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


@contextlib.contextmanager
def bound(config: ServerConfig) -> Iterator[list[socket.socket]]:
    """Sockets bound to the address, before time is spent on a model: what loads for minutes shall not lose its port.

    Nobody can connect before `listen`: whoever asks meanwhile is refused, as while there is no server.

    Raises:
        ConfigError: names host or port, and what the system says.
    """
    sockets: list[socket.socket] = []
    try:
        with _told(config):
            port, unavailable = config.port, None
            found = socket.getaddrinfo(config.host, port, type=socket.SOCK_STREAM, flags=socket.AI_PASSIVE)
            for family, kind, protocol, _, address in found:
                try:
                    sockets.append(_bind(family, kind, protocol, (address[0], port, *address[2:])))
                except OSError as error:
                    # A host may have a name for both protocols, and one of them only.
                    if error.errno not in (errno.EADDRNOTAVAIL, errno.EAFNOSUPPORT):
                        raise
                    unavailable = error
                else:
                    port = sockets[0].getsockname()[1]
            if unavailable is not None and not sockets:
                raise unavailable
        yield sockets
    finally:
        for sock in sockets:
            sock.close()


def listen(sockets: Sequence[socket.socket], config: ServerConfig) -> None:
    """Let clients come. Raises `ConfigError` as `bound`."""
    with _told(config):
        for sock in sockets:
            _share(sock, True)
            sock.listen(BACKLOG)


@contextlib.contextmanager
def _told(config: ServerConfig) -> Iterator[None]:
    """What the system says of an address, as an error that names the option."""
    try:
        yield
    except (OSError, UnicodeError) as error:
        taken = isinstance(error, OSError) and error.errno in (errno.EADDRINUSE, errno.EACCES)
        option, value = ("port", config.port) if taken else ("host", config.host)
        raise ConfigError(f"{option}: cannot listen on {value!r} ({error})") from None


def _bind(family: int, kind: int, protocol: int, address: tuple[Any, ...]) -> socket.socket:
    """A socket of its own at an address."""
    sock = socket.socket(family, kind, protocol)
    try:
        if family == socket.AF_INET6:
            sock.setsockopt(socket.IPPROTO_IPV6, socket.IPV6_V6ONLY, 1)
        try:
            sock.bind(address)
        except OSError as error:
            if error.errno != errno.EADDRINUSE:
                raise
            # Connections of a server that ended a minute ago may still be there; beside one that runs this fails too.
            _share(sock, True)
            sock.bind(address)
            _share(sock, False)
    except BaseException:
        sock.close()
        raise
    return sock


def _share(sock: socket.socket, shared: bool) -> None:
    """Whether others that share may bind to the address while nobody listens, and after connections have ended."""
    if os.name == "posix":  # elsewhere the option means something else
        sock.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, int(shared))


class DrainingServer(uvicorn.Server):
    """uvicorn, with the server told to drain as soon as the process shall end, not when all connections are closed.

    Args:
        app: what `create_app` made. config: its options.
    """

    def __init__(self, app: FastAPI, config: ServerConfig, *, log_level: str = "info") -> None:
        self.served = app.state.server
        self.address = config
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

    async def startup(self, sockets: list[socket.socket] | None = None) -> None:
        """Begin to accept, and say where: uvicorn is silent about sockets that it is given."""
        await super().startup(sockets)
        for sock in sockets or ():
            host, port, *_ = sock.getsockname()
            host = f"[{host}]" if ":" in host else host
            logger.info("Listening on http://%s:%d (Press CTRL+C to quit)", host, port)

    async def serve(self, sockets: list[socket.socket] | None = None) -> None:
        """Serve until the process shall end.

        Args:
            sockets: as `bound` yields them; None: bound here.
        Raises:
            ConfigError: as `bound`.
        """
        with contextlib.ExitStack() as stack:
            sockets = stack.enter_context(bound(self.address)) if sockets is None else sockets
            listen(sockets, self.address)
            spare_the_loaded()
            share_the_interpreter()
            await super().serve(sockets)
