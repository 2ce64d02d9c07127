"""Cells of a check, an arm at a tp each, and how their answers fare against plain decoding on one rank."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import asdict, dataclass, field
from typing import Any

from rich.console import Console
from rich.table import Table

from mstar.scripts.arms import PLAIN, Arm, ArmError, parse_arms
from mstar.scripts.check_client import Answer

WIDTH = 120  # columns of a table that goes to a file or a pipe
Cell = tuple[Arm, int]  # and the tp


class CheckError(Exception):
    """The check cannot go on; the message is for the person who runs it."""


@dataclass(slots=True)
class CellResult:
    """One cell against the reference. details: one entry an answer that differs."""

    arm: str
    tp: int
    prompts: int
    tokens: int
    k: int  # drafts a step as loaded
    steps: int
    drafted: int
    accepted: int
    equal: int = 0
    near_ties: int = 0
    divergences: int = 0
    details: list[dict[str, Any]] = field(default_factory=list)

    @property
    def tau(self) -> float:
        return self.accepted / self.steps if self.steps else 0.0

    @property
    def drafts_per_step(self) -> float:
        return self.drafted / self.steps if self.steps else 0.0

    @property
    def thin(self) -> bool:
        """Whether the load's policy kept so many steps without drafts that little was checked."""
        return self.drafts_per_step < self.k / 2

    def add(self, detail: dict[str, Any]) -> None:
        """Counts an answer that differs by its `verdict`: "near-tie" or "divergence"."""
        near = detail["verdict"] == "near-tie"
        self.near_ties += near
        self.divergences += not near
        self.details.append(detail)

    def as_row(self) -> dict[str, Any]:
        return {
            **asdict(self),
            "tau": self.tau,
            "tokens_per_step": self.tau + 1,
            "drafts_per_step": self.drafts_per_step,
            "thin": self.thin,
        }


def cells_of(arms: str, tps: str, elsewhere: bool = False) -> list[Cell]:
    """Every arm at every tp but the reference itself, and that too if the reference runs elsewhere.

    Raises ArmError and ValueError.
    """
    parsed = parse_arms(arms)
    declined = [arm.name for arm in parsed if arm.declined]
    if declined:
        raise ArmError(f"{', '.join(declined)}: checks hold drafts on, so they take plain and mtp1 to mtp8")
    cells = [(arm, tp) for tp in map(int, tps.split(",")) for arm in parsed]
    return [cell for cell in cells if elsewhere or cell != (PLAIN, 1)]


def cell_flags(cell: Cell, dtype: str, daemon_flags: Sequence[str]) -> list[str]:
    """What a cell's daemon is started with."""
    arm, tp = cell
    fixed = ["--mtp-fixed"] if arm.drafts else []  # a cell that stops drafting checks nothing
    return ["--tp", str(tp), "--dtype", dtype, *arm.daemon_flags, *fixed, *daemon_flags]


def check_loaded(cell: Cell, loaded: dict[str, Any]) -> None:
    """A cell that silently runs without drafts would check nothing. Raises CheckError."""
    arm, tp = cell
    spec = loaded["spec"]
    if spec["k"] != arm.drafts:
        raise CheckError(f"{arm.name} at tp {tp} loaded k {spec['k']}: {spec['reason']}")


def tally(cell: Cell, answers: Sequence[Answer], reference: Sequence[Answer]) -> tuple[CellResult, list[int]]:
    """A cell's result with the answers that are equal counted, and the indices of the others."""
    differ = [
        index
        for index, (mine, theirs) in enumerate(zip(answers, reference, strict=True))
        if mine.outcome != theirs.outcome
    ]
    result = CellResult(
        arm=cell[0].name,
        tp=cell[1],
        prompts=len(answers),
        tokens=sum(len(answer.ids) for answer in answers),
        k=cell[0].drafts,
        steps=sum(answer.steps for answer in answers),
        drafted=sum(answer.drafted for answer in answers),
        accepted=sum(answer.accepted for answer in answers),
        equal=len(answers) - len(differ),
    )
    return result, differ


def verdict_of(cells: Sequence[CellResult], strict: bool) -> str:
    """ "fail" for a divergence, and with `strict` for a near-tie; "inconclusive" where a cell checked little."""
    if not cells or any(cell.divergences or (strict and cell.near_ties) for cell in cells):
        return "fail"
    return "inconclusive" if any(cell.thin for cell in cells) else "pass"


def print_cells(title: str, rows: Sequence[dict[str, Any]], console: Console) -> None:
    table = Table(title=title)
    table.add_column("arm")
    for column in ("tp", "prompts", "tokens", "equal", "near-ties", "divergences"):
        table.add_column(column, justify="right")
    for column in ("drafts a step", "tau", "tokens a step"):
        table.add_column(column, justify="right")
    for row in rows:
        counts = (row[name] for name in ("tp", "prompts", "tokens", "equal", "near_ties", "divergences"))
        figures = (f"{row[name]:.2f}" for name in ("drafts_per_step", "tau", "tokens_per_step"))
        table.add_row(row["arm"], *map(str, counts), *figures)
    console.print(table)
    for row in rows:
        if row["thin"]:
            console.print(
                f"[yellow]{row['arm']} at tp {row['tp']}: the load's policy let few drafts be checked"
            )
        for detail in row["details"]:
            console.print(f"{row['arm']} at tp {row['tp']}: {detail}", highlight=False)
