"""What `make demo` runs: a daemon of two ranks on the built-in model, an answer, its figures, a clean end.

Everything goes through public interfaces: the command `mstar-daemon` and the Python client.
"""

from __future__ import annotations

import os
import subprocess
import sys
import tempfile
import time
from pathlib import Path

import click

from mstar.daemon.chat_cli import Printer, figures
from mstar.daemon.client import Client, DaemonError, NoDaemon
from mstar.daemon.progress import LoadBars
from mstar.scripts.serving_daemon import running_process

MODEL = "builtin:tiny"
PROMPT = "In a few sentences, explain why the sky is blue."
START_S = 60.0
END_S = 30.0


class DemoError(Exception):
    """Something that the demo promises did not happen."""


@click.command()
@click.argument("prompt", default=PROMPT)
@click.option("--tp", default=2, show_default=True, help="Ranks.")
@click.option("--max-tokens", default=256, show_default=True, help="Longest answer.")
def main(prompt: str, tp: int, max_tokens: int) -> None:
    """Start a daemon, ask the built-in model PROMPT, show the figures, end the daemon."""
    with tempfile.TemporaryDirectory(prefix="mstar-demo-") as folder:
        try:
            _demo(Path(folder), prompt, tp, max_tokens)
        except (DemoError, DaemonError, NoDaemon) as error:
            raise click.ClickException(str(error)) from error


def _demo(folder: Path, prompt: str, tp: int, max_tokens: int) -> None:
    address = f"ipc://{folder}/zmq"
    flags = ["--tp", str(tp), "--bind", address, "--line", f"unix:{folder}/line", "--log-level", "warning"]
    _say(f"$ mstar-daemon {' '.join(flags)}")
    command = [sys.executable, "-m", "mstar.daemon.cli", *flags]
    with running_process(command, stdin=subprocess.DEVNULL) as daemon:
        with Client(address) as client:
            _wait(client, daemon)
            with LoadBars() as bars:
                loaded = client.load(MODEL, bars)
            _say(
                f"{loaded.model}: {loaded.params / 1e6:.1f} M parameters, {loaded.dtype}, {loaded.device}, "
                f"tp {loaded.tp}, loaded in {loaded.load_ms / 1e3:.1f} s\n\n> {prompt}"
            )
            messages = [{"role": "user", "content": prompt}]
            done = Printer().show(client.generate(messages=messages, max_tokens=max_tokens))
            _say(f"\n{figures(done)}")
            ranks = [rank.pid for rank in client.status().ranks]
            client.shutdown()
        code = daemon.wait(END_S)
    _check_end(code, ranks, folder)
    _say(f"the daemon and its {len(ranks)} ranks have ended, and nothing is left behind")


def _wait(client: Client, daemon: subprocess.Popen[bytes]) -> None:
    """Until the daemon answers."""
    deadline = time.monotonic() + START_S
    while True:
        try:
            client.ping()
            return
        except NoDaemon as error:
            if daemon.poll() is not None:
                raise DemoError(f"the daemon ended with exit code {daemon.returncode}") from error
            if time.monotonic() > deadline:
                raise DemoError(f"the daemon did not answer within {START_S:.0f} s") from error
            time.sleep(0.05)


def _check_end(code: int, ranks: list[int], folder: Path) -> None:
    left = [f"process {pid} of a rank" for pid in ranks if _runs(pid)]
    left += [f"the file {path}" for path in folder.iterdir()]
    if code or left:
        raise DemoError(f"the daemon ended with exit code {code}, and left {', '.join(left) or 'nothing'}")


def _runs(pid: int) -> bool:
    try:
        os.kill(pid, 0)
    except ProcessLookupError:
        return False
    return True


def _say(text: str) -> None:
    click.echo(text)


if __name__ == "__main__":
    main()
