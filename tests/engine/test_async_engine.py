"""The engine behind an event loop: every waiter gets its answer or its error, and nothing is left behind."""

from __future__ import annotations

import asyncio
import random
from collections.abc import AsyncIterator, Callable, Coroutine
from contextlib import asynccontextmanager
from typing import Any

import numpy as np
import pytest
import torch

from onela import (
    BeamParams,
    CancelledError,
    CapacityError,
    DeadlineError,
    NumericsError,
    Request,
    RequestError,
    Result,
)
from onela.engine import AsyncEngine
from onela.engine.async_engine import StepReport
from onela.errors import EngineError, QueueFullError, UnavailableError
from tests.engine.fake_model import NAN_TOKEN, RAISE_TOKEN, alone, answer, check_nothing_is_held, fake_engine
from tests.engine.test_scheduler import prompt_of

NARROW = BeamParams(beam_width=4)


@asynccontextmanager
async def running(**options: Any) -> AsyncIterator[AsyncEngine]:
    engine = AsyncEngine(fake_engine(**options))
    engine.start()
    try:
        yield engine
    finally:
        await engine.stop(drain_s=20)
        check_nothing_is_held(engine.engine)


def drive(test: Callable[[], Coroutine[Any, Any, None]]) -> None:
    asyncio.run(asyncio.wait_for(test(), 60))


def hold_steps(engine: AsyncEngine) -> Callable[[], None]:
    """Keep the worker out of `step` until the returned function is called."""
    import threading

    gate = threading.Event()
    step = engine.engine.step

    def held() -> Any:
        gate.wait(20)
        return step()

    engine.engine.step = held  # type: ignore[method-assign]
    return gate.set


def test_many_requests_at_once_each_get_their_own_answer() -> None:
    async def test() -> None:
        requests = [Request(prompt_token_ids=prompt_of(1 + i % 23, i), request_id=str(i)) for i in range(60)]
        async with running(max_batch_tokens=30, max_slots=100, max_waiting=1000) as engine:
            results = await asyncio.gather(*(engine.generate(request, NARROW) for request in requests))
        for request, result in zip(requests, results):
            assert result.request_id == request.request_id
            assert answer(result) == answer(alone(request, NARROW))

    drive(test)


def test_random_cancels_timeouts_and_faults_hurt_nobody_else() -> None:
    async def test() -> None:
        chance = random.Random(5)
        kinds = [chance.choice(["ok", "ok", "ok", "cancel", "timeout", "nan"]) for _ in range(80)]

        async def ask(engine: AsyncEngine, number: int, kind: str) -> Result | BaseException:
            await asyncio.sleep(chance.random() * 0.3)
            prompt = prompt_of(3 + number % 17, number)
            if kind == "nan":
                prompt[1] = NAN_TOKEN
            request = Request(prompt_token_ids=prompt, timeout_s=0.005 if kind == "timeout" else None)
            task = asyncio.ensure_future(engine.generate(request, NARROW))
            if kind == "cancel":
                await asyncio.sleep(chance.random() * 0.02)
                task.cancel()
            try:
                return await task
            except (Exception, asyncio.CancelledError) as error:
                return error

        async with running(max_batch_tokens=20, max_slots=60) as engine:
            outcomes = await asyncio.gather(*(ask(engine, i, kind) for i, kind in enumerate(kinds)))
        for number, (kind, outcome) in enumerate(zip(kinds, outcomes)):
            if isinstance(outcome, Result):
                assert kind != "nan"
                expected = alone(Request(prompt_token_ids=prompt_of(3 + number % 17, number)), NARROW)
                assert answer(outcome) == answer(expected)
            else:
                allowed = {"cancel": asyncio.CancelledError, "timeout": DeadlineError, "nan": NumericsError}
                assert isinstance(outcome, allowed[kind])

    drive(test)


def test_a_step_that_raises_fails_its_requests_and_the_next_one_is_served() -> None:
    async def test() -> None:
        async with running() as engine:
            with pytest.raises(EngineError, match="a kernel fell over"):
                await engine.generate(Request(prompt_token_ids=[5, RAISE_TOKEN]), NARROW)
            assert engine.healthy
            result = await engine.generate(Request(prompt_token_ids=[5]), NARROW)
            assert answer(result) == answer(alone(Request(prompt_token_ids=[5]), NARROW))

    drive(test)


def test_steps_that_all_fail_make_the_engine_unhealthy() -> None:
    async def test() -> None:
        async with running() as engine:
            for _ in range(3):
                with pytest.raises(EngineError):
                    await engine.generate(Request(prompt_token_ids=[5, RAISE_TOKEN]), NARROW)
            assert not engine.healthy
            with pytest.raises(UnavailableError):
                await engine.generate(Request(prompt_token_ids=[5]), NARROW)

    drive(test)


def test_broken_bookkeeping_ends_everyone_and_does_not_hang() -> None:
    async def test() -> None:
        async with running() as engine:
            schedule = engine.engine.scheduler.schedule

            def broken(**_: Any) -> Any:
                engine.engine.scheduler.schedule = schedule  # type: ignore[method-assign]
                raise KeyError("lost")

            engine.engine.scheduler.schedule = broken  # type: ignore[method-assign]
            with pytest.raises(EngineError, match="KeyError"):
                await engine.generate(Request(prompt_token_ids=[5]), NARROW)
            assert (await engine.generate(Request(prompt_token_ids=[5]), NARROW)).items

    drive(test)


def test_a_worker_that_dies_leaves_nobody_waiting(caplog: pytest.LogCaptureFixture) -> None:
    async def test() -> None:
        engine = AsyncEngine(fake_engine())
        engine.start()

        def broken(_: Any) -> Any:
            raise KeyError("lost")

        engine.engine.scheduler.add = broken  # type: ignore[assignment, method-assign]
        with pytest.raises(UnavailableError):
            await engine.generate(Request(prompt_token_ids=[5]), NARROW)
        assert not engine.accepting
        with pytest.raises(UnavailableError):
            await engine.generate(Request(prompt_token_ids=[5]), NARROW)
        await engine.stop(drain_s=1)

    drive(test)
    assert "the engine's thread has ended" in caplog.text


def test_errors_of_the_request_itself_are_raised_to_its_sender() -> None:
    async def test() -> None:
        async with running(max_slots=8) as engine:
            with pytest.raises(RequestError, match="vocabulary"):
                await engine.generate(Request(prompt_token_ids=[5, 1000]), NARROW)
            with pytest.raises(CapacityError, match="max_slots allows 8"):
                await engine.generate(Request(prompt_token_ids=[5]), BeamParams(beam_width=40))

    drive(test)


def test_a_full_queue_refuses_at_once() -> None:
    async def test() -> None:
        async with running(max_waiting=3, max_prompts=1) as engine:
            release = hold_steps(engine)
            tasks = []
            for _ in range(3):
                tasks.append(asyncio.ensure_future(engine.generate(Request(prompt_token_ids=[5]), NARROW)))
                while engine.num_waiting < len(tasks):
                    await asyncio.sleep(0.001)
            with pytest.raises(QueueFullError, match="max_waiting allows 3"):
                await engine.generate(Request(prompt_token_ids=[5]), NARROW)
            release()
            assert len(await asyncio.gather(*tasks)) == 3

    drive(test)


def test_stopping_drains_what_runs_and_refuses_what_comes() -> None:
    async def test() -> None:
        engine = AsyncEngine(fake_engine(max_prompts=1))
        release = hold_steps(engine)
        engine.start()
        tasks = [
            asyncio.ensure_future(engine.generate(Request(prompt_token_ids=[5]), NARROW)) for _ in range(5)
        ]
        while engine.num_waiting < 5:
            await asyncio.sleep(0.001)
        stopping = asyncio.ensure_future(engine.stop(drain_s=20))
        await asyncio.sleep(0)
        release()
        with pytest.raises(UnavailableError, match="shutting down"):
            await engine.generate(Request(prompt_token_ids=[5]), NARROW)
        assert all(result.items for result in await asyncio.gather(*tasks))
        await stopping
        assert not engine.healthy
        check_nothing_is_held(engine.engine)

    drive(test)


def test_a_drain_that_takes_too_long_ends_the_rest_with_an_error() -> None:
    async def test() -> None:
        engine = AsyncEngine(fake_engine(max_prompts=1))
        release = hold_steps(engine)
        engine.start()
        tasks = [
            asyncio.ensure_future(engine.generate(Request(prompt_token_ids=[5]), NARROW)) for _ in range(3)
        ]
        while engine.num_waiting < 3:
            await asyncio.sleep(0.001)
        stopping = asyncio.ensure_future(engine.stop(drain_s=0.05))
        await asyncio.sleep(0.1)
        release()
        await stopping
        outcomes = await asyncio.gather(*tasks, return_exceptions=True)
        assert all(isinstance(outcome, (UnavailableError, Result)) for outcome in outcomes)
        assert any(isinstance(outcome, UnavailableError) for outcome in outcomes)
        check_nothing_is_held(engine.engine)

    drive(test)


def test_steps_are_reported_and_requests_can_be_watched() -> None:
    async def test() -> None:
        reports: list[StepReport] = []
        levels: list[int] = []
        engine = AsyncEngine(fake_engine(max_batch_tokens=10), on_step=reports.append)
        engine.start()
        request = Request(prompt_token_ids=prompt_of(25))
        await engine.generate(request, NARROW, observer=lambda active: levels.append(active.level))
        await engine.stop()
        assert levels == [1, 2, 3]
        assert [report.prefill_tokens for report in reports] == [10, 10, 5, 0, 0]
        assert [report.decode_rows for report in reports] == [0, 0, 0, 4, 4]
        assert [len(report.ended) for report in reports] == [0, 0, 0, 0, 1]

    drive(test)


def test_a_faulty_observer_hurts_nobody() -> None:
    async def test() -> None:
        def fail(_: Any) -> None:
            raise ValueError

        engine = AsyncEngine(fake_engine(), on_step=fail)
        engine.start()
        result = await engine.generate(Request(prompt_token_ids=[5]), NARROW, observer=fail)
        assert answer(result) == answer(alone(Request(prompt_token_ids=[5]), NARROW))
        await engine.stop()

    drive(test)


def test_a_cancelled_request_ends_as_cancelled() -> None:
    async def test() -> None:
        async with running() as engine:
            release = hold_steps(engine)
            task = asyncio.ensure_future(engine.generate(Request(prompt_token_ids=[5]), NARROW))
            while not engine._tickets:
                await asyncio.sleep(0.001)
            [ticket] = engine._tickets.values()
            task.cancel()
            release()
            with pytest.raises(asyncio.CancelledError):
                await task
            while engine._tickets:
                await asyncio.sleep(0.001)
            # The step that was under way may have been the last one, on a slow machine.
            assert isinstance(ticket.active.outcome, (CancelledError, Result))

    drive(test)


def test_prompts_of_any_kind() -> None:
    """What a synchronous engine takes is taken, and what it refuses is refused with the same words."""

    async def test() -> None:
        async with running() as engine:
            expected = answer(alone(Request(prompt_token_ids=[3, 4]), NARROW))
            for tokens in ([3, 4], (3, 4), np.array([3, 4]), torch.tensor([3, 4]), iter([3, 4])):
                result = await engine.generate(Request(prompt_token_ids=tokens), NARROW)  # type: ignore[arg-type]
                assert answer(result) == expected
            for wrong in (5, np.array(5), torch.tensor(5)):
                with pytest.raises(
                    RequestError, match="prompt_token_ids: a list of whole numbers is expected"
                ):
                    await engine.generate(Request(prompt_token_ids=wrong))  # type: ignore[arg-type]
            for nothing in (None, "ab"):
                with pytest.raises(RequestError, match="requests: a list of Request is expected"):
                    await engine.generate(nothing)  # type: ignore[arg-type]

    drive(test)
