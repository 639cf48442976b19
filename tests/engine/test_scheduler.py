"""Continuous batching: every request ends once, nothing leaks, nobody starves, company changes no answer."""

from __future__ import annotations

import contextlib
import dataclasses
from collections.abc import Iterator
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from onela import BeamParams, CancelledError, CapacityError, DeadlineError, Engine, NumericsError, Request
from onela.engine.active import ActiveRequest
from onela.engine.flight import MAX_FLIGHTS, Flight
from onela.errors import EngineError, QueueFullError, RequestError
from tests.engine.fake_model import NAN_TOKEN, RAISE_TOKEN, alone, answer, check_nothing_is_held, fake_engine
from tests.engine.helpers import random_prompt


class Clock:
    def __init__(self) -> None:
        self.now = 100.0

    def __call__(self) -> float:
        return self.now


def with_clock(engine: Engine) -> Clock:
    clock = Clock()
    engine.scheduler.clock = clock
    return clock


class LateEvent:
    """What a device that is slow says of a step: not done, so many times, unless it is waited for."""

    def __init__(self, times: int) -> None:
        self.times = times

    def query(self) -> bool:
        self.times -= 1
        return self.times < 0

    def synchronize(self) -> None:
        self.times = 0


@contextlib.contextmanager
def slow_device(times: int) -> Iterator[None]:
    """Steps are done only when they have been asked for so many times, or are waited for."""
    begin = Flight.begin
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(
            Flight, "begin", lambda *given: dataclasses.replace(begin(*given), done=LateEvent(times))
        )
        yield


def prompt_of(length: int, seed: int = 0) -> list[int]:
    return [3 + token % 90 for token in random_prompt(length, seed)]


def run(engine: Engine, limit: int = 10_000) -> list[ActiveRequest]:
    ended = []
    while engine.scheduler.has_work:
        ended += engine.step()
        limit -= 1
        assert limit, "the engine does not come to an end"
    return ended


arrivals = st.fixed_dictionaries(
    {
        "length": st.integers(1, 40),
        "seed": st.integers(0, 2),
        "session": st.sampled_from([None, "a", "b"]),
        "width": st.integers(1, 12),
        "tokens": st.integers(1, 3),
        "priority": st.integers(-1, 1),
        "timeout": st.sampled_from([None, None, None, 1, 4]),
        "fault": st.sampled_from([None, None, None, None, "nan", "raise"]),
        "wait": st.integers(0, 3),
        "cancel_after": st.sampled_from([None, None, None, 0, 1, 2, 5]),
    }
)


@settings(max_examples=60, deadline=None)
@given(
    plan=st.lists(arrivals, min_size=1, max_size=10),
    options=st.fixed_dictionaries(
        {
            "max_batch_tokens": st.sampled_from([3, 7, 1000]),
            "max_batch_rows": st.sampled_from([12, 20, 1000]),
            "max_slots": st.sampled_from([24, 40, None]),
            "max_pages": st.sampled_from([10, 16, None]),
            "max_prompts": st.sampled_from([1, 3, None]),
            "max_overtaken": st.sampled_from([0, 1, 64]),
            "max_tokens_beside_decode": st.sampled_from([None, None, 0, 5]),
            "page_size": st.just(4),
            "prompt_cache_bytes": st.sampled_from([0, 300, 1000, 100_000]),
            "prompt_cache_host_bytes": st.sampled_from([0, 300, 100_000]),
            "prompt_cache_interval": st.sampled_from([4, 8]),
            "prompt_cache_tail": st.sampled_from([0, 2]),
        }
    ),
    late=st.sampled_from([0, 0, 1, 3, 99]),
)
def test_every_request_ends_once_and_as_if_alone(
    plan: list[dict[str, Any]], options: dict[str, Any], late: int
) -> None:
    with slow_device(late):
        check_plan(plan, options)


def check_plan(plan: list[dict[str, Any]], options: dict[str, Any]) -> None:
    engine = fake_engine(**options)
    clock = with_clock(engine)
    submitted: list[tuple[ActiveRequest, dict[str, Any]]] = []
    ended: list[ActiveRequest] = []
    cancelled: list[ActiveRequest] = []
    cancels: list[tuple[float, ActiveRequest]] = []

    def turn() -> None:
        for due, request in list(cancels):
            if due <= clock.now:
                cancels.remove((due, request))
                if engine.cancel(request):
                    cancelled.append(request)
        ended.extend(engine.step())
        clock.now += 1

    for arrival in plan:
        for _ in range(arrival["wait"]):
            turn()
        prompt = prompt_of(arrival["length"], arrival["seed"])
        if arrival["fault"]:
            prompt[len(prompt) // 2] = NAN_TOKEN if arrival["fault"] == "nan" else RAISE_TOKEN
        request = Request(
            prompt_token_ids=prompt,
            priority=arrival["priority"],
            timeout_s=arrival["timeout"],
            session_id=arrival["session"],
        )
        params = BeamParams(beam_width=arrival["width"], max_tokens=arrival["tokens"])
        active = engine.submit(request, params)
        submitted.append((active, arrival))
        if arrival["cancel_after"] is not None:
            cancels.append((clock.now + arrival["cancel_after"], active))
    for _ in range(2000):
        if not engine.scheduler.has_work:
            break
        turn()

    everyone = ended + cancelled
    assert len(everyone) == len(set(map(id, everyone))) == len(plan)
    assert {id(request) for request in everyone} == {id(request) for request, _ in submitted}
    check_nothing_is_held(engine)
    faults = {arrival["fault"] for arrival in plan}
    for request, arrival in submitted:
        outcome = request.outcome
        if isinstance(outcome, CancelledError):
            assert request in cancelled
        elif isinstance(outcome, DeadlineError):
            assert arrival["timeout"] is not None
        elif isinstance(outcome, EngineError):
            assert "raise" in faults
            assert "a kernel fell over" in str(outcome)
        elif isinstance(outcome, NumericsError):
            assert arrival["fault"] == "nan"
        else:
            assert arrival["fault"] is None
            assert answer(outcome) == answer(alone(request.request, request.params))


def test_a_long_prompt_is_prefilled_in_pieces_beside_decode() -> None:
    engine = fake_engine(max_batch_tokens=10, page_size=4, max_tokens_beside_decode=None)
    short, long = prompt_of(5), prompt_of(64, seed=1)
    first = engine.submit(Request(prompt_token_ids=short), BeamParams(beam_width=8))
    second = engine.submit(Request(prompt_token_ids=long), BeamParams(beam_width=8))
    engine.step()
    assert (first.level, second.prompt and second.prompt.num_tokens) == (1, 5)
    engine.step()
    assert (first.level, second.prompt and second.prompt.num_tokens) == (2, 15)
    ended = run(engine)
    assert ended == [first, second]
    for request in ended:
        assert answer(request.outcome) == answer(alone(request.request, request.params))


@pytest.mark.parametrize("cached", [False, True])
def test_a_prompt_that_fits_into_the_next_step_is_not_cut(cached: bool) -> None:
    options: dict[str, Any] = {}
    if cached:
        options = {"prompt_cache_bytes": 1 << 20, "prompt_cache_interval": 4, "prompt_cache_tail": 1}
    options |= {"max_batch_tokens": 16, "page_size": 4, "max_tokens_beside_decode": None}
    engine = fake_engine(**options)
    if cached:
        engine.generate([Request(prompt_token_ids=prompt_of(13))], BeamParams(beam_width=4))
    lengths = []
    schedule = engine.scheduler.schedule

    def watched(**given: Any) -> Any:
        batch = schedule(**given)
        lengths.append([chunk.end - chunk.start for chunk in batch.prefill])
        return batch

    engine.scheduler.schedule = watched  # type: ignore[method-assign]
    for seed, length in ((1, 9), (0, 13), (2, 40)):
        engine.submit(Request(prompt_token_ids=prompt_of(length, seed)), BeamParams(beam_width=4))
    run(engine)
    # The third one is cut anyway, and takes what is left. Of the second all but one token may be known.
    assert lengths[0] == ([8, 1, 7] if cached else [9])
    if not cached:
        assert lengths[1:5] == [[13, 3], [16], [16], [5]]


def test_those_who_decode_end_before_the_next_prompts_when_no_tokens_may_run_beside_them() -> None:
    engine = fake_engine(max_tokens_beside_decode=0)
    requests = [engine.submit(Request(prompt_token_ids=prompt_of(9)), BeamParams(beam_width=4))]
    engine.step()
    requests.append(engine.submit(Request(prompt_token_ids=prompt_of(5)), BeamParams(beam_width=4)))
    assert engine.step() == []
    assert (requests[0].level, requests[1].prompt) == (2, None)
    assert engine.step() == [requests[0]]
    assert run(engine) == [requests[1]]


def test_the_host_goes_on_while_the_device_is_at_work() -> None:
    """One prompt and the steps of its SID are under way at a time; the next prompt waits for the first to be done."""
    with slow_device(99):
        engine = fake_engine()
        for seed in range(3):
            engine.submit(Request(prompt_token_ids=prompt_of(9, seed)), BeamParams(beam_width=4))
        under_way = []
        ended = engine.step()
        for seed in range(3, 6):
            engine.submit(Request(prompt_token_ids=prompt_of(9, seed)), BeamParams(beam_width=4))
        while engine.scheduler.has_work:
            under_way.append([bool(flight.batch.prefill) for flight in engine._flights])
            ended += engine.step()
        assert under_way[:4] == [[True], [True, False], [True, False, False], [False, False]]
        assert max(map(len, under_way)) <= MAX_FLIGHTS
        assert max(map(sum, under_way)) == 1
        assert len(ended) == 6
        assert all(answer(r.outcome) == answer(alone(r.request, r.params)) for r in ended)
        check_nothing_is_held(engine)


def test_a_prompt_in_pieces_does_not_wait_for_the_device_between_them() -> None:
    with slow_device(99):
        engine = fake_engine(max_batch_tokens=8)
        request = engine.submit(Request(prompt_token_ids=prompt_of(20)), BeamParams(beam_width=4))
        for count in (8, 16, 20):
            assert engine.step() == []
            assert request.prompt is not None
            assert request.prompt.num_tokens == count
        assert len(engine._flights) == 3
        assert run(engine) == [request]
    assert answer(request.outcome) == answer(alone(request.request, request.params))


def test_a_device_that_fails_ends_the_requests_of_its_steps_once(monkeypatch: pytest.MonkeyPatch) -> None:
    def broken(_: Any) -> None:
        raise RuntimeError("an illegal address")

    with slow_device(99):
        engine = fake_engine()
        requests = [
            engine.submit(Request(prompt_token_ids=prompt_of(n)), BeamParams(beam_width=4)) for n in (5, 9)
        ]
        ended = engine.step() + engine.step()
        assert ended == []
        engine.cancel(requests[0])
        monkeypatch.setattr(LateEvent, "synchronize", broken)
        ended = run(engine)
        assert ended == [requests[1]]
        assert "an illegal address" in str(requests[1].outcome)
        monkeypatch.undo()
    check_nothing_is_held(engine)
    later = Request(prompt_token_ids=prompt_of(9))
    [result] = engine.generate([later], BeamParams(beam_width=4))
    assert answer(result) == answer(alone(later, BeamParams(beam_width=4)))


def test_no_step_runs_more_than_the_budgets() -> None:
    engine = fake_engine(max_batch_tokens=16, max_batch_rows=20, max_tokens_beside_decode=None)
    for i in range(12):
        engine.submit(Request(prompt_token_ids=prompt_of(9 + i, i)), BeamParams(beam_width=3 + i))
    schedule = engine.scheduler.schedule
    seen = []

    def watched(**options: Any) -> Any:
        batch = schedule(**options)
        assert sum(chunk.end - chunk.start for chunk in batch.prefill) <= 16
        assert sum(request.width for request in batch.decode) <= 20
        seen.append(batch)
        return batch

    engine.scheduler.schedule = watched  # type: ignore[method-assign]
    assert len(run(engine)) == 12
    assert any(batch.prefill and batch.decode for batch in seen)


def test_order_is_priority_then_deadline_then_arrival() -> None:
    engine = fake_engine(max_prompts=1)
    with_clock(engine)
    asked = [
        ("a", 0, None),
        ("b", 0, 500.0),
        ("c", 0, 100.0),
        ("d", 1, None),
        ("e", -1, 50.0),
        ("f", 0, None),
    ]
    for name, priority, timeout in asked:
        engine.submit(
            Request(prompt_token_ids=[5], request_id=name, priority=priority, timeout_s=timeout),
            BeamParams(beam_width=2),
        )
    assert [request.request.request_id for request in run(engine)] == ["d", "c", "b", "a", "f", "e"]


def test_nobody_starves_under_a_stream_of_more_urgent_requests() -> None:
    engine = fake_engine(max_prompts=1, max_overtaken=5)
    params = BeamParams(beam_width=2, max_tokens=1)
    patient = engine.submit(Request(prompt_token_ids=[5], priority=-3), params)
    served = 0
    while patient.outcome is None:
        engine.submit(Request(prompt_token_ids=[6], priority=9), params)
        served += len(engine.step())
        assert served < 20
    assert served == 6, "five may pass, then it is the patient one's turn"


def test_a_large_request_is_not_passed_by_small_ones_that_would_fit() -> None:
    engine = fake_engine(max_slots=24)
    small = BeamParams(beam_width=4)
    running = engine.submit(Request(prompt_token_ids=[5, 6]), small)
    engine.step()
    large = engine.submit(Request(prompt_token_ids=[5]), BeamParams(beam_width=12))
    late = engine.submit(Request(prompt_token_ids=[7]), small)
    order = run(engine)
    assert order.index(large) < order.index(late)
    assert order[0] is running


def test_a_request_that_can_never_fit_is_refused_with_the_numbers() -> None:
    engine = fake_engine(max_pages=4, page_size=8, max_batch_rows=64)
    with pytest.raises(CapacityError, match=r"5 KV pages, max_pages allows 4"):
        engine.submit(Request(prompt_token_ids=prompt_of(33)), BeamParams(beam_width=2))
    with pytest.raises(CapacityError, match=r"90 beams in a step, max_batch_rows allows 64"):
        engine.submit(Request(prompt_token_ids=[5]), BeamParams(beam_width=90))
    check_nothing_is_held(engine)


def test_a_full_queue_refuses_with_a_time_to_come_back() -> None:
    engine = fake_engine(max_waiting=2, max_prompts=1)
    clock = with_clock(engine)
    params = BeamParams(beam_width=2)
    for _ in range(2):
        engine.submit(Request(prompt_token_ids=[5]), params)
    with pytest.raises(QueueFullError, match=r"2 requests are waiting, max_waiting allows 2") as first:
        engine.submit(Request(prompt_token_ids=[5]), params)
    assert first.value.retry_after_s == 1.0
    while engine.scheduler.has_work:
        engine.step()
        clock.now += 3
    for _ in range(2):
        engine.submit(Request(prompt_token_ids=[5]), params)
    with pytest.raises(QueueFullError) as second:
        engine.submit(Request(prompt_token_ids=[5]), params)
    # Two ended nine seconds apart, and two are waiting.
    assert second.value.retry_after_s == 18.0


def test_generate_takes_more_requests_than_may_wait() -> None:
    engine = fake_engine(max_waiting=2, max_prompts=1)
    results = engine.generate([Request(prompt_token_ids=[5 + i]) for i in range(7)], BeamParams(beam_width=4))
    for i, result in enumerate(results):
        assert answer(result) == answer(alone(Request(prompt_token_ids=[5 + i]), BeamParams(beam_width=4)))


@pytest.mark.parametrize("steps", [0, 1, 2, 3])
def test_a_cancelled_request_frees_everything_at_once(steps: int) -> None:
    engine = fake_engine(max_batch_tokens=8)
    request = engine.submit(Request(prompt_token_ids=prompt_of(16)), BeamParams(beam_width=4))
    for _ in range(steps):
        engine.step()
    assert engine.cancel(request)
    check_nothing_is_held(engine)
    assert isinstance(request.outcome, CancelledError)
    assert not engine.cancel(request)
    assert engine.step() == []


def test_a_deadline_ends_waiting_and_running_requests() -> None:
    engine = fake_engine(max_prompts=1)
    clock = with_clock(engine)
    running = engine.submit(Request(prompt_token_ids=[5], timeout_s=2), BeamParams(beam_width=4))
    waiting = engine.submit(Request(prompt_token_ids=[5], timeout_s=2.5), BeamParams(beam_width=4))
    engine.step()
    clock.now += 2
    assert engine.step() == [running]
    assert "running, 1 tokens chosen" in str(running.outcome)
    assert waiting.prompt is not None, "its place was free in the same step"
    clock.now += 1
    assert engine.step() == [waiting]
    check_nothing_is_held(engine)


@pytest.mark.parametrize("fault", [NAN_TOKEN, RAISE_TOKEN])
def test_a_fault_is_its_own_requests_alone(fault: int) -> None:
    engine = fake_engine()
    good = engine.submit(Request(prompt_token_ids=prompt_of(9)), BeamParams(beam_width=4))
    engine.step()
    bad = engine.submit(Request(prompt_token_ids=[5, fault, 6]), BeamParams(beam_width=4))
    run(engine)
    check_nothing_is_held(engine)
    if fault == NAN_TOKEN:
        assert isinstance(bad.outcome, NumericsError)
        assert answer(good.outcome) == answer(alone(good.request, good.params))
    else:
        # Whoever shared the step that raised is lost with it; the engine goes on.
        assert isinstance(bad.outcome, EngineError)
        assert isinstance(bad.outcome.__cause__, RuntimeError)
    later = Request(prompt_token_ids=prompt_of(9))
    [result] = engine.generate([later], BeamParams(beam_width=4))
    assert answer(result) == answer(alone(later, BeamParams(beam_width=4)))


def test_a_step_that_fails_at_its_end_hands_out_what_it_has_ended_before(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    engine = fake_engine()
    requests = [
        engine.submit(Request(prompt_token_ids=prompt_of(n)), BeamParams(beam_width=4)) for n in (5, 9)
    ]
    engine.step(), engine.step()
    outcome = engine._outcome

    def broken(request: ActiveRequest, beams: Any) -> Any:
        if request is requests[1]:
            raise RuntimeError("the device is gone")
        return outcome(request, beams)

    monkeypatch.setattr(engine, "_outcome", broken)
    assert engine.step() == requests
    assert answer(requests[0].outcome) == answer(alone(requests[0].request, requests[0].params))
    assert isinstance(requests[1].outcome, EngineError)
    check_nothing_is_held(engine)


@pytest.mark.parametrize("what", ["records", "prompts", "pages"])
@pytest.mark.parametrize("cached", [False, True])
def test_no_memory_for_a_request_is_its_trouble_alone(what: str, cached: bool) -> None:
    options = {"prompt_cache_bytes": 100_000, "prompt_cache_interval": 8, "page_size": 4} if cached else {}
    engine = fake_engine(max_tokens_beside_decode=None, **options)
    pools = {
        "records": engine.state.records.pool,
        "prompts": engine.state.prompts.prompt_tensors,
        "pages": engine.state.prompts.page_tensors,
    }
    small = engine.submit(Request(prompt_token_ids=prompt_of(9)), BeamParams(beam_width=4))
    engine.step()
    pool = pools[what]
    reserve = pool.reserve

    def fail(_: int) -> None:
        pool.reserve = reserve  # type: ignore[method-assign]
        raise MemoryError("out of memory")

    pool.reserve = fail  # type: ignore[method-assign]
    unlucky = engine.submit(Request(prompt_token_ids=prompt_of(30)), BeamParams(beam_width=40))
    later = engine.submit(Request(prompt_token_ids=prompt_of(30)), BeamParams(beam_width=40))
    ended = engine.step()
    assert unlucky in ended
    assert isinstance(unlucky.outcome, EngineError)
    assert "out of memory" in str(unlucky.outcome)
    run(engine)
    check_nothing_is_held(engine)
    for request in (small, later):
        assert answer(request.outcome) == answer(alone(request.request, request.params))


@pytest.mark.parametrize(
    ("field", "value"), [("timeout_s", 0), ("timeout_s", float("nan")), ("timeout_s", "1"), ("priority", 1.5)]
)
def test_a_malformed_field_is_named(field: str, value: Any) -> None:
    with pytest.raises(RequestError, match=field):
        Request(prompt_token_ids=[5], **{field: value})


def test_timings_add_up() -> None:
    engine = fake_engine(max_prompts=1)
    clock = with_clock(engine)
    engine.submit(Request(prompt_token_ids=[5]), BeamParams(beam_width=4))
    second = engine.submit(Request(prompt_token_ids=[5]), BeamParams(beam_width=4))
    while engine.scheduler.has_work:
        engine.step()
        clock.now += 1
    assert second.outcome.timings is not None
    timings = second.outcome.timings
    assert (timings.queue, timings.prefill, timings.decode, timings.total) == (3, 0, 2, 5)


def test_logprobs_of_tokens_add_up_to_the_items() -> None:
    engine = fake_engine()
    request = Request(prompt_token_ids=prompt_of(7), logprobs=True)
    [result] = engine.generate([request], BeamParams(beam_width=30))
    prefixes: dict[tuple[int, ...], float] = {}
    for item in result.items:
        assert item.token_logprobs is not None
        assert len(item.token_logprobs) == 3
        assert sum(item.token_logprobs) == pytest.approx(item.cum_logprob, abs=1e-5)
        for length in (1, 2):
            score = prefixes.setdefault(item.sid[:length], sum(item.token_logprobs[:length]))
            assert score == pytest.approx(sum(item.token_logprobs[:length]), abs=1e-5)
    assert answer(result) == answer(alone(Request(prompt_token_ids=prompt_of(7)), BeamParams(beam_width=30)))


def test_the_last_step_of_a_request_takes_no_slots_of_its_own() -> None:
    """Twelve requests of three levels decode together; a forward holds three of them, and so do the spare slots."""
    engine = fake_engine(None, max_batch_rows=20)
    clock = with_clock(engine)
    requests = [Request(prompt_token_ids=prompt_of(5, seed)) for seed in range(12)]
    active = [engine.submit(request, BeamParams(beam_width=6)) for request in requests]
    most = 0
    while engine.scheduler.has_work:
        engine.step()
        clock.now += 1
        most = max(most, engine.state.records.slots.num_taken)
        assert engine.state.records.spare_size <= 2 * 20
    # Six beams of one step each, where two steps of each would be 144.
    assert most <= 12 * 6 + 2 * 20
    for request in active:
        assert answer(request.outcome) == answer(
            fake_engine(None).generate([request.request], BeamParams(beam_width=6))[0]
        )
    check_nothing_is_held(engine)


def test_one_forward_takes_so_many_prompts_and_no_more(monkeypatch: pytest.MonkeyPatch) -> None:
    """However little of them is new: what has been captured has room for so many prompts."""
    engine = fake_engine(max_batch_tokens=200)
    batches: list[int] = []
    schedule = engine.scheduler.schedule

    def watched(**given: Any) -> Any:
        batch = schedule(**given)
        batches.append(len(batch.prefill))
        return batch

    engine.scheduler.schedule = watched  # type: ignore[method-assign]
    requests = [Request(prompt_token_ids=prompt_of(5, seed)) for seed in range(20)]
    expected = [answer(alone(request, BeamParams(beam_width=2))) for request in requests]
    for most, wanted in ((16, [16, 4]), (7, [7, 7, 6])):
        monkeypatch.setattr("onela.engine.scheduler.MAX_PREFILL_PROMPTS", most)
        batches.clear()
        results = engine.generate(requests, BeamParams(beam_width=2))
        assert [count for count in batches if count] == wanted
        assert [answer(result) for result in results] == expected
