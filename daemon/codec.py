"""Bytes to requests and events to bytes, for both faces: msgpack maps and JSON lines.

Whatever arrives, decoding a request gives a typed request or raises ProtocolError, nothing else.
Encoding an event validates nothing: a token's way out is one dict and one C encoder.
"""

from __future__ import annotations

import dataclasses
import json
import math
import threading
from typing import Any, NoReturn

import msgpack
from pydantic import TypeAdapter, ValidationError
from pydantic_core import from_json

from mstar.daemon.protocol import EVENTS, Event, ProtocolError, Request, parse_request

MAX_MESSAGE_BYTES = 8 * 2**20  # a longer message is refused, the connection stays
HARD_LIMIT_BYTES = 64 * 2**20  # past this the connection is closed
# a prompt of a million ids fits 8 MiB; a longer array or map is no message of ours, and its header
# alone would make the decoder reserve memory for it
MAX_ITEMS = 2**20


def decode_msgpack(data: bytes | memoryview) -> Request:
    """The request in one msgpack map. Raises ProtocolError."""
    return parse_request(_unpack_msgpack(data))


def decode_json(data: bytes | memoryview) -> Request:
    """The request in one JSON object (UTF-8, the newline may be there or not). Raises ProtocolError."""
    return parse_request(_unpack_json(data))


def encode_msgpack(event: Event) -> bytes:
    """The event as one msgpack map."""
    return bytes(_PACKER.of_thread.pack(to_map(event)))


def encode_json(event: Event) -> bytes:
    """The event as one JSON object and a newline; infinities and NaN become null."""
    data = to_map(event)
    try:
        text = _JSON.encode(data)
    except ValueError:  # JSON has no -inf, which is the honest log-probability of a masked token
        text = _JSON.encode(_finite(data))
    return text.encode("utf-8", "replace") + b"\n"


def to_map(event: Event) -> dict[str, Any]:
    """The event's wire map; sub-models are left as they are."""
    kind, required, optional = _PLANS[type(event)]
    data: dict[str, Any] = {"type": kind}
    for wire, name in required:
        data[wire] = getattr(event, name)
    for wire, name in optional:
        value = getattr(event, name)
        if value is not None:
            data[wire] = value
    return data


def encode_request_msgpack(request: Request) -> bytes:
    """A client's request as one msgpack map, fields at their defaults left out."""
    return bytes(msgpack.packb({"type": request.type, **request.model_dump(exclude_unset=True)}))


def encode_request_json(request: Request) -> bytes:
    """A client's request as one JSON object and a newline, fields at their defaults left out."""
    return _JSON.encode({"type": request.type, **request.model_dump(exclude_unset=True)}).encode() + b"\n"


def decode_event_msgpack(data: bytes | memoryview) -> Event:
    """The event in one msgpack map. Raises ProtocolError (`malformed`) when it is none."""
    return parse_event(_unpack_msgpack(data, HARD_LIMIT_BYTES))


def decode_event_json(data: bytes | memoryview) -> Event:
    """The event in one JSON object. Raises ProtocolError (`malformed`) when it is none."""
    return parse_event(_unpack_json(data, HARD_LIMIT_BYTES))


def parse_event(data: object) -> Event:
    """The typed event in a decoded map; fields that a newer daemon added are dropped."""
    kind = data.get("type") if isinstance(data, dict) else None
    adapter = _ADAPTERS.get(kind) if isinstance(kind, str) else None
    if adapter is None or not isinstance(data, dict):
        raise ProtocolError("malformed", f"no event of this protocol: type {kind!r:.60}")
    del data["type"]
    try:
        event: Event = adapter.validate_python(data)
    except ValidationError as error:
        first = error.errors(include_url=False)[0]
        raise ProtocolError("malformed", f"unreadable {kind} event: {first['loc']}: {first['msg']}") from None
    return event


def too_large(size_bytes: int) -> ProtocolError:
    """The refusal of a message over the size limit; size_bytes may count only what was read of it."""
    return ProtocolError(
        "malformed",
        f"message of {size_bytes} bytes or more is over the limit of {MAX_MESSAGE_BYTES}: send less at once",
    )


def _unpack_msgpack(data: bytes | memoryview, limit: int = MAX_MESSAGE_BYTES) -> object:
    if len(data) > limit:
        raise too_large(len(data))
    try:
        return msgpack.unpackb(
            data,
            raw=False,
            ext_hook=_no_ext,
            object_pairs_hook=_text_keys,
            max_array_len=MAX_ITEMS,
            max_map_len=MAX_ITEMS,
            max_ext_len=0,
        )
    except (ValueError, TypeError, RecursionError, MemoryError, msgpack.exceptions.UnpackException) as error:
        raise ProtocolError(
            "malformed", f"not one msgpack map: {str(error)[:200] or type(error).__name__}"
        ) from None


def _unpack_json(data: bytes | memoryview, limit: int = MAX_MESSAGE_BYTES) -> object:
    if len(data) > limit:
        raise too_large(len(data))
    try:
        return from_json(bytes(data), allow_inf_nan=False)
    except (ValueError, RecursionError, MemoryError) as error:
        raise ProtocolError("malformed", f"not one JSON object: {str(error)[:200]}") from None


def _no_ext(code: int, data: bytes) -> NoReturn:
    raise ValueError(f"extension type {code} is not part of this protocol")


def _text_keys(pairs: list[tuple[Any, Any]]) -> dict[str, Any]:
    for key, _ in pairs:
        if type(key) is not str:
            raise ValueError("a map's keys should be text")
    return dict(pairs)


class _Packers(threading.local):
    """A packer for each thread: making one takes longer than packing a token."""

    def __init__(self) -> None:
        self.of_thread = msgpack.Packer(default=_to_submap, unicode_errors="replace")


def _to_submap(value: Any) -> dict[str, Any]:
    if type(value) not in _PLANS:
        raise TypeError(f"{type(value).__name__} has no place in an event")
    data = to_map(value)
    del data["type"]
    return data


def _finite(value: Any) -> Any:
    if isinstance(value, float):
        return value if math.isfinite(value) else None
    if isinstance(value, list | tuple):
        return [_finite(v) for v in value]
    if isinstance(value, dict):
        return {k: _finite(v) for k, v in value.items()}
    return _finite(_to_submap(value)) if type(value) in _PLANS else value


# wire name and attribute of the fields that are always sent, and of those left out when None
_Plan = tuple[str | None, tuple[tuple[str, str], ...], tuple[tuple[str, str], ...]]


def _plan(cls: type[Any]) -> _Plan:
    required: list[tuple[str, str]] = []
    optional: list[tuple[str, str]] = []
    for f in dataclasses.fields(cls):
        wire = "class" if f.name == "error_class" else f.name
        (optional if f.default is None else required).append((wire, f.name))
    return getattr(cls, "type", None), tuple(required), tuple(optional)


def _event_types() -> set[type[Any]]:
    from mstar.daemon import events

    return {c for c in vars(events).values() if isinstance(c, type) and dataclasses.is_dataclass(c)}


_PLANS: dict[type[Any], _Plan] = {cls: _plan(cls) for cls in _event_types()}
_PACKER = _Packers()
_JSON = json.JSONEncoder(ensure_ascii=False, separators=(",", ":"), allow_nan=False, default=_to_submap)
_ADAPTERS: dict[str, TypeAdapter[Any]] = {kind: TypeAdapter(cls) for kind, cls in EVENTS.items()}
