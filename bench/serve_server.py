"""What `bench/serve.py` drives: a server with random weights in a process of its own."""

from __future__ import annotations

import argparse
import atexit
import cProfile
import logging
import socket
import subprocess
import sys
import time
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import httpx
import numpy as np
import torch

from bench.qwen3 import QWEN3_1_7B
from onela import Engine, EngineConfig, ItemCatalog, SidVocabulary
from onela.bench.models import SHAPE_08B, TINY, random_model
from onela.config import ServerConfig

# Model, codes per level, levels.
SHAPES = {"qwen3.5-0.8b": (SHAPE_08B, 8192, 4), "qwen3-1.7b": (QWEN3_1_7B, 8192, 3), "tiny": (TINY, 256, 4)}


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

    # What a warm start consists of is in the log.
    logging.basicConfig(level=logging.WARNING, format="%(relativeCreated)7d ms %(name)s: %(message)s")
    logging.getLogger("onela").setLevel(logging.INFO)
    begun = time.perf_counter()
    engine = make_engine(arguments, ItemCatalog.load(arguments.catalog))
    captures = engine.runner.num_captures
    print(f"engine made in {time.perf_counter() - begun:.1f} s, {captures} graphs captured", flush=True)
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


def free_port() -> int:
    """A port that nobody listens on now."""
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        return int(free.getsockname()[1])


@contextmanager
def server(
    arguments: argparse.Namespace, catalog: Path, *, max_body: int = 2 << 20
) -> Iterator[tuple[str, int]]:
    """A server in a process of its own: its address and process id."""
    port = free_port()
    words = ["server", "--shape", arguments.shape, "--port", str(port), "--catalog", str(catalog)]
    words += ["--cache-bytes", str(arguments.cache_bytes), "--batch-tokens", str(arguments.batch_tokens)]
    words += ["--host-cache-bytes", str(arguments.host_cache_bytes)]
    if arguments.profile:
        words += ["--profile", str(arguments.profile)]
    if arguments.option:
        words += ["--option", *arguments.option]
    script = Path(__file__).with_name("serve.py")
    process = subprocess.Popen([sys.executable, str(script), *words, "--max-body", str(max_body)])
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
