"""`mstar-daemon`: flags, signals, exit code."""

from __future__ import annotations

import asyncio
import os
import signal
import sys
from pathlib import Path
from typing import Any

import click

from mstar.daemon.addresses import AddressError
from mstar.daemon.logs import logging_to_stderr
from mstar.daemon.settings import Settings, SettingsError, load_settings


@click.command(context_settings={"help_option_names": ["-h", "--help"]})
@click.option("--tp", type=int, metavar="N", help="Ranks of a load, one process each [1].")
@click.option("--model", metavar="M", help="Load at start: a directory, a hub id or builtin:tiny.")
@click.option("--dtype", metavar="D", help="auto, bf16, fp16 or fp32 [auto].")
@click.option("--max-seq", type=int, metavar="N", help="Longest sequence, tokens [the config's, ≤ 65536].")
@click.option("--max-num-seqs", type=int, metavar="N", help="Requests that run at once [64].")
@click.option("--memory-fraction", type=float, metavar="F", help="Share of the device's memory [0.9].")
@click.option("--mtp", type=click.Choice(["off", "on", "auto"]), help="Multi-token prediction [auto].")
@click.option("--mtp-k", type=int, metavar="K", help="Drafts a step, 1 to 8 [3].")
@click.option("--config", type=click.Path(dir_okay=False, path_type=Path), help="TOML file of these names.")
@click.option("--bind", metavar="ADDR", help="ZeroMQ: tcp://, ipc:// or off [tcp://127.0.0.1:5570].")
@click.option("--line", metavar="ADDR", help="JSON lines: tcp://, unix: or off [tcp://127.0.0.1:5571].")
@click.option("--stdio", is_flag=True, default=None, help="JSON lines on stdin and stdout, no ports.")
@click.option("--metrics", metavar="HOST:PORT", help="Serve Prometheus metrics.")
@click.option("--device", type=click.Choice(["auto", "cpu", "cuda"]), help="Where the ranks run [auto].")
@click.option("--threads", type=int, metavar="N", help="CPU threads of each rank [cores / ranks].")
@click.option("--log-level", type=click.Choice(["debug", "info", "warning", "error"]), help="[info]")
@click.option("--drain-s", type=float, metavar="S", help="What runs may finish so long at the end [10].")
@click.option("--lease-s", type=float, metavar="S", help="A silent ZeroMQ client is gone after [30].")
@click.option("--eager", is_flag=True, default=None, help="GPU: run steps without captured graphs.")
@click.option("--mtp-fixed", is_flag=True, default=None, hidden=True)
@click.option("--heartbeat-s", type=float, hidden=True)
@click.option("--heartbeat-lost-s", type=float, hidden=True)
@click.option("--max-waiting", type=int, hidden=True)
@click.version_option(package_name="mstar")
def main(config: Path | None, **flags: Any) -> None:
    """Serves a model of the Qwen3.5 family to clients on this machine.

    Settings come from the flags, then from the file of --config: from its section of the platform in use
    ([cpu], [cuda] or [rocm]), then from its top level.
    """
    try:
        settings = load_settings(flags, config)
    except SettingsError as error:
        raise click.UsageError(str(error)) from error
    with logging_to_stderr(settings.log_level):
        failure = asyncio.run(_serve(settings))
    if failure is not None:
        raise click.ClickException(failure)


async def _serve(settings: Settings) -> str | None:
    """Runs the daemon to its end; returns why it could not start, if so."""
    from mstar.daemon.server import Server, StartupLoadError

    server = Server(settings)
    loop = asyncio.get_running_loop()
    for number in (signal.SIGTERM, signal.SIGINT):
        loop.add_signal_handler(number, server.stop)
    try:
        await server.start(_claim_stdio() if settings.stdio else None)
        await server.serve()
    except (AddressError, StartupLoadError) as error:
        return str(error)
    return None


def _claim_stdio() -> tuple[int, int]:
    """Descriptors of the real stdin and stdout; whatever else writes to stdout goes to stderr from now on."""
    sys.stdout.flush()
    claimed = os.dup(0), os.dup(1)
    os.dup2(2, 1)
    return claimed


if __name__ == "__main__":
    main()
