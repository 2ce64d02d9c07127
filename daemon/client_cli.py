"""`mstar`: the daemon's client on the command line.

Answers go to stdout; progress, figures and errors to stderr. Exit codes: 0, 1 for an error event,
2 for usage, 3 for no daemon, 130 for Ctrl-C.
"""

from __future__ import annotations

import functools
import json
import os
import shutil
import sys
import time
import typing
from collections.abc import Callable
from pathlib import Path
from typing import Any, TypeVar

import click

from mstar.daemon import codec
from mstar.daemon.chat_cli import Printer, converse, figures
from mstar.daemon.client import DEFAULT_ADDRESS, Client, DaemonError, NoDaemon
from mstar.daemon.field_options import field_options, fields_of
from mstar.daemon.progress import LoadBars
from mstar.daemon.protocol import Done, Event, Generate, Load, LoadSpecFields, SpecRequest

EXIT_ERROR, EXIT_NO_DAEMON, EXIT_INTERRUPTED = 1, 3, 130
F = TypeVar("F", bound=Callable[..., Any])


@click.group(context_settings={"help_option_names": ["-h", "--help"]})
@click.version_option(package_name="mstar")
@click.option(
    "--connect", metavar="ADDR", default=DEFAULT_ADDRESS, show_default=True, help="The daemon's --bind."
)
@click.pass_context
def main(context: click.Context, connect: str) -> None:
    """Talk to a running mstar-daemon."""
    context.obj = connect


def command(work: F) -> F:
    """A command of `main` that gets a client first, and whose errors become exit codes."""

    @functools.wraps(work)
    def run(*arguments: Any, connect: str | None, **options: Any) -> None:
        address = connect or click.get_current_context().obj
        try:
            with Client(address) as client:
                work(client, *arguments, **options)
        except DaemonError as error:
            if options.get("as_json"):
                _print_event(error.event)
            else:
                click.echo(f"error: {error}", err=True)
            sys.exit(EXIT_ERROR)
        except NoDaemon as error:
            click.echo(f"error: {error}", err=True)
            sys.exit(EXIT_NO_DAEMON)
        except KeyboardInterrupt:
            click.echo(err=True)
            sys.exit(EXIT_INTERRUPTED)
        except BrokenPipeError:  # `mstar generate … | head`: what is left has no reader
            os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
            sys.exit(EXIT_ERROR)

    # after the command as well as before it
    option = click.option("--connect", metavar="ADDR", default=None, help="The daemon's --bind.")
    return typing.cast(F, main.command()(option(run)))


as_json = click.option("--json", "as_json", is_flag=True, help="Print the raw events, one a line.")
quiet = click.option("-q", "--quiet", is_flag=True, help="No progress and no figures.")


@command
@click.argument("model")
@click.option("--override", "overrides", metavar="KEY=JSON", multiple=True, help="Replace a config field.")
@field_options(Load, LoadSpecFields)
@as_json
@quiet
def load(
    client: Client, model: str, overrides: tuple[str, ...], as_json: bool, quiet: bool, **options: Any
) -> None:
    """Load MODEL: a directory, a hub id or builtin:tiny."""
    fields = fields_of(options, LoadSpecFields)
    if overrides:
        fields["overrides"] = dict(_override(text) for text in overrides)
    if as_json:
        _print_event(client.load(model, _print_event, **fields))
        return
    try:
        with LoadBars(quiet) as bars:
            loaded = client.load(model, bars, **fields)
    except KeyboardInterrupt:
        click.echo("\nthe load goes on; mstar status tells when it is ready", err=True)
        raise
    if not quiet:
        click.echo(
            f"loaded {loaded.model}: {loaded.params / 1e6:.1f} M parameters, {loaded.dtype}, {loaded.device}, "
            f"tp {loaded.tp}, {loaded.kv.tokens} KV tokens, {loaded.load_ms / 1e3:.1f} s"
        )
        for note in loaded.notes:
            click.echo(f"note: {note}", err=True)


@command
@click.argument("prompt", required=False)
@click.option(
    "--chat",
    "templated",
    is_flag=True,
    help="Send the prompt as a user's message (--system and --thinking do).",
)
@click.option("--id", "id", default=None, help="The request's id, to abort it by.")
@click.option("--attempt-id", type=int, default=0, help="The request's attempt_id.")
@field_options(Generate, SpecRequest)
@as_json
@quiet
def generate(
    client: Client,
    prompt: str | None,
    templated: bool,
    id: str | None,
    as_json: bool,
    quiet: bool,
    **options: Any,
) -> None:
    """Stream the answer to PROMPT, or to what stdin holds.

    The prompt goes to the model as it is; with --chat, --system or --thinking it is a user's message, rendered
    by the model's chat template.
    """
    fields = fields_of(options, SpecRequest)
    if not as_json:
        _refuse_unseen(fields, "add --json")
    if prompt is None or prompt == "-":
        if sys.stdin.isatty():
            click.echo("prompt (end with Ctrl-D):", err=True)
        try:
            prompt = sys.stdin.buffer.read().decode()
        except UnicodeDecodeError as error:
            raise click.UsageError(
                f"the prompt is not UTF-8: {error.reason} at byte {error.start}"
            ) from error
    if templated or "system" in fields or "thinking" in fields:
        fields["messages"] = [{"role": "user", "content": prompt}]
    else:
        fields["prompt"] = prompt
    if id is not None:
        fields["id"] = id
    # a client that closes aborts what it left, so Ctrl-C needs nothing more
    generation = client.generate(**fields)
    reason: str | None = None
    if as_json:
        for event in generation:
            _print_event(event)
            reason = event.finish_reason if isinstance(event, Done) else reason
    else:
        done = Printer(quiet=quiet).show(generation)
        reason = done.finish_reason
        if not quiet:
            click.echo(figures(done), err=True)
    if reason == "abort":
        click.echo("error: the answer was aborted before its end", err=True)
        sys.exit(EXIT_ERROR)


@command
@field_options(Generate, SpecRequest)
@quiet
def chat(client: Client, quiet: bool, **options: Any) -> None:
    """Hold a conversation. /clear forgets it, /quit or Ctrl-D ends it, Ctrl-C ends the running answer."""
    fields = fields_of(options, SpecRequest)
    _refuse_unseen(fields, "use generate --json")
    converse(client, fields, quiet)


def _refuse_unseen(fields: dict[str, Any], instead: str) -> None:
    """Raises UsageError for what is asked for and would not be shown as text."""
    for field in ("logprobs", "return_ids"):
        if fields.get(field):
            raise click.UsageError(f"--{field.replace('_', '-')} does not show in text: {instead}")


@command
@as_json
def status(client: Client, as_json: bool) -> None:
    """Tell what is loaded and how its ranks are."""
    event = client.status()
    if as_json:
        _print_event(event)
        return
    click.echo(f"{event.state}{f': {event.reason}' if event.reason else ''}")
    if event.loaded is not None:
        told = event.loaded
        click.echo(f"model    {told.model} ({told.arch}, {told.params / 1e6:.1f} M parameters, {told.dtype})")
        click.echo(
            f"room     {told.kv.tokens} KV tokens, {told.max_seq} a sequence, {told.max_num_seqs} sequences"
        )
        click.echo(f"requests {event.running} running, {event.waiting} waiting")
    for rank in event.ranks:
        beat = "none yet" if rank.last_heartbeat_ms is None else f"{rank.last_heartbeat_ms / 1e3:.1f} s ago"
        memory = f"{rank.memory_bytes / 2**20:.0f} MiB"
        click.echo(f"rank {rank.rank}   pid {rank.pid}, {rank.device}, {memory}, heartbeat {beat}")


@command
@as_json
@click.option("--phases", is_flag=True, help="Only the parts of a step: p50, p95, mean (us) and count.")
@click.option(
    "--trace", type=click.Path(dir_okay=False, path_type=Path), help="Profile steps into this file."
)
@click.option("--steps", type=click.IntRange(1, 1000), default=20, show_default=True, help="Of the profile.")
def stats(client: Client, as_json: bool, phases: bool, trace: Path | None, steps: int) -> None:
    """Tell the counters since load. A trace opens in Perfetto; the daemon must be serving while it is taken."""
    if trace is not None:
        if not os.access(trace.parent, os.W_OK):
            raise click.UsageError(f"--trace: {trace.parent} is not there, or not to be written to")
        click.echo(f"waiting for {steps} steps, up to 90 s; send requests meanwhile", err=True)
    event = client.stats(steps if trace is not None else 0)
    if trace is not None:
        if event.trace is None:
            raise click.ClickException("no profile: too few steps came; send requests while it is taken")
        try:
            shutil.move(event.trace, trace)
        except OSError as error:
            raise click.ClickException(f"the profile stays in {event.trace}: {error}") from error
        click.echo(f"{trace}: {steps} steps", err=True)
        event.trace = str(trace)
    if phases and not as_json:
        for name, (p50, p95, mean, count) in event.phases.items():
            click.echo(f"{name:<8} p50 {p50:9.1f}  p95 {p95:9.1f}  mean {mean:9.1f} us  of {count:.0f} steps")
        return
    if as_json:
        _print_event(event)
        return
    data = json.loads(codec.encode_json(event))
    for name, value in data.items():
        if name not in ("type", "id", "phases", "trace"):
            shown = ", ".join(f"{k} {v}" for k, v in value.items()) if isinstance(value, dict) else value
            click.echo(f"{name:<12} {shown if shown != '' else '-'}")


@command
@click.argument("id")
@click.argument("attempt_id", type=int, default=0)
@click.option("--integer", is_flag=True, help="ID is an integer, not text.")
def abort(client: Client, id: str, attempt_id: int, integer: bool) -> None:
    """End the request ID, whoever sent it. What is unknown or finished is ignored."""
    if integer and not id.isdecimal():
        raise click.UsageError("with --integer, ID is a number")
    client.abort(int(id) if integer else id, attempt_id)


@command
def unload(client: Client) -> None:
    """End the load and its ranks."""
    client.unload()
    click.echo("unloaded")


@command
def reset(client: Client) -> None:
    """Drop cached prefixes."""
    client.reset()
    click.echo("reset")


@command
def ping(client: Client) -> None:
    """Ask whether the daemon is there."""
    client.ping()  # connects
    start_s = time.perf_counter()
    client.ping()
    click.echo(f"pong in {(time.perf_counter() - start_s) * 1e3:.1f} ms")


@command
def shutdown(client: Client) -> None:
    """End the daemon."""
    client.shutdown()
    click.echo("shutting down")


def _print_event(event: Event) -> None:
    sys.stdout.write(codec.encode_json(event).decode())
    sys.stdout.flush()


def _override(text: str) -> tuple[str, Any]:
    key, equals, value = text.partition("=")
    if not equals or not key:
        raise click.UsageError(f"--override takes KEY=JSON, not {text!r}")
    try:
        return key, json.loads(value)
    except ValueError:
        return key, value


if __name__ == "__main__":
    main()
