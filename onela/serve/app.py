"""The HTTP application: routes over an `AsyncEngine`."""

from __future__ import annotations

import asyncio
import logging
from collections.abc import AsyncIterator, Awaitable, Iterable, Iterator
from contextlib import asynccontextmanager, contextmanager
from pathlib import Path
from typing import Any, TypeVar

from fastapi import FastAPI, Request
from fastapi.exceptions import RequestValidationError
from fastapi.responses import HTMLResponse, PlainTextResponse, Response, StreamingResponse
from starlette.exceptions import HTTPException

from onela._version import __version__
from onela.config import ServerConfig
from onela.engine import AsyncEngine, Engine, Result
from onela.engine.request import prompt_field
from onela.errors import CancelledError, CatalogError, EngineError, OneLAError, RequestError, UnavailableError
from onela.serve import openai, protocol
from onela.serve.failures import classify, error_response, http_response, validation_response
from onela.serve.metrics import CONTENT_TYPE, Metrics
from onela.serve.middleware import Bodies, Door
from onela.serve.stream import Watch
from onela.serve.wire import Json, JsonRoute

logger = logging.getLogger(__name__)
PAGE = Path(__file__).with_name("page.html")
T = TypeVar("T")
STATUSES = (400, 401, 408, 413, 422, 429, 499, 500, 503, 504)
RESPONSES: dict[int | str, dict[str, Any]] = {code: {"model": protocol.ErrorResponse} for code in STATUSES}
ADMIN_RESPONSES: dict[int | str, dict[str, Any]] = {
    code: {"model": protocol.ErrorResponse} for code in (400, 401, 403, 408, 409, 413, 422)
}
STREAM: dict[int | str, dict[str, Any]] = {200: {"content": {"text/event-stream": {}}}}
NOT_READY: dict[int | str, dict[str, Any]] = {503: {"description": "Not now."}}


class Server:
    """What the routes work on.

    Args:
        engine: not started yet. config: limits and keys.
    """

    def __init__(self, engine: Engine, config: ServerConfig) -> None:
        self.config = config
        self.metrics = Metrics()
        self.bodies = Bodies(config.body_timeout_s)
        self.engine = AsyncEngine(
            engine, on_step=self.metrics.step, max_prompt_tokens=config.max_prompt_tokens
        )
        self.metrics.watch(self.engine)

    @property
    def vocabulary(self) -> Any:
        return self.engine.engine.vocabulary

    async def stop(self) -> None:
        """Take nothing more, let what runs end for at most `drain_s` seconds, then stop the engine."""
        self.bodies.end()
        await self.engine.stop(drain_s=self.config.drain_s)

    async def run(self, http: Request, *requests: Any, prompts: Iterable[str] = ()) -> list[Result]:
        """Answer requests, unless the client hangs up: then they are cancelled.

        Args:
            prompts: where the client has written each one's prompt, if not in the field of that name.
        """
        written = list(prompts) or map(prompt_field, requests)
        tasks = [asyncio.ensure_future(self._answer(*asked)) for asked in zip(requests, written)]
        try:
            return await unless_disconnected(http, asyncio.gather(*tasks))
        finally:
            for task in tasks:
                task.cancel()
            outcomes = await asyncio.gather(*tasks, return_exceptions=True)
            for outcome in outcomes:
                self.count(outcome)

    async def _answer(self, request: Any, written: str) -> Result:
        with protocol.field_called(prompt_field(request), written):
            return await self.engine.generate(request)

    def count(self, outcome: Result | BaseException) -> None:
        """Count how a request ended."""
        if isinstance(outcome, Result):
            self.metrics.ended(outcome)
        elif isinstance(outcome, asyncio.CancelledError):
            self.metrics.ended("cancelled")
        else:
            self.metrics.ended(classify(outcome if isinstance(outcome, OneLAError) else EngineError())[2])


async def unless_disconnected(http: Request, work: Awaitable[T]) -> T:
    """Await the work; when the client hangs up first, cancel it and raise `CancelledError`."""

    async def hang_up() -> None:
        while (await http.receive())["type"] != "http.disconnect":
            pass

    task = asyncio.ensure_future(work)
    gone = asyncio.ensure_future(hang_up())
    try:
        await asyncio.wait({task, gone}, return_when=asyncio.FIRST_COMPLETED)
        if not task.done():
            raise CancelledError("the client has closed the connection")
        return task.result()
    finally:
        gone.cancel()
        task.cancel()
        await asyncio.gather(task, gone, return_exceptions=True)


def create_app(engine: Engine, config: ServerConfig | None = None) -> FastAPI:
    """The application over an engine, which is started and stopped with it.

    Args:
        engine: nobody else may use it meanwhile.
        config: None: the defaults.
    """
    config = config or ServerConfig()
    server = Server(engine, config)

    @asynccontextmanager
    async def lifespan(_: FastAPI) -> AsyncIterator[None]:
        server.engine.start()
        yield
        await server.stop()

    app = FastAPI(
        title="OneLA",
        version=__version__,
        description="Exact wide-beam decoding for generative recommenders.",
        lifespan=lifespan,
        docs_url=None,
        redoc_url=None,
    )
    app.router.route_class = JsonRoute
    app.state.server = server
    app.add_middleware(Door, config=config, bodies=server.bodies)
    _handle_errors(app)
    _add_recommend(app, server)
    _add_openai(app, server)
    _add_catalog(app, server)
    _add_status(app, server)
    return app


def _handle_errors(app: FastAPI) -> None:
    @app.exception_handler(OneLAError)
    async def onela_error(_: Request, error: OneLAError) -> Json:
        if classify(error)[0] == 500:
            logger.error("a request failed: %s", error, exc_info=error)
        return error_response(error)

    @app.exception_handler(Exception)
    async def unforeseen(_: Request, error: Exception) -> Json:
        return error_response(EngineError(f"the server failed unexpectedly: {type(error).__name__}"))

    @app.exception_handler(RequestValidationError)
    async def invalid(request: Request, error: RequestValidationError) -> Json:
        if isinstance(error.body, bytes):  # nobody has tried to read it
            given = request.headers.get("content-type")
            return error_response(RequestError("content-type", "application/json is expected", value=given))
        return validation_response(error.errors(), error.body)

    @app.exception_handler(HTTPException)
    async def refused(_: Request, error: HTTPException) -> Json:
        if error.status_code == 503:
            return error_response(UnavailableError(error.detail))
        return http_response(error.status_code, str(error.detail), error.headers)


def _add_recommend(app: FastAPI, server: Server) -> None:
    config = server.config

    @app.post("/v1/recommend", response_model=protocol.RecommendResponse, responses={**RESPONSES, **STREAM})
    async def recommend(body: protocol.RecommendRequest, http: Request) -> Any:
        """Recommend items for one prompt."""
        request = body.to_request(config)
        if not body.stream:
            [result] = await server.run(http, request)
            return Json(protocol.recommend_body(result, config.model_name))

        def finish(result: Result) -> dict[str, Any]:
            return protocol.recommend_body(result, config.model_name)

        watch = Watch(server.engine, request, server.vocabulary)
        watch.task.add_done_callback(
            lambda task: server.count(
                asyncio.CancelledError() if task.cancelled() else task.exception() or task.result()
            )
        )
        try:
            first = await unless_disconnected(http, watch.first())
        except BaseException:
            await watch.cancel()
            raise
        return StreamingResponse(watch.events(first, finish), media_type="text/event-stream")


def _add_openai(app: FastAPI, server: Server) -> None:
    config = server.config

    @app.post("/v1/completions", responses=RESPONSES)
    async def completions(body: protocol.CompletionRequest, http: Request) -> Json:
        """OpenAI's completions: one choice per beam, best first."""
        requests = body.to_requests(config, server.vocabulary.num_levels)
        results = await server.run(http, *requests, prompts=body.prompts)
        logprobs = body.logprobs is not None
        return Json(openai.completion_body(results, server.vocabulary, config.model_name, logprobs=logprobs))

    @app.post("/v1/chat/completions", responses=RESPONSES)
    async def chat(body: protocol.ChatRequest, http: Request) -> Json:
        """OpenAI's chat completions: one choice per beam, best first."""
        [result] = await server.run(http, body.to_request(config, server.vocabulary.num_levels))
        logprobs = bool(body.logprobs)
        return Json(openai.chat_body(result, server.vocabulary, config.model_name, logprobs=logprobs))

    @app.get("/v1/models", responses={401: {"model": protocol.ErrorResponse}})
    async def models() -> dict[str, Any]:
        """The one model that is served."""
        card = {"id": config.model_name, "object": "model", "created": 0, "owned_by": "onela"}
        card["catalog_version"] = server.engine.engine.served.version
        return {"object": "list", "data": [card]}


def _add_catalog(app: FastAPI, server: Server) -> None:
    catalogs = server.engine.engine.catalogs

    def state() -> dict[str, Any]:
        active = catalogs.active
        return {
            "active": active.version,
            "previous": None if catalogs.previous is None else catalogs.previous.version,
            "staged": None if catalogs.staged is None else catalogs.staged.version,
            "num_items": 0 if active.catalog is None else active.catalog.num_items,
            "num_sids": 0 if active.catalog is None else active.catalog.num_sids,
        }

    @app.post("/v1/catalog/load", response_model=protocol.CatalogResponse, responses=ADMIN_RESPONSES)
    async def load(body: protocol.LoadRequest) -> dict[str, Any]:
        """Read and check a catalogue file on the server; what is being served does not change."""
        path = _allowed_path(body.path, server.config.catalog_dir)
        await asyncio.to_thread(catalogs.load, path, format=body.format)
        return state()

    @app.post("/v1/catalog/switch", response_model=protocol.CatalogResponse, responses=ADMIN_RESPONSES)
    async def switch(body: protocol.SwitchRequest) -> dict[str, Any]:
        """Serve the catalogue that was loaded; running requests end on the one that they began with."""
        with _conflicts():
            catalogs.switch(body.version)
        return state()

    @app.post("/v1/catalog/rollback", response_model=protocol.CatalogResponse, responses=ADMIN_RESPONSES)
    async def rollback() -> dict[str, Any]:
        """Serve the catalogue before this one."""
        with _conflicts():
            catalogs.rollback()
        return state()


@contextmanager
def _conflicts() -> Iterator[None]:
    """What cannot be switched to is no fault of the request's form."""
    try:
        yield
    except CatalogError as error:
        raise HTTPException(409, str(error)) from None


def _allowed_path(path: str, root: str | None) -> Path:
    """Where the file is, links followed. Raises `CatalogError` for one that may not be read."""
    try:
        resolved = Path(path).resolve()
    except (OSError, ValueError, RuntimeError) as error:
        raise CatalogError(f"path: {path!r} is no path ({error})") from None
    if root is not None and not resolved.is_relative_to(Path(root).resolve()):
        raise CatalogError(f"path: {path!r} lies outside catalog_dir")
    return resolved


def _add_status(app: FastAPI, server: Server) -> None:
    @app.head("/health", include_in_schema=False)
    @app.get("/health", responses=NOT_READY)
    async def health(response: Response) -> dict[str, str]:
        """200 while the process can serve at all; else it had better be restarted."""
        response.status_code = 200 if server.engine.healthy else 503
        return {"status": "ok" if server.engine.healthy else "failing"}

    @app.head("/ready", include_in_schema=False)
    @app.get("/ready", responses=NOT_READY)
    async def ready(response: Response) -> dict[str, str]:
        """200 while new requests are taken; 503 while draining, or with the queue full."""
        full = server.engine.num_waiting >= server.engine.engine.config.max_waiting
        ready = server.engine.accepting and not full
        response.status_code = 200 if ready else 503
        return {"status": "ready" if ready else "full" if full else "stopped"}

    @app.get("/metrics", response_class=PlainTextResponse)
    async def metrics() -> PlainTextResponse:
        """Everything that is measured, for Prometheus."""
        return PlainTextResponse(server.metrics.render(), media_type=CONTENT_TYPE)

    @app.get("/", response_class=HTMLResponse, include_in_schema=False)
    async def page() -> HTMLResponse:
        return HTMLResponse(PAGE.read_text(encoding="utf-8"))
