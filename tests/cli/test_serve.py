"""`onela serve` as a process: it answers, and SIGTERM lets what runs end."""

from __future__ import annotations

import concurrent.futures
import errno
import json
import os
import signal
import socket
import subprocess
import sys
import time
from collections.abc import Iterator
from pathlib import Path
from typing import IO

import httpx
import pytest

from tests.checkpoints import save_qwen3_5
from tests.engine.helpers import random_sids, vocabulary_of

SIZES = (6, 8, 7)


@pytest.fixture(scope="module")
def files(tmp_path_factory: pytest.TempPathFactory) -> Path:
    path = tmp_path_factory.mktemp("serve")
    save_qwen3_5(path / "model")
    vocabulary = vocabulary_of(*SIZES)
    levels = [vocabulary.token_ids(level).tolist() for level in range(3)]
    (path / "vocabulary.json").write_text(json.dumps(levels))
    rows = [{"item_id": i, "sid": list(sid)} for i, sid in enumerate(random_sids(120, SIZES))]
    (path / "items.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))
    return path


@pytest.fixture
def process(files: Path) -> Iterator[tuple[subprocess.Popen[str], str]]:
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        port = free.getsockname()[1]
    command = [sys.executable, "-m", "onela.cli.main", "serve", str(files / "model"), "--port", str(port)]
    command += ["--catalog", str(files / "items.jsonl"), "--vocabulary", str(files / "vocabulary.json")]
    environment = {**os.environ, "ONELA_SERVE_MODEL_NAME": "tiny", "ONELA_PROMPT_CACHE_BYTES": "10000000"}
    server = subprocess.Popen(command, env=environment, stderr=subprocess.PIPE, text=True)
    url = f"http://127.0.0.1:{port}"
    limit = time.monotonic() + 60
    while True:
        try:
            if httpx.get(f"{url}/ready").status_code == 200:
                break
        except httpx.TransportError:
            assert server.poll() is None, server.stderr and server.stderr.read()
            assert time.monotonic() < limit
            time.sleep(0.1)
    yield server, url
    if server.poll() is None:
        server.kill()
    server.communicate()


@pytest.mark.slow
def test_it_answers_and_drains_on_sigterm(process: tuple[subprocess.Popen[str], str]) -> None:
    server, url = process
    assert httpx.get(f"{url}/v1/models").json()["data"][0]["id"] == "tiny"
    body = {"prompt_token_ids": [5] * 200, "beam_width": 60}
    first = httpx.post(f"{url}/v1/recommend", json=body).json()
    assert len(first["items"]) == 60
    with concurrent.futures.ThreadPoolExecutor(8) as pool, httpx.Client(timeout=60) as client:
        answers = [pool.submit(client.post, f"{url}/v1/recommend", json=body) for _ in range(8)]
        while not any(answer.done() for answer in answers):
            time.sleep(0.005)
        server.send_signal(signal.SIGTERM)
        for answer in answers:
            items = answer.result().json()["items"]
            assert [item["sid"] for item in items] == [item["sid"] for item in first["items"]]
    # uvicorn drains, then raises the signal again for whoever started it.
    assert server.wait(30) in (0, -signal.SIGTERM)
    with pytest.raises(httpx.TransportError):
        httpx.get(f"{url}/health")


def test_a_taken_port_is_one_line_and_code_2_and_nothing_is_loaded(tmp_path: Path) -> None:
    with socket.socket() as taken:
        taken.bind(("127.0.0.1", 0))
        taken.listen()
        port = taken.getsockname()[1]
        # There is no model here: that would be told, were it looked for.
        command = [sys.executable, "-m", "onela.cli.main", "serve", str(tmp_path), "--port", str(port)]
        done = subprocess.run(command, capture_output=True, text=True, check=False)
    assert done.returncode == 2
    assert done.stderr.startswith(f"onela: port: cannot listen on {port} (")
    assert len(done.stderr.splitlines()) == 1


def written_to(pipe: Path, reader: subprocess.Popen[str]) -> IO[str]:
    """A pipe, once the process has opened it to read."""
    while True:
        try:
            end = os.open(pipe, os.O_WRONLY | os.O_NONBLOCK)
        except OSError as error:
            if error.errno != errno.ENXIO or reader.poll() is not None:
                raise
            time.sleep(0.05)
        else:
            os.set_blocking(end, True)
            return os.fdopen(end, "w")


def test_the_port_is_its_own_while_the_model_loads(files: Path) -> None:
    """Another server that comes meanwhile is the one that is refused."""
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        port = free.getsockname()[1]
    # Reading the vocabulary from a pipe, it waits in the midst of loading.
    pipe = files / "pipe"
    os.mkfifo(pipe)
    command = [sys.executable, "-m", "onela.cli.main", "serve", str(files / "model"), "--port", str(port)]
    command += ["--catalog", str(files / "items.jsonl"), "--vocabulary", str(pipe)]
    server = subprocess.Popen(command, stderr=subprocess.PIPE, text=True)
    try:
        with written_to(pipe, server) as vocabulary:
            with socket.socket() as other:
                other.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
                with pytest.raises(OSError, match="in use"):
                    other.bind(("127.0.0.1", port))
            with pytest.raises(httpx.ConnectError):
                httpx.get(f"http://127.0.0.1:{port}/ready")
            vocabulary.write((files / "vocabulary.json").read_text())
        limit = time.monotonic() + 60
        while True:
            try:
                assert httpx.get(f"http://127.0.0.1:{port}/ready").status_code == 200
                break
            except httpx.ConnectError:
                assert server.poll() is None
                assert time.monotonic() < limit
                time.sleep(0.1)
        server.send_signal(signal.SIGTERM)
        told = server.communicate(timeout=30)[1]
        assert f"Listening on http://127.0.0.1:{port} " in told
    finally:
        server.kill()
        server.communicate()


@pytest.mark.parametrize(
    ("options", "environ", "told"),
    [
        (("--host", "no.such.host.invalid"), {}, "onela: host: cannot listen on 'no.such.host.invalid' ("),
        (("--host", "192.0.2.1"), {}, "onela: host: cannot listen on '192.0.2.1' ("),
        (("--host", "a" * 64), {}, f"onela: host: cannot listen on '{'a' * 64}' ("),
        ((), {"ONELA_SERVE_COLOUR": "red"}, "onela: ONELA_SERVE_COLOUR: unknown variable"),
        (
            ("--max-replicas", "3"),
            {},
            "onela: --max-replicas, --gpus-per-replica, --cpus-per-replica: they go",
        ),
        (
            ("--gpus-per-replica", "1"),
            {},
            "onela: --max-replicas, --gpus-per-replica, --cpus-per-replica: they go",
        ),
    ],
)
def test_an_unusable_option_is_one_line_and_code_2(
    options: tuple[str, ...], environ: dict[str, str], told: str, files: Path
) -> None:
    command = [sys.executable, "-m", "onela.cli.main", "serve", str(files / "model"), *options]
    done = subprocess.run(command, env={**os.environ, **environ}, capture_output=True, text=True, check=False)
    assert done.returncode == 2
    assert done.stderr.startswith(told)
    assert len(done.stderr.splitlines()) == 1
