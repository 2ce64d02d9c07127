"""Progress of long work on a terminal: one bar a stage of a load, or a line a stage where there is no terminal."""

from __future__ import annotations

from types import TracebackType
from typing import Self

from rich.console import Console
from rich.progress import BarColumn, Progress, TaskID, TextColumn, TimeElapsedColumn

from mstar.daemon.protocol import LoadProgress

_SCALES = ((1 << 30, "GiB"), (1 << 20, "MiB"), (1 << 10, "KiB"))
_STAGES = {
    "read": "reading",
    "shard": "sharding",
    "compile": "compiling",
    "warmup": "warming up",
    "capture": "capturing",
}


class LoadBars:
    """Shows the `load_progress` events it is called with, on stderr. NO_COLOR is respected (rich does).

    quiet: show nothing. console: another place to write to.
    """

    def __init__(self, quiet: bool = False, console: Console | None = None) -> None:
        self._console = console or Console(stderr=True, quiet=quiet)
        self._progress = Progress(
            TextColumn("{task.description:>12}"),
            BarColumn(),
            TextColumn("{task.fields[amount]}"),
            TimeElapsedColumn(),
            console=self._console,
            disable=quiet or not self._console.is_terminal,
        )
        self._bars: dict[str, TaskID] = {}
        self._told: set[str] = set()
        self._starting: TaskID | None = None

    def __call__(self, event: LoadProgress) -> None:
        """Moves the stage's bar."""
        self._begun()
        name = _STAGES.get(event.stage, event.stage)
        amount = amount_of(event.done, event.total, event.unit)
        if self._progress.disable:
            if event.done >= event.total and event.stage not in self._told:
                self._told.add(event.stage)
                self._console.print(f"{name}: {amount}", highlight=False)
            return
        if event.stage not in self._bars:
            self._bars[event.stage] = self._progress.add_task(name, total=event.total, amount=amount)
        self._progress.update(self._bars[event.stage], completed=event.done, total=event.total, amount=amount)

    def __enter__(self) -> Self:
        self._progress.start()
        if not self._progress.disable:  # ranks take seconds to start, and say nothing meanwhile
            self._starting = self._progress.add_task("starting", total=None, amount="ranks")
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self._progress.stop()

    def _begun(self) -> None:
        if self._starting is not None:
            self._progress.update(self._starting, total=1, completed=1)
            self._starting = None


def amount_of(done: int, total: int, unit: str) -> str:
    """`3.0/11.0 MiB` for bytes, `3/11 tensors` for anything else."""
    if unit != "bytes":
        return f"{done}/{total} {unit}"
    for scale, name in _SCALES:
        if total >= scale:
            return f"{done / scale:.1f}/{total / scale:.1f} {name}"
    return f"{done}/{total} bytes"
