"""`bench/serve.py load`: latencies and throughput of a server under requests at a rate, or so many at a time."""

from __future__ import annotations

import argparse
import json
import subprocess
import sys
import tempfile
import time
from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import httpx
import numpy as np

from bench.common import Failures, append_result
from bench.load_client import encode_body
from bench.serve_server import SHAPES, make_catalog, server, server_options
from onela import EngineConfig


class Clients:
    """Processes that send (`bench/load_client.py`)."""

    def __init__(self, count: int) -> None:
        script = Path(__file__).with_name("load_client.py")
        pipes: dict[str, Any] = {"stdin": subprocess.PIPE, "stdout": subprocess.PIPE, "text": True}
        self.processes = [subprocess.Popen([sys.executable, str(script)], **pipes) for _ in range(count)]

    def order(self, orders: Sequence[dict[str, Any]]) -> None:
        """Send each client its order; `answers` reads what they say to it."""
        for process, order in zip(self.processes, orders):
            process.stdin.write(json.dumps(order) + "\n")  # type: ignore[union-attr]
            process.stdin.flush()  # type: ignore[union-attr]

    def answers(self) -> list[Any]:
        """One line of each."""
        return [json.loads(process.stdout.readline()) for process in self.processes]  # type: ignore[union-attr]

    def prepare(self, name: str, shares: Sequence[Sequence[dict[str, Any]]]) -> None:
        """Let each client encode its share of the bodies; `answers` waits for that."""
        self.order([{"prepare": name, "bodies": share} for share in shares])

    def run(self, name: str, port: int, options: Sequence[dict[str, Any]]) -> list[dict[str, Any]]:
        """Let all of them send what they have prepared, from one moment on; what became of each request."""
        common = {"run": name, "host": "127.0.0.1", "port": port, "start": time.monotonic() + 0.2}
        self.order([{**common, **option} for option in options])
        return [line for answer in self.answers() for line in answer]

    def close(self) -> None:
        for process in self.processes:
            process.stdin.close()  # type: ignore[union-attr]
            process.wait(30)
            process.stdout.close()  # type: ignore[union-attr]


@dataclass(frozen=True)
class Traffic:
    """The requests of one run.

    Attributes:
        first: those that have been answered before, so that the cache holds their states.
        shares: those that are measured, of each client.
    """

    first: list[dict[str, Any]]
    shares: list[list[dict[str, Any]]]


def make_traffic(arguments: argparse.Namespace, count: int, seed: int, cached: float) -> Traffic:
    """Prompts of random lengths from the shortest to the longest, by `count` requests.

    With `cached` they are those of returning users: each visit's prompt is the visit's before and so many new tokens
    that this share of it was there. A user comes back again and again until the longest prompt is reached; then
    another one takes the place. They stand at different visits when the measured time begins, so that all lengths are
    seen at any time of it, and the visits before are answered beforehand.
    """
    shortest, longest = arguments.prompts
    fields = {"beam_width": arguments.beam_width, "n": min(arguments.n, arguments.beam_width)}
    chance = np.random.default_rng(seed)
    names = iter(range(seed * 1_000_000, (seed + 1) * 1_000_000))
    shares: list[list[dict[str, Any]]] = [[] for _ in range(arguments.client_processes)]
    if not cached:
        for i in range(count):
            length = int(chance.integers(shortest, longest + 1))
            shares[i % len(shares)].append({"seed": next(names), "length": length, "fields": fields})
        return Traffic([], shares)
    config = EngineConfig()
    block, tail = config.prompt_cache_interval, config.prompt_cache_tail
    lengths = [shortest]
    while (kept := (lengths[-1] - tail) // block * block) < longest * cached:
        if kept / cached <= lengths[-1]:
            raise ValueError(
                f"--prompts: {shortest} tokens are too few for a share of {cached} to be kept of more"
            )
        lengths.append(int(kept / cached))
    visits = len(lengths) - 1
    first = []
    chains: list[list[dict[str, Any]]] = []
    for chain in range(-(-count // visits)):
        stage, of_chain = chain % visits, []
        for start, steps in ((stage, visits - stage), (0, stage)):
            if not steps:
                continue
            user, history = next(names), next(names)
            named = {"history": history, "fields": {**fields, "session_id": f"user {user}"}}
            first.append({**named, "seed": history, "length": lengths[start]})
            of_chain += [
                # What this visit adds is part of the history, so that the next visit goes on from there.
                {**named, "seed": history, "length": lengths[visit]}
                for visit in range(start + 1, start + steps + 1)
            ]
        chains.append(of_chain)
    order = chance.permutation(len(chains))
    for visit in range(visits):
        for place, chain in enumerate(order):
            shares[place % len(shares)].append(chains[chain][visit])
    return Traffic(first, shares)


def percentiles(values: Sequence[float]) -> dict[str, float]:
    return {f"p{q}": float(np.percentile(values, q)) for q in (50, 95, 99)} if values else {}


def check_cache(url: str, traffic: Traffic, failures: Failures) -> None:
    """A hit answers as a cold run does, but for roundings: most items are the same."""
    shares = []
    with httpx.Client(base_url=url, timeout=120) as client:
        for description in [body for share in traffic.shares for body in share][:4]:
            body = encode_body(description)
            headers = {"content-type": "application/json"}
            sids = []
            for _ in range(2):
                response = client.post("/v1/recommend", content=body, headers=headers)
                response.raise_for_status()
                sids.append({tuple(item["sid"]) for item in response.json()["items"]})
            shares.append(len(sids[0] & sids[1]) / len(sids[0]))
    print(f"share of items that cold and cached runs have in common: {min(shares):.2f} to {max(shares):.2f}")
    if min(shares) < 0.6:
        failures.add("cache", f"a cached prompt has only {min(shares):.2f} of a cold one's items")


def run_load(arguments: argparse.Namespace) -> None:
    """Every share of cached tokens, every rate, in order; a share ends with the first rate that is too slow."""
    failures = Failures()
    clients = Clients(arguments.client_processes)
    runs: list[tuple[str, float, float, Traffic]] = []
    try:
        for number in range(max(len(arguments.rates), len(arguments.cached_rates or ()))):
            for cached in arguments.cached:
                rates = arguments.cached_rates if cached and arguments.cached_rates else arguments.rates
                if number >= (1 if arguments.concurrency is not None else len(rates)):
                    continue
                rate = 0.0 if arguments.concurrency is not None else rates[number]
                count = arguments.count or max(20, int(rate * arguments.seconds))
                traffic = make_traffic(arguments, count, 1 + len(runs), cached)
                clients.prepare(f"{cached} {number}", traffic.shares)
                runs.append((f"{cached} {number}", cached, rate, traffic))
        with tempfile.TemporaryDirectory() as folder:
            path = Path(folder) / "items"
            make_catalog(arguments.shape, arguments.items, 0).save(path)
            begun = time.perf_counter()
            with server(arguments, path) as (url, _):
                print(f"ready after {time.perf_counter() - begun:.1f} s", flush=True)
                for _ in runs:
                    clients.answers()
                measure(arguments, url, clients, runs, failures)
    finally:
        clients.close()
    failures.exit()


def measure(
    arguments: argparse.Namespace,
    url: str,
    clients: Clients,
    runs: Sequence[tuple[str, float, float, Traffic]],
    failures: Failures,
) -> None:
    """Run what has been prepared against a server that is up."""
    port, senders = int(url.rsplit(":", 1)[1]), len(clients.processes)

    def ask_all(shares: Sequence[Sequence[dict[str, Any]]], concurrency: int) -> None:
        clients.prepare("first", shares)
        clients.answers()
        clients.run("first", port, [{"concurrency": max(1, concurrency // senders)}] * senders)

    begun = time.perf_counter()
    too_slow: set[float] = set()
    warmed: set[float] = set()
    for name, cached, rate, traffic in runs:
        if cached in too_slow:
            continue
        if cached not in warmed:
            # Shapes that come up are captured and compiled with requests of the same kind, not with those measured.
            warmed.add(cached)
            spare = make_traffic(arguments, arguments.warm, 900 + len(warmed), cached)
            if arguments.cache_bytes and not cached:
                check_cache(url, spare, failures)
            if spare.first:
                ask_all([spare.first[i::senders] for i in range(senders)], 32)
            ask_all(spare.shares, 24)
            ask_all(make_traffic(arguments, senders * 4, 950 + len(warmed), 0.0).shares, 1)
            print(f"warm after {time.perf_counter() - begun:.1f} s, {read_counters(url)}", flush=True)
        if traffic.first:
            ask_all([traffic.first[i::senders] for i in range(senders)], 32)
        if arguments.concurrency is not None:
            parts = [len(range(i, arguments.concurrency, senders)) for i in range(senders)]
            options: list[dict[str, Any]] = [{"concurrency": part} for part in parts]
        else:
            options = [{"rate": rate / senders, "seed": 7 * i + int(rate)} for i in range(senders)]
        before = read_counters(url)
        answers = clients.run(name, port, options)
        engine = {key: value - before[key] for key, value in read_counters(url).items()}
        lost = sum(answer["status"] != 200 for answer in answers)
        if lost:
            failures.add(f"rate {rate:g}/s", f"{lost} of {len(answers)} requests failed")
        if report_load(arguments, rate, cached, answers, engine) > arguments.limit_ms or lost:
            too_slow.add(cached)


def read_counters(url: str) -> dict[str, float]:
    """What the server has counted so far."""
    names = ("onela_step_seconds_count", "onela_step_seconds_sum", "onela_step_rows_sum")
    names += ("onela_graph_captures_total", "onela_device_wait_seconds_total")
    lines = (line.split() for line in httpx.get(f"{url}/metrics").text.splitlines())
    return {words[0].removeprefix("onela_"): float(words[1]) for words in lines if words[0] in names}


def report_load(
    arguments: argparse.Namespace,
    rate: float,
    cached: float,
    answers: Sequence[dict[str, Any]],
    engine: dict[str, float],
) -> float:
    """Print and keep what was measured; returns the 99th percentile of latency."""
    good = [answer for answer in answers if answer["status"] == 200]
    failed = Counter(str(answer["status"]) for answer in answers if answer["status"] != 200)
    names = ("latency", "queue", "prefill", "decode", "total")
    stages = {name: percentiles([answer[name] for answer in good]) for name in names}
    tokens = sum(answer["prompt_tokens"] for answer in good)
    hit = sum(answer["cached_tokens"] for answer in good) / max(1, tokens)
    taken = max((a["due"] + a["latency"] / 1000 for a in good), default=0.0)
    reached = len(good) / taken if taken else 0.0
    named = f"rate {rate:g}/s" if rate else f"{arguments.concurrency} at a time"
    print(
        f"{named}: {len(good)} answered in {taken:.1f} s "
        f"({reached:.1f}/s), failed {dict(failed) or 'none'}, {100 * hit:.0f} % of {tokens} tokens cached"
    )
    for name, values in stages.items():
        print(
            "   ",
            f"{name:8}",
            "  ".join(f"{key} {value:7.1f} ms" for key, value in values.items()),
            flush=True,
        )
    busy = engine["step_seconds_sum"] - engine["device_wait_seconds_total"]
    print(
        f"    engine   {engine['step_seconds_count']:.0f} steps, {busy / max(taken, 1e-9):.0%} of a core, "
        f"{engine['graph_captures_total']:.0f} captures",
        flush=True,
    )
    case = {"shape": arguments.shape, "W": arguments.beam_width, "O": SHAPES[arguments.shape][2]}
    case |= {"n": min(arguments.n, arguments.beam_width), "prompts": arguments.prompts, "cached": cached}
    case |= {"rate": rate} if rate else {"concurrency": arguments.concurrency}
    p99 = stages["latency"].get("p99", float("inf"))
    shared: dict[str, Any] = {
        "stages": stages,
        "answered": len(good),
        "failed": dict(failed),
        "hit_rate": hit,
    }
    shared |= {
        "engine": engine,
        "seconds": taken,
        "commit": arguments.commit,
        "options": server_options(arguments),
    }
    for metric, unit, value in (("latency_p99", "ms", p99), ("throughput", "requests/s", reached)):
        append_result(
            "serve",
            arm="onela",
            case=case,
            metric=metric,
            unit=unit,
            value=value,
            out=arguments.out,
            **shared,
        )
    return p99
