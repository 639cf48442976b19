"""Which status and which body an error is answered with. `docs/errors.md` explains every one."""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import Any

from onela.errors import (
    CancelledError,
    CapacityError,
    CatalogError,
    ConfigError,
    DeadlineError,
    OneLAError,
    QueueFullError,
    RequestError,
    UnavailableError,
    shorten,
)
from onela.serve.validation import faults_of
from onela.serve.wire import Json

# Error -> (status, type, code); the first that fits. Whatever is not here is the server's own fault.
STATUS: tuple[tuple[type[OneLAError], int, str, str], ...] = (
    (RequestError, 422, "invalid_request_error", "invalid_request"),
    (CapacityError, 422, "invalid_request_error", "never_fits"),
    (CatalogError, 422, "invalid_request_error", "invalid_catalog"),
    (ConfigError, 422, "invalid_request_error", "invalid_option"),
    (QueueFullError, 429, "rate_limit_error", "queue_full"),
    (DeadlineError, 504, "timeout_error", "deadline_exceeded"),
    (CancelledError, 499, "cancelled", "cancelled"),
    (UnavailableError, 503, "unavailable_error", "unavailable"),
    (OneLAError, 500, "server_error", "engine_error"),
)


def classify(error: OneLAError) -> tuple[int, str, str]:
    """Status, type and code of an error."""
    return next((status, kind, code) for cls, status, kind, code in STATUS if isinstance(error, cls))


def error_body(message: str, kind: str, code: str, param: str | None = None) -> dict[str, Any]:
    """The body of an error, in OpenAI's form."""
    param = None if param is None else _printable(shorten(param))
    return {"error": {"message": _printable(message), "type": kind, "param": param, "code": code}}


def _printable(text: str) -> str:
    """The text with what UTF-8 has no bytes for written out: it may quote anything that a client sent."""
    return text.encode(errors="backslashreplace").decode()


def error_response(error: OneLAError) -> Json:
    """The answer to a request that ended with an error of OneLA's."""
    status, kind, code = classify(error)
    headers = {}
    if isinstance(error, QueueFullError):
        headers["Retry-After"] = str(math.ceil(error.retry_after_s))
    elif status == 503:
        headers["Retry-After"] = "1"
    param = error.field if isinstance(error, RequestError) else None
    return Json(error_body(str(error), kind, code, param), status, headers)


def validation_response(errors: Sequence[Any], body: Any) -> Json:
    """The answer to a body that has the wrong shape: what is wrong, field by field, the first one as `param`."""
    wrong = dict.fromkeys((fault.field, fault.text + fault.given) for fault in faults_of(errors, body))
    first = next(iter(wrong))[0]
    message = "; ".join(f"{shorten(field)}: {text}" for field, text in wrong)
    return Json(error_body(message, "invalid_request_error", "invalid_request", first), 422)


def http_response(status: int, detail: str, headers: Any = None) -> Json:
    """The answer to what never reached a route: no such path or method, no key, too long a body or half of one."""
    codes = {
        400: "bad_request",
        401: "unauthorized",
        403: "forbidden",
        404: "not_found",
        405: "method_not_allowed",
        408: "body_timeout",
        409: "conflict",
        413: "body_too_large",
    }
    body = error_body(detail, "invalid_request_error", codes.get(status, "http_error"))
    return Json(body, status, headers)
