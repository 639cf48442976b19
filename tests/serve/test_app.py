"""Every route over a real socket: answers, refusals by field and status, limits, keys, disconnects."""

from __future__ import annotations

import concurrent.futures
import contextlib
import gc
import json
import socket
import threading
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import httpx
import pytest
import torch

from onela import BeamParams, Request
from onela.engine.active import ActiveRequest
from onela.engine.served import ServedCatalog
from tests.engine.fake_model import NAN_TOKEN, RAISE_TOKEN, check_nothing_is_held
from tests.serve.helpers import CATALOG, ITEMS, metric, serving, text_engine

BODY = {"prompt_token_ids": [5, 6, 7], "beam_width": 20, "n": 5}


@pytest.fixture(scope="module")
def client() -> Iterator[httpx.Client]:
    engine = text_engine()
    with serving(
        engine, max_body_bytes=50_000, max_beam_width=200, max_prompt_tokens=300, max_item_ids=50
    ) as client:
        yield client
    check_nothing_is_held(engine)


def direct(body: dict[str, Any]) -> list[tuple[Any, ...]]:
    """What the engine itself answers."""
    request = Request(
        prompt_token_ids=body["prompt_token_ids"],
        exclude_item_ids=body.get("exclude_item_ids"),
        allow_item_ids=body.get("allow_item_ids"),
        filter=body.get("filter"),
    )
    params = BeamParams(beam_width=body["beam_width"], num_return_sequences=body["n"])
    [result] = text_engine().generate([request], params)
    return [(list(item.sid), item.item_id, item.cum_logprob) for item in result.items]


def listed(answer: dict[str, Any]) -> list[tuple[Any, ...]]:
    return [(item["sid"], item["item_ids"][0], item["cum_logprob"]) for item in answer["items"]]


def test_recommend_answers_what_the_engine_does(client: httpx.Client) -> None:
    answer = client.post("/v1/recommend", json={**BODY, "request_id": "r1"}).json()
    assert listed(answer) == direct(BODY)
    assert answer["request_id"] == "r1"
    assert answer["catalog_version"] == CATALOG.version
    assert answer["items"][0]["titles"] == [f"Item {answer['items'][0]['item_ids'][0]}"]
    assert answer["usage"]["prompt_tokens"] == 3
    assert answer["finish_reason"] == "stop"
    timings = answer["timings_ms"]
    assert 0 < timings["queue"] + timings["prefill"] + timings["decode"] <= timings["total"] + 0.01


@pytest.mark.parametrize(
    "filters",
    [
        {"filter": {"lang": ["en"], "in_stock": True}},
        {"exclude_item_ids": list(range(50))},
        {"allow_item_ids": [3, 4, 5, 99999]},
    ],
)
def test_filters(client: httpx.Client, filters: dict[str, Any]) -> None:
    body = {**BODY, **filters}
    answer = client.post("/v1/recommend", json=body).json()
    assert listed(answer) == direct(body)
    assert answer["items"]


def test_a_filter_that_leaves_nothing_is_an_empty_answer(client: httpx.Client) -> None:
    response = client.post("/v1/recommend", json={**BODY, "allow_item_ids": []})
    assert response.status_code == 200
    assert response.json()["items"] == []
    assert response.json()["finish_reason"] == "filtered"
    assert "no item of the catalogue is left" in response.json()["reason"]


def test_text_and_messages(client: httpx.Client) -> None:
    text = client.post("/v1/recommend", json={"prompt": "user: hello\n", "beam_width": 9}).json()
    chat = client.post(
        "/v1/recommend", json={"messages": [{"role": "user", "content": "hello"}], "beam_width": 9}
    ).json()
    assert listed(text) == listed(chat)
    assert len(text["items"]) == 9


@pytest.mark.parametrize(
    ("change", "field"),
    [
        ({"beam_width": 0}, "beam_width"),
        ({"beam_width": "20"}, "beam_width"),
        ({"beam_width": 201}, "beam_width"),
        ({"n": 21}, "n"),
        ({"n": None, "num_return_sequences": 21}, "num_return_sequences"),
        ({"n": 5, "num_return_sequences": 5}, "n"),
        ({"beam_width_array": [5, 201, 5]}, "beam_width_array"),
        ({"max_tokens": 4}, "max_tokens"),
        ({"colour": 1}, "colour"),
        ({"prompt": "and text"}, "prompt_token_ids"),
        ({"prompt_token_ids": None}, "prompt_token_ids"),
        ({"prompt_token_ids": []}, "prompt_token_ids"),
        ({"prompt_token_ids": [1.5]}, "prompt_token_ids.0"),
        ({"prompt_token_ids": [97]}, "prompt_token_ids"),
        ({"prompt_token_ids": [5] * 301}, "prompt_token_ids"),
        ({"prompt_token_ids": None, "prompt": "x" * 4801}, "prompt"),
        ({"prompt_token_ids": None, "prompt": "x" * 301}, "prompt"),
        ({"prompt_token_ids": None, "messages": [{"role": "user", "content": "x" * 300}]}, "messages"),
        ({"filter": {"colour": "red"}}, "filter.colour"),
        ({"exclude_item_ids": ["a"]}, "exclude_item_ids"),
        ({"exclude_item_ids": list(range(51))}, "exclude_item_ids"),
        ({"filter": {"lang": ["en"] * 51}}, "filter.lang"),
        ({"timeout_s": 0}, "timeout_s"),
        ({"length_penalty": "nan"}, "length_penalty"),
        ({"normalizer": "none"}, "normalizer"),
    ],
)
def test_a_wrong_field_is_422_and_named(client: httpx.Client, change: dict[str, Any], field: str) -> None:
    body = {name: value for name, value in {**BODY, **change}.items() if value is not None}
    response = client.post("/v1/recommend", json=body)
    assert response.status_code == 422, response.text
    error = response.json()["error"]
    assert error["param"] == field
    assert error["type"] == "invalid_request_error"
    assert field in error["message"]


@pytest.mark.parametrize(
    ("change", "value"),
    [
        ({"beam_width": 0}, "(got 0)"),
        ({"beam_width": 201}, "at most 200 (got 201)"),
        ({"timeout_s": -1}, "(got -1)"),
        ({"normalizer": "none"}, "(got 'none')"),
        ({"exclude_item_ids": [None]}, "(got None)"),
        ({"filter": {"x" * 20_000: 1}}, "no item of the catalogue has this attribute"),
        ({"y" * 20_000: 1}, "not permitted"),
        ({"prompt_token_ids": ["z" * 20_000]}, "zzz... (20002 characters)"),
    ],
)
def test_the_message_has_the_value_and_few_words(
    client: httpx.Client, change: dict[str, Any], value: str
) -> None:
    response = client.post("/v1/recommend", json={**BODY, **change})
    assert response.status_code == 422
    assert value in response.json()["error"]["message"]
    assert len(response.content) < 1200


@pytest.mark.parametrize(
    ("prompt", "place"),
    [
        ([97], "prompt"),
        ([5] * 301, "prompt"),
        ([[5], [97]], "prompt.1"),
        ([[5], [6] * 301], "prompt.1"),
        (["a", "b" * 5000], "prompt.1"),
        (["a", "b" * 301], "prompt.1"),
    ],
)
def test_prompts_of_completions_are_named_as_they_were_sent(
    client: httpx.Client, prompt: list[Any], place: str
) -> None:
    response = client.post("/v1/completions", json={"model": "onela", "prompt": prompt, "n": 4})
    assert response.status_code == 422, response.text
    error = response.json()["error"]
    assert error["param"] == place
    assert error["message"].startswith(f"{place}: ")


def test_of_the_forms_of_a_prompt_the_one_that_was_meant_is_told(client: httpx.Client) -> None:
    response = client.post("/v1/completions", json={"model": "onela", "prompt": [5, -1], "n": 4})
    assert response.status_code == 422
    message = "prompt.1: Input should be greater than or equal to 0 (got -1)"
    assert response.json()["error"]["message"] == message
    assert response.json()["error"]["param"] == "prompt.1"


@pytest.mark.parametrize(
    ("content", "status", "message"),
    [
        (b"", 422, "body: Field required"),
        (b"{", 422, "body: not JSON: Expecting property name enclosed in double quotes, character 1"),
        (b"nul", 422, "body: not JSON: Expecting value, character 0"),
        (b"[]", 422, "body: Input should be an object (got a list)"),
        (b"5", 422, "body: Input should be an object (got 5)"),
        (
            b'{"prompt_token_ids": [NaN]}',
            422,
            "prompt_token_ids.0: Input should be a valid integer (got nan)",
        ),
        (b"\xff", 400, "the body cannot be read as JSON: 'utf-8' codec can't decode byte 0xff in position 0"),
        (b"[" * 9000, 400, "the body cannot be read as JSON: maximum recursion depth exceeded"),
        (b"[" + b"9" * 6000 + b"]", 400, "the body cannot be read as JSON: Exceeds the limit (4300 digits)"),
    ],
)
def test_what_is_no_json_object(client: httpx.Client, content: bytes, status: int, message: str) -> None:
    response = client.post("/v1/recommend", content=content, headers={"content-type": "application/json"})
    assert response.status_code == status
    assert response.json()["error"]["message"].startswith(message)


@pytest.mark.parametrize("kind", ["text/plain", "application/x-www-form-urlencoded", None])
def test_a_body_that_is_not_said_to_be_json(client: httpx.Client, kind: str | None) -> None:
    """What curl sends unless it is told."""
    headers = {} if kind is None else {"content-type": kind}
    response = client.post("/v1/recommend", content=json.dumps(BODY).encode(), headers=headers)
    assert response.status_code == 422
    error = response.json()["error"]
    assert error["param"] == "content-type"
    assert error["message"] == f"content-type: application/json is expected (got {kind!r})"


@pytest.mark.parametrize(
    "wrong",
    [
        {"top_p": True},
        {"presence_penalty": False},
        {"frequency_penalty": False},
        {"stream": 0},
        {"use_beam_search": 1},
        {"echo": 0},
    ],
)
def test_a_boolean_is_no_number_and_a_number_no_boolean(client: httpx.Client, wrong: dict[str, Any]) -> None:
    [field] = wrong
    body = {"model": "onela", "prompt": [5], "top_p": 1.0, "presence_penalty": 0.0, "stream": False}
    assert client.post("/v1/completions", json=body).status_code == 200
    response = client.post("/v1/completions", json={**body, **wrong})
    assert response.status_code == 422
    kind = "number" if isinstance(wrong[field], bool) else "boolean"
    assert (
        response.json()["error"]["message"] == f"{field}: Input should be a valid {kind} (got {wrong[field]})"
    )


def test_a_body_that_is_too_long_is_413_declared_or_not(client: httpx.Client) -> None:
    long = json.dumps({**BODY, "request_id": "x" * 60_000}).encode()
    declared = client.post("/v1/recommend", content=long, headers={"content-type": "application/json"})

    def pieces() -> Iterator[bytes]:
        for start in range(0, len(long), 1000):
            yield long[start : start + 1000]

    chunked = client.post("/v1/recommend", content=pieces(), headers={"content-type": "application/json"})
    for response in (declared, chunked):
        assert response.status_code == 413
        assert response.json()["error"]["code"] == "body_too_large"


def test_unknown_paths_and_methods_have_the_same_form(client: httpx.Client) -> None:
    assert client.get("/v1/nothing").json()["error"]["code"] == "not_found"
    assert client.get("/v1/recommend").json()["error"]["code"] == "method_not_allowed"


@pytest.mark.parametrize("path", ["/health", "/ready"])
def test_a_probe_may_ask_for_the_head_alone(client: httpx.Client, path: str) -> None:
    response = client.head(path)
    assert (response.status_code, response.content) == (200, b"")


def test_nan_is_500_and_says_so_and_the_next_request_is_served(client: httpx.Client) -> None:
    response = client.post("/v1/recommend", json={**BODY, "prompt_token_ids": [5, NAN_TOKEN]})
    assert response.status_code == 500
    assert "NaN" in response.json()["error"]["message"]
    response = client.post("/v1/recommend", json={**BODY, "prompt_token_ids": [5, RAISE_TOKEN]})
    assert response.status_code == 500
    assert listed(client.post("/v1/recommend", json=BODY).json()) == direct(BODY)
    assert client.get("/health").status_code == 200


@pytest.mark.parametrize("stream", [False, True])
def test_what_nobody_foresaw_is_500_in_the_same_form(stream: bool, caplog: pytest.LogCaptureFixture) -> None:
    engine = text_engine()

    def broken(*_: Any) -> Any:
        raise KeyError("lost")

    with serving(engine) as client:
        prepare, engine.prepare = engine.prepare, broken  # type: ignore[method-assign]
        response = client.post("/v1/recommend", json={**BODY, "stream": stream})
        assert response.status_code == 500
        assert response.json()["error"]["code"] == "engine_error"
        assert "KeyError" in response.json()["error"]["message"]
        assert metric(client, 'onela_requests_total{outcome="engine_error"}') == 1
        engine.prepare = prepare  # type: ignore[method-assign]
        assert client.post("/v1/recommend", json=BODY).status_code == 200
    assert "KeyError" in caplog.text


def test_a_route_that_breaks_is_500_in_the_same_form(
    client: httpx.Client, monkeypatch: pytest.MonkeyPatch
) -> None:
    def broken(*_: Any) -> Any:
        raise KeyError("a secret")

    monkeypatch.setattr(client.server.metrics, "render", broken)  # type: ignore[attr-defined]
    response = client.get("/metrics", headers={"connection": "close"})
    assert response.status_code == 500
    assert response.json()["error"]["code"] == "engine_error"
    assert "KeyError" in response.json()["error"]["message"]
    assert "secret" not in response.text


def read_events(response: httpx.Response) -> list[tuple[str, dict[str, Any]]]:
    events = []
    for block in response.read().decode().strip().split("\n\n"):
        name, data = block.split("\n")
        events.append((name.removeprefix("event: "), json.loads(data.removeprefix("data: "))))
    return events


def test_a_stream_shows_every_level_and_ends_in_the_answer(client: httpx.Client) -> None:
    with client.stream("POST", "/v1/recommend", json={**BODY, "stream": True}) as response:
        events = read_events(response)
    assert [name for name, _ in events] == ["step", "step", "step", "result"]
    sids: list[list[int]] = [[]]
    for level, (_, step) in enumerate(events[:-1], 1):
        assert step["level"] == level
        sids = [[*sids[max(parent, 0)], code] for code, parent in zip(step["codes"], step["parents"])]
    scores = dict(zip(map(tuple, sids), events[2][1]["cum_logprobs"]))
    result = events[-1][1]
    assert listed(result) == direct(BODY)
    for item in result["items"]:
        assert scores[tuple(item["sid"])] == pytest.approx(item["cum_logprob"], abs=1e-4)


def test_a_stream_that_cannot_begin_has_an_ordinary_status(client: httpx.Client) -> None:
    response = client.post("/v1/recommend", json={**BODY, "prompt_token_ids": [97], "stream": True})
    assert response.status_code == 422
    with client.stream(
        "POST", "/v1/recommend", json={**BODY, "allow_item_ids": [], "stream": True}
    ) as response:
        assert [name for name, _ in read_events(response)] == ["result"]


def slow(engine: Any) -> threading.Event:
    """Steps wait for the event that is returned, but not for ever."""
    gate = threading.Event()
    step = engine.step

    def held() -> Any:
        gate.wait(10)
        return step()

    engine.step = held
    return gate


def wait_for(condition: Any, seconds: float = 10) -> None:
    limit = time.monotonic() + seconds
    while not condition():
        assert time.monotonic() < limit
        time.sleep(0.01)


@pytest.mark.parametrize("stream", [False, True])
def test_a_client_that_hangs_up_cancels_its_request(stream: bool) -> None:
    engine = text_engine()
    gate = slow(engine)
    with serving(engine) as client:
        body = json.dumps({**BODY, "stream": stream}).encode()
        host, port = client.base_url.host, client.base_url.port
        connection = socket.create_connection((host, port))
        head = f"POST /v1/recommend HTTP/1.1\r\nhost: {host}\r\ncontent-type: application/json\r\n"
        connection.sendall(head.encode() + f"content-length: {len(body)}\r\n\r\n".encode() + body)
        wait_for(lambda: engine.scheduler.has_work)
        connection.close()
        wait_for(lambda: metric(client, 'onela_requests_total{outcome="cancelled"}') == 1)
        gate.set()
        wait_for(lambda: not engine.scheduler.has_work)
        check_nothing_is_held(engine)


def test_a_full_queue_is_429_with_retry_after_and_not_ready() -> None:
    engine = text_engine(max_waiting=2, max_prompts=1)
    gate = slow(engine)
    with serving(engine) as client, concurrent.futures.ThreadPoolExecutor() as pool:
        held = [pool.submit(httpx.post, f"{client.base_url}/v1/recommend", json=BODY) for _ in range(2)]
        wait_for(lambda: client.get("/ready").json() == {"status": "full"})
        assert client.get("/ready").status_code == 503
        response = client.post("/v1/recommend", json=BODY)
        assert response.status_code == 429
        assert int(response.headers["retry-after"]) >= 1
        assert response.json()["error"]["code"] == "queue_full"
        gate.set()
        assert [future.result().status_code for future in held] == [200, 200]
        assert client.get("/ready").status_code == 200
        assert metric(client, 'onela_requests_total{outcome="queue_full"}') == 1


def test_a_request_out_of_time_is_504() -> None:
    engine = text_engine()
    gate = slow(engine)
    with serving(engine) as client:
        threading.Timer(0.2, gate.set).start()
        response = client.post("/v1/recommend", json={**BODY, "timeout_s": 0.05})
        assert response.status_code == 504
        assert response.json()["error"]["code"] == "deadline_exceeded"


def test_a_request_that_never_fits_is_422_with_the_numbers() -> None:
    with serving(text_engine(max_slots=30)) as client:
        response = client.post("/v1/recommend", json={**BODY, "beam_width": 100})
        assert response.status_code == 422
        assert response.json()["error"]["code"] == "never_fits"
        assert "max_slots allows 30" in response.json()["error"]["message"]


def test_shutting_down_lets_requests_end() -> None:
    engine = text_engine()
    gate = slow(engine)
    with concurrent.futures.ThreadPoolExecutor() as pool:
        with serving(engine) as client:
            answers = [
                pool.submit(httpx.post, f"{client.base_url}/v1/recommend", json=BODY) for _ in range(3)
            ]
            wait_for(lambda: client.server.engine.num_waiting == 3)  # type: ignore[attr-defined]
            threading.Timer(0.3, gate.set).start()
        assert [answer.result().status_code for answer in answers] == [200] * 3


def test_what_does_not_end_in_time_is_503() -> None:
    engine = text_engine()
    gate = slow(engine)
    with concurrent.futures.ThreadPoolExecutor() as pool:
        with serving(engine, drain_s=0) as client:
            answer = pool.submit(httpx.post, f"{client.base_url}/v1/recommend", json=BODY)
            wait_for(lambda: client.server.engine.num_waiting == 1)  # type: ignore[attr-defined]
            threading.Timer(0.3, gate.set).start()
        assert answer.result().status_code == 503
        assert answer.result().json()["error"]["code"] == "unavailable"
    check_nothing_is_held(engine)


@pytest.mark.parametrize("chunked", [False, True])
def test_half_a_request_does_not_hold_up_the_end(chunked: bool, caplog: pytest.LogCaptureFixture) -> None:
    length, half = ("transfer-encoding: chunked", "2\r\n{ \r\n") if chunked else ("content-length: 90", "{ ")
    with contextlib.ExitStack() as stack:
        with serving(text_engine(), drain_s=10) as client:
            host, port = client.base_url.host, client.base_url.port
            connection = stack.enter_context(socket.create_connection((host, port), timeout=10))
            head = (
                f"POST /v1/recommend HTTP/1.1\r\nhost: {host}\r\ncontent-type: application/json\r\n{length}"
            )
            connection.sendall(f"{head}\r\n\r\n{half}".encode())
            wait_for(lambda: client.server.bodies.parts)  # type: ignore[attr-defined]
            started = time.monotonic()
        assert time.monotonic() - started < 5
        answer = b"".join(iter(lambda: connection.recv(4096), b"")).decode()
    assert answer.startswith("HTTP/1.1 503")
    assert "retry-after: 1" in answer
    assert "connection: close" in answer
    assert '"message":"the server is shutting down"' in answer
    assert '"code":"unavailable"' in answer
    assert not caplog.records


@pytest.mark.parametrize("chunked", [False, True])
def test_a_body_that_stands_still_is_408_and_its_connection_closed(chunked: bool) -> None:
    length, part = ("transfer-encoding: chunked", "1\r\n \r\n") if chunked else ("content-length: 90", " ")
    with serving(text_engine(), body_timeout_s=1) as client:
        host, port = client.base_url.host, client.base_url.port
        with socket.create_connection((host, port), timeout=10) as connection:
            head = (
                f"POST /v1/recommend HTTP/1.1\r\nhost: {host}\r\ncontent-type: application/json\r\n{length}"
            )
            connection.sendall(f"{head}\r\n\r\n".encode())
            # It may be slow: together this takes longer than the limit, no part of it does.
            for _ in range(6):
                time.sleep(0.3)
                connection.sendall(part.encode())
            stood_still = time.monotonic()
            answer = b"".join(iter(lambda: connection.recv(4096), b"")).decode()
            assert 0.9 < time.monotonic() - stood_still < 5
        assert answer.startswith("HTTP/1.1 408")
        assert "connection: close" in answer
        assert '"message":"no more of the body has come for body_timeout_s = 1 s"' in answer
        assert '"code":"body_timeout"' in answer
        assert not client.server.bodies.parts  # type: ignore[attr-defined]
        assert client.post("/v1/recommend", json=BODY).status_code == 200


def test_keys() -> None:
    with serving(text_engine(), api_key="secret", admin_token="admin") as client:
        assert client.post("/v1/recommend", json=BODY).status_code == 401
        assert client.get("/v1/models", headers={"authorization": "Bearer wrong"}).status_code == 401
        good = {"authorization": "Bearer secret"}
        assert client.post("/v1/recommend", json=BODY, headers=good).status_code == 200
        assert client.post("/v1/catalog/rollback", headers=good).status_code == 401
        for path in ("/health", "/ready", "/metrics", "/"):
            assert client.get(path).status_code == 200


def test_catalogues_are_shut_without_an_admin_token(client: httpx.Client) -> None:
    response = client.post("/v1/catalog/load", json={"path": "/etc/passwd"})
    assert response.status_code == 403


def test_a_catalogue_is_loaded_switched_and_rolled_back(tmp_path: Path) -> None:
    inside = tmp_path / "catalogs"
    inside.mkdir()
    path = inside / "new.jsonl"
    path.write_text("".join(json.dumps({**item, "title": "new"}) + "\n" for item in ITEMS[:40]))
    (inside / "broken.jsonl").write_text('{"item_id": 1, "sid": [0, 0, 0]}\n{"item_id": 1}\n')
    (inside / "link.jsonl").symlink_to("/etc/hosts")
    admin = {"authorization": "Bearer admin"}
    with serving(text_engine(), admin_token="admin", catalog_dir=str(inside)) as client:

        def call(action: str, status: int = 200, **body: Any) -> dict[str, Any]:
            response = client.post(f"/v1/catalog/{action}", json=body or {}, headers=admin)
            assert response.status_code == status, response.text
            return response.json()

        assert "no catalogue is loaded" in call("switch", 409)["error"]["message"]
        assert "no earlier catalogue" in call("rollback", 409)["error"]["message"]
        assert (
            "broken.jsonl, line 2" in call("load", 422, path=str(inside / "broken.jsonl"))["error"]["message"]
        )
        for outside in ("/etc/hosts", str(inside / ".." / "x"), str(inside / "link.jsonl")):
            assert "outside catalog_dir" in call("load", 422, path=outside)["error"]["message"]
        assert call("load", 422, path=str(path), format="tea")["error"]["code"] == "invalid_option"
        for no_path in ("a\0b", str(inside / ("x" * 4000))):
            assert call("load", 422, path=no_path)["error"]["code"] == "invalid_catalog"
        staged = call("load", path=str(path))
        assert staged["active"] == CATALOG.version
        assert client.post("/v1/recommend", json=BODY).json()["catalog_version"] == CATALOG.version
        call("switch", 409, version="other")
        assert call("switch", version=staged["staged"])["num_items"] == 40
        answer = client.post("/v1/recommend", json=BODY).json()
        assert answer["catalog_version"] == staged["staged"]
        assert answer["items"][0]["titles"] == ["new"]
        assert call("rollback")["active"] == CATALOG.version
        assert listed(client.post("/v1/recommend", json=BODY).json()) == direct(BODY)
        assert metric(client, "onela_catalog_switches_total") == 2


def test_many_clients_and_a_switch_in_between_every_answer_is_one_versions() -> None:
    half = CATALOG.from_items(ITEMS[::2], CATALOG.vocabulary)
    engine = text_engine(
        max_slots=200,
        max_batch_tokens=64,
        prompt_cache_bytes=10_000,
        page_size=4,
        prompt_cache_interval=8,
        prompt_cache_tail=2,
    )
    expected: dict[Any, Any] = {}
    for catalog in (CATALOG, half):
        for i in range(10):
            request = Request(prompt_token_ids=[5 + i] * (i * 3 + 1))
            [result] = text_engine(catalog).generate([request], BeamParams(beam_width=12))
            expected[catalog.version, i] = [list(item.sid) for item in result.items]
    with serving(engine) as client, concurrent.futures.ThreadPoolExecutor(16) as pool:

        def ask(i: int) -> tuple[int, dict[str, Any]]:
            body = {"prompt_token_ids": [5 + i % 10] * (i % 10 * 3 + 1), "beam_width": 12}
            return i % 10, client.post("/v1/recommend", json=body).json()

        futures = [pool.submit(ask, i) for i in range(200)]
        for count, catalog in ((20, half), (80, CATALOG), (140, half)):
            wait_for(lambda count=count: sum(future.done() for future in futures) >= count)
            engine.catalogs.load(catalog)
            engine.catalogs.switch()
        versions = set()
        for future in futures:
            i, answer = future.result()
            versions.add(answer["catalog_version"])
            assert [item["sid"] for item in answer["items"]] == expected[answer["catalog_version"], i]
    assert versions == {CATALOG.version, half.version}
    check_nothing_is_held(engine)


def test_nothing_stays_behind_after_many_requests_and_switches() -> None:
    half = CATALOG.from_items(ITEMS[::2], CATALOG.vocabulary)
    engine = text_engine(
        prompt_cache_bytes=5_000,
        prompt_cache_host_bytes=5_000,
        page_size=4,
        prompt_cache_interval=8,
        prompt_cache_tail=2,
    )

    def live() -> tuple[int, int]:
        gc.collect()
        alive = gc.get_objects()
        tensors = sum(issubclass(type(thing), torch.Tensor) for thing in alive)
        return tensors, sum(type(thing) in (ActiveRequest, ServedCatalog) for thing in alive)

    with serving(engine) as client:
        counts = []
        for turn in range(3):
            for i in range(60):
                body = {
                    "prompt_token_ids": [5 + i % 9] * (i % 40 + 1),
                    "beam_width": 8,
                    "session_id": f"{turn} {i}",
                }
                client.post("/v1/recommend", json={**body, "exclude_item_ids": [i], "stream": i % 2 == 0})
                if i % 20 == 0:
                    engine.catalogs.load(half if i % 40 else CATALOG)
                    engine.catalogs.switch()
            counts.append(live())
    # Sessions differ from turn to turn, and so does all that could be kept for each.
    assert counts[2][0] <= counts[1][0] + 5, counts
    assert counts[2][1] <= counts[1][1], counts
