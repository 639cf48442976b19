"""Ctrl-C while an engine is at work: nothing is lost, and the next answer is what it would have been."""

from __future__ import annotations

import signal
import threading
from collections.abc import Iterator
from typing import Any

import pytest

from onela import BeamParams, Request
from onela.engine.interrupts import deferred_interrupts
from tests.engine.fake_model import answer, check_nothing_is_held, fake_engine

REQUESTS = [Request(prompt_token_ids=[3, 4, 5 + i]) for i in range(3)]
PARAMS = BeamParams(beam_width=20)


@pytest.fixture(autouse=True)
def python_handles_ctrl_c() -> Iterator[None]:
    before = signal.signal(signal.SIGINT, signal.default_int_handler)
    yield
    after = signal.signal(signal.SIGINT, before)
    assert after is signal.default_int_handler


@pytest.mark.parametrize(
    ("part", "call"),
    [
        ("prompts", "allocate"),
        ("records", "admit"),
        ("rows", "allocate"),
        ("rows", "free"),
        ("prompts", "free"),
    ],
)
def test_whatever_is_being_given_out_or_taken_back(
    part: str, call: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    engine = fake_engine()
    expected = [answer(result) for result in engine.generate(REQUESTS, PARAMS)]
    owner = getattr(engine.scheduler, part)
    original = getattr(owner, call)

    def interrupted(*args: Any, **options: Any) -> Any:
        given = original(*args, **options)
        signal.raise_signal(signal.SIGINT)
        monkeypatch.undo()  # once
        return given

    monkeypatch.setattr(owner, call, interrupted)
    with pytest.raises(KeyboardInterrupt):
        engine.generate(REQUESTS, PARAMS)
    check_nothing_is_held(engine)
    assert [answer(result) for result in engine.generate(REQUESTS, PARAMS)] == expected


def test_a_second_one_does_not_wait() -> None:
    reached = []
    with deferred_interrupts():
        signal.raise_signal(signal.SIGINT)
        reached.append(1)
        with pytest.raises(KeyboardInterrupt):
            signal.raise_signal(signal.SIGINT)
        reached.append(2)
    assert reached == [1, 2]


def test_it_is_delivered_at_the_end() -> None:
    context = deferred_interrupts()
    context.__enter__()
    signal.raise_signal(signal.SIGINT)
    with pytest.raises(KeyboardInterrupt):
        context.__exit__(None, None, None)


def test_it_is_delivered_when_it_is_let() -> None:
    with deferred_interrupts() as deliver:
        deliver()
        signal.raise_signal(signal.SIGINT)
        with pytest.raises(KeyboardInterrupt):
            deliver()
        deliver()


def test_other_threads_and_a_process_that_ignores_it() -> None:
    seen: list[Any] = []

    def work() -> None:
        with deferred_interrupts() as deliver:
            seen.append(signal.getsignal(signal.SIGINT))
            deliver()

    thread = threading.Thread(target=work)
    thread.start()
    thread.join()
    assert seen == [signal.default_int_handler]
    signal.signal(signal.SIGINT, signal.SIG_IGN)
    work()
    assert seen[1] is signal.SIG_IGN
    signal.signal(signal.SIGINT, signal.default_int_handler)
