"""Sampled answers under seeds, speculative and sharded against plain on one rank; and a chi-square of the draws.

    python -m mstar.scripts.check_sampled --model builtin:tiny --arms plain,mtp1,mtp3,mtp8 --tp 1,2

The same seed must give the same tokens in every cell. Where two answers part, exact logits from a pass in this
process, penalised, scaled, filtered and noised once more (`mstar.scripts.sampled_reference`), say whether both
tokens were within 2 bf16 units in the last place of being drawn (float32: 1e-4): a near-tie.

The chi-square draws the first tokens of one prompt with many seeds, through the daemon of the first cell that
speculates, and holds them to exact probabilities. The second of them is drawn by a step that checks drafts.
"""

from __future__ import annotations

import json
import sys
from collections import Counter
from collections.abc import Sequence
from dataclasses import asdict
from pathlib import Path
from typing import Any

import click
import torch
from rich.console import Console
from rich.table import Table

from mstar.daemon.client import DaemonError, NoDaemon
from mstar.daemon.text import load_text
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
from mstar.scripts.check_prompts import short_prompts
from mstar.scripts.chi_square import chi_square
from mstar.scripts.near_ties import allowed_gap, first_difference
from mstar.scripts.offline_model import OfflineModel
from mstar.scripts.planted import planted_acceptance, planted_note
from mstar.scripts.sampled_reference import Sampling, is_near_tie, probabilities, scaled_logits
from mstar.scripts.serving_daemon import launched_daemon
from mstar.scripts.serving_load import BenchError

SETTINGS = (
    Sampling(),
    Sampling(temperature=0.8, top_k=20, top_p=0.9),
    Sampling(temperature=1.2, top_p=0.95),
    Sampling(min_p=0.05, presence_penalty=0.5),
    Sampling(temperature=0.7, repetition_penalty=1.1, frequency_penalty=0.2),
)
# Draws for the chi-square: everything for the first token, and the best few for the first two together.
OPEN = Sampling()
NARROW = Sampling(temperature=2.0, top_k=8)
STORY = "Write a short story about a brass key."
LEAST_P = 1e-4
CHI_CONCURRENCY = 64


@click.command()
@check_options(prompts=100, max_tokens=64)
@click.option("--draws", default=20_000, show_default=True, help="For each chi-square; 0: none.")
def main(
    model: str,
    dtype: str,
    arms: str,
    tps: str,
    prompt_count: int,
    max_tokens: int,
    draws: int,
    concurrency: int,
    seed: int,
    strict: bool,
    json_path: Path | None,
    daemon_flags: tuple[str, ...],
) -> None:
    """Checks that sampled text depends on its seed alone. Flags after `--` go to the daemons."""
    progress = Console(stderr=True)
    try:
        cells = cells_of(arms, tps)
        check = Check(model, dtype, daemon_flags, concurrency)
        check.make_requests(prompt_count, max_tokens, seed)
        check.ask_reference()
        speculating = next((cell for cell in cells if cell[0].drafts), (PLAIN, 1))
        results = []
        for cell in cells:
            progress.print(f"{cell[0].name} at tp {cell[1]}", highlight=False)
            results.append(check.run_cell(cell))
        tests = []
        if draws:
            progress.print(f"chi-square, {speculating[0].name} at tp {speculating[1]}", highlight=False)
            tests = check.chi_squares(speculating, draws)
    except (ArmError, BenchError, CheckError, DaemonError, LoadError, NoDaemon, ValueError) as error:
        raise click.ClickException(f"{error}") from error
    failed = [test for test in tests if test["p_value"] < LEAST_P or test["impossible"]]
    verdict = "fail" if failed else verdict_of(results, strict)
    if verdict == "pass" and speculating[0].drafts and tests and tests[-1]["drafts_checked"] < draws / 2:
        verdict = "inconclusive"  # most second tokens were drawn by plain steps
    report = {
        "schema": 1,
        "check": "sampled",
        "model": model,
        "fingerprint": check.loaded["fingerprint"],
        "planted": planted_acceptance(check.path),
        "dtype": check.loaded["dtype"],
        "settings": [setting.fields() for setting in SETTINGS],
        "strict": strict,
        "verdict": verdict,
        "cells": [cell.as_row() for cell in results],
        "chi_square": tests,
    }
    print_report(report, Console() if sys.stdout.isatty() else Console(width=WIDTH))
    if json_path is not None:
        json_path.write_text(json.dumps(report, indent=1) + "\n")
    if report["verdict"] != "pass":
        raise SystemExit(1)


class Check:
    """The requests, the reference's answers, and cells against them."""

    def __init__(self, model: str, dtype: str, daemon_flags: Sequence[str], concurrency: int) -> None:
        self.model = model
        self.path = resolve(model)
        self.dtype = dtype
        self.daemon_flags = daemon_flags
        self.concurrency = concurrency
        self.loaded: dict[str, Any] = {}
        self.reference: list[Answer] = []
        self.requests: list[dict[str, Any]] = []
        self._offline: OfflineModel | None = None

    def make_requests(self, count: int, max_tokens: int, seed: int) -> None:
        """Prompts with the settings in turn, a seed each."""
        self.requests = [
            {
                "prompt_ids": prompt.ids,
                "max_tokens": max_tokens,
                "seed": 7919 * index + seed,
                **SETTINGS[index % len(SETTINGS)].fields(),
            }
            for index, prompt in enumerate(short_prompts(self.path, count, seed))
        ]

    def ask_reference(self) -> None:
        """Plain decoding on one rank."""
        with launched_daemon(self.model, self._flags((PLAIN, 1))) as (link, self.loaded):
            self.reference = ask_all(link.address, self.requests, self.concurrency)

    def run_cell(self, cell: Cell) -> CellResult:
        with launched_daemon(self.model, self._flags(cell)) as (link, loaded):
            check_loaded(cell, loaded)
            answers = ask_all(link.address, self.requests, self.concurrency)
        result, differ = tally(cell, answers, self.reference)
        for index in differ:
            result.add(self._judge(index, answers[index]))
        return result

    def chi_squares(self, cell: Cell, draws: int) -> list[dict[str, Any]]:
        """The first token with everything allowed, and the first two together of the best few."""
        prompt = load_text(self.path).render([{"role": "user", "content": STORY}])
        tests = []
        with launched_daemon(self.model, self._flags(cell)) as (link, _):
            for name, sampling, length in (("first token", OPEN, 1), ("first two tokens", NARROW, 2)):
                request = {
                    "prompt_ids": prompt,
                    "ignore_eos": True,
                    "max_tokens": 1 if length == 1 else length + 2,  # room for drafts to be checked
                    **sampling.fields(),
                }
                answers = ask_all(
                    link.address, [{**request, "seed": seed} for seed in range(draws)], CHI_CONCURRENCY
                )
                counts = Counter(tuple(answer.ids[:length]) for answer in answers)
                test = chi_square(counts, self._expected(prompt, sampling, length))
                tests.append(
                    {
                        "draws_of": name,
                        "cell": f"{cell[0].name} at tp {cell[1]}",
                        "sampling": sampling.fields(),
                        "drafts_checked": sum(answer.drafted for answer in answers),
                        **asdict(test),
                    }
                )
        return tests

    def _expected(self, prompt: list[int], sampling: Sampling, length: int) -> dict[tuple[int, ...], float]:
        """Exact probabilities of the first `length` tokens."""
        reached: dict[tuple[int, ...], float] = {(): 1.0}
        for _ in range(length):
            longer: dict[tuple[int, ...], float] = {}
            for before, chance in reached.items():
                logits = self._logits(prompt + list(before))
                each = probabilities(scaled_logits(logits, sampling, prompt, before), sampling)
                for token in each.nonzero().flatten().tolist():
                    longer[(*before, token)] = chance * float(each[token])
            reached = longer
        return reached

    def _judge(self, index: int, answer: Answer) -> dict[str, Any]:
        """What the difference between an answer and the reference's is."""
        request, reference = self.requests[index], self.reference[index]
        place = first_difference(answer.ids, reference.ids)
        detail: dict[str, Any] = {"prompt": index, "index": place, "verdict": "divergence"}
        if place is None or place >= min(len(answer.ids), len(reference.ids)):
            return detail | {"why": "one answer ends where the other goes on, with equal tokens before"}
        tokens = answer.ids[place], reference.ids[place]
        prompt, before = request["prompt_ids"], reference.ids[:place]
        sampling = SETTINGS[index % len(SETTINGS)]
        logits = self._logits(prompt + before)
        allowed = allowed_gap(self.loaded["dtype"], float(logits.max())) / sampling.temperature
        near = is_near_tie(
            scaled_logits(logits, sampling, prompt, before),
            sampling,
            request["seed"],
            len(prompt) + place,
            tokens,
            allowed,
        )
        return detail | {
            "tokens": tokens,
            "allowed": allowed,
            "verdict": "near-tie" if near else "divergence",
        }

    def _logits(self, ids: list[int]) -> torch.Tensor:
        if self._offline is None:
            self._offline = OfflineModel(self.model, self.dtype)
        return self._offline.next_logits(ids)

    def _flags(self, cell: Cell) -> list[str]:
        return cell_flags(cell, self.dtype, self.daemon_flags)


def print_report(report: dict[str, Any], console: Console) -> None:
    title = (
        f"sampled under seeds against plain at tp 1: {report['model']} ({report['fingerprint'][:12]}), "
        f"{report['dtype']}{planted_note(report['planted'])}"
    )
    print_cells(title, report["cells"], console)
    if report["chi_square"]:
        table = Table(title=f"draws against exact probabilities{planted_note(report['planted'])}")
        table.add_column("draws of")
        table.add_column("cell")
        for column in ("draws", "bins", "chi-square", "p", "impossible", "drafts checked"):
            table.add_column(column, justify="right")
        for test in report["chi_square"]:
            counts = (str(test[name]) for name in ("draws", "bins"))
            figures = (f"{test['statistic']:.1f}", f"{test['p_value']:.4f}", str(test["impossible"]))
            table.add_row(test["draws_of"], test["cell"], *counts, *figures, str(test["drafts_checked"]))
        console.print(table)
    console.print(f"verdict: {report['verdict']}", highlight=False)


if __name__ == "__main__":
    main()
