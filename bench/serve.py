"""A real server over HTTP, under load and under fire.

    python bench/serve.py load [--shape qwen3.5-0.8b] [--rates 20 40 60] [--cached 0 0.8]
    python bench/serve.py load --shape qwen3-1.7b --prompts 5000 5000 --concurrency 4
    python bench/serve.py faults [--requests 10000] [--replicas 2]
    python bench/serve.py simulate --rates 60 75 90 [--batch-tokens 12288] [--option max_tokens_beside_decode=none]

`load` sends requests at random times of a fixed mean rate, whether earlier ones have been answered or not (an open
loop: a slow server gets no mercy), in increasing rates until the 99th percentile of latency is too long, and reports
latencies by stage for each; with `--concurrency` it keeps so many under way instead. The sending is done by processes
of its own (`bench/load_client.py`). `faults` keeps a number of clients busy with good requests, malformed and oversize
ones, and ones that hang up, switches the catalogue every second, and compares every answer with a list that was
recorded beforehand; the server's memory must not grow. With `--replicas`, the server is `onela serve --replicas`, and
one replica after the other is killed meanwhile. `simulate` is `load` without a model, a server or a GPU: what the
engine's way of batching makes of what a step costs.
"""

from __future__ import annotations

import os
import sys

if not __package__:  # bench/operator.py would hide the standard library's
    sys.path[0] = os.path.dirname(os.path.dirname(os.path.abspath(__file__)))

import argparse
import signal
from pathlib import Path

from bench.serve_faults import run_faults
from bench.serve_load import run_load
from bench.serve_server import SHAPES, run_server
from bench.serve_simulation import run_simulation
from onela import EngineConfig


def positive(text: str) -> float:
    """A finite number above 0."""
    value = float(text)
    if not 0 < value < float("inf"):
        raise argparse.ArgumentTypeError(f"a finite number above 0 is expected, got {text}")
    return value


def pair(text: str) -> str:
    """NAME=VALUE."""
    if "=" not in text:
        raise argparse.ArgumentTypeError(f"NAME=VALUE is expected, got {text}")
    return text


def check(parser: argparse.ArgumentParser, arguments: argparse.Namespace) -> None:
    """Refuse what a mode would not do as it says."""
    shortest, longest = arguments.prompts
    if not 0 < shortest <= longest:
        parser.error(f"--prompts: shortest and longest are expected, got {shortest} {longest}")
    if arguments.mode == "simulate":
        cached = [option for option in arguments.option if option.startswith("prompt_cache")]
        if arguments.concurrency is not None or arguments.cache_bytes or arguments.host_cache_bytes or cached:
            parser.error("simulate: only rates without a prompt cache can be simulated")


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("mode", choices=["load", "faults", "simulate", "server"])
    parser.add_argument("--shape", choices=SHAPES, default="tiny")
    parser.add_argument("--rates", type=positive, nargs="+", default=[5, 10, 20], help="requests per second")
    parser.add_argument("--cached-rates", type=positive, nargs="+", help="those of cached prompts, if others")
    parser.add_argument("--concurrency", type=int, help="so many requests at a time, instead of rates")
    parser.add_argument("--seconds", type=positive, default=20, help="of load at each rate")
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
    parser.add_argument(
        "--option", type=pair, nargs="+", default=[], help="NAME=VALUE: other options of the engine"
    )
    parser.add_argument(
        "--cost",
        type=pair,
        nargs="+",
        default=[],
        help="simulate: NAME=MILLISECONDS, see bench/serve_simulation.py",
    )
    parser.add_argument("--profile", type=Path, help="where to write a profile of the engine's thread")
    parser.add_argument("--commit", help="the commit that is measured, where there is no checkout to ask")
    parser.add_argument("--out", type=Path, help="where to append results instead of bench/results")
    parser.add_argument("--port", type=int, default=0, help=argparse.SUPPRESS)
    parser.add_argument("--catalog", type=Path, help=argparse.SUPPRESS)
    parser.add_argument("--max-body", type=int, default=2 << 20, help=argparse.SUPPRESS)
    arguments = parser.parse_args()
    check(parser, arguments)
    if arguments.concurrency is not None:
        arguments.client_processes = min(arguments.client_processes, arguments.concurrency)
    # Whoever ends this process ends what it has started; and a server's profile is written at its exit.
    signal.signal(signal.SIGTERM, lambda *_: sys.exit(1))
    modes = {"load": run_load, "faults": run_faults, "simulate": run_simulation, "server": run_server}
    modes[arguments.mode](arguments)


if __name__ == "__main__":
    main()
