"""Bodies as JSON, read and written by pydantic's own parser: prompts of thousands of tokens come with every request."""

from __future__ import annotations

import json
from collections.abc import Callable
from typing import Any

import pydantic_core
from fastapi import Request, Response
from fastapi.responses import JSONResponse
from fastapi.routing import APIRoute
from starlette.exceptions import HTTPException


class Json(JSONResponse):
    """A JSON answer."""

    def render(self, content: Any) -> bytes:
        return pydantic_core.to_json(content)


class JsonRequest(Request):
    """A request whose body is read as JSON. What is wrong with a body is said by the standard library."""

    async def json(self) -> Any:
        if not hasattr(self, "_json"):
            body = await self.body()
            try:
                self._json = pydantic_core.from_json(body)
            except ValueError:
                try:
                    self._json = json.loads(body)
                except json.JSONDecodeError:
                    raise
                except (ValueError, RecursionError) as error:  # no UTF-8, too many digits, too many levels
                    raise HTTPException(400, f"the body cannot be read as JSON: {error}") from None
        return self._json


class JsonRoute(APIRoute):
    """A route that reads bodies as `JsonRequest` does."""

    def get_route_handler(self) -> Callable[[Request], Any]:
        handle = super().get_route_handler()

        async def read(request: Request) -> Response:
            return await handle(JsonRequest(request.scope, request.receive))

        return read
