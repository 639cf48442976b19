"""A real server over HTTP, under load and under fire.

    python bench/serve.py load [--shape qwen3.5-0.8b] [--rates 20 40 60] [--cached 0.8]
    python bench/serve.py faults [--requests 10000]

`load` sends requests at random times of a fixed mean rate, whether earlier ones have been answered or not (an open
loop: a slow server gets no mercy), and reports latencies by stage for each rate. `faults` keeps a number of clients
busy with good requests, malformed and oversize ones, and ones that hang up, switches the catalogue every second, and
compares every answer with a list that was recorded beforehand; the server's memory must not grow.
"""

from __future__ import annotations

import argparse
import asyncio
import json
import random
import socket
import subprocess
import sys
import tempfile
import time
from collections import Counter
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Any

sys.path.insert(0, str(Path(__file__).resolve().parent.parent))

import httpx
import numpy as np
import torch

from bench.common import Failures, append_result
from onela import BeamParams, Engine, EngineConfig, ItemCatalog, Request, SidVocabulary
from onela.bench.models import SHAPE_08B, TINY, random_model
from onela.config import ServerConfig

SHAPES = {"qwen3.5-0.8b": (SHAPE_08B, 8192), "tiny": (TINY, 256)}
LEVELS = 4
ADMIN = {"authorization": "Bearer admin"}


def make_engine(arguments: argparse.Namespace, catalog: ItemCatalog | None) -> Engine:
    """The engine that is served: random weights, as many codes per level as the shape has room for."""
    values, size = SHAPES[arguments.shape]
    device = torch.device("cuda" if torch.cuda.is_available() else "cpu")
    model = random_model(values, torch.bfloat16 if device.type == "cuda" else torch.float32, device)
    config = EngineConfig.from_env(
        prompt_cache_bytes=arguments.cache_bytes,
        prompt_cache_host_bytes=arguments.cache_bytes,
        max_batch_tokens=arguments.batch_tokens,
    )
    return Engine(model, vocabulary(size), catalog, config=config)


def vocabulary(size: int) -> SidVocabulary:
    """Levels of `size` codes, one after the other, from token 1000 on."""
    return SidVocabulary.from_token_ids(
        [list(range(1000 + level * size, 1000 + (level + 1) * size)) for level in range(LEVELS)]
    )


def make_catalog(size: int, count: int, seed: int) -> ItemCatalog:
    """Random items."""
    sids = np.unique(np.random.default_rng(seed).integers(0, size, size=(count, LEVELS)), axis=0)
    return ItemCatalog.from_arrays(np.arange(len(sids)), sids)


def run_server(arguments: argparse.Namespace) -> None:
    """The server's process."""
    from onela.serve.app import create_app
    from onela.serve.run import DrainingServer

    engine = make_engine(arguments, ItemCatalog.load(arguments.catalog))
    config = ServerConfig(port=arguments.port, admin_token="admin", max_body_bytes=arguments.max_body)
    DrainingServer(create_app(engine, config), config, log_level="warning").run()


@contextmanager
def server(
    arguments: argparse.Namespace, catalog: Path, *, max_body: int = 2 << 20
) -> Iterator[tuple[str, int]]:
    """A server in a process of its own: its address and process id."""
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        port = free.getsockname()[1]
    words = ["server", "--shape", arguments.shape, "--port", str(port), "--catalog", str(catalog)]
    words += ["--cache-bytes", str(arguments.cache_bytes), "--batch-tokens", str(arguments.batch_tokens)]
    process = subprocess.Popen([sys.executable, __file__, *words, "--max-body", str(max_body)])
    url = f"http://127.0.0.1:{port}"
    try:
        while True:
            if process.poll() is not None:
                raise RuntimeError(f"the server left with code {process.returncode}")
            try:
                if httpx.get(f"{url}/ready").status_code == 200:
                    break
            except httpx.TransportError:
                time.sleep(0.2)
        yield url, process.pid
    finally:
        process.terminate()
        process.wait(60)


# ---- load


def percentiles(values: Sequence[float]) -> dict[str, float]:
    return {f"p{q}": float(np.percentile(values, q)) for q in (50, 95, 99)} if values else {}


async def open_loop(
    client: httpx.AsyncClient, bodies: Sequence[dict[str, Any]], rate: float
) -> list[dict[str, Any]]:
    """Send every body at its time; the answers, each with its latency as the client saw it."""
    chance = random.Random(1)

    async def ask(body: dict[str, Any]) -> dict[str, Any]:
        begun = time.perf_counter()
        try:
            response = await client.post("/v1/recommend", json=body)
            answer = response.json() if response.status_code == 200 else {"failed": response.status_code}
        except httpx.TransportError as error:
            answer = {"failed": type(error).__name__}
        answer["latency_ms"] = 1000 * (time.perf_counter() - begun)
        return answer

    tasks, due = [], time.perf_counter()
    for body in bodies:
        due += chance.expovariate(rate)
        await asyncio.sleep(max(0.0, due - time.perf_counter()))
        tasks.append(asyncio.ensure_future(ask(body)))
    return await asyncio.gather(*tasks)


def make_bodies(arguments: argparse.Namespace, count: int, seed: int, cached: float) -> list[dict[str, Any]]:
    """Prompts of random lengths; with `cached`, that share of each is one of a few users' histories."""
    chance = np.random.default_rng(seed)
    users = [
        np.random.default_rng(99 + u).integers(0, 900, arguments.prompts[1]) for u in range(arguments.users)
    ]
    bodies = []
    for number in range(count):
        length = int(chance.integers(arguments.prompts[0], arguments.prompts[1] + 1))
        tokens = chance.integers(0, 900, length)
        body: dict[str, Any] = {"beam_width": arguments.beam_width, "n": min(50, arguments.beam_width)}
        if cached:
            user = number % arguments.users
            kept = int(length * cached)
            tokens[:kept] = users[user][:kept]
            body["session_id"] = f"user {user}"
        bodies.append({**body, "prompt_token_ids": tokens.tolist()})
    return bodies


def warm(client: httpx.Client, arguments: argparse.Namespace, bodies: Sequence[dict[str, Any]]) -> None:
    """Fill the cache as earlier visits would have, and check that a hit answers as a cold run does."""
    for body in bodies[:8]:
        first, second = (client.post("/v1/recommend", json=body).json()["items"] for _ in range(2))
        common = {tuple(item["sid"]) for item in first} & {tuple(item["sid"]) for item in second}
        if len(common) < 0.7 * len(first):
            raise RuntimeError("a cached prompt gives other items than a cold one")
    if arguments.cached:
        for body in bodies:
            kept = int(len(body["prompt_token_ids"]) * arguments.cached)
            client.post(
                "/v1/recommend", json={**body, "prompt_token_ids": body["prompt_token_ids"][:kept] + [1] * 33}
            )


def run_load(arguments: argparse.Namespace) -> None:
    size = SHAPES[arguments.shape][1]
    with tempfile.TemporaryDirectory() as folder:
        path = Path(folder) / "items"
        make_catalog(size, arguments.items, 0).save(path)
        failures = Failures()
        with server(arguments, path) as (url, _):
            for rate in arguments.rates:
                count = max(20, int(rate * arguments.seconds))
                bodies = make_bodies(arguments, count, int(rate), arguments.cached)
                with httpx.Client(base_url=url, timeout=120) as client:
                    warm(client, arguments, bodies)
                answers = asyncio.run(_load(url, bodies, rate))
                report_load(arguments, rate, answers)
                lost = sum("failed" in answer for answer in answers)
                if lost:
                    failures.add(f"rate {rate:g}/s", f"{lost} of {len(answers)} requests failed")
    failures.exit()


async def _load(url: str, bodies: Sequence[dict[str, Any]], rate: float) -> list[dict[str, Any]]:
    limits = httpx.Limits(max_connections=2000, max_keepalive_connections=2000)
    async with httpx.AsyncClient(base_url=url, timeout=120, limits=limits) as client:
        return await open_loop(client, bodies, rate)


def report_load(arguments: argparse.Namespace, rate: float, answers: Sequence[dict[str, Any]]) -> None:
    good = [answer for answer in answers if "failed" not in answer]
    failed = Counter(answer["failed"] for answer in answers if "failed" in answer)
    stages = {"latency": [answer["latency_ms"] for answer in good]}
    for stage in ("queue", "prefill", "decode", "total"):
        stages[stage] = [answer["timings_ms"][stage] for answer in good]
    tokens = sum(answer["usage"]["prompt_tokens"] for answer in good)
    hit = sum(answer["usage"]["cached_tokens"] for answer in good) / max(1, tokens)
    print(
        f"rate {rate:g}/s: {len(good)} answered, failed {dict(failed) or 'none'}, {100 * hit:.0f} % of tokens cached"
    )
    for stage, values in stages.items():
        print(
            "   ",
            f"{stage:8}",
            "  ".join(f"{name} {value:8.1f} ms" for name, value in percentiles(values).items()),
        )
    case = {"shape": arguments.shape, "W": arguments.beam_width, "O": LEVELS, "prompts": arguments.prompts}
    case |= {"rate": rate, "cached": arguments.cached}
    append_result(
        "serve",
        arm="onela",
        case=case,
        metric="latency_p99",
        unit="ms",
        value=percentiles(stages["latency"]).get("p99", float("nan")),
        out=arguments.out,
        stages={stage: percentiles(values) for stage, values in stages.items()},
        answered=len(good),
        failed={str(name): number for name, number in failed.items()},
        hit_rate=hit,
    )


# ---- faults


def run_faults(arguments: argparse.Namespace) -> None:
    arguments.beam_width, arguments.prompts = 16, [8, 200]
    size = SHAPES[arguments.shape][1]
    catalogs = [make_catalog(size, 4000, seed) for seed in (1, 2)]
    bodies = make_bodies(arguments, 40, 3, 0.5)
    expected = {}
    for catalog in catalogs:
        engine = make_engine(argparse.Namespace(**{**vars(arguments), "cache_bytes": 0}), catalog)
        requests = [Request(prompt_token_ids=body["prompt_token_ids"]) for body in bodies]
        for i, result in enumerate(engine.generate(requests, BeamParams(beam_width=16))):
            expected[catalog.version, i] = {item.sid: item.cum_logprob for item in result.items}
    with tempfile.TemporaryDirectory() as folder:
        paths = []
        for number, catalog in enumerate(catalogs):
            paths.append(Path(folder) / f"items{number}")
            catalog.save(paths[-1])
        with server(arguments, paths[0], max_body=100_000) as (url, pid):
            outcome = asyncio.run(_faults(arguments, url, pid, bodies, expected, paths))
    print(json.dumps(outcome, indent=2))
    append_result(
        "serve",
        arm="onela",
        case={"shape": arguments.shape, "faults": arguments.requests},
        metric="wrong_or_lost",
        unit="requests",
        value=outcome["wrong"] + outcome["lost"],
        out=arguments.out,
        **{name: value for name, value in outcome.items() if name not in ("wrong", "lost")},
    )
    leaked = outcome["places_held_afterwards"] > 0 or outcome["memory_growth_mib"] > 64
    if outcome["wrong"] or outcome["lost"] or leaked:
        raise SystemExit("requests were lost or wrong, places are still held, or memory grew")


async def _faults(
    arguments: argparse.Namespace,
    url: str,
    pid: int,
    bodies: Sequence[dict[str, Any]],
    expected: dict[Any, Any],
    paths: Sequence[Path],
) -> dict[str, Any]:
    counts: Counter[str] = Counter()
    memory: list[float] = []
    chance = random.Random(7)
    limits = httpx.Limits(max_connections=64)

    async def one(client: httpx.AsyncClient) -> None:
        kind = chance.choices(["good", "hang up", "malformed", "oversize", "too wide"], [80, 8, 4, 4, 4])[0]
        i = chance.randrange(len(bodies))
        body: Any = {"prompt_token_ids": bodies[i]["prompt_token_ids"], "beam_width": 16}
        wanted = 200
        if kind == "malformed":
            body, wanted = b'{"prompt_token_ids": [5, ', 422
        elif kind == "oversize":
            body, wanted = {**body, "request_id": "x" * 200_000}, 413
        elif kind == "too wide":
            body, wanted = {**body, "beam_width": 60_000}, 422
        content = body if isinstance(body, bytes) else json.dumps(body).encode()
        sending = client.post("/v1/recommend", content=content, headers={"content-type": "application/json"})
        if kind == "hang up":
            try:
                await asyncio.wait_for(sending, chance.random() * 0.05)
            except (TimeoutError, asyncio.TimeoutError):
                counts["hung up"] += 1
            return
        response = await sending
        if response.status_code != wanted:
            counts["wrong"] += 1
            counts[f"status {response.status_code} for {kind}"] += 1
        elif wanted == 200:
            answer = response.json()
            scores = expected[answer["catalog_version"], i]
            got = {tuple(item["sid"]): item["cum_logprob"] for item in answer["items"]}
            same = got.keys() == scores.keys() and all(abs(got[s] - scores[s]) < 1e-3 for s in got)
            counts["good" if same else "wrong"] += 1
            counts[f"catalogue {answer['catalog_version']}"] += 1
        else:
            counts[f"refused, {kind}"] += 1

    async def swap(client: httpx.AsyncClient) -> None:
        number = 0
        while True:
            await asyncio.sleep(1)
            number += 1
            path = {"path": str(paths[number % 2])}
            for action, body in (("load", path), ("switch", {})):
                response = await client.post(f"/v1/catalog/{action}", json=body, headers=ADMIN)
                response.raise_for_status()
            counts["switches"] += 1
            memory.append(_rss_mib(pid))

    async def work(client: httpx.AsyncClient, queue: Iterator[int]) -> None:
        for _ in queue:
            await one(client)
            counts["ended"] += 1

    begun = time.perf_counter()
    async with httpx.AsyncClient(base_url=url, timeout=120, limits=limits) as client:
        swapping = asyncio.ensure_future(swap(client))
        queue = iter(range(arguments.requests))
        await asyncio.gather(*(work(client, queue) for _ in range(arguments.clients)))
        swapping.cancel()
        await asyncio.sleep(1)
        held = await _held(client)
    third = max(1, len(memory) // 3)
    growth = max(memory[-third:], default=0) - max(memory[third : 2 * third], default=0)
    ended, wrong = counts.pop("ended"), counts.pop("wrong", 0)
    return {
        "requests": arguments.requests,
        "seconds": round(time.perf_counter() - begun, 1),
        "lost": arguments.requests - ended,
        "wrong": wrong,
        **counts,
        "places_held_afterwards": held,
        "memory_mib": [round(value) for value in memory[:: max(1, len(memory) // 10)]],
        "memory_growth_mib": round(growth, 1),
    }


async def _held(client: httpx.AsyncClient) -> float:
    """Places that requests still hold, by the metrics."""
    names = ("onela_requests_running", "onela_requests_waiting", "onela_slots_used", "onela_prompts_used")
    lines = (await client.get("/metrics")).text.splitlines()
    return sum(float(line.split()[1]) for line in lines if line.split()[0] in names)


def _rss_mib(pid: int) -> float:
    for line in Path(f"/proc/{pid}/status").read_text().splitlines():
        if line.startswith("VmRSS"):
            return int(line.split()[1]) / 1024
    return 0.0


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("mode", choices=["load", "faults", "server"])
    parser.add_argument("--shape", choices=SHAPES, default="tiny")
    parser.add_argument("--rates", type=float, nargs="+", default=[5, 10, 20], help="requests per second")
    parser.add_argument("--seconds", type=float, default=20, help="of load at each rate")
    parser.add_argument("--prompts", type=int, nargs=2, default=[1024, 5120], help="shortest and longest")
    parser.add_argument("--beam-width", type=int, default=256)
    parser.add_argument("--cached", type=float, default=0.0, help="share of each prompt that was seen before")
    parser.add_argument("--users", type=int, default=64)
    parser.add_argument("--items", type=int, default=1_000_000)
    parser.add_argument("--requests", type=int, default=10_000, help="of faults")
    parser.add_argument("--clients", type=int, default=24, help="of faults")
    parser.add_argument("--cache-bytes", type=int, default=0)
    parser.add_argument("--batch-tokens", type=int, default=EngineConfig.max_batch_tokens)
    parser.add_argument("--out", type=Path, help="where to append results instead of bench/results")
    parser.add_argument("--port", type=int, default=0, help=argparse.SUPPRESS)
    parser.add_argument("--catalog", type=Path, help=argparse.SUPPRESS)
    parser.add_argument("--max-body", type=int, default=2 << 20, help=argparse.SUPPRESS)
    arguments = parser.parse_args()
    {"load": run_load, "faults": run_faults, "server": run_server}[arguments.mode](arguments)


if __name__ == "__main__":
    main()
