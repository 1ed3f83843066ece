"""Errors in the form of OpenAI's interface."""

from __future__ import annotations

import re
from collections.abc import Mapping
from typing import Any

from pydantic import ValidationError
from starlette.responses import JSONResponse, Response

from hybridspec.errors import CapacityError, CheckpointError, UnsupportedError

__all__ = [
    "WRONG_CALL",
    "ApiError",
    "error_body",
    "error_response",
    "from_validation",
    "going_down",
    "loading",
    "wrong_call",
]

# What the engine raises for a request that does not fit; its messages begin with the field's name.
WRONG_CALL = (ValueError, TypeError, UnsupportedError, CapacityError, CheckpointError)
_KINDS = {
    401: "authentication_error",
    404: "not_found_error",
    429: "rate_limit_error",
    500: "internal_server_error",
    503: "service_unavailable_error",
}


class ApiError(Exception):
    """An answer other than the one that was asked for.

    Args:
        status: HTTP status.
        message: what is wrong, and what was expected.
        param: the field that it is about.
        code: short name of the kind of mistake.
        headers: to send with it.
    """

    def __init__(
        self,
        status: int,
        message: str,
        *,
        param: str | None = None,
        code: str | None = None,
        headers: Mapping[str, str] | None = None,
    ) -> None:
        super().__init__(message)
        self.status = status
        self.message = message
        self.param = param
        self.code = code
        self.headers = dict(headers or {})


def error_body(error: ApiError) -> dict[str, Any]:
    """Return what a body or an event of a stream says about an error."""
    kind = _KINDS.get(error.status, "invalid_request_error")
    return {
        "error": {
            "message": error.message,
            "type": kind,
            "param": error.param,
            "code": error.code,
        }
    }


def error_response(error: ApiError) -> Response:
    return JSONResponse(error_body(error), error.status, headers=error.headers)


def wrong_call(error: Exception) -> ApiError:
    """Return what the client is told where the engine refuses a request."""
    message = str(error) or type(error).__name__
    name = re.match(r"([a-z_]+): ", message)
    return ApiError(400, message, param=name[1] if name else None)


def from_validation(error: ValidationError) -> ApiError:
    """Return what the client is told where a field has a wrong type or value."""
    first = error.errors(include_url=False, include_input=False, include_context=False)[0]
    path = [str(part) for part in first["loc"]]
    name = path[0] if path else None
    where = ".".join(path) or "body"
    return ApiError(400, f"{where}: {first['msg']}", param=name)


def going_down() -> ApiError:
    """Return what clients are told once the server ends."""
    return ApiError(
        503, "the server is going down", code="shutting_down", headers={"Retry-After": "5"}
    )


def loading() -> ApiError:
    """Return what clients are told until there is a model."""
    return ApiError(503, "the model is being loaded", code="loading", headers={"Retry-After": "5"})
