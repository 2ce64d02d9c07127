"""Long greedy runs, speculative against plain, in this process: tokens, and the states that they leave.

    python -m mstar.scripts.check_long --model builtin:tiny --arms mtp3 --tokens 2048

Requests go on past the end of sequence. Tokens are equal, or part at a near-tie (`mstar.scripts.near_ties`), or
diverge. At some lengths the speculative run's states are set beside those of the plain run at the same length: S
and the conv's inputs of the linear layers, keys and values of the last block of the others.
"""

from __future__ import annotations

import json
import sys
from collections.abc import Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import click
import torch
from rich.console import Console
from rich.table import Table

from mstar.kernels.native import set_threads
from mstar.loader import LoadError, fingerprint
from mstar.ranks.messages import SamplingParams
from mstar.scripts.arms import ArmError, parse_arms
from mstar.scripts.check_cells import WIDTH, CheckError
from mstar.scripts.check_prompts import CheckPrompt, short_prompts
from mstar.scripts.near_ties import allowed_gap, difference, first_difference
from mstar.scripts.offline_engine import OfflineEngine
from mstar.scripts.offline_model import OfflineModel
from mstar.scripts.planted import planted_note

# Of the plain state's norm. The same operations in the same order give 0; a kernel that sums in another order gets
# this much from one rounding more or less of what it reads.
STATE_BOUNDS = {"fp32": 1e-4, "fp16": 5e-3, "bf16": 2e-2}
COMPARED_EVERY = 512  # tokens; and the last time a few tokens before the end


@dataclass(slots=True)
class LongRun:
    """One request's tokens with the best two of each, and its states by length."""

    ids: list[int] = field(default_factory=list)
    tops: list[list[tuple[int, float]]] = field(default_factory=list)
    states: dict[int, dict[str, torch.Tensor]] = field(default_factory=dict)
    steps: int = 0
    accepted: int = 0


@click.command()
@click.option("--model", default="builtin:tiny", show_default=True, help="A directory, hub id or built-in.")
@click.option("--dtype", default="auto", show_default=True, help="auto, bf16, fp16 or fp32.")
@click.option("--device", default="cpu", show_default=True, help="cpu or cuda.")
@click.option("--arms", default="mtp3", show_default=True, help="mtp1 to mtp8, a list.")
@click.option("--prompts", "prompt_count", default=8, show_default=True, type=click.IntRange(1))
@click.option("--tokens", default=2048, show_default=True, type=click.IntRange(1), help="Of each run.")
@click.option("--seed", default=1, show_default=True, help="Of the prompts.")
@click.option("--threads", default=1, show_default=True, type=click.IntRange(1), help="On a CPU.")
@click.option("--json", "json_path", type=click.Path(path_type=Path), help="Write everything to this file.")
def main(
    model: str,
    dtype: str,
    device: str,
    arms: str,
    prompt_count: int,
    tokens: int,
    seed: int,
    threads: int,
    json_path: Path | None,
) -> None:
    """Checks long speculative runs and their states."""
    torch.set_num_threads(threads)
    set_threads(threads)
    try:
        loaded = OfflineModel(model, dtype, device)
        prompts = short_prompts(loaded.path, prompt_count, seed)
        rows = [row for arm in parse_arms(arms) for row in check_arm(loaded, prompts, tokens, arm.drafts)]
    except (ArmError, CheckError, LoadError) as error:
        raise click.ClickException(f"{error}") from error
    report = {
        "schema": 1,
        "check": "long",
        "model": model,
        "fingerprint": fingerprint(loaded.path),
        "planted": loaded.planted,
        "dtype": loaded.dtype_name,
        "tokens": tokens,
        "state_bound": STATE_BOUNDS[loaded.dtype_name],
        "verdict": "pass" if rows and all(row["verdict"] != "divergence" for row in rows) else "fail",
        "rows": rows,
    }
    print_report(report, Console() if sys.stdout.isatty() else Console(width=WIDTH))
    if json_path is not None:
        json_path.write_text(json.dumps(report, indent=1) + "\n")
    if report["verdict"] != "pass":
        raise SystemExit(1)


def check_arm(
    model: OfflineModel, prompts: Sequence[CheckPrompt], tokens: int, drafts: int
) -> list[dict[str, Any]]:
    """One row a prompt."""
    every = [*range(COMPARED_EVERY, tokens, COMPARED_EVERY), max(1, tokens - drafts - 1)]
    wanted = [[len(prompt.ids) + count for count in every] for prompt in prompts]
    speculative = run(model, prompts, tokens, drafts, wanted, exact=False)
    plain = run(model, prompts, tokens, 0, [sorted(r.states) for r in speculative], exact=True)
    return [
        {"prompt": index, "arm": f"mtp{drafts}", **compare(model, prompts[index], mine, theirs)}
        for index, (mine, theirs) in enumerate(zip(speculative, plain, strict=True))
    ]


def run(
    model: OfflineModel,
    prompts: Sequence[CheckPrompt],
    tokens: int,
    drafts: int,
    wanted: Sequence[Sequence[int]],
    exact: bool,
) -> list[LongRun]:
    """All prompts at once, with states at the first length at or past each of `wanted`; at it, where `exact`."""
    longest = max(len(prompt.ids) for prompt in prompts) + tokens
    if longest > model.config.max_position_embeddings:
        most = model.config.max_position_embeddings
        raise CheckError(f"prompts and --tokens take {longest} positions, and the model has {most}")
    engine = OfflineEngine(model, drafts=drafts, max_num_seqs=len(prompts), max_seq=longest)
    params = SamplingParams(max_tokens=tokens, seed=0, logprobs=2)
    runs = [LongRun() for _ in prompts]
    for index, prompt in enumerate(prompts):
        engine.submit(index, prompt.ids, params)
    left = [list(lengths) for lengths in wanted]
    while engine.step():
        for part in engine.runs:
            mine = runs[part.request_id]
            mine.ids += part.ids
            mine.tops += [[(token, value) for token, value in entry[1]] for entry in part.logprobs or ()]
            mine.steps += part.drafted is not None
            mine.accepted += part.accepted
        for index, (slot, length) in engine.lengths().items():
            due = [at for at in left[index] if at <= length]
            if due and (length == due[-1] or not exact):
                runs[index].states[length] = engine.states(slot)
            left[index] = left[index][len(due) :]
    return runs


def compare(model: OfflineModel, prompt: CheckPrompt, mine: LongRun, theirs: LongRun) -> dict[str, Any]:
    """What became of one prompt: "equal", "near-tie" or "divergence", of tokens or of states."""
    place = first_difference(mine.ids, theirs.ids)
    row: dict[str, Any] = {
        "tokens": len(mine.ids),
        "first_difference": place,
        "tau": mine.accepted / mine.steps if mine.steps else 0.0,
        "steps": mine.steps,
        "verdict": "equal",
    }
    if place is not None:
        ids = theirs.ids
        parted = difference(place, mine.ids, ids, _at(mine.tops, place), _at(theirs.tops, place))
        top_logit = float(model.next_logits(prompt.ids + ids[:place]).max())
        allowed = allowed_gap(model.dtype_name, top_logit)
        near = parted.gap is not None and parted.gap <= allowed
        row |= {"gap": parted.gap, "allowed": allowed, "verdict": "near-tie" if near else "divergence"}
    # a state at a length has seen the tokens before it alone
    equal_until = len(prompt.ids) + (len(mine.ids) if place is None else place)
    lengths = sorted(length for length in mine.states if length <= equal_until and length in theirs.states)
    row["states_at"] = lengths
    row["state_difference"] = max(
        (
            relative(mine.states[length][name], value)
            for length in lengths
            for name, value in theirs.states[length].items()
        ),
        default=None,
    )
    bound = STATE_BOUNDS[model.dtype_name]
    if (not lengths and place is None) or (row["state_difference"] or 0.0) > bound:
        row["verdict"] = "divergence"
    return row


def relative(a: torch.Tensor, b: torch.Tensor) -> float:
    """The norm of the difference over b's."""
    size = float(b.double().norm())
    return float((a.double() - b.double()).norm()) / size if size else float((a != b).any())


def _at(tops: Sequence[list[tuple[int, float]]], place: int) -> list[tuple[int, float]]:
    return tops[place] if place < len(tops) else []


def print_report(report: dict[str, Any], console: Console) -> None:
    table = Table(
        title=f"long greedy runs against plain: {report['model']} ({report['fingerprint'][:12]}), "
        f"{report['dtype']}, {report['tokens']} tokens{planted_note(report['planted'])}"
    )
    for column in ("arm", "prompt", "tokens", "verdict"):
        table.add_column(column)
    for column in ("parts at", "steps", "tau", "states compared at", "largest difference"):
        table.add_column(column, justify="right")
    for row in report["rows"]:
        apart = row["first_difference"]
        difference_seen = row["state_difference"]
        table.add_row(
            row["arm"],
            str(row["prompt"]),
            str(row["tokens"]),
            row["verdict"],
            "" if apart is None else str(apart),
            str(row["steps"]),
            f"{row['tau']:.2f}",
            ", ".join(map(str, row["states_at"])),
            "" if difference_seen is None else f"{difference_seen:.1e}",
        )
    console.print(table)
    console.print(f"verdict: {report['verdict']}", highlight=False)


if __name__ == "__main__":
    main()
