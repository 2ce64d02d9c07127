"""Runs the five prompts of the battery against a daemon, and says what is wrong with the answers.

    python -m mstar.scripts.serve_harness --mode battery -- --tp 2 --mtp on
    python -m mstar.scripts.serve_harness --mode chain --connect tcp://127.0.0.1:5571

`battery` asks each prompt in a conversation of its own, `chain` all of them in one that grows, with the answers fed
back. JSON lines go to stdout, one a prompt and a summary, the table to stderr. Exit code 1: an answer loops, is
empty, did not end with `done` or lacks what it should say; 2: there was no daemon to ask.
"""

from __future__ import annotations

import json
import tempfile
import time
import uuid
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import click
from rich.console import Console
from rich.table import Table

from mstar.daemon.addresses import AddressError
from mstar.loader import LoadError, resolve
from mstar.scripts.harness_checks import is_attractor, md5_of, missing_substrings
from mstar.scripts.harness_prompts import BUILT_IN, Prompt, PromptsError, read_prompts
from mstar.scripts.line_link import LineLink, LinkError
from mstar.scripts.planted import planted_acceptance, planted_note
from mstar.scripts.serving_daemon import launched_daemon
from mstar.scripts.serving_load import BenchError

WIDTH = 150  # columns of a table that goes to a file or a pipe
NO_DAEMON = 2
_SPEC = ("mtp", "k", "steps", "drafted", "accepted")


@click.command()
@click.option("--mode", type=click.Choice(["battery", "chain"]), default="battery", show_default=True)
@click.option("--model", default="builtin:tiny", show_default=True, help="What a daemon of our own loads.")
@click.option("--connect", metavar="ADDR", help="Ask the daemon whose line face is there.")
@click.option("--prompts-file", type=click.Path(exists=True, dir_okay=False, path_type=Path), help="JSON.")
@click.option("--request", "request_json", default="{}", metavar="JSON", help="Fields of every `generate`.")
@click.option("--timeout-s", default=120.0, show_default=True, help="Longest silence of the daemon.")
@click.argument("daemon_flags", nargs=-1, type=click.UNPROCESSED)
def main(
    mode: str,
    model: str,
    connect: str | None,
    prompts_file: Path | None,
    request_json: str,
    timeout_s: float,
    daemon_flags: tuple[str, ...],
) -> None:
    """Checks served answers. Flags after `--` go to mstar-daemon."""
    if connect and daemon_flags:
        raise click.UsageError("--connect asks a daemon as it runs: no daemon flags")
    console = Console(stderr=True)
    if not console.is_terminal:
        console = Console(stderr=True, width=WIDTH)
    try:
        prompts = list(BUILT_IN) if prompts_file is None else read_prompts(prompts_file)
        extra = _request_fields(request_json)
        with _daemon(model, connect, daemon_flags, timeout_s) as (link, loaded):
            rows = []
            for row in run(link, prompts, mode, extra):
                click.echo(json.dumps(row, ensure_ascii=False))
                rows.append(row)
            summary = summarise(mode, rows, loaded, _planted(str(loaded["model"])))
    except (AddressError, BenchError, LinkError, LoadError, PromptsError) as error:
        console.print(f"[red]{error}", highlight=False)
        raise SystemExit(NO_DAEMON) from None
    click.echo(json.dumps(summary, ensure_ascii=False))
    print_table(summary, rows, console)
    if summary["failed"]:
        raise SystemExit(1)


def run(
    link: LineLink, prompts: Sequence[Prompt], mode: str, extra: dict[str, Any]
) -> Iterator[dict[str, Any]]:
    """Asks the prompts one after another; yields what is known of each answer."""
    conversation: list[dict[str, Any]] = []
    for prompt in prompts:
        messages = [*conversation, *prompt.messages] if mode == "chain" else prompt.messages
        row = ask(link, prompt, messages, extra)
        yield row
        conversation = [*messages, {"role": "assistant", "content": row["assistant_content"]}]


def ask(
    link: LineLink, prompt: Prompt, messages: list[dict[str, Any]], extra: dict[str, Any]
) -> dict[str, Any]:
    """One request and everything that is said of its answer."""
    fields = {"messages": messages, "max_tokens": prompt.max_tokens, **extra}
    texts: dict[str, list[str]] = {"token": [], "reasoning": []}
    end: dict[str, Any] = {}
    start: dict[str, Any] = {}
    failure: str | None = None
    began = time.perf_counter()
    first_ms: float | None = None
    try:
        for event in link.generate({"id": f"harness-{uuid.uuid4().hex[:12]}", "attempt_id": 0, **fields}):
            kind = event["type"]
            if kind in texts:
                texts[kind].append(event["text"])
                first_ms = first_ms or (time.perf_counter() - began) * 1e3
            elif kind == "gen_start":
                start = event
            else:
                end = event
    except LinkError as error:
        failure = str(error)
    visible, thinking = "".join(texts["token"]), "".join(texts["reasoning"])
    if end.get("type") == "error":
        failure = f"{end['class']}: {end['message']}"
    return {
        "prompt": prompt.name,
        **_measured(start, end, first_ms),
        "attractor": is_attractor(visible) or is_attractor(thinking),
        "empty": not visible.strip(),
        "runaway": end.get("finish_reason") == "length",
        "open_think": bool(end.get("open_think", False)),
        "saw_done": end.get("type") == "done",
        "failure": failure,
        "expected_substrings": prompt.expected_substrings,
        "retrieval_missing": missing_substrings(visible, prompt.expected_substrings),
        "prompt_md5": md5_of(messages),
        "request_md5": md5_of(fields),
        "content_md5": md5_of(visible),
        "assistant_content": visible,
        "thinking_content": thinking,
    }


def _measured(start: dict[str, Any], end: dict[str, Any], first_ms: float | None) -> dict[str, Any]:
    """The daemon's own figures; the time to the first token is the client's, sockets included."""
    usage, timings, spec = end.get("usage", {}), end.get("timings", {}), end.get("spec", {})
    return {
        "finish": end.get("finish_reason", end.get("type")),
        "gen": usage.get("completion_tokens", 0),
        "ctx": start.get("prompt_tokens"),
        "cached": start.get("cached_tokens"),
        "tau": spec.get("tau", 0.0),
        "tokens_per_step": spec.get("tokens_per_step", 1.0),
        "spec": {name: spec.get(name) for name in _SPEC},
        "prefill_tok_s": timings.get("prefill_tok_s"),
        "decode_tok_s": timings.get("decode_tok_s"),
        "ttft_ms": first_ms,
    }


def failures_of(row: dict[str, Any]) -> list[str]:
    """What makes the harness exit with 1; a runaway alone does not."""
    found = [name for name in ("attractor", "empty") if row[name]]
    if not row["saw_done"]:
        found.append(row["failure"] or "no terminal event")
    if row["retrieval_missing"]:
        found.append(f"lacks {', '.join(map(repr, row['retrieval_missing']))}")
    return found


def summarise(
    mode: str, rows: Sequence[dict[str, Any]], loaded: dict[str, Any], planted: float | None
) -> dict[str, Any]:
    """The last line: the load that was in force, and how the answers fared."""
    steps = sum(row["spec"]["steps"] or 0 for row in rows)
    accepted = sum(row["spec"]["accepted"] or 0 for row in rows)
    return {
        "summary": mode,
        "prompts": len(rows),
        "stops": sum(row["finish"] == "stop" for row in rows),
        "failed": sum(bool(failures_of(row)) for row in rows),
        "runaways": sum(row["runaway"] for row in rows),
        "gen": sum(row["gen"] for row in rows),
        "tau": accepted / steps if steps else 0.0,
        "content_md5": md5_of([row["content_md5"] for row in rows]),
        "fingerprint": loaded["fingerprint"],
        "planted": planted,
        "load": loaded,
    }


def print_table(summary: dict[str, Any], rows: Sequence[dict[str, Any]], console: Console) -> None:
    load, spec = summary["load"], summary["load"]["spec"]
    drafts = f"mtp k {spec['k']}" if spec["mtp"] else "no mtp"
    table = Table(
        title=f"{summary['summary']}: {load['model']} ({load['fingerprint'][:12]}), {load['dtype']}, "
        f"tp {load['tp']}, {drafts}, {load['device']}{planted_note(summary['planted'])}"
    )
    for column in ("prompt", "finish"):
        table.add_column(column)
    for column in ("ctx", "gen", "tau", "tok/step", "prefill tok/s", "decode tok/s", "ttft ms"):
        table.add_column(column, justify="right")
    table.add_column("content md5")
    table.add_column("wrong")
    for row in rows:
        wrong = failures_of(row) + [name for name in ("runaway", "open_think") if row[name]]
        table.add_row(
            row["prompt"],
            str(row["finish"]),
            str(row["ctx"]),
            str(row["gen"]),
            f"{row['tau']:.2f}",
            f"{row['tokens_per_step']:.2f}",
            *(_figure(row[name]) for name in ("prefill_tok_s", "decode_tok_s", "ttft_ms")),
            row["content_md5"][:12],
            ", ".join(wrong),
        )
    console.print(table)
    console.print(
        f"{summary['stops']}/{summary['prompts']} stop, {summary['failed']} failed, "
        f"tau {summary['tau']:.2f}, all contents {summary['content_md5'][:12]}",
        highlight=False,
    )


def _figure(value: float | None) -> str:
    return "" if value is None else f"{value:.0f}" if value >= 100 else f"{value:.1f}"


@contextmanager
def _daemon(
    model: str, connect: str | None, flags: Sequence[str], timeout_s: float
) -> Iterator[tuple[LineLink, dict[str, Any]]]:
    """A link to the line face of the daemon at `connect`, or of one of our own, and what `loaded` said."""
    if connect is None:
        with tempfile.TemporaryDirectory(prefix="mstar-harness-") as folder:
            line = f"unix:{folder}/line"
            with (
                launched_daemon(model, flags, line=line) as (_, loaded),
                LineLink(line, timeout_s) as link,
            ):
                yield link, loaded
        return
    with LineLink(connect, timeout_s) as link:
        status = link.ask("status")
        if status.get("state") != "ready":
            raise LinkError(f"the daemon at {connect} has no model ready: {status.get('state')}")
        yield link, status["loaded"]


def _planted(model: str) -> float | None:
    try:
        return planted_acceptance(resolve(model))
    except LoadError:  # the daemon's directory need not be ours
        return None


def _request_fields(text: str) -> dict[str, Any]:
    try:
        fields = json.loads(text)
    except ValueError as error:
        raise click.UsageError(f"--request is not JSON: {error}") from error
    if not isinstance(fields, dict):
        raise click.UsageError("--request is a JSON object of `generate` fields")
    return fields


if __name__ == "__main__":
    main()
