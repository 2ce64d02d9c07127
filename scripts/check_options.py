"""Command line options that checks of speculative and sharded against plain decoding have in common."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import click

Command = Callable[..., Any]


def check_options(prompts: int, max_tokens: int) -> Callable[[Command], Command]:
    """Adds them to a command, which gets what a shell calls --tp, --prompts and --json by the names below.

    prompts, max_tokens: defaults.
    """
    options = (
        click.option("--model", default="builtin:tiny", show_default=True, help="What the daemons load."),
        click.option("--dtype", default="auto", show_default=True, help="auto, bf16, fp16 or fp32."),
        click.option("--arms", default="plain,mtp1,mtp2,mtp3,mtp5,mtp8", show_default=True),
        click.option("--tp", "tps", default="1,2", show_default=True, help="Tensor parallel sizes, a list."),
        click.option("--prompts", "prompt_count", default=prompts, show_default=True, type=click.IntRange(0)),
        click.option(
            "--max-tokens",
            default=max_tokens,
            show_default=True,
            type=click.IntRange(1),
            help="Of an answer.",
        ),
        click.option(
            "--concurrency", default=8, show_default=True, type=click.IntRange(1), help="Requests at once."
        ),
        click.option("--seed", default=1, show_default=True, help="Of the prompts."),
        click.option(
            "--strict", is_flag=True, help="A near-tie fails, too (dtype fp32 on the built-in model)."
        ),
        click.option(
            "--json", "json_path", type=click.Path(path_type=Path), help="Write everything to this file."
        ),
        click.argument("daemon_flags", nargs=-1, type=click.UNPROCESSED),
    )

    def add(command: Command) -> Command:
        for option in reversed(options):
            command = option(command)
        return command

    return add
