"""The load test's traffic is what it says it is, and its commands run."""

from __future__ import annotations

import argparse
import json
import signal
import socketserver
import threading
from collections.abc import Iterator
from pathlib import Path

import numpy as np
import pytest

import bench.serve
from bench.load_client import draw_tokens, encode_body, encode_request
from bench.serve_load import Clients, make_traffic
from bench.serve_simulation import Costs, make_arrivals, simulate
from onela import EngineConfig
from onela.engine.prefill_packing import bucket
from onela.engine.scheduler import Batch

ARGUMENTS = argparse.Namespace(prompts=[1024, 5120], beam_width=256, n=50, client_processes=3)


def test_cold_prompts_have_all_lengths_and_nothing_in_common() -> None:
    traffic = make_traffic(ARGUMENTS, 300, 1, 0.0)
    bodies = [body for share in traffic.shares for body in share]
    assert (len(bodies), traffic.first) == (300, [])
    lengths = [body["length"] for body in bodies]
    assert min(lengths) < 1200
    assert max(lengths) > 4900
    assert len({tuple(draw_tokens(body)[:64]) for body in bodies}) == 300


def test_a_returning_user_brings_the_share_that_was_cached() -> None:
    traffic = make_traffic(ARGUMENTS, 100, 1, 0.8)
    bodies = [body for share in traffic.shares for body in share]
    assert len(bodies) >= 100
    config = EngineConfig()
    latest = {body["fields"]["session_id"]: body for body in traffic.first}
    for body in bodies:
        before = latest[body["fields"]["session_id"]]
        tokens, known = draw_tokens(body), draw_tokens(before)
        assert tokens[: len(known)] == known
        kept = (len(known) - config.prompt_cache_tail) // 64 * 64
        assert kept / len(tokens) == pytest.approx(0.8, abs=0.001)
        latest[body["fields"]["session_id"]] = body
    # At any time all lengths are seen.
    half = [body["length"] for share in traffic.shares for body in share[: len(share) // 2]]
    whole = [body["length"] for body in bodies]
    assert sum(half) / len(half) == pytest.approx(sum(whole) / len(whole), rel=0.1)
    assert all(1024 <= length <= 5120 for length in whole)


class NotFound(socketserver.StreamRequestHandler):
    """Answers everything 404, on a connection that stays."""

    def handle(self) -> None:
        while head := self.rfile.readline():
            length = 0
            while head.strip():
                name, _, value = head.decode().partition(":")
                length = int(value) if name.lower() == "content-length" else length
                head = self.rfile.readline()
            self.rfile.read(length)
            self.wfile.write(b"HTTP/1.1 404 Not Found\r\ncontent-length: 0\r\n\r\n")


def test_clients_tell_of_more_answers_than_a_pipe_holds() -> None:
    """A pipe holds 64 KiB; 1,500 answers take twice that."""
    body = {"seed": 1, "length": 8, "vocabulary": 100, "fields": {}}
    with socketserver.ThreadingTCPServer(("127.0.0.1", 0), NotFound) as server:
        threading.Thread(target=server.serve_forever, daemon=True).start()
        clients = Clients(2)
        try:
            clients.prepare("all", [[body] * 1500] * 2)
            assert clients.answers() == [1500, 1500]
            lines = clients.run("all", server.server_address[1], [{"concurrency": 4}] * 2)
        finally:
            clients.close()
            server.shutdown()
    assert len(lines) == 3000
    assert {line["status"] for line in lines} == {404}


def test_too_short_prompts_are_refused() -> None:
    short = argparse.Namespace(**{**vars(ARGUMENTS), "prompts": [256, 1024]})
    with pytest.raises(ValueError, match="256 tokens are too few"):
        make_traffic(short, 10, 1, 0.8)


def test_a_request_is_what_http_expects() -> None:
    body = encode_body({"seed": 1, "length": 3, "fields": {"n": 5}})
    head, rest = encode_request(body).split(b"\r\n\r\n", 1)
    assert rest == body
    assert f"Content-Length: {len(body)}".encode() in head


@pytest.fixture
def _sigterm() -> Iterator[None]:
    """The script takes SIGTERM for itself."""
    before = signal.getsignal(signal.SIGTERM)
    yield
    signal.signal(signal.SIGTERM, before)


@pytest.mark.slow
@pytest.mark.usefixtures("_sigterm")
def test_faults_of_a_few_requests(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    path = tmp_path / "lines.jsonl"
    monkeypatch.setattr("sys.argv", ["serve.py", "faults", "--requests", "60", "--out", str(path)])
    bench.serve.main()
    line = json.loads(path.read_text())
    assert (line["value"], line["places_held_afterwards"], line["requests"]) == (0, 0, 60)
    assert line["good"] > 30


@pytest.mark.slow
@pytest.mark.usefixtures("_sigterm")
def test_load_of_a_few_requests(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    path = tmp_path / "lines.jsonl"
    sizes = ["--prompts", "20", "40", "--beam-width", "8", "--items", "500", "--count", "8", "--warm", "4"]
    words = ["serve.py", "load", "--concurrency", "2", *sizes, "--limit-ms", "60000", "--out", str(path)]
    monkeypatch.setattr("sys.argv", words)
    bench.serve.main()
    lines = [json.loads(line) for line in path.read_text().splitlines()]
    assert {line["metric"] for line in lines} == {"latency_p99", "throughput"}
    assert all((line["answered"], line["failed"]) == (8, {}) for line in lines)


def test_a_simulated_request_alone_takes_what_its_steps_cost() -> None:
    costs = Costs(http=0.25)
    config = EngineConfig(max_batch_tokens=8192)
    latencies, busy = simulate([(0.0, 3000), (1.0, 5000)], config, costs, width=200, levels=3)
    for length, latency in zip((3000, 5000), latencies):
        prefill = costs.prefill + costs.prefill_token * bucket(length) + costs.prefill_pair * length**2 / 1e6
        decode = costs.decode + 0.2 * costs.decode_row + costs.select + 0.2 * costs.select_row
        first = costs.select + 0.001 * costs.select_row
        assert latency == pytest.approx(2 * 0.25 + costs.host + prefill + first + 2 * decode)
    assert 0 < busy < 0.1


def test_a_simulation_sees_what_batching_is_worth() -> None:
    arguments = argparse.Namespace(**{**vars(ARGUMENTS), "seconds": 4, "count": None})
    arrivals = make_arrivals(arguments, 75, 1)
    p99 = {}
    for tokens in (5120, 12288):
        latencies, busy = simulate(arrivals, EngineConfig(max_batch_tokens=tokens, max_waiting=1000), Costs())
        assert len(latencies) == len(arrivals) == 300
        assert min(latencies) > Costs().step(Batch())
        p99[tokens] = float(np.percentile(latencies, 99))
        assert 0.6 < busy < 1
    assert p99[12288] < 0.9 * p99[5120]


@pytest.mark.usefixtures("_sigterm")
def test_the_simulation_runs_as_a_command(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    words = ["serve.py", "simulate", "--rates", "20", "--count", "30", "--cost", "prefill=3", "http=0"]
    monkeypatch.setattr("sys.argv", words)
    bench.serve.main()
    assert "rate 20/s: 30 requests, latency p50" in capsys.readouterr().out
    monkeypatch.setattr("sys.argv", [*words[:-1], "coffee=1"])
    with pytest.raises(SystemExit, match="--cost: coffee: no such cost"):
        bench.serve.main()


@pytest.mark.usefixtures("_sigterm")
@pytest.mark.parametrize(
    ("words", "named"),
    [
        (["--rates", "-5"], "--rates"),
        (["--rates", "nan"], "--rates"),
        (["--prompts", "500", "100"], "--prompts"),
        (["--option", "foo"], "--option"),
        (["--concurrency", "4"], "simulate"),
        (["--option", "prompt_cache_bytes=1000"], "simulate"),
        (["--cost", "decode=nan"], "--cost: decode"),
        (["--cost", "decode=x"], "--cost"),
    ],
)
def test_what_cannot_be_simulated_is_refused(
    words: list[str], named: str, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr("sys.argv", ["serve.py", "simulate", *words])
    with pytest.raises(SystemExit) as stopped:
        bench.serve.main()
    assert named in capsys.readouterr().err + str(stopped.value)
