"""Ctrl-C between two steps of the engine instead of within one, where places that are half given out would be lost."""

from __future__ import annotations

import contextlib
import signal
import threading
from collections.abc import Callable, Iterator
from types import FrameType


@contextlib.contextmanager
def deferred_interrupts() -> Iterator[Callable[[], None]]:
    """Inside, Ctrl-C waits until the function that is yielded is called, or the end; a second one does not wait.

    Only the main thread is interrupted: on others nothing changes, nor where no function of Python's handles Ctrl-C.

    Raises:
        KeyboardInterrupt: one that has waited; or whatever else the process does on Ctrl-C.
    """
    handler = None
    if threading.current_thread() is threading.main_thread():
        handler = signal.getsignal(signal.SIGINT)
    if not callable(handler):
        yield lambda: None
        return
    handle: Callable[[int, FrameType | None], object] = handler
    waiting: list[tuple[int, FrameType | None]] = []

    def wait(number: int, frame: FrameType | None) -> None:
        waiting.append((number, frame))
        if len(waiting) > 1:
            deliver()

    def deliver() -> None:
        if waiting:
            last = waiting.pop()
            waiting.clear()
            handle(*last)

    signal.signal(signal.SIGINT, wait)
    try:
        yield deliver
    finally:
        signal.signal(signal.SIGINT, handler)
        deliver()
