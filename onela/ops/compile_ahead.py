"""Compiles the kernels of a piece of work on many threads before it is run: one after the other they take minutes."""

from __future__ import annotations

import contextlib
import logging
import os
import sys
import time
from collections.abc import Callable, Iterable, Iterator
from concurrent.futures import Executor, Future, ThreadPoolExecutor
from types import FrameType
from typing import Any

import torch
from torch.utils._python_dispatch import TorchDispatchMode

logger = logging.getLogger(__name__)

MAX_THREADS = 32
"""Triton's passes let other threads run, its front end does not: more threads would only wait for that."""


class Compilations:
    """Compilations under way, as Triton asks for them while it looks a kernel up that is not compiled yet.

    Triton hands each to `submit`, and launches what that returns: nothing. A kernel that is being tuned is timed, so
    it is compiled at once and launched.

    Args:
        executor: where they run.
    """

    def __init__(self, executor: Executor) -> None:
        self.executor = executor
        self._begun: dict[str, tuple[Future[Any], Callable[[Any], None]]] = {}

    def submit(self, key: str, compile_kernel: Callable[[], Any], keep: Callable[[Any], None]) -> Any:
        """Begin one, unless it is under way; `keep` tells Triton of its result."""
        if _is_being_tuned(sys._getframe(1)):
            kernel = compile_kernel()
            keep(kernel)
            return kernel
        if key not in self._begun:
            self._begun[key] = self.executor.submit(compile_kernel), keep
        return None

    def finish(self) -> int:
        """Wait for all of them. Returns how many have succeeded; whoever needs another meets its error then."""
        count = 0
        for compilation, keep in self._begun.values():
            with contextlib.suppress(Exception):
                keep(compilation.result())
                count += 1
        return count


class _Zeros(TorchDispatchMode):
    """Inside, new tensors hold zeros: what no kernel has written may be an index."""

    def __torch_dispatch__(
        self, func: Any, types: Any, args: tuple[Any, ...] = (), kwargs: dict[str, Any] | None = None
    ) -> Any:
        result = func(*args, **(kwargs or {}))
        return result.zero_() if "empty" in func.name() and isinstance(result, torch.Tensor) else result


def compile_ahead(runs: Iterable[Callable[[], object]], *, threads: int | None = None) -> int:
    """Compile the Triton kernels that these need and that the process does not have, all at the same time.

    Each is run once without those kernels, so what it computes is worthless and what it writes to must be so too.
    Whatever prevents it, a kernel is compiled when it is first launched, as ever.

    Args:
        runs: forwards on a GPU, over inputs for which zeros are valid indices.
        threads: None: one per CPU core, at most `MAX_THREADS`.
    Returns:
        kernels that were compiled, or found in Triton's cache on the disk.
    """
    begun = time.perf_counter()
    count = 0
    with ThreadPoolExecutor(threads or min(MAX_THREADS, _cores())) as executor:
        compilations = Compilations(executor)
        try:
            with _asked_for_by_triton(compilations), _Zeros():
                for run in runs:
                    run()
        except Exception as error:  # the forwards themselves will say what is wrong, if anything is
            logger.info("not all kernels are compiled ahead: %s: %s", type(error).__name__, error)
        count = compilations.finish()
    logger.info("compiled %d kernels ahead in %.1f s", count, time.perf_counter() - begun)
    return count


@contextlib.contextmanager
def _asked_for_by_triton(compilations: Compilations) -> Iterator[None]:
    """Inside, and on this thread alone, Triton hands its compilations to these."""
    from triton.runtime._async_compile import active_mode

    token = active_mode.set(compilations)
    try:
        yield
    finally:
        active_mode.reset(token)


def _is_being_tuned(frame: FrameType | None) -> bool:
    """Whether one of Triton's tuners is among the callers."""
    while frame is not None:
        if os.path.basename(frame.f_code.co_filename) == "autotuner.py":
            return True
        frame = frame.f_back
    return False


def _cores() -> int:
    """CPU cores that the process may use."""
    return len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count() or 1
