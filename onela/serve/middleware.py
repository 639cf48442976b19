"""What every request passes before it reaches a route: the length of its body and its key."""

from __future__ import annotations

import asyncio
import hmac

from starlette.datastructures import Headers
from starlette.exceptions import HTTPException
from starlette.types import ASGIApp, Message, Receive, Scope, Send

from onela.config import ServerConfig
from onela.serve.failures import http_response

OPEN_PATHS = frozenset({"/", "/health", "/ready", "/metrics"})
ADMIN_PREFIX = "/v1/catalog/"


class Bodies:
    """The bodies that are being read: nobody waits for a part that does not come, nor once the server shuts down.

    Args:
        timeout_s: seconds that each part of a body may take.
    """

    def __init__(self, timeout_s: float) -> None:
        self.timeout_s = timeout_s
        self._ended = False
        self.parts: set[asyncio.Future[Message]] = set()

    def end(self) -> None:
        """Wait for no part any more: who has not sent all of a request is answered 503."""
        self._ended = True
        for part in self.parts:
            part.cancel()

    async def read(self, receive: Receive) -> Message:
        """The next part of a body.

        Raises:
            HTTPException: 408 if it does not come in time, 503 if it has not come when the bodies are ended.
        """
        if not self._ended:
            part = asyncio.ensure_future(receive())
            self.parts.add(part)
            try:
                await asyncio.wait({part}, timeout=self.timeout_s)
                if part.done() and not part.cancelled():
                    return part.result()
            finally:
                self.parts.discard(part)
                part.cancel()
        if self._ended:
            raise HTTPException(503, "the server is shutting down")
        # What is still to come would be taken for the next request.
        raise HTTPException(408, stalled(self.timeout_s), {"connection": "close"})


def stalled(timeout_s: float) -> str:
    """What is said of a body of which no part has come for so long."""
    return f"no more of the body has come for body_timeout_s = {timeout_s:g} s"


class Door:
    """Refuses bodies that are too long and callers without the right key.

    Args:
        app: what lies behind. config: keys and limits. bodies: ends those that stand still, on shutdown all.
    """

    def __init__(self, app: ASGIApp, config: ServerConfig, bodies: Bodies) -> None:
        self.app = app
        self.config = config
        self.bodies = bodies

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        if scope["type"] != "http":
            await self.app(scope, receive, send)
            return
        headers = Headers(scope=scope)
        refusal = self._refuse(scope["path"], headers)
        if refusal is not None:
            await refusal(scope, receive, send)
            return
        limit, seen, whole = self.config.max_body_bytes, 0, False

        async def counted() -> Message:
            nonlocal seen, whole
            message = await (receive() if whole else self.bodies.read(receive))
            whole = not message.get("more_body", False)
            seen += len(message.get("body", b""))
            if seen > limit:
                raise HTTPException(413, f"the body is longer than max_body_bytes = {limit}")
            return message

        await self.app(scope, counted, send)

    def _refuse(self, path: str, headers: Headers) -> ASGIApp | None:
        key = self.config.api_key
        if path.startswith(ADMIN_PREFIX):
            key = self.config.admin_token
            if key is None:
                return http_response(403, "catalogues cannot be changed here: no admin_token is set")
        if key is not None and path not in OPEN_PATHS:
            given = headers.get("authorization", "").removeprefix("Bearer ")
            if not hmac.compare_digest(given.encode(), key.encode()):
                return http_response(401, "a valid key is needed", {"WWW-Authenticate": "Bearer"})
        length = headers.get("content-length", "")
        limit = self.config.max_body_bytes
        if length.isdigit() and int(length) > limit:
            return http_response(413, f"the body has {length} bytes, max_body_bytes allows {limit}")
        return None
