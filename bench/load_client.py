"""The sending side of a load test: one process of several, over keep-alive connections, with bodies encoded beforehand.

Driven by `bench/serve_load.py` through its standard input and output, one JSON line each way:

    {"prepare": NAME, "bodies": [...]}      encode these requests
    {"run": NAME, "host": ..., "port": ..., "start": T, "rate": R, "seed": S}       open loop: at random times
    {"run": NAME, "host": ..., "port": ..., "start": T, "concurrency": C}           closed loop: C at any time

A body is described by numbers from which its tokens are drawn, so that megabytes need not travel. Latency counts from
the time at which a request was due, so a client that comes late hides nothing. Neither torch nor the package is
imported.
"""

from __future__ import annotations

import os
import sys

if not __package__:  # bench/operator.py would hide the standard library's
    sys.path[0] = os.path.dirname(os.path.dirname(os.path.abspath(__file__)))

import asyncio
import json
import random
import time
from collections import deque
from collections.abc import Iterator
from typing import Any

import numpy as np

try:
    import uvloop
except ImportError:
    uvloop = None
KEPT_TOKENS = 900
"""Prompts are drawn from tokens below this one; the codes begin above it."""


def draw_tokens(description: dict[str, Any]) -> list[int]:
    """The prompt of a description: `length` tokens, the first `common` of them those of `history`."""
    common = description.get("common", 0)
    tokens = np.random.default_rng(description["seed"]).integers(0, KEPT_TOKENS, description["length"])
    if common:
        tokens[:common] = np.random.default_rng(description["history"]).integers(0, KEPT_TOKENS, common)
    return tokens.tolist()


def encode_body(description: dict[str, Any]) -> bytes:
    """The JSON body of a description."""
    body = {**description["fields"], "prompt_token_ids": draw_tokens(description)}
    return json.dumps(body, separators=(",", ":")).encode()


def encode_request(body: bytes) -> bytes:
    """The whole HTTP request."""
    head = (
        "POST /v1/recommend HTTP/1.1\r\nHost: localhost\r\nContent-Type: application/json\r\n"
        f"Content-Length: {len(body)}\r\n\r\n"
    )
    return head.encode() + body


class Connection:
    """One keep-alive connection."""

    def __init__(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        self.reader, self.writer = reader, writer

    async def ask(self, request: bytes) -> tuple[int, bytes]:
        """Send a request and read its answer: status and body."""
        self.writer.write(request)
        head = await self.reader.readuntil(b"\r\n\r\n")
        status = int(head[9:12])
        length = int(head.lower().split(b"content-length:", 1)[1].split(b"\r\n", 1)[0])
        return status, await self.reader.readexactly(length)


class Client:
    """As many connections as are needed at a time, each used again."""

    def __init__(self, host: str, port: int) -> None:
        self.host, self.port = host, port
        self.free: deque[Connection] = deque()
        self.answers: list[tuple[float, float, int, bytes]] = []

    async def open(self, count: int) -> None:
        """Connections made beforehand."""
        self.free.extend([await self._connect() for _ in range(count)])

    async def _connect(self) -> Connection:
        return Connection(*await asyncio.open_connection(self.host, self.port, limit=1 << 22))

    async def ask(self, request: bytes, due: float) -> None:
        """Send one request; notes when it was due, its latency in ms, and its answer. Status 0: no answer."""
        connection = None
        try:
            connection = self.free.pop() if self.free else await self._connect()
            status, body = await connection.ask(request)
            self.free.append(connection)
        except (OSError, asyncio.IncompleteReadError, IndexError, ValueError) as error:
            status, body = 0, type(error).__name__.encode()
        self.answers.append((due, 1000 * (time.monotonic() - due), status, body))

    def close(self) -> None:
        for connection in self.free:
            connection.writer.close()


def due_times(rate: float, seed: int) -> Iterator[float]:
    """Random times of a mean rate, in seconds from the start on, without end."""
    chance, due = random.Random(seed), 0.0
    while True:
        due += chance.expovariate(rate)
        yield due


async def open_loop(client: Client, requests: list[bytes], start: float, rate: float, seed: int) -> None:
    """Send every request at its time, whether earlier ones have been answered or not."""
    tasks = []
    for request, after in zip(requests, due_times(rate, seed)):
        due = start + after
        await asyncio.sleep(max(0.0, due - time.monotonic()))
        tasks.append(asyncio.ensure_future(client.ask(request, due)))
    await asyncio.gather(*tasks)


async def closed_loop(client: Client, requests: list[bytes], start: float, concurrency: int) -> None:
    """Keep `concurrency` requests under way."""
    queue = iter(requests)

    async def work() -> None:
        for request in queue:
            await client.ask(request, time.monotonic())

    await asyncio.sleep(max(0.0, start - time.monotonic()))
    await asyncio.gather(*(work() for _ in range(concurrency)))


def summarize(answers: list[tuple[float, float, int, bytes]], start: float) -> list[dict[str, Any]]:
    """What is worth reporting of every answer."""
    lines = []
    for due, latency, status, body in answers:
        line: dict[str, Any] = {"due": due - start, "latency": latency, "status": status}
        if status == 200:
            answer = json.loads(body)
            line |= {stage: answer["timings_ms"][stage] for stage in ("queue", "prefill", "decode", "total")}
            line["prompt_tokens"] = answer["usage"]["prompt_tokens"]
            line["cached_tokens"] = answer["usage"]["cached_tokens"]
            line["items"] = len(answer["items"])
        lines.append(line)
    return lines


async def run(order: dict[str, Any], requests: list[bytes]) -> list[dict[str, Any]]:
    client = Client(order["host"], order["port"])
    await client.open(order.get("concurrency", 16))
    if "rate" in order:
        await open_loop(client, requests, order["start"], order["rate"], order["seed"])
    else:
        await closed_loop(client, requests, order["start"], order["concurrency"])
    client.close()
    return summarize(client.answers, order["start"])


def write_line(text: str) -> None:
    """One line to standard output, whole.

    After uvloop has run, a pipe takes a part of a long write, and print loses the rest.
    """
    data = memoryview((text + "\n").encode())
    while data:
        data = data[os.write(sys.stdout.fileno(), data) :]


def main() -> None:
    prepared: dict[str, list[bytes]] = {}
    for line in sys.stdin:
        order = json.loads(line)
        if "prepare" in order:
            prepared[order["prepare"]] = [encode_request(encode_body(d)) for d in order["bodies"]]
            answer: Any = len(prepared[order["prepare"]])
        else:
            work = run(order, prepared.pop(order["run"]))
            answer = uvloop.run(work) if uvloop is not None else asyncio.run(work)
        write_line(json.dumps(answer))


if __name__ == "__main__":
    main()
