"""A plain client of the daemon's line face: one JSON object a line, both ways."""

from __future__ import annotations

import json
import socket
import time
from collections.abc import Iterator
from types import TracebackType
from typing import Any, Self

from mstar.daemon.addresses import TcpAddress, parse_address

CONNECT_S = 5.0
ENDS = ("done", "error")


class LinkError(Exception):
    """The daemon cannot be reached or does not answer; the message is for the person who runs the script."""


class LineLink:
    """One connection. Raises LinkError when there is no daemon, and AddressError for a wrong address."""

    def __init__(self, address: str, timeout_s: float = 120.0) -> None:
        """address: the daemon's `--line`. timeout_s: the longest silence while an answer is awaited."""
        self.address = address
        self._timeout_s = timeout_s
        self._buffer = b""
        place = parse_address(address)
        family = socket.AF_INET if isinstance(place, TcpAddress) else socket.AF_UNIX
        if isinstance(place, TcpAddress) and ":" in place.host:
            family = socket.AF_INET6
        self._socket = socket.socket(family, socket.SOCK_STREAM)
        self._socket.settimeout(CONNECT_S)
        try:
            target = (place.host, place.port) if isinstance(place, TcpAddress) else str(place.path)
            self._socket.connect(target)
        except OSError as error:
            self._socket.close()
            reason = error.strerror or error
            raise LinkError(f"no daemon answers at {address}: {reason}") from error

    def send(self, message: dict[str, Any]) -> None:
        try:
            self._socket.sendall(json.dumps(message).encode() + b"\n")
        except OSError as error:
            raise LinkError(f"the daemon at {self.address} is gone: {error.strerror or error}") from error

    def receive(self) -> dict[str, Any]:
        """The next event."""
        deadline = time.monotonic() + self._timeout_s
        while b"\n" not in self._buffer:
            left = deadline - time.monotonic()
            if left <= 0:
                raise LinkError(f"the daemon at {self.address} said nothing for {self._timeout_s:.0f} s")
            self._socket.settimeout(left)
            try:
                data = self._socket.recv(1 << 16)
            except TimeoutError:
                continue
            except OSError as error:
                raise LinkError(f"the daemon at {self.address} is gone: {error.strerror or error}") from error
            if not data:
                raise LinkError(f"the daemon at {self.address} closed the connection")
            self._buffer += data
        line, _, self._buffer = self._buffer.partition(b"\n")
        event: dict[str, Any] = json.loads(line)
        return event

    def ask(self, kind: str) -> dict[str, Any]:
        """The answer to `status`, `stats` or `ping`."""
        self.send({"type": kind})
        return self.receive()

    def generate(self, request: dict[str, Any]) -> Iterator[dict[str, Any]]:
        """Sends a `generate` with its keys and yields its events, up to `done` or `error`."""
        self.send({"type": "generate", **request})
        while True:
            event = self.receive()
            if event.get("id") != request["id"] or event.get("attempt_id") != request["attempt_id"]:
                continue
            yield event
            if event["type"] in ENDS:
                return

    def close(self) -> None:
        self._socket.close()

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.close()
