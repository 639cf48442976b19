"""`bench/serve.py simulate`: what latencies the engine's way of batching gives, with its device replaced by a clock.

The engine schedules, admits and waits as it does on a GPU, and the requests are those that `load` sends; only what a
step takes is worked out from a few numbers instead of being run. So policies and options can be compared in seconds,
and without noise. What the numbers leave out (HTTP beside the engine, a host that is late) is not there.
"""

from __future__ import annotations

import argparse
import dataclasses
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any
from unittest import mock

import numpy as np
import torch

from bench.load_client import due_times
from bench.serve_load import make_traffic
from bench.serve_server import vocabulary
from onela import BeamParams, Engine, EngineConfig, Request, UnavailableError
from onela.bench.models import TINY, random_model
from onela.engine.active import ActiveRequest
from onela.engine.engine import Flight as EngineFlight
from onela.engine.flight import Flight
from onela.engine.prefill_packing import bucket
from onela.engine.scheduler import Batch


@dataclass(frozen=True)
class Costs:
    """What a step takes, in milliseconds; the defaults are fitted to Qwen3.5-0.8B's shape on one H200.

    Attributes:
        prefill: of every prefill forward. prefill_token: per token of it, padding included. prefill_pair: per pair of
            tokens of one prompt, a million of them.
        decode: of every decode forward. decode_row: per beam of it, a thousand of them.
        select: of every selection. select_row: per beam chosen from, a thousand of them.
        host: of the engine's thread for a step. http: before a request reaches the engine, and after it has left.
    """

    prefill: float = 1.5
    prefill_token: float = 0.00185
    prefill_pair: float = 0.11
    decode: float = 0.6
    decode_row: float = 2.15
    select: float = 0.15
    select_row: float = 0.2
    host: float = 0.4
    http: float = 1.5

    def step(self, batch: Batch) -> float:
        """Milliseconds of the device for one step of the engine."""
        total = 0.0
        if batch.prefill:
            tokens = sum(chunk.end - chunk.start for chunk in batch.prefill)
            pairs = sum(chunk.end**2 - chunk.start**2 for chunk in batch.prefill)
            total += self.prefill + self.prefill_token * bucket(tokens) + self.prefill_pair * pairs / 1e6
        rows = sum(request.width for request in batch.decode)
        if rows:
            total += self.decode + self.decode_row * rows / 1e3
        if batch.requests:
            chosen_from = sum(request.width for request in batch.requests)
            total += self.select + self.select_row * chosen_from / 1e3
        return total


class Device:
    """A device that does nothing but take its time, and the clock that the engine reads.

    Args:
        costs: what steps take.

    `now` is seconds. `busy` is how long it has worked.
    """

    def __init__(self, costs: Costs) -> None:
        self.costs = costs
        self.now = 0.0
        self.busy = 0.0
        self._free_at = 0.0

    def clock(self) -> float:
        return self.now

    def run(self, batch: Batch) -> None:
        """Take a step of the engine: what is noted of prompts is noted, and nothing is computed."""
        self.now += self.costs.host / 1e3
        for chunk in batch.prefill:
            assert chunk.request.prompt is not None
            chunk.request.prompt.num_tokens = chunk.end
        taken = self.costs.step(batch) / 1e3
        self.busy += taken
        self._free_at = max(self._free_at, self.now) + taken

    def begin(self, batch: Batch, _: torch.device) -> Flight:
        """The step that has just been taken, under way."""
        finished = [request for request in batch.requests if request.finished]
        return Flight(batch, finished, Nothing(len(finished)), Done(self, self._free_at))  # type: ignore[arg-type]


@dataclass(frozen=True)
class Nothing:
    """The beams of so many requests, of which nothing is known."""

    count: int

    def read(self) -> list[None]:
        return [None] * self.count


@dataclass(frozen=True)
class Done:
    """Stands in for a `torch.cuda.Event`."""

    device: Device
    at: float

    def query(self) -> bool:
        return self.device.now >= self.at

    def synchronize(self) -> None:
        self.device.now = max(self.device.now, self.at)


def simulate(
    arrivals: Sequence[tuple[float, int]],
    config: EngineConfig,
    costs: Costs,
    *,
    width: int = 256,
    levels: int = 4,
) -> tuple[list[float], float]:
    """Answer requests of these prompts.

    Args:
        arrivals: when each is due, in seconds, and the tokens of its prompt. width: beams. levels: tokens per SID.
    Returns:
        latencies: milliseconds, in the order in which they were due. busy: share of the time that the device worked.
    """
    device = Device(costs)
    cpu = torch.device("cpu")
    shape = {**TINY, "num_hidden_layers": 1, "max_position_embeddings": 1 << 20, "full_attention_interval": 2}
    engine = Engine(random_model(shape, torch.float32, cpu), vocabulary(256, levels), config=config)
    engine.scheduler.clock = device.clock
    engine.runner.run = device.run  # type: ignore[method-assign]
    ended_at: dict[int, float] = {}
    asked: list[ActiveRequest] = []
    http = costs.http / 1e3
    # How a request ends is of no interest, as long as it does not go on.
    over = UnavailableError("simulated")
    due = sorted(arrivals)
    with (
        mock.patch.object(EngineFlight, "begin", device.begin),
        mock.patch.object(engine, "_outcome", return_value=over),
    ):
        while len(ended_at) < len(due):
            while len(asked) < len(due) and due[len(asked)][0] + http <= device.now:
                tokens = np.zeros(due[len(asked)][1], dtype=np.int32)
                params = BeamParams(beam_width=width)
                asked.append(engine.submit(Request(prompt_token_ids=tokens.tolist()), params))
            if not engine.scheduler.has_work:
                device.now = due[len(asked)][0] + http
                continue
            for request in engine.step():
                ended_at[id(request)] = device.now + http
    latencies = [1e3 * (ended_at[id(request)] - at) for request, (at, _) in zip(asked, due)]
    return latencies, device.busy / device.now


def run_simulation(arguments: argparse.Namespace) -> None:
    """Every rate, over the requests that `load` would send."""
    given = dict(option.split("=", 1) for option in arguments.cost)
    unknown = given.keys() - {field.name for field in dataclasses.fields(Costs)}
    if unknown:
        raise SystemExit(f"--cost: {', '.join(sorted(unknown))}: no such cost")
    try:
        costs = Costs(**{name: float(value) for name, value in given.items()})
    except ValueError as error:
        raise SystemExit(f"--cost: milliseconds are expected: {error}") from None
    for name, value in dataclasses.asdict(costs).items():
        if not 0 <= value < float("inf"):
            raise SystemExit(f"--cost: {name}: milliseconds, 0 or more, are expected, got {value}")
    environ = {"ONELA_MAX_BATCH_TOKENS": str(arguments.batch_tokens), "ONELA_MAX_WAITING": "1000000"}
    environ |= {f"ONELA_{name.upper()}": value for name, value in (o.split("=", 1) for o in arguments.option)}
    config = EngineConfig.from_env(environ, device="cpu")
    for number, rate in enumerate(arguments.rates):
        arrivals = make_arrivals(arguments, rate, 1 + number)
        latencies, busy = simulate(arrivals, config, costs, width=arguments.beam_width)
        p50, p95, p99 = np.percentile(latencies, [50, 95, 99])
        print(
            f"rate {rate:g}/s: {len(arrivals)} requests, latency p50 {p50:.1f} ms  p95 {p95:.1f} ms  "
            f"p99 {p99:.1f} ms, device busy for {busy:.0%}",
            flush=True,
        )


def make_arrivals(arguments: Any, rate: float, seed: int) -> list[tuple[float, int]]:
    """When the requests of a rate are due, in seconds, and the tokens of their prompts."""
    count = arguments.count or max(20, int(rate * arguments.seconds))
    shares = make_traffic(arguments, count, seed, 0.0).shares
    return [
        (due, body["length"])
        for i, share in enumerate(shares)
        for due, body in zip(due_times(rate / len(shares), 7 * i + int(rate)), share)
    ]
