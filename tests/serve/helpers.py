"""A real server on a free port, over an engine with the model of integers."""

from __future__ import annotations

import contextlib
import threading
import time
from collections.abc import Iterator
from typing import Any

import httpx

from onela import Engine
from onela.config import ServerConfig
from onela.serve.app import create_app
from onela.serve.run import DrainingServer
from tests.engine.fake_text import CATALOG, ITEMS, text_engine

__all__ = ["CATALOG", "ITEMS", "metric", "serving", "text_engine"]


@contextlib.contextmanager
def serving(engine: Engine, **options: Any) -> Iterator[httpx.Client]:
    """A client of a server in a thread; the server is stopped, and must have drained, at the end."""
    config = ServerConfig(**{"drain_s": 5, "port": 0, **options})
    app = create_app(engine, config)
    server = DrainingServer(app, config, log_level="error")
    thread = threading.Thread(target=server.run, daemon=True)
    thread.start()
    limit = time.monotonic() + 20
    while not server.started:
        assert thread.is_alive(), "the server did not start"
        assert time.monotonic() < limit
        time.sleep(0.005)
    port = server.servers[0].sockets[0].getsockname()[1]
    try:
        with httpx.Client(base_url=f"http://127.0.0.1:{port}", timeout=30) as client:
            client.server = app.state.server  # type: ignore[attr-defined]
            yield client
    finally:
        server.should_exit = True
        thread.join(20)
        assert not thread.is_alive()


def metric(client: httpx.Client, name: str) -> float:
    """The value of one sample of /metrics; 0 for one that has not been counted yet."""
    for line in client.get("/metrics").text.splitlines():
        if line.startswith(f"{name} "):
            return float(line.split()[-1])
    return 0.0
