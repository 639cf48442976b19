"""A real server over HTTP, under load and under fire.

    python bench/serve.py load [--shape qwen3.5-0.8b] [--rates 20 40 60] [--cached 0 0.8]
    python bench/serve.py load --shape qwen3-1.7b --prompts 5000 5000 --concurrency 4
    python bench/serve.py faults [--requests 10000] [--replicas 2]

`load` sends requests at random times of a fixed mean rate, whether earlier ones have been answered or not (an open
loop: a slow server gets no mercy), in increasing rates until the 99th percentile of latency is too long, and reports
latencies by stage for each; with `--concurrency` it keeps so many under way instead. The sending is done by processes
of its own (`bench/load_client.py`). `faults` keeps a number of clients busy with good requests, malformed and oversize
ones, and ones that hang up, switches the catalogue every second, and compares every answer with a list that was
recorded beforehand; the server's memory must not grow. With `--replicas`, the server is `onela serve --replicas`, and
one replica after the other is killed meanwhile.
"""

from __future__ import annotations

import os
import sys

if not __package__:  # bench/operator.py would hide the standard library's
    sys.path[0] = os.path.dirname(os.path.dirname(os.path.abspath(__file__)))

import argparse
import asyncio
import atexit
import cProfile
import json
import random
import signal
import socket
import subprocess
import tempfile
import time
from collections import Counter
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import httpx
import numpy as np
import torch

from bench.common import Failures, append_result
from bench.load_client import draw_tokens, encode_body
from bench.qwen3 import QWEN3_1_7B
from onela import BeamParams, Engine, EngineConfig, ItemCatalog, Request, SidVocabulary
from onela.bench.models import SHAPE_08B, TINY, random_model
from onela.config import ServerConfig

# Model, codes per level, levels.
SHAPES = {"qwen3.5-0.8b": (SHAPE_08B, 8192, 4), "qwen3-1.7b": (QWEN3_1_7B, 8192, 3), "tiny": (TINY, 256, 4)}
ADMIN = {"authorization": "Bearer admin"}


def server_options(arguments: argparse.Namespace) -> dict[str, Any]:
    """The engine's options."""
    given = {f"ONELA_{name.upper()}": value for name, value in (o.split("=", 1) for o in arguments.option)}
    return {
        "prompt_cache_bytes": arguments.cache_bytes,
        "prompt_cache_host_bytes": arguments.host_cache_bytes,
        "max_batch_tokens": arguments.batch_tokens,
        **{name[6:].lower(): value for name, value in given.items()},
    }


def make_engine(arguments: argparse.Namespace, catalog: ItemCatalog | None) -> Engine:
    """The engine that is served: random weights, as many codes per level as the shape has room for."""
    values, size, levels = SHAPES[arguments.shape]
    device = torch.device("cuda" if torch.cuda.is_available() else "cpu")
    model = random_model(values, torch.bfloat16 if device.type == "cuda" else torch.float32, device)
    environ = {f"ONELA_{name.upper()}": str(value) for name, value in server_options(arguments).items()}
    return Engine(model, vocabulary(size, levels), catalog, config=EngineConfig.from_env(environ))


def vocabulary(size: int, levels: int) -> SidVocabulary:
    """Levels of `size` codes, one after the other, from token 1000 on."""
    return SidVocabulary.from_token_ids(
        [list(range(1000 + level * size, 1000 + (level + 1) * size)) for level in range(levels)]
    )


def make_catalog(shape: str, count: int, seed: int) -> ItemCatalog:
    """Random items with titles."""
    _, size, levels = SHAPES[shape]
    sids = np.unique(np.random.default_rng(seed).integers(0, size, size=(count, levels)), axis=0)
    return ItemCatalog.from_arrays(np.arange(len(sids)), sids, titles=[f"Item {i}" for i in range(len(sids))])


def run_server(arguments: argparse.Namespace) -> None:
    """The server's process."""
    from onela.serve.app import create_app
    from onela.serve.run import DrainingServer

    begun = time.perf_counter()
    engine = make_engine(arguments, ItemCatalog.load(arguments.catalog))
    captures = engine.runner.num_captures
    print(f"engine made in {time.perf_counter() - begun:.1f} s, {captures} forwards captured", flush=True)
    if arguments.profile:
        profile_thread(engine, arguments.profile)
    config = ServerConfig(port=arguments.port, admin_token="admin", max_body_bytes=arguments.max_body)
    DrainingServer(create_app(engine, config), config, log_level="warning").run()


def profile_thread(engine: Engine, path: Path) -> None:
    """Keep Python's profile of the thread that steps the engine, in a file for `pstats`."""
    step, profile = engine.step, cProfile.Profile()

    def profiled() -> Any:
        profile.enable()
        try:
            return step()
        finally:
            profile.disable()

    engine.step = profiled  # type: ignore[method-assign]
    atexit.register(lambda: profile.dump_stats(path))


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
    words += ["--host-cache-bytes", str(arguments.host_cache_bytes)]
    if arguments.profile:
        words += ["--profile", str(arguments.profile)]
    if arguments.option:
        words += ["--option", *arguments.option]
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
        try:
            process.wait(20)
        except subprocess.TimeoutExpired:
            process.kill()


# ---- load


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


# ---- faults


def save_checkpoint(folder: Path) -> None:
    """A tiny hybrid with random weights, as a checkpoint that `onela serve` loads."""
    import transformers

    config = transformers.Qwen3_5TextConfig(**TINY, initializer_range=0.125)
    torch.manual_seed(0)
    transformers.Qwen3_5ForCausalLM(config).save_pretrained(folder)


@contextmanager
def replicas(arguments: argparse.Namespace, folder: Path, catalog: Path) -> Iterator[tuple[str, int]]:
    """`onela serve --replicas`: its address and process id."""
    _, size, levels = SHAPES["tiny"]
    words = vocabulary(size, levels)
    tokens = folder / "vocabulary.json"
    tokens.write_text(json.dumps([words.token_ids(level).tolist() for level in range(levels)]))
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        port = free.getsockname()[1]
    command = [
        sys.executable,
        "-m",
        "onela.cli.main",
        "serve",
        str(folder / "model"),
        "--catalog",
        str(catalog),
    ]
    command += ["--vocabulary", str(tokens), "--port", str(port), "--replicas", str(arguments.replicas)]
    command += ["--cpus-per-replica", "0.1", "--gpus-per-replica", str(arguments.gpus_per_replica)]
    command += ["--device", "cuda" if arguments.gpus_per_replica else "cpu", "--dtype", "float32"]
    command += ["--prompt-cache-bytes", str(arguments.cache_bytes)]
    environ = {**os.environ, "ONELA_SERVE_ADMIN_TOKEN": "admin", "ONELA_SERVE_MAX_BODY_BYTES": "100000"}
    environ |= {"RAY_USAGE_STATS_ENABLED": "0", "PYTHONPATH": str(Path(__file__).resolve().parent.parent)}
    log = (folder / "server.log").open("w")
    process = subprocess.Popen(command, env=environ, stdout=log, stderr=subprocess.STDOUT)
    url = f"http://127.0.0.1:{port}"
    try:
        limit = time.monotonic() + 180
        while True:
            if process.poll() is not None or time.monotonic() > limit:
                raise RuntimeError(
                    f"the server has not started:\n{(folder / 'server.log').read_text()[-3000:]}"
                )
            try:
                if httpx.get(f"{url}/metrics", timeout=5).text.count("\nonela_up{") == arguments.replicas:
                    break
            except httpx.TransportError:
                pass
            time.sleep(0.5)
        yield url, process.pid
    finally:
        process.send_signal(signal.SIGINT)
        try:
            process.wait(60)
        except subprocess.TimeoutExpired:
            process.kill()
        log.close()


def replica_pids(server_pid: int) -> list[int]:
    """Processes of the replicas that this server has started, the oldest first."""
    found = []
    for folder in Path("/proc").iterdir():
        if not folder.name.isdigit():
            continue
        try:
            named = (folder / "cmdline").read_bytes().startswith(b"ray::ServeReplica:onela:Replica")
            if named and server_pid in _ancestors(int(folder.name)):
                found.append(
                    (int((folder / "stat").read_text().rsplit(")", 1)[1].split()[19]), int(folder.name))
                )
        except OSError:  # it has left meanwhile
            continue
    return [pid for _, pid in sorted(found)]


def _ancestors(pid: int) -> list[int]:
    parents = []
    while pid > 1:
        pid = int(Path(f"/proc/{pid}/stat").read_text().rsplit(")", 1)[1].split()[1])
        parents.append(pid)
    return parents


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
        case |= {"replicas": arguments.replicas, "gpus_per_replica": arguments.gpus_per_replica}
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
    return sum(float(line.split()[1]) for line in lines if line.split()[0].partition("{")[0] in names)


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
    parser.add_argument("--cached-rates", type=float, nargs="+", help="those of cached prompts, if others")
    parser.add_argument("--concurrency", type=int, help="so many requests at a time, instead of rates")
    parser.add_argument("--seconds", type=float, default=20, help="of load at each rate")
    parser.add_argument("--count", type=int, help="requests of each run, instead of seconds")
    parser.add_argument("--warm", type=int, default=128, help="requests before those that are measured")
    parser.add_argument("--limit-ms", type=float, default=100, help="99th percentile at which rates end")
    parser.add_argument("--client-processes", type=int, default=4)
    parser.add_argument("--prompts", type=int, nargs=2, default=[1024, 5120], help="shortest and longest")
    parser.add_argument("--beam-width", type=int, default=256)
    parser.add_argument("--n", type=int, default=50, help="items to return")
    parser.add_argument(
        "--cached", type=float, nargs="+", default=[0.0], help="shares of each prompt that were seen before"
    )
    parser.add_argument("--items", type=int, default=1_000_000)
    parser.add_argument("--requests", type=int, default=10_000, help="of faults")
    parser.add_argument("--clients", type=int, default=24, help="of faults")
    parser.add_argument(
        "--replicas", type=int, default=0, help="faults: of `onela serve --replicas`; 0: without"
    )
    parser.add_argument(
        "--gpus-per-replica", type=float, default=0, help="faults: of `onela serve`; 0: replicas on the CPU"
    )
    parser.add_argument(
        "--kill-every", type=float, default=20, help="faults: seconds between killed replicas"
    )
    parser.add_argument("--cache-bytes", type=int, default=0)
    parser.add_argument("--host-cache-bytes", type=int, default=0)
    parser.add_argument("--batch-tokens", type=int, default=EngineConfig.max_batch_tokens)
    parser.add_argument("--option", nargs="+", default=[], help="NAME=VALUE: other options of the engine")
    parser.add_argument("--profile", type=Path, help="where to write a profile of the engine's thread")
    parser.add_argument("--commit", help="the commit that is measured, where there is no checkout to ask")
    parser.add_argument("--out", type=Path, help="where to append results instead of bench/results")
    parser.add_argument("--port", type=int, default=0, help=argparse.SUPPRESS)
    parser.add_argument("--catalog", type=Path, help=argparse.SUPPRESS)
    parser.add_argument("--max-body", type=int, default=2 << 20, help=argparse.SUPPRESS)
    arguments = parser.parse_args()
    if arguments.concurrency is not None:
        arguments.client_processes = min(arguments.client_processes, arguments.concurrency)
    # Whoever ends this process ends what it has started; and a server's profile is written at its exit.
    signal.signal(signal.SIGTERM, lambda *_: sys.exit(1))
    {"load": run_load, "faults": run_faults, "server": run_server}[arguments.mode](arguments)


if __name__ == "__main__":
    main()
