"""What the daemon's text side costs a token: one token a push, as decode gives them.

python -m mstar.scripts.bench_text [--model builtin:tiny] FILE
"""

from __future__ import annotations

import time
from pathlib import Path
from typing import Any

import click

from mstar.daemon.text import load_text
from mstar.loader.resolve import resolve

CASES: dict[str, dict[str, Any]] = {
    "plain": {},
    "with ids": {"return_ids": True},
    "16 stop strings that rarely begin": {"stop": [f"{c}top sequence {c}" for c in "abcdefghijklmnop"]},
    "stop strings that often begin": {"stop": ["the \ue000", " a\ue000", "e\ue000"]},
}


@click.command()
@click.option("--model", default="builtin:tiny", show_default=True)
@click.argument("text", type=click.Path(exists=True, dir_okay=False, path_type=Path))
def main(model: str, text: Path) -> None:
    """Pushes the tokens of TEXT through an emitter; the best of five passes, in microseconds a token."""
    loaded = load_text(resolve(model))
    ids = loaded.encode(text.read_text())
    click.echo(f"{model}, {len(ids)} tokens")
    for name, options in CASES.items():
        best = float("inf")
        for _ in range(5):
            emitter = loaded.emitter(**options)
            start = time.perf_counter()
            for token_id in ids:
                emitter.push((token_id,))
            best = min(best, time.perf_counter() - start)
        click.echo(f"{name}: {best / len(ids) * 1e6:.2f} us")


if __name__ == "__main__":
    main()
