"""Greedy answers of speculative and sharded decoding against those of plain decoding on one rank.

    python -m mstar.scripts.check_greedy --model builtin:tiny --arms plain,mtp1,mtp3,mtp8 --tp 1,2,4

Every cell (an arm at a tp) is a daemon of its own; the reference is plain decoding on one rank. Answers are equal in
tokens, text and finish reason, or part at a near-tie (`mstar.scripts.near_ties`), or diverge, which is a failure.

Answers are first asked for without logprobs, the way most requests run. Where one differs it is asked for again, in
its cell and in the reference, with logprobs of the best two; the gap comes from these, and the size of the largest
logit, which logprobs do not tell, from a pass of the same dtype in this process.
"""

from __future__ import annotations

import json
import sys
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import click
from rich.console import Console

from mstar.daemon.client import DaemonError, NoDaemon
from mstar.loader import LoadError, resolve
from mstar.scripts.arms import PLAIN, ArmError
from mstar.scripts.check_cells import (
    WIDTH,
    Cell,
    CellResult,
    CheckError,
    cell_flags,
    cells_of,
    check_loaded,
    print_cells,
    tally,
    verdict_of,
)
from mstar.scripts.check_client import Answer, ask_all
from mstar.scripts.check_options import check_options
from mstar.scripts.check_prompts import LONG, CheckPrompt, long_prompts, short_prompts
from mstar.scripts.near_ties import Difference, allowed_gap, difference, first_difference
from mstar.scripts.offline_model import OfflineModel
from mstar.scripts.planted import planted_acceptance, planted_note
from mstar.scripts.serving_daemon import launched_daemon
from mstar.scripts.serving_load import BenchError


@click.command()
@check_options(prompts=200, max_tokens=96)
@click.option("--long", "long_count", default=4, show_default=True, help="Long prompts beside them.")
@click.option("--long-tokens", default=4000, show_default=True, help="Length of a long prompt.")
@click.option("--reference-device", help="Where the reference runs, if not where the cells do: `cpu`, say.")
def main(
    model: str,
    dtype: str,
    arms: str,
    tps: str,
    prompt_count: int,
    max_tokens: int,
    long_count: int,
    long_tokens: int,
    reference_device: str | None,
    concurrency: int,
    seed: int,
    strict: bool,
    json_path: Path | None,
    daemon_flags: tuple[str, ...],
) -> None:
    """Checks that greedy text does not depend on speculation or tp. Flags after `--` go to the daemons."""
    progress = Console(stderr=True)
    try:
        cells = cells_of(arms, tps, reference_device is not None)
        path = resolve(model)
        prompts = short_prompts(path, prompt_count, seed)
        prompts += long_prompts(path, long_count, long_tokens, seed)
        check = Check(model, dtype, prompts, max_tokens, concurrency, daemon_flags, reference_device)
        check.ask_reference()
        results = []
        for cell in cells:
            progress.print(f"{cell[0].name} at tp {cell[1]}", highlight=False)
            results.append(check.run_cell(cell))
        check.judge(results)
    except (ArmError, BenchError, CheckError, DaemonError, LoadError, NoDaemon, ValueError) as error:
        raise click.ClickException(f"{error}") from error
    report = check.report(results, strict, planted_acceptance(path))
    print_report(report, Console() if sys.stdout.isatty() else Console(width=WIDTH))
    if json_path is not None:
        json_path.write_text(json.dumps(report, indent=1) + "\n")
    if report["verdict"] != "pass":
        raise SystemExit(1)


class Check:
    """The prompts, the reference's answers, and cells against them."""

    def __init__(
        self,
        model: str,
        dtype: str,
        prompts: Sequence[CheckPrompt],
        max_tokens: int,
        concurrency: int,
        daemon_flags: Sequence[str],
        reference_device: str | None = None,
    ) -> None:
        self.model = model
        self.dtype = dtype
        self.prompts = prompts
        self.concurrency = concurrency
        self.daemon_flags = daemon_flags
        self.reference_flags = ["--device", reference_device] if reference_device else []
        # long prompts go on past the end of their answer: what is behind it depends on all of them
        self.requests = [
            {"prompt_ids": prompt.ids, "max_tokens": max_tokens, "ignore_eos": prompt.kind == LONG}
            for prompt in prompts
        ]
        self.loaded: dict[str, Any] = {}  # what the reference's daemon said
        self.device = ""  # of the cells
        self.reference: list[Answer] = []
        self._scored: list[Answer] = []  # the reference's, with logprobs
        self._parted: list[tuple[CellResult, int, Difference]] = []

    def ask_reference(self) -> None:
        """Plain decoding on one rank: with and without logprobs, which must not change a token."""
        flags = [*self._flags((PLAIN, 1)), *self.reference_flags]  # a later one wins
        with launched_daemon(self.model, flags) as (link, self.loaded):
            self.reference = ask_all(link.address, self.requests, self.concurrency)
            self._scored = ask_all(link.address, _scored(self.requests), self.concurrency)
        if not self.loaded["device"].startswith("cpu"):
            # a step's rows choose its kernels there: an answer may part from itself, at near-ties
            raise CheckError(
                f"on {self.loaded['device']} answers depend on their batch: give --reference-device cpu"
            )
        for index, (plain, scored) in enumerate(zip(self.reference, self._scored, strict=True)):
            if plain.outcome != scored.outcome:
                raise CheckError(f"prompt {index}: plain decoding on one rank gives two answers")

    def run_cell(self, cell: Cell) -> CellResult:
        """Asks a cell; answers that differ wait for `judge`."""
        with launched_daemon(self.model, self._flags(cell)) as (link, loaded):
            check_loaded(cell, loaded)
            self.device = loaded["device"]
            on_cpu = self.device.startswith("cpu")
            answers = ask_all(link.address, self.requests, self.concurrency)
            result, differ = tally(cell, answers, self.reference)
            places = {i: first_difference(answers[i].ids, self.reference[i].ids) for i in differ}
            # Elsewhere an answer may part from itself when it is asked for again, at near-ties, before the difference
            # even: the one token is asked for, behind what both have.
            again = [self.requests[i] if on_cpu else self._behind(i, places[i] or 0) for i in differ]
            scores = ask_all(link.address, _scored(again), self.concurrency)
        for index, scored in zip(differ, scores, strict=True):
            place = places[index]
            if place is None or (on_cpu and scored.ids[: place + 1] != answers[index].ids[: place + 1]):
                why = (
                    "equal ids, other text or reason" if place is None else "another answer when asked again"
                )
                result.add({"prompt": index, "index": place, "verdict": "divergence", "why": why})
                continue
            mine, theirs = (
                run.entries[at][1] if at < len(run.entries) else []
                for run, at in ((scored, place if on_cpu else 0), (self._scored[index], place))
            )
            ids = self.reference[index].ids
            self._parted.append((result, index, difference(place, answers[index].ids, ids, mine, theirs)))
        return result

    def judge(self, results: Sequence[CellResult]) -> None:
        """Tells near-ties from divergences, with the largest logits from a pass in this process."""
        tops: dict[tuple[int, int], float] = {}
        offline: OfflineModel | None = None
        dtype = self.loaded["dtype"]
        for result, prompt, parted in self._parted:
            key = (prompt, parted.index)
            if parted.gap is not None and key not in tops and dtype != "fp32":
                offline = offline or OfflineModel(self.model, self.dtype)
                ids = self.prompts[prompt].ids + self.reference[prompt].ids[: parted.index]
                tops[key] = float(offline.next_logits(ids).max())
            allowed = allowed_gap(dtype, tops.get(key, 0.0))
            near = parted.gap is not None and parted.gap <= allowed
            result.add(
                {
                    "prompt": prompt,
                    "kind": self.prompts[prompt].kind,
                    "index": parted.index,
                    "tokens": parted.tokens,
                    "gap": parted.gap,
                    "allowed": allowed,
                    "top_logit": tops.get(key),
                    "verdict": "near-tie" if near else "divergence",
                }
            )
        self._parted.clear()

    def report(self, results: Sequence[CellResult], strict: bool, planted: float | None) -> dict[str, Any]:
        return {
            "schema": 1,
            "check": "greedy",
            "model": self.model,
            "fingerprint": self.loaded["fingerprint"],
            "planted": planted,
            "dtype": self.loaded["dtype"],
            "device": self.device,
            "reference_device": self.loaded["device"],
            "prompts": [{"kind": prompt.kind, "tokens": len(prompt.ids)} for prompt in self.prompts],
            "strict": strict,
            "verdict": verdict_of(results, strict),
            "cells": [cell.as_row() for cell in results],
        }

    def _behind(self, index: int, place: int) -> dict[str, Any]:
        """A request for the one token that follows `place` tokens of the reference's answer."""
        ids = self.prompts[index].ids + self.reference[index].ids[:place]
        return {**self.requests[index], "prompt_ids": ids, "max_tokens": 1}

    def _flags(self, cell: Cell) -> list[str]:
        return cell_flags(cell, self.dtype, self.daemon_flags)


def _scored(requests: Sequence[dict[str, Any]]) -> list[dict[str, Any]]:
    return [{**request, "logprobs": 2} for request in requests]


def print_report(report: dict[str, Any], console: Console) -> None:
    lengths = [prompt["tokens"] for prompt in report["prompts"]]
    title = (
        f"greedy against plain at tp 1: {report['model']} ({report['fingerprint'][:12]}), {report['dtype']}, "
        f"{len(lengths)} prompts of {min(lengths)} to {max(lengths)} tokens{planted_note(report['planted'])}"
    )
    print_cells(title, report["cells"], console)
    console.print(f"verdict: {report['verdict']}", highlight=False)


if __name__ == "__main__":
    main()
