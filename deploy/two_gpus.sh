#!/bin/sh
# Two replicas with a GPU each, under fire: good, malformed, oversize and abandoned requests, a catalogue switch every second,
# and every 20 seconds one replica killed. Leaves with an error when a request is lost or answered wrongly.
# Needs two GPUs and `pip install -e ".[gpu,cluster]"`.
set -e
cd "$(dirname "$0")/.."
test "$(nvidia-smi -L | wc -l)" -ge 2 || { echo "two GPUs are needed" >&2; exit 1; }
exec python3 bench/serve.py faults --replicas 2 --gpus-per-replica 1 \
    --requests 10000 --cache-bytes 500000000 "$@"
