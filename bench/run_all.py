"""Runs every benchmark that measures on a GPU, one after the other.

A script that fails does not stop the others; it is named at the end, and the exit code says so.

    python -m bench.run_all [decode serve ...]      # all, or those of these scripts
"""

from __future__ import annotations

import os
import sys

if not __package__:  # bench/operator.py would hide the standard library's
    sys.path[0] = os.path.dirname(os.path.dirname(os.path.abspath(__file__)))

import argparse
import shlex
import subprocess
import time
from pathlib import Path

from bench.common import Failures

COMMANDS = (
    "operator --arms all",
    "operator_sweep prepare",
    "operator_sweep time",
    "operator_sweep summarize",
    "layer_step",
    "products",
    "attention --prepare",
    "beam_select --prepare --torch",
    "prefill",
    "decode --shapes 4x256 1x128 1x512 1x1024 4x128 4x512 4x1024 16x128 16x512 16x1024 --tokens 3 4 5 6 7 --parts",
    "crossover",
    "qwen3 --fp8 1.7b",
    "overlap --model qwen3-1.7b --device cuda",
    "fp8 --speed",
    "capacity",
    "filters",
    "serve load --shape qwen3.5-0.8b --rates 60 75 90 --cached-rates 150 200 250 --cached 0 0.8"
    " --items 50000 --cache-bytes 12000000000 --batch-tokens 5120"
    " --option max_slots=50000 max_pages=12000 max_prompts=64 preallocate=1 warm_up_tokens=5120 warm_up_requests=8"
    " max_tokens_beside_decode=0",
    "serve load --shape qwen3-1.7b --prompts 5000 5000 --concurrency 4 --count 120 --warm 12 --limit-ms 5000"
    " --items 50000 --batch-tokens 5056"
    " --option max_slots=8000 max_pages=1600 max_prompts=16 preallocate=1 warm_up_requests=4"
    " max_tokens_beside_decode=0",
    "tune",
    "dram",
    "peers",
)


def main() -> None:
    scripts = list(dict.fromkeys(line.split()[0] for line in COMMANDS))
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("scripts", nargs="*", metavar="SCRIPT", help=f"of {', '.join(scripts)}; default: all")
    arguments = parser.parse_args()
    for name in arguments.scripts:
        if name not in scripts:
            parser.error(f"SCRIPT: {name!r}, expected one of {', '.join(scripts)}")
    failures = Failures()
    for line in COMMANDS:
        name, *words = shlex.split(line)
        if name not in (arguments.scripts or scripts):
            continue
        print(f"== python bench/{name}.py {shlex.join(words)}", flush=True)
        begun = time.perf_counter()
        code = subprocess.call([sys.executable, str(Path(__file__).with_name(f"{name}.py")), *words])
        print(f"== {time.perf_counter() - begun:.0f} s", flush=True)
        if code:
            failures.add(line, f"exit code {code}")
    failures.exit()


if __name__ == "__main__":
    main()
