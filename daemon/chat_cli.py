"""What `mstar generate` and `mstar chat` show: streamed text, dimmed thinking, a line of figures."""

from __future__ import annotations

import contextlib
import os
import sys
from typing import Any

import click

from mstar.daemon.client import Client, DaemonError, Generation
from mstar.daemon.protocol import Done, Reasoning, Token

_DIM, _PLAIN = "\x1b[2m", "\x1b[0m"


class Printer:
    """Writes a generation's text as it comes.

    Thinking is dimmed where stdout is a terminal; elsewhere it goes to stderr, so that stdout holds
    the answer alone. quiet leaves thinking out there.
    """

    def __init__(self, quiet: bool = False) -> None:
        self._terminal = sys.stdout.isatty()
        self._dims = self._terminal and not os.environ.get("NO_COLOR")
        self._quiet = quiet
        self._thinking = False
        self.text = ""

    def show(self, generation: Generation) -> Done:
        """Shows a generation to its end. Raises what iterating it raises."""
        done: Done | None = None
        try:
            for event in generation:
                if isinstance(event, Token):
                    # first: Ctrl-C may come as soon as it is seen, and what is seen stays in the conversation
                    self.text += event.text
                    self._write(event.text, thinking=False)
                elif isinstance(event, Reasoning):
                    self._write(event.text, thinking=True)
                elif isinstance(event, Done):
                    done = event
        finally:
            self._switch(thinking=False)
            sys.stdout.write("\n")
            sys.stdout.flush()
        assert done is not None  # a stream ends with `done` or raises
        return done

    def _write(self, text: str, thinking: bool) -> None:
        if not text or (thinking and self._quiet and not self._terminal):
            return
        self._switch(thinking)
        out = sys.stderr if thinking and not self._terminal else sys.stdout
        out.write(text)
        out.flush()

    def _switch(self, thinking: bool) -> None:
        if thinking == self._thinking:
            return
        self._thinking = thinking
        if not self._terminal:
            if not thinking:
                sys.stderr.write("\n")
            return
        if self._dims:
            sys.stdout.write(_DIM if thinking else _PLAIN)
        if not thinking:
            sys.stdout.write("\n")


def figures(done: Done) -> str:
    """One line: tokens, time to the first, rate, why it ended."""
    usage, timings = done.usage, done.timings
    thinking = f" ({usage.reasoning_tokens} thinking)" if usage.reasoning_tokens else ""
    parts = [f"{usage.prompt_tokens} prompt + {usage.completion_tokens} tokens{thinking}"]
    if timings.ttft_ms is not None:
        parts.append(f"ttft {timings.ttft_ms:.0f} ms")
    if timings.decode_tok_s is not None:
        parts.append(f"{timings.decode_tok_s:.1f} tok/s")
    if done.spec.mtp:
        parts.append(f"{done.spec.tokens_per_step:.2f} tokens a step")
    parts.append(f"finish: {done.finish_reason}")
    return "[" + ", ".join(parts) + "]"


def converse(client: Client, fields: dict[str, Any], quiet: bool) -> None:
    """Reads turns until /quit or the end of stdin. Raises DaemonError at once where nobody is at a terminal."""
    terminal = sys.stdin.isatty()
    if terminal:
        with contextlib.suppress(ImportError):
            import readline  # noqa: F401  line editing for input()
        client.ping()  # no daemon: better said before the first turn is typed
    messages: list[dict[str, Any]] = []
    while (text := _read_turn(terminal)) is not None:
        if not text.strip():
            continue
        if text.strip() == "/clear":
            messages.clear()
            continue
        messages.append({"role": "user", "content": text})
        try:
            answer, done = _answer(client, messages, fields, quiet)
        except DaemonError as error:
            if not terminal:
                raise
            click.echo(f"error: {error}", err=True)
            messages.pop()
            continue
        messages.append({"role": "assistant", "content": answer})
        if not quiet:
            click.echo(figures(done), err=True)


def _read_turn(terminal: bool) -> str | None:
    """The next turn, or None for the end."""
    while True:
        try:
            text = input("> " if terminal else "")
        except EOFError:
            return None
        except KeyboardInterrupt:
            if not terminal:
                raise
            click.echo("\n(/quit or Ctrl-D ends the chat)", err=True)
            continue
        return None if text.strip() == "/quit" else text


def _answer(
    client: Client, messages: list[dict[str, Any]], fields: dict[str, Any], quiet: bool
) -> tuple[str, Done]:
    """Shows the answer; Ctrl-C aborts it and keeps what came."""
    generation = client.generate(messages=messages, **fields)
    printer = Printer(quiet=quiet)
    try:
        done = printer.show(generation)
    except KeyboardInterrupt:
        generation.abort()
        done = printer.show(generation)
    return printer.text, done
