"""The protocol's types under one name, and how a map becomes a request or one clear error.

Requests are pydantic models (`requests.py`), events plain dataclasses (`events.py`); bytes on the
wire are the codec's (`codec.py`).
"""

from __future__ import annotations

from typing import Any

from pydantic import ValidationError
from pydantic_core import ErrorDetails

from mstar.daemon.events import (
    EVENTS,
    Done,
    ErrorClass,
    ErrorEvent,
    Event,
    FinishReason,
    GenStart,
    KvReport,
    Loaded,
    LoadedSpec,
    LoadProgress,
    Pong,
    Pool,
    RankStatus,
    Reasoning,
    ResetDone,
    ShuttingDown,
    SpecReport,
    SpecStats,
    State,
    StatsEvent,
    StatusEvent,
    Timings,
    Token,
    TokenLogprob,
    Unloaded,
    Usage,
)
from mstar.daemon.requests import (
    INT64_MAX,
    REQUESTS,
    Abort,
    Generate,
    Load,
    LoadSpecFields,
    Message,
    Ping,
    Request,
    Reset,
    Shutdown,
    SpecRequest,
    Stats,
    Status,
    TextPart,
    Unload,
    is_request_id,
)

__all__ = [
    "EVENTS", "REQUESTS",
    "Abort", "Done", "ErrorClass", "ErrorEvent", "Event", "FinishReason", "GenStart", "Generate", "KvReport",
    "Load", "LoadProgress", "LoadSpecFields", "Loaded", "LoadedSpec", "Message", "Ping", "Pong", "Pool",
    "ProtocolError", "RankStatus", "Reasoning", "Request", "Reset", "ResetDone", "Shutdown", "ShuttingDown",
    "SpecReport", "SpecRequest", "SpecStats", "State", "Stats", "StatsEvent", "Status", "StatusEvent",
    "TextPart", "Timings", "Token", "TokenLogprob", "Unload", "Unloaded", "Usage", "is_request_id",
    "parse_request",
]  # fmt: skip


class ProtocolError(Exception):
    """What becomes an `error` event.

    error_class: one of the protocol's classes. message: what is wrong and what to do.
    retryable: None takes the class's own (`overloaded` alone is).
    id, attempt_id: the request at fault, as far as it could be read.
    """

    def __init__(
        self,
        error_class: ErrorClass,
        message: str,
        field: str | None = None,
        retryable: bool | None = None,
        id: str | int | None = None,
        attempt_id: int | None = None,
    ) -> None:
        super().__init__(message)
        self.error_class: ErrorClass = error_class
        self.message = message
        self.field = field
        self.retryable = error_class == "overloaded" if retryable is None else retryable
        self.id = id
        self.attempt_id = attempt_id

    def event(self) -> ErrorEvent:
        """The event that tells it."""
        return ErrorEvent(
            error_class=self.error_class,
            message=self.message,
            retryable=self.retryable,
            field=self.field,
            id=self.id,
            attempt_id=self.attempt_id,
        )


def parse_request(data: object) -> Request:
    """The typed request in a decoded map.

    Raises ProtocolError: `malformed` for what is no map, `unsupported` for what is not built yet,
    `validation` for the rest, with the field's path, and with the request's keys where they can be read.
    """
    if not isinstance(data, dict):
        raise ProtocolError("malformed", f"a message is a map with `type`, not {_kind(data)}")
    id, attempt_id = _keys(data)
    try:
        return _validated(data)
    except ProtocolError as error:
        error.id, error.attempt_id = id, attempt_id
        raise


def _validated(data: dict[str, Any]) -> Request:
    kind = data.get("type")
    known = ", ".join(REQUESTS)
    if not isinstance(kind, str):
        what = "type is missing" if kind is None else f"type should be text, not {_kind(kind)}"
        raise ProtocolError("validation", f"{what}; known types: {known}", field="type")
    model = REQUESTS.get(kind)
    if model is None:
        raise ProtocolError("validation", f"unknown type {_short(kind)}; known types: {known}", field="type")
    try:
        return model.model_validate(data)  # type: ignore[return-value]
    except ValidationError as error:
        raise _protocol_error(error.errors(include_url=False), model.__name__.lower()) from None
    except (RecursionError, UnicodeError, OverflowError) as error:
        raise ProtocolError("malformed", f"the message cannot be read: {error}") from None


def _keys(data: dict[str, Any]) -> tuple[str | int | None, int | None]:
    id, attempt_id = data.get("id"), data.get("attempt_id")
    attempt_ok = type(attempt_id) is int and 0 <= attempt_id <= INT64_MAX
    return (id if is_request_id(id) else None), (attempt_id if attempt_ok else None)


def _protocol_error(errors: list[ErrorDetails], kind: str) -> ProtocolError:
    """One error for the first fault; a wrong field goes before one that is right but not built."""
    errors.sort(key=lambda e: e["type"] == "unsupported")
    first = errors[0]
    kind_of_fault, msg = first["type"], first["msg"]
    field = str(first["ctx"]["field"]) if kind_of_fault == "inconsistent" else _path(first["loc"]) or None
    if kind_of_fault == "extra_forbidden":
        message = f"unknown field {field} in {kind}: leave it out"
    elif kind_of_fault == "missing":
        message = f"{field} is missing in {kind}"
    elif kind_of_fault == "inconsistent":
        message = msg
    elif field is None:
        message = f"{kind} {msg}"
    elif msg.startswith("Input should"):
        message = f"{field} {msg.removeprefix('Input ')}, not {_short(first['input'])}"
    else:
        message = f"{field}: {msg}"
    if len(errors) > 1:
        message += f" (and {len(errors) - 1} more)"
    error_class: ErrorClass = "unsupported" if kind_of_fault == "unsupported" else "validation"
    return ProtocolError(error_class, message, field=field)


def _path(loc: tuple[int | str, ...]) -> str:
    """`messages[0].content[1].text`; union tags (`<parts>`) are ours alone and left out."""
    path = ""
    for step in loc:
        if isinstance(step, int):
            path += f"[{step}]"
        elif step not in ("<text>", "<parts>"):
            path += f".{step}" if path else step
    return path if len(path) <= 200 else path[:200] + "…"


def _short(value: object) -> str:
    """The value for a message, or its kind when it is long."""
    if isinstance(value, str):
        return repr(value) if len(value) <= 60 else f"text of {len(value)} characters"
    if value is None or isinstance(value, bool):
        return {None: "null", True: "true", False: "false"}[value]
    if isinstance(value, float) or (isinstance(value, int) and abs(value) < 2**70):
        return repr(value)
    return _kind(value)


def _kind(value: object) -> str:
    if value is None:
        return "null"
    for kinds, name in ((bool, "a boolean"), (int, "an integer"), (float, "a number"), (str, "text"),
                        (list | tuple, "a list"), (dict, "a map"), (bytes, "bytes")):  # fmt: skip
        if isinstance(value, kinds):
            return name
    return type(value).__name__
