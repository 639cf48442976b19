"""Two replicas on the CPU: sessions stay where their cache is, and a replica that is lost loses no request."""

from __future__ import annotations

import asyncio
import concurrent.futures
import dataclasses
import json
import re
import socket
import threading
import time
import warnings
from collections.abc import Iterator
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import httpx
import pytest
import yaml

from onela.errors import ConfigError
from onela.serve.merge import merge_metrics
from tests.checkpoints import save_qwen3_5
from tests.engine.helpers import random_prompt, random_sids, vocabulary_of

SIZES = (6, 8, 7)
DEPLOY = Path(__file__).parent.parent.parent / "deploy" / "serve.yaml"


def test_metrics_of_replicas_are_joined() -> None:
    one = '# HELP a Text.\n# TYPE a counter\na_total 1.0\n# HELP b Text.\n# TYPE b gauge\nb{x="1"} 2.0\n'
    two = one.replace("1.0", "3.0")
    assert merge_metrics([one, two]) == (
        '# HELP a Text.\n# TYPE a counter\na_total{replica="0"} 1.0\na_total{replica="1"} 3.0\n'
        '# HELP b Text.\n# TYPE b gauge\nb{replica="0",x="1"} 2.0\nb{replica="1",x="1"} 2.0\n'
    )


@pytest.fixture(scope="module")
def cluster(tmp_path_factory: pytest.TempPathFactory) -> Iterator[tuple[str, Path, Any]]:
    # Ray's own code warns; what is tested here is ours.
    with warnings.catch_warnings(), pytest.MonkeyPatch.context() as patch:
        warnings.simplefilter("ignore")
        for name in ("RAY_USAGE_STATS_ENABLED", "RAY_DEDUP_LOGS"):
            patch.setenv(name, "0")
        ray = pytest.importorskip("ray")
        from onela.serve.cluster import ClusterSpec, run

        path = tmp_path_factory.mktemp("cluster")
        save_qwen3_5(path / "model")
        rows = [{"item_id": i, "sid": list(sid)} for i, sid in enumerate(random_sids(120, SIZES))]
        for name, kept in (("items.jsonl", rows), ("half.jsonl", rows[:60])):
            (path / name).write_text("".join(json.dumps(row) + "\n" for row in kept))
        vocabulary = vocabulary_of(*SIZES)
        with socket.socket() as free:
            free.bind(("127.0.0.1", 0))
            port = free.getsockname()[1]
        spec = ClusterSpec(
            model=str(path / "model"),
            catalog=str(path / "items.jsonl"),
            vocabulary=tuple(tuple(vocabulary.token_ids(level).tolist()) for level in range(3)),
            replicas=2,
            num_cpus=0.5,
            engine={"device": "cpu", "prompt_cache_bytes": 50_000_000},
            server={"host": "127.0.0.1", "port": port, "admin_token": "admin", "drain_s": 5},
        )
        ray.init(num_cpus=2, include_dashboard=False, object_store_memory=100_000_000)
        run(spec, blocking=False)
        yield f"http://127.0.0.1:{port}", path, spec
        from ray import serve

        serve.shutdown()
        ray.shutdown()


def replicas() -> list[Any]:
    import ray

    named = ray.util.list_named_actors(all_namespaces=True)
    found = [actor for actor in named if re.search(r"SERVE_REPLICA.*#Replica#", actor["name"])]
    return [ray.get_actor(actor["name"], actor["namespace"]) for actor in found]


class NoReplica:
    """A handle of a deployment of which no replica is up."""

    def __init__(self, error: Exception) -> None:
        self.error = error

    def options(self, **_: Any) -> Any:
        return SimpleNamespace(whole=self, call=self)

    def remote(self, *_: Any) -> Any:
        raise self.error

    def broadcast(self, *_: Any) -> Any:
        raise self.error


@pytest.mark.filterwarnings("ignore")
@pytest.mark.parametrize("path", ["/v1/recommend", "/metrics", "/v1/catalog/load", "/v1/catalog/switch"])
@pytest.mark.parametrize("lost", ["unavailable", "actor"])
def test_without_a_replica_the_gateway_says_when_to_come_back(
    path: str, lost: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    pytest.importorskip("ray")
    from fastapi import Request
    from ray.exceptions import RayActorError
    from ray.serve._private.common import DeploymentID
    from ray.serve.exceptions import DeploymentUnavailableError

    from onela.serve import cluster as module

    error = DeploymentUnavailableError(DeploymentID("Replica")) if lost == "unavailable" else RayActorError()
    replicas = NoReplica(error)
    gateway = module.Gateway(replicas, 1000, 60)  # type: ignore[arg-type]

    async def receive() -> dict[str, Any]:
        return {"type": "http.request", "body": b"{}", "more_body": False}

    async def no_wait(_: float) -> None:
        pass

    monkeypatch.setattr(module.asyncio, "sleep", no_wait)
    response = asyncio.run(gateway(Request(module._scope("POST", path, []), receive)))
    assert (response.status_code, response.headers["retry-after"]) == (503, "1")
    assert json.loads(response.body)["error"]["code"] == "unavailable"


@pytest.mark.filterwarnings("ignore")
def test_the_gateway_waits_for_a_piece_of_a_body_so_long() -> None:
    pytest.importorskip("ray")
    from fastapi import Request

    from onela.serve import cluster as module

    gateway = module.Gateway(NoReplica(AssertionError("nobody is to be asked")), 1000, 0.2)  # type: ignore[arg-type]
    pieces = [b"{", b" "]

    async def receive() -> dict[str, Any]:
        if not pieces:
            await asyncio.sleep(60)
        return {"type": "http.request", "body": pieces.pop(), "more_body": True}

    response = asyncio.run(gateway(Request(module._scope("POST", "/v1/recommend", []), receive)))
    assert (response.status_code, response.headers["connection"]) == (408, "close")
    assert json.loads(response.body)["error"]["code"] == "body_timeout"


@pytest.mark.slow
@pytest.mark.timeout(240)
@pytest.mark.filterwarnings("ignore")
def test_sessions_stay_and_a_lost_replica_loses_nothing(
    cluster: tuple[str, Path, Any], request: pytest.FixtureRequest
) -> None:
    import ray

    url, path, spec = cluster
    client = httpx.Client(base_url=url, timeout=60)
    request.addfinalizer(client.close)
    prompts = [random_prompt(300, seed) for seed in range(6)]
    bodies = [
        {"prompt_token_ids": p, "beam_width": 20, "session_id": f"user {i}"} for i, p in enumerate(prompts)
    ]
    first = [client.post("/v1/recommend", json=body).json() for body in bodies]
    again = [client.post("/v1/recommend", json=body).json() for body in bodies]
    assert [answer["usage"]["cached_tokens"] for answer in first] == [0] * 6
    assert [answer["usage"]["cached_tokens"] for answer in again] == [256] * 6

    def sids(answer: dict[str, Any]) -> list[list[int]]:
        return [item["sid"] for item in answer["items"]]

    assert list(map(sids, first)) == list(map(sids, again))
    samples = re.findall(
        r'onela_requests_total{replica="(\d)",outcome="stop"} (\d+)', client.get("/metrics").text
    )
    assert sum(int(count) for _, count in samples) == 12
    assert len(samples) == 2, "six sessions are spread over both replicas"

    # Errors come through as they are, and streams too.
    assert client.post("/v1/recommend", json={"beam_width": 3}).status_code == 422
    with client.stream("POST", "/v1/recommend", json={**bodies[0], "stream": True}) as response:
        events = [line for line in response.iter_lines() if line.startswith("event: ")]
    assert events == ["event: step"] * 3 + ["event: result"]

    # One of the two is killed while requests run.
    with concurrent.futures.ThreadPoolExecutor(6) as pool:
        answers = [pool.submit(client.post, "/v1/recommend", json=bodies[i % 6]) for i in range(90)]
        while sum(answer.done() for answer in answers) < 15:
            time.sleep(0.01)
        ray.kill(replicas()[0], no_restart=True)
        for i, answer in enumerate(answers):
            assert answer.result().status_code == 200, answer.result().text
            assert sids(answer.result().json()) == sids(first[i % 6])

    # Ray brings the second one back; a catalogue is switched on both.
    limit = time.monotonic() + 90
    while client.get("/metrics").text.count("\nonela_up{") < 2:
        assert time.monotonic() < limit
        time.sleep(0.5)
    admin = {"authorization": "Bearer admin"}
    load = client.post("/v1/catalog/load", json={"path": str(path / "half.jsonl")}, headers=admin)
    assert load.status_code == 200, load.text
    assert client.post("/v1/catalog/switch", json={}, headers=admin).json()["num_items"] == 60
    versions = {client.post("/v1/recommend", json=body).json()["catalog_version"] for body in bodies}
    assert versions == {load.json()["staged"]}
    assert client.post("/v1/catalog/switch", json={}, headers=admin).status_code == 409

    # Deployed again with another option, the replicas are replaced one by one under load.
    from onela.serve.cluster import run

    before = {actor._actor_id for actor in replicas()}
    changed = dataclasses.replace(spec, engine={**spec.engine, "max_waiting": 77})
    with concurrent.futures.ThreadPoolExecutor(3) as pool:
        rolling = pool.submit(run, changed, blocking=False)
        served = 0
        while not rolling.done():
            for answer in pool.map(lambda body: client.post("/v1/recommend", json=body), bodies[:2]):
                assert answer.status_code == 200, answer.text
                served += 1
        rolling.result()
    assert served > 10
    assert not before & {actor._actor_id for actor in replicas()}


@pytest.mark.slow
@pytest.mark.timeout(240)
@pytest.mark.filterwarnings("ignore")
def test_replicas_come_under_load_and_go_after_it(cluster: tuple[str, Path, Any]) -> None:
    """Between one and two of them, never more, and no request fails meanwhile."""
    from onela.serve.cluster import run

    url, _, spec = cluster
    few = {"replicas": 1, "max_replicas": 2, "target_requests": 2}
    run(dataclasses.replace(spec, **few, upscale_delay_s=1, downscale_delay_s=3), blocking=False)
    body = {"prompt_token_ids": random_prompt(1500, 1), "beam_width": 200}
    seen = [len(replicas())]
    stop = threading.Event()

    def ask() -> int:
        count = 0
        with httpx.Client(base_url=url, timeout=60) as client:
            while not stop.is_set():
                response = client.post("/v1/recommend", json=body)
                assert response.status_code == 200, response.text
                count += 1
        return count

    def wait_for(count: int) -> None:
        limit = time.monotonic() + 80
        while seen[-1] != count:
            assert time.monotonic() < limit, seen
            time.sleep(0.5)
            seen.append(len(replicas()))

    with concurrent.futures.ThreadPoolExecutor(8) as pool:
        clients = [pool.submit(ask) for _ in range(8)]
        try:
            wait_for(2)
            time.sleep(5)
            seen.append(len(replicas()))
        finally:
            stop.set()
        assert sum(client.result() for client in clients) > 8
    assert seen[-1] == 2
    wait_for(1)
    assert max(seen) == 2
    with httpx.Client(base_url=url, timeout=60) as client:
        assert client.post("/v1/recommend", json=body).status_code == 200


def test_the_deployment_file_is_what_the_code_takes() -> None:
    pytest.importorskip("ray")
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        from onela.serve.cluster import ClusterSpec
    [application] = yaml.safe_load(DEPLOY.read_text())["applications"]
    assert application["import_path"] == "onela.serve.cluster:build"
    spec = ClusterSpec(**application["args"])
    assert spec.max_replicas == 8
    with pytest.raises(ConfigError, match="max_replicas: 1 is less"):
        ClusterSpec(**{**application["args"], "max_replicas": 1})
    with pytest.raises(ConfigError, match="sid_pattern: give it or a vocabulary, not both"):
        ClusterSpec(model="m", vocabulary=((1,), (2,)), sid_pattern="x")
    for part in ("engine", "server", "prompts"):
        with pytest.raises(ConfigError, match="beams: unknown option"):
            ClusterSpec(**{**application["args"], part: {"beams": 3}})
