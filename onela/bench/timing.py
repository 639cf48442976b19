"""Times on a GPU, by events and by CUDA graphs, and on a CPU by the host's clock."""

from __future__ import annotations

import statistics
import time
from collections.abc import Callable, Sequence
from typing import Any

import torch


def copy_bandwidth(num_bytes: int = 1 << 32) -> float:
    """Bytes per second of a large device-to-device copy, read and written bytes both counted."""
    source = torch.empty(num_bytes // 4, dtype=torch.int32, device="cuda").random_()
    target = torch.empty_like(source)
    times = time_events(lambda: target.copy_(source), samples=10, per_sample=1)
    return 2 * num_bytes / (statistics.median(times) * 1e-6)


def time_events(
    run: Callable[[], Any], *, samples: int = 20, per_sample: int = 1, warm: int = 3
) -> list[float]:
    """Microseconds of one run, per sample; a sample is `per_sample` runs between two events."""
    for _ in range(warm):
        run()
    times = []
    for _ in range(samples):
        begin, end = torch.cuda.Event(enable_timing=True), torch.cuda.Event(enable_timing=True)
        begin.record()
        for _ in range(per_sample):
            run()
        end.record()
        end.synchronize()
        times.append(begin.elapsed_time(end) * 1e3 / per_sample)
    return times


def time_graph(
    calls: Sequence[Callable[[], Any]], *, samples: int = 20, target_us: float = 3000
) -> list[float]:
    """Microseconds of running all calls once, captured together in one CUDA graph and replayed back to back."""
    stream = torch.cuda.Stream()
    # What the calls read may still be on its way there.
    stream.wait_stream(torch.cuda.current_stream())
    with torch.cuda.stream(stream):
        for call in calls:
            call()
    stream.synchronize()
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph, stream=stream):
        kept = [call() for call in calls]
    graph.replay()
    once = statistics.median(time_events(graph.replay, samples=3))
    times = time_events(graph.replay, samples=samples, per_sample=max(1, int(target_us / max(once, 1.0))))
    del kept
    return times


def time_host(run: Callable[[], Any], *, samples: int = 5, warm: int = 1) -> list[float]:
    """Microseconds of each run by the host's clock, after `warm` runs that are not counted."""
    for _ in range(warm):
        run()
    times = []
    for _ in range(samples):
        start = time.perf_counter()
        run()
        times.append((time.perf_counter() - start) * 1e6)
    return times
