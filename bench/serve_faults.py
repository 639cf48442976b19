"""`bench/serve.py faults`: nothing may be lost, wrong, held or leaked, whatever clients and replicas do."""

from __future__ import annotations

import argparse
import asyncio
import json
import os
import random
import signal
import tempfile
import time
from collections import Counter
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

import httpx

from bench.common import append_result
from bench.load_client import draw_tokens
from bench.serve_replicas import replica_pids, replicas, save_checkpoint
from bench.serve_server import SHAPES, make_catalog, make_engine, server, vocabulary
from onela import BeamParams, Engine, Request

ADMIN = {"authorization": "Bearer admin"}


def run_faults(arguments: argparse.Namespace) -> None:
    arguments.shape = "tiny"
    prompts = [draw_tokens({"seed": i, "length": length}) for i, length in enumerate(range(8, 208, 5))]
    catalogs = [make_catalog("tiny", 4000, seed) for seed in (1, 2)]
    with tempfile.TemporaryDirectory() as name:
        folder = Path(name)
        if arguments.replicas:
            save_checkpoint(folder / "model")
        expected, paths = {}, []
        for number, catalog in enumerate(catalogs):
            if arguments.replicas:
                words = vocabulary(*SHAPES["tiny"][1:])
                engine = Engine.from_pretrained(
                    folder / "model", catalog=catalog, vocabulary=words, device="cpu"
                )
            else:
                engine = make_engine(argparse.Namespace(**{**vars(arguments), "cache_bytes": 0}), catalog)
            requests = [Request(prompt_token_ids=tokens) for tokens in prompts]
            for i, result in enumerate(engine.generate(requests, BeamParams(beam_width=16))):
                expected[catalog.version, i] = {item.sid: item.cum_logprob for item in result.items}
            paths.append(folder / f"items{number}")
            catalog.save(paths[-1])
        if arguments.replicas:
            served = replicas(arguments, folder, paths[0])
        else:
            served = server(arguments, paths[0], max_body=100_000)
        with served as (url, pid):
            outcome = asyncio.run(_faults(arguments, url, pid, prompts, expected, paths))
    print(json.dumps(outcome, indent=2))
    case = {"shape": arguments.shape, "faults": arguments.requests}
    if arguments.replicas:
        case["replicas"] = arguments.replicas
    if arguments.gpus_per_replica:
        case["gpus_per_replica"] = arguments.gpus_per_replica
    append_result(
        "serve",
        arm="onela",
        case=case,
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
    prompts: Sequence[Sequence[int]],
    expected: dict[Any, Any],
    paths: Sequence[Path],
) -> dict[str, Any]:
    counts: Counter[str] = Counter()
    memory: list[float] = []
    chance = random.Random(7)
    limits = httpx.Limits(max_connections=64)
    watched = replica_pids(pid)[0] if arguments.replicas else pid

    async def one(client: httpx.AsyncClient) -> None:
        kind = chance.choices(["good", "hang up", "malformed", "oversize", "too wide"], [80, 8, 4, 4, 4])[0]
        i = chance.randrange(len(prompts))
        body: Any = {"prompt_token_ids": prompts[i], "beam_width": 16}
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
                if not arguments.replicas:
                    response.raise_for_status()
                # A replica that was started between the two has nothing to switch to, and one that died says nothing:
                # the next round sets it right.
                elif response.status_code not in (200, 409, 503):
                    counts["wrong"] += 1
                    counts[f"status {response.status_code} for {action}"] += 1
            counts["switches" if response.status_code == 200 else "switches not on every replica"] += 1
            memory.append(_rss_mib(watched))

    async def kill() -> None:
        while arguments.replicas:
            await asyncio.sleep(arguments.kill_every)
            pids = replica_pids(pid)
            if len(pids) > 1:
                os.kill(next(p for p in reversed(pids) if p != watched), signal.SIGKILL)
                counts["replicas killed"] += 1

    async def work(client: httpx.AsyncClient, queue: Iterator[int]) -> None:
        for _ in queue:
            try:
                await one(client)
                counts["ended"] += 1
            except httpx.TransportError as error:
                counts[f"lost, {type(error).__name__}"] += 1

    begun = time.perf_counter()
    async with httpx.AsyncClient(base_url=url, timeout=120, limits=limits) as client:
        beside = [asyncio.ensure_future(swap(client)), asyncio.ensure_future(kill())]
        queue = iter(range(arguments.requests))
        await asyncio.gather(*(work(client, queue) for _ in range(arguments.clients)))
        for task in beside:
            if task.done():
                task.result()
            task.cancel()
        await asyncio.sleep(1)
        held = await _held(client)
    third = len(memory) // 3  # too short a run says nothing of growth
    growth = max(memory[-third:]) - max(memory[third : 2 * third]) if third else 0.0
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
    return sum(float(line.split()[1]) for line in lines if line.split()[0].partition("{")[0] in names)


def _rss_mib(pid: int) -> float:
    for line in Path(f"/proc/{pid}/status").read_text().splitlines():
        if line.startswith("VmRSS"):
            return int(line.split()[1]) / 1024
    return 0.0
