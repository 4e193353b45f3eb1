"""What can be wrong with a request, as one value: the status, the one error shape, and the headers that say how to come back.

Nothing here is ever made of a user's text: a message names fields, limits and ids of ours.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Final

INVALID: Final = "invalid_request_error"
UNAUTHENTICATED: Final = "authentication_error"
NOT_FOUND: Final = "not_found_error"
LIMITED: Final = "rate_limit_error"
SERVER: Final = "server_error"

NEVER_RETRY: Final[Mapping[str, str]] = {"x-should-retry": "false"}


@dataclass(frozen=True, slots=True, kw_only=True)
class Problem:
    """One refusal. `extra` are further members of the error object, such as `wait_ms`."""

    status: int
    type: str
    code: str
    message: str
    param: str | None = None
    headers: Mapping[str, str] = field(default_factory=dict)
    extra: Mapping[str, object] = field(default_factory=dict)

    def body(self) -> dict[str, object]:
        """The JSON that every error answer has."""
        error: dict[str, object] = {
            "message": self.message,
            "type": self.type,
            "param": self.param,
            "code": self.code,
        }
        return {"error": {**error, **self.extra}}


class Refused(Exception):
    """Carries a problem to the rim, where it becomes the answer."""

    def __init__(self, problem: Problem) -> None:
        super().__init__(problem.code)
        self.problem = problem


def invalid(message: str, *, param: str | None = None, code: str = "invalid_request") -> Refused:
    """400: the request itself is wrong."""
    return Refused(Problem(status=400, type=INVALID, code=code, message=message, param=param))


def unprocessable(message: str, *, param: str | None, code: str) -> Refused:
    """422: well formed, and yet it cannot be done."""
    return Refused(
        Problem(
            status=422, type=INVALID, code=code, message=message, param=param, headers=NEVER_RETRY
        )
    )


def not_found(what: str) -> Refused:
    """404: there is no such thing, or it is somebody else's; nobody can tell which."""
    return Refused(
        Problem(status=404, type=NOT_FOUND, code="not_found", message=f"There is no such {what}.")
    )


def unauthenticated(message: str, *, code: str) -> Refused:
    """401."""
    return Refused(
        Problem(
            status=401,
            type=UNAUTHENTICATED,
            code=code,
            message=message,
            headers={"www-authenticate": 'Bearer realm="turnlog", error="invalid_token"'},
        )
    )


def too_large(bytes_max: int) -> Refused:
    """413."""
    return Refused(
        Problem(
            status=413,
            type=INVALID,
            code="body_too_large",
            message=f"The body is larger than {bytes_max} bytes.",
            headers=NEVER_RETRY,
        )
    )


def unavailable(
    message: str, *, code: str, retry_after_s: int = 1, extra: Mapping[str, object] | None = None
) -> Refused:
    """503: nothing is wrong with the request; come back."""
    return Refused(
        Problem(
            status=503,
            type=SERVER,
            code=code,
            message=message,
            headers={"retry-after": str(retry_after_s)},
            extra=extra or {},
        )
    )


def log_behind() -> Refused:
    """503: the log may have more for this client than this edge has read so far."""
    return unavailable("This server has not read so far yet; come back.", code="log_behind")


DRAINING: Final = Problem(
    status=503,
    type=SERVER,
    code="draining",
    message="This server is going away; ask again, and another one answers.",
    headers={"retry-after": "1"},
)
