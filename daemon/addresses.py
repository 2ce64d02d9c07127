"""Where the daemon listens: parsing, loopback only, and Unix sockets that outlive nobody.

There is no authentication, so nothing but this machine's own users may connect: TCP on
loopback addresses, Unix sockets with mode 0600.
"""

from __future__ import annotations

import contextlib
import ipaddress
import os
import socket
import stat
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path


class AddressError(ValueError):
    """An address that cannot be listened on; the message says why and what to do."""


@dataclass(frozen=True, slots=True)
class TcpAddress:
    host: str  # a loopback IP address, without brackets
    port: int  # 0: any free port

    def __str__(self) -> str:
        return f"tcp://{f'[{self.host}]' if ':' in self.host else self.host}:{self.port}"


@dataclass(frozen=True, slots=True)
class UnixAddress:
    path: Path
    scheme: str = "unix:"  # "unix:" or "ipc://", as the user wrote it

    def __str__(self) -> str:
        return f"{self.scheme}{self.path}"


Address = TcpAddress | UnixAddress


def parse_address(text: str) -> Address:
    """`tcp://HOST:PORT` (PORT may be 0 or `*`), `ipc://PATH` or `unix:PATH`. Raises AddressError."""
    if text.startswith("tcp://"):
        return parse_host_port(text.removeprefix("tcp://"), text)
    for scheme in ("ipc://", "unix://", "unix:"):
        if text.startswith(scheme):
            return _unix(text.removeprefix(scheme), "ipc://" if scheme == "ipc://" else "unix:", text)
    raise AddressError(f"{text!r} is not an address: write tcp://127.0.0.1:PORT, ipc://PATH or unix:PATH")


def parse_host_port(text: str, shown: str | None = None) -> TcpAddress:
    """`HOST:PORT` of a loopback host. Raises AddressError."""
    shown = shown or text
    host, colon, port_text = text.rpartition(":")
    host = host.removeprefix("[").removesuffix("]")
    if not colon or not host:
        raise AddressError(f"{shown!r} lacks a host or a port: write 127.0.0.1:PORT")
    if host == "localhost":
        host = "127.0.0.1"
    try:
        loopback = ipaddress.ip_address(host).is_loopback
    except ValueError:
        loopback = False
    if not loopback:
        raise AddressError(
            f"{shown!r} is refused: mstar has no authentication, so it listens on loopback addresses only "
            "(127.0.0.1, ::1, localhost); to reach it from elsewhere, use an ssh tunnel"
        )
    if port_text == "*":
        port_text = "0"
    if not (port_text.isascii() and port_text.isdigit() and int(port_text) < 65536):
        raise AddressError(f"{shown!r}: the port is a number up to 65535, or 0 for any free one")
    return TcpAddress(host, int(port_text))


@contextlib.contextmanager
def claim_unix_socket(address: UnixAddress) -> Iterator[None]:
    """Around a bind: removes a stale socket, refuses a live one; the new one is born with mode 0600.

    Raises AddressError where somebody listens already or the path is something else.
    """
    path = address.path
    try:
        kind = os.lstat(path).st_mode
    except FileNotFoundError:
        pass
    else:
        if not stat.S_ISSOCK(kind):
            raise AddressError(f"{address}: {path} exists and is not a socket; choose another path")
        with socket.socket(socket.AF_UNIX, socket.SOCK_STREAM) as probe:
            probe.settimeout(1.0)
            try:
                probe.connect(str(path))
            except (ConnectionRefusedError, FileNotFoundError):
                path.unlink(missing_ok=True)  # left by a process that was killed
            except OSError as error:
                raise AddressError(f"{address}: cannot tell whether {path} is in use ({error})") from error
            else:
                raise AddressError(f"{address}: a process listens there; stop it or choose another path")
    before = os.umask(0o177)
    try:
        yield
    except OSError as error:
        raise AddressError(f"{address}: {error.strerror or error}") from error
    finally:
        os.umask(before)
    path.chmod(0o600)


def _unix(path: str, scheme: str, shown: str) -> UnixAddress:
    if not path or path.startswith(("@", "*")):
        raise AddressError(f"{shown!r}: write the path of a socket file (its mode keeps other users out)")
    full = Path(path).expanduser().absolute()
    if len(os.fsencode(full)) > 100:  # sockaddr_un holds 108 bytes on Linux, 104 elsewhere
        raise AddressError(f"{shown!r}: a socket's path has at most 100 bytes; choose a shorter one")
    if not full.parent.is_dir():
        raise AddressError(f"{shown!r}: there is no directory {full.parent}")
    return UnixAddress(full, scheme)
