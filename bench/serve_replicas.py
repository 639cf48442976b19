"""Several replicas of a tiny model by `onela serve --replicas`, and which processes they are."""

from __future__ import annotations

import argparse
import json
import os
import signal
import subprocess
import sys
import time
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import httpx
import torch

from bench.serve_server import SHAPES, free_port, vocabulary
from onela.bench.models import TINY


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
    port = free_port()
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
    root = str(Path(__file__).resolve().parent.parent)
    path = os.pathsep.join(filter(None, [root, os.environ.get("PYTHONPATH")]))
    environ |= {"RAY_USAGE_STATS_ENABLED": "0", "PYTHONPATH": path}
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
