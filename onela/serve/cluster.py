"""Several replicas of the server through Ray Serve, over the GPUs and hosts of a Ray cluster.

A gateway takes the HTTP requests and hands each to a replica: those of one session always to the same one, so that its
prompt cache hits, by consistent hashing, so that few sessions move when replicas come and go. A replica is the whole
single-process application, called without a socket. The search is deterministic, so a request whose replica died before
it answered is simply asked again elsewhere.
"""

from __future__ import annotations

import asyncio
import logging
from collections.abc import AsyncIterator
from dataclasses import asdict, dataclass, field, fields
from typing import Any

import pydantic_core
import ray
from fastapi import Request, Response
from fastapi.responses import StreamingResponse
from ray import serve
from ray.exceptions import RayActorError
from ray.serve.config import AutoscalingConfig, RequestRouterConfig
from ray.serve.exceptions import BackPressureError, DeploymentUnavailableError
from ray.serve.handle import DeploymentHandle

from onela.config import EngineConfig, ServerConfig
from onela.engine import Engine
from onela.engine.prompting import PromptOptions
from onela.errors import ConfigError, UnavailableError
from onela.items import SidVocabulary
from onela.serve.app import create_app
from onela.serve.failures import error_response, http_response
from onela.serve.merge import merge_metrics
from onela.serve.metrics import CONTENT_TYPE
from onela.serve.middleware import ADMIN_PREFIX, stalled
from onela.serve.run import share_the_interpreter, spare_the_loaded

logger = logging.getLogger(__name__)
ROUTER = "ray.serve.experimental.consistent_hash_router:ConsistentHashRouter"
SESSION_HEADER = "x-session-id"
ATTEMPTS = 4
REPEATABLE = ("/metrics", f"{ADMIN_PREFIX}load")
Answer = tuple[int, list[tuple[bytes, bytes]], bytes]
# Hop-by-hop headers are the gateway's own business.
NOT_FORWARDED = frozenset({"host", "connection", "content-length", "transfer-encoding", "keep-alive"})


@dataclass(frozen=True)
class ClusterSpec:
    """What every replica is built from; paths must be readable on every host.

    Attributes:
        model: checkpoint directory. catalog: catalogue, if any. vocabulary: token ids of each SID level, if they are
            not to be found in the tokenizer. sid_pattern: how SID tokens read, if not in a published way.
        replicas: at the start, and the least there are. max_replicas: the most; None: as many as `replicas`.
        target_requests: requests per replica above which another one is started, and below which one is given up.
        upscale_delay_s, downscale_delay_s: seconds that either must last.
        num_gpus, num_cpus: what a replica asks Ray for.
        engine: options of `EngineConfig`. server: options of `ServerConfig`. prompts: options of `PromptOptions`.
    """

    model: str
    catalog: str | None = None
    vocabulary: tuple[tuple[int, ...], ...] | None = None
    sid_pattern: str | None = None
    replicas: int = 1
    max_replicas: int | None = None
    target_requests: int = 64
    upscale_delay_s: float = 30
    downscale_delay_s: float = 600
    num_gpus: float = 0
    num_cpus: float = 1
    engine: dict[str, Any] = field(default_factory=dict)
    server: dict[str, Any] = field(default_factory=dict)
    prompts: dict[str, Any] = field(default_factory=dict)

    def __post_init__(self) -> None:
        if self.replicas < 1:
            raise ConfigError(f"replicas: at least 1 is needed, got {self.replicas}")
        if self.max_replicas is not None and self.max_replicas < self.replicas:
            raise ConfigError(f"max_replicas: {self.max_replicas} is less than replicas = {self.replicas}")
        if self.vocabulary is not None and self.sid_pattern is not None:
            raise ConfigError("sid_pattern: give it or a vocabulary, not both")
        # Unknown options are refused here too, by name.
        EngineConfig.from_env({}, **self.engine)
        ServerConfig.from_env({}, **self.server)
        known = {option.name for option in fields(PromptOptions)}
        for name in self.prompts:
            if name not in known:
                raise ConfigError(f"{name}: unknown option of prompts; known are {', '.join(sorted(known))}")

    def build(self) -> Engine:
        """Load the engine of one replica."""
        vocabulary = None if self.vocabulary is None else SidVocabulary.from_token_ids(self.vocabulary)
        return Engine.from_pretrained(
            self.model,
            catalog=self.catalog,
            vocabulary=vocabulary,
            sid_pattern=self.sid_pattern,
            **self.engine,
            **self.prompts,
        )


class Replica:
    """The single-process application in a Ray actor."""

    def __init__(self, spec: dict[str, Any]) -> None:
        cluster = ClusterSpec(**spec)
        self.app = create_app(cluster.build(), ServerConfig(**cluster.server))
        self.server = self.app.state.server
        self.server.engine.start()
        spare_the_loaded()
        share_the_interpreter()

    def check_health(self) -> None:
        """Ray replaces a replica for which this raises."""
        if not self.server.engine.healthy:
            raise UnavailableError("the engine is not running")

    async def call(self, scope: dict[str, Any], body: bytes) -> AsyncIterator[Any]:
        """One HTTP request: yields (status, headers), then the pieces of the body."""
        messages: asyncio.Queue[Any] = asyncio.Queue()
        gone = asyncio.Event()
        given = False

        async def receive() -> dict[str, Any]:
            nonlocal given
            if not given:
                given = True
                return {"type": "http.request", "body": body, "more_body": False}
            await gone.wait()
            return {"type": "http.disconnect"}

        async def send(message: Any) -> None:
            messages.put_nowait(message)

        task = asyncio.ensure_future(self.app(scope, receive, send))
        task.add_done_callback(lambda _: messages.put_nowait(None))
        try:
            while (message := await messages.get()) is not None:
                if message["type"] == "http.response.start":
                    yield message["status"], message["headers"]
                elif message.get("body"):
                    yield message["body"]
            await task
        finally:
            gone.set()
            task.cancel()

    async def whole(self, scope: dict[str, Any], body: bytes) -> Answer:
        """One HTTP request whose answer comes in one piece: (status, headers, body)."""
        status, headers, pieces = 500, [], b""
        async for part in self.call(scope, body):
            if isinstance(part, tuple):
                status, headers = part
            else:
                pieces += part
        return status, headers, pieces


class Gateway:
    """Takes requests and finds the replica of each."""

    def __init__(self, replicas: DeploymentHandle, max_body_bytes: int, body_timeout_s: float) -> None:
        self.replicas = replicas
        self.max_body_bytes = max_body_bytes
        self.body_timeout_s = body_timeout_s

    async def __call__(self, request: Request) -> Response:
        """Metrics and catalogues concern every replica, all else is for one."""
        path = request.url.path
        try:
            body = await self._body(request)
        except asyncio.TimeoutError:
            return http_response(408, stalled(self.body_timeout_s), {"connection": "close"})
        scope = _scope(request.method, path, _headers(request))
        if path != "/metrics" and not path.startswith(ADMIN_PREFIX):
            return await self._forward(scope, body, request.headers.get(SESSION_HEADER))
        answers = await self._everywhere(scope, body)
        if not answers:
            return error_response(UnavailableError("no replica is up, or one was lost on the way"))
        if path == "/metrics":
            return Response(merge_metrics([text.decode() for *_, text in answers]), media_type=CONTENT_TYPE)
        # What one replica could not do has not been done: the worst answer is given.
        status, _, text = max(answers, key=lambda answer: answer[0])
        return Response(text, status, media_type="application/json")

    async def _forward(self, scope: dict[str, Any], body: bytes, session: str | None) -> Response:
        """Ask one replica, and another one if that is lost before it has answered."""
        fields = _fields(body)
        for name in ("session_id", "user"):
            found = fields.get(name)
            session = session or (found if isinstance(found, str) else None)
        ask = self._stream if fields.get("stream") is True else self._ask
        for attempt in range(ATTEMPTS):
            try:
                return await ask(scope, body, session or "")
            except RayActorError as error:
                logger.warning("a replica was lost before it answered, attempt %d: %s", attempt + 1, error)
                await asyncio.sleep(0.1 * 2**attempt)
            except (BackPressureError, DeploymentUnavailableError):
                break
        return error_response(UnavailableError("no replica takes requests now"))

    async def _ask(self, scope: dict[str, Any], body: bytes, session: str) -> Response:
        """An answer in one piece: a replica that is lost half-way has said nothing yet."""
        asked = self.replicas.options(session_id=session).whole.remote(scope, body)
        try:
            status, headers, text = await asked
        except asyncio.CancelledError:  # the client has gone
            asked.cancel()
            raise
        return _with_headers(Response(text, status), headers)

    async def _stream(self, scope: dict[str, Any], body: bytes, session: str) -> Response:
        parts = self.replicas.options(stream=True, session_id=session).call.remote(scope, body)
        status, headers = await parts.__anext__()
        return _with_headers(StreamingResponse(_rest(parts), status), headers)

    async def _everywhere(self, scope: dict[str, Any], body: bytes) -> list[Answer]:
        """What every replica answers; nothing when not all that are known can.

        Switching and rolling back are not tried again: some replicas may have done it.
        """
        for attempt in range(ATTEMPTS if scope["path"] in REPEATABLE else 1):
            try:
                return await self.replicas.broadcast("whole", scope, body).results_async()
            except (RayActorError, DeploymentUnavailableError) as error:
                logger.warning("not every replica answers, attempt %d: %s", attempt + 1, error)
                await asyncio.sleep(0.1 * 2**attempt)
        return []

    async def _body(self, request: Request) -> bytes:
        """All of the body, or one piece too many: for the replica to refuse it, with the limit's name.

        Raises:
            TimeoutError: the next piece has not come in time.
        """
        pieces, stream = b"", request.stream()
        while len(pieces) <= self.max_body_bytes:
            piece = await asyncio.wait_for(anext(stream, None), self.body_timeout_s)
            if piece is None:
                break
            pieces += piece
        return pieces


async def _rest(parts: Any) -> AsyncIterator[bytes]:
    async for part in parts:
        yield part


def _with_headers(response: Response, headers: Any) -> Response:
    response.raw_headers = [(bytes(name), bytes(value)) for name, value in headers]
    return response


def _fields(body: bytes) -> dict[str, Any]:
    """The fields of a JSON body; none where it is no object. What is wrong with it, a replica says."""
    try:
        fields = pydantic_core.from_json(body) if body else None
    except ValueError:
        return {}
    return fields if isinstance(fields, dict) else {}


def _headers(request: Request) -> list[tuple[bytes, bytes]]:
    return [(name, value) for name, value in request.headers.raw if name.decode() not in NOT_FORWARDED]


def _scope(method: str, path: str, headers: list[tuple[bytes, bytes]]) -> dict[str, Any]:
    return {
        "type": "http",
        "asgi": {"version": "3.0"},
        "http_version": "1.1",
        "scheme": "http",
        "method": method,
        "path": path,
        "raw_path": path.encode(),
        "query_string": b"",
        "root_path": "",
        "headers": headers,
        "server": ("replica", 80),
        "client": ("gateway", 0),
    }


def build(args: ClusterSpec | dict[str, Any]) -> serve.Application:
    """The Ray Serve application; with a mapping, what `serve deploy` calls (`deploy/serve.yaml`).

    Raises:
        ConfigError: an option has an unusable value.
    """
    spec = args if isinstance(args, ClusterSpec) else ClusterSpec(**args)
    config = ServerConfig(**spec.server)
    scaling: dict[str, Any] = {"num_replicas": spec.replicas}
    if spec.max_replicas is not None and spec.max_replicas > spec.replicas:
        scaling = {
            "autoscaling_config": AutoscalingConfig(
                min_replicas=spec.replicas,
                initial_replicas=spec.replicas,
                max_replicas=spec.max_replicas,
                target_ongoing_requests=spec.target_requests,
                upscale_delay_s=spec.upscale_delay_s,
                downscale_delay_s=spec.downscale_delay_s,
                metrics_interval_s=min(10, spec.upscale_delay_s),
                look_back_period_s=min(30, spec.upscale_delay_s),
            )
        }
    # A replica has a queue of its own, which refuses with numbers; Ray's shall not come before it.
    max_ongoing = 2 * EngineConfig(**spec.engine).max_waiting
    replica = serve.deployment(Replica, name="Replica").options(
        max_ongoing_requests=max_ongoing,
        ray_actor_options={"num_cpus": spec.num_cpus, "num_gpus": spec.num_gpus},
        graceful_shutdown_timeout_s=config.drain_s,
        health_check_period_s=5,
        request_router_config=RequestRouterConfig(request_router_class=ROUTER),
        **scaling,
    )
    front = serve.deployment(Gateway, name="Gateway").options(
        max_ongoing_requests=max_ongoing * (spec.max_replicas or spec.replicas),
        ray_actor_options={"num_cpus": 0},
        graceful_shutdown_timeout_s=config.drain_s,
    )
    return front.bind(replica.bind(asdict(spec)), config.max_body_bytes, config.body_timeout_s)


def run(spec: ClusterSpec, *, blocking: bool = True) -> None:
    """Serve on this machine, or on the Ray cluster that it belongs to.

    Args:
        spec: what to serve. blocking: return only when interrupted; False: return when all replicas are ready.
    """
    config = ServerConfig(**spec.server)
    if not ray.is_initialized():
        ray.init(ignore_reinit_error=True, include_dashboard=False)
    serve.start(http_options={"host": config.host, "port": config.port})
    serve.run(build(spec), name="onela", route_prefix="/", blocking=blocking)
