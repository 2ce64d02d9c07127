"""The daemon's configuration: flags, and a TOML file of the same names.

Precedence, lowest first: defaults, the file's top level, the file's section of the platform
in use (`[cpu]`, `[cuda]`, `[rocm]`), flags.
"""

from __future__ import annotations

import tomllib
from collections.abc import Mapping
from pathlib import Path
from typing import Annotated, Any, Literal

from pydantic import BaseModel, ConfigDict, Field, ValidationError

from mstar.daemon.addresses import AddressError, parse_address, parse_host_port
from mstar.daemon.devices import Platform, detect_platform, usable_cores

DEFAULT_BIND = "tcp://127.0.0.1:5570"
DEFAULT_LINE = "tcp://127.0.0.1:5571"
_SECTIONS = ("cpu", "cuda", "rocm")


class SettingsError(ValueError):
    """A flag or a file that cannot be used; the message names it and says what would be right."""


class Settings(BaseModel):
    """What a daemon was started with. Names are those of the flags, with `_` for `-`."""

    model_config = ConfigDict(extra="forbid", frozen=True, strict=True)

    # Defaults of `load`
    tp: Annotated[int, Field(ge=1, le=64)] = 1
    model: str | None = None  # loaded at start
    dtype: Literal["auto", "bf16", "fp16", "fp32"] = "auto"
    max_seq: Annotated[int, Field(ge=2)] | None = None
    max_num_seqs: Annotated[int, Field(ge=1, le=4096)] = 64
    memory_fraction: Annotated[float, Field(gt=0, le=1, strict=False)] = 0.9
    mtp: Literal["off", "on", "auto"] = "auto"
    mtp_k: Annotated[int, Field(ge=1, le=8)] = 3
    eager: bool = False  # GPU: steps run call by call on the shapes that graphs would have
    mtp_fixed: bool = False  # k is never lowered: a check that stops drafting says nothing

    # Faces
    bind: str = DEFAULT_BIND  # "off", too
    line: str = DEFAULT_LINE  # "off", too
    stdio: bool = False
    metrics: str | None = None  # HOST:PORT

    # The machine
    device: Literal["auto", "cpu", "cuda"] = "auto"
    threads: Annotated[int, Field(ge=0, le=1024)] = 0  # CPU threads of each rank; 0: the cores over the ranks

    # Limits of the control process
    log_level: Literal["debug", "info", "warning", "error"] = "info"
    drain_s: Annotated[float, Field(ge=0, strict=False)] = 10.0
    lease_s: Annotated[float, Field(gt=0, strict=False)] = 30.0
    max_waiting: Annotated[int, Field(ge=1)] = 1024  # live requests, running ones included
    heartbeat_s: Annotated[float, Field(gt=0, strict=False)] = 1.0
    heartbeat_lost_s: Annotated[float, Field(gt=0, strict=False)] = 10.0

    @property
    def platform(self) -> Platform:
        return detect_platform(self.device)

    def rank_threads(self, tp: int) -> int:
        """CPU threads of each of `tp` ranks."""
        return self.threads or max(1, usable_cores() // tp)


def load_settings(flags: Mapping[str, Any], config: Path | None = None) -> Settings:
    """Settings from `flags` (None = not given) over the TOML file `config`. Raises SettingsError."""
    given = {name: value for name, value in flags.items() if value is not None}
    values = {**_read_config(config, given.get("device")), **given} if config else given
    if values.get("stdio"):
        # A parent that drives one daemon through pipes can run several: no port is taken unasked.
        values = {"bind": "off", "line": "off", **values}
    settings = _validate(values, "flags" if config is None else f"flags and {config}")
    _check_addresses(settings)
    return settings


def _read_config(path: Path, device_flag: str | None) -> dict[str, Any]:
    try:
        document = tomllib.loads(path.read_text(encoding="utf-8"))
    except (OSError, UnicodeDecodeError) as error:
        raise SettingsError(f"--config {path}: {error}") from error
    except tomllib.TOMLDecodeError as error:
        raise SettingsError(f"--config {path}: not TOML: {error}") from error
    sections: dict[str, dict[str, Any]] = {}
    for name in _SECTIONS:
        section = document.pop(name, {})
        if not isinstance(section, dict):
            raise SettingsError(f"--config {path}: [{name}] is a section of settings, not a value")
        sections[name] = _underscored(section)
        if "device" in sections[name]:
            raise SettingsError(f"--config {path}: [{name}] cannot set device, which chooses the section")
        _validate(sections[name], f"--config {path}, section [{name}]")
    top = _underscored(document)
    checked = _validate(top, f"--config {path}")
    return {**top, **sections[detect_platform(device_flag or checked.device)]}


def _underscored(values: dict[str, Any]) -> dict[str, Any]:
    return {name.replace("-", "_"): value for name, value in values.items()}


def _validate(values: Mapping[str, Any], source: str) -> Settings:
    try:
        return Settings(**values)
    except ValidationError as error:
        first = error.errors()[0]
        name = ".".join(str(part) for part in first["loc"]).replace("_", "-")
        problem = "no such setting" if first["type"] == "extra_forbidden" else first["msg"]
        raise SettingsError(f"{source}: {name}: {problem}") from error


def _check_addresses(settings: Settings) -> None:
    for flag, text in (("bind", settings.bind), ("line", settings.line)):
        if text == "off":
            continue
        try:
            parse_address(text)
        except AddressError as error:
            raise SettingsError(f"--{flag} {error}") from error
    if settings.bind == settings.line == "off" and not settings.stdio:
        raise SettingsError("nobody could reach this daemon: give --bind, --line or --stdio")
    if settings.bind != "off" and settings.bind.startswith("unix:"):
        raise SettingsError(f"--bind {settings.bind!r}: ZeroMQ's Unix sockets are written ipc://PATH")
    if settings.line != "off" and settings.line.startswith("ipc:"):
        raise SettingsError(f"--line {settings.line!r}: the line face's Unix sockets are written unix:PATH")
    if settings.metrics is not None:
        try:
            parse_host_port(settings.metrics)
        except AddressError as error:
            raise SettingsError(f"--metrics {error}") from error
