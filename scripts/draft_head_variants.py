"""How far the MTP head's drafts are accepted, by depth, for each variant of the head that exists.

    python -m mstar.scripts.draft_head_variants --model builtin:tiny

Chats with their answers are run through the model token by token. After every token the head drafts, and the
trunk checks the drafts as a speculative step does: a draft counts if it and all drafts before it are what the
trunk, given them, finds likeliest. The chat then goes on with its own next token, so every position is measured
once, and the head's KV holds true hiddens up to it.

Nothing can guess the random codes of look-up chats, and half of the training mix's tokens are theirs: of 150 drawn
chats a few long ones decide the figure. So by default the chats have the training set's mix exactly
(`tasks.balanced_chats`), the figure is the mean over several seeds, and the table shows how far these lie apart.
"""

from __future__ import annotations

import json
import statistics
import sys
import time
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import click
import torch
from rich.console import Console
from rich.table import Table

from mstar.arch import DecodeInputs, MtpHead, PrefillInputs
from mstar.daemon.text import TextModel, load_text
from mstar.kernels.native import set_threads
from mstar.kernels.rows import Rows
from mstar.loader import LoadError, fingerprint
from mstar.scripts.offline_model import OfflineModel, Rooms
from mstar.scripts.planted import planted_note
from mstar.scripts.tasks import SHEET, Turn, balanced_chats, chats, render

VARIANTS = ("bf16", "fp32")
WHOLE, ANSWERS = "whole chats", "assistant turns"


@dataclass(frozen=True, slots=True)
class Sample:
    """A chat in tokens; in_answer: whether each of them belongs to an assistant's turn, its end mark included."""

    ids: list[int]
    in_answer: list[bool]
    kind: str = ""  # whole chats are counted by kind, too


@dataclass(slots=True)
class Share:
    """Positions whose drafts all lie in a kind of text, and how many had their first 1, 2, ... accepted."""

    positions: int
    accepted: list[int]

    def rates(self) -> list[float]:
        return [count / max(1, self.positions) for count in self.accepted]


@click.command()
@click.option("--model", default="builtin:tiny", show_default=True, help="A directory, hub id or built-in.")
@click.option("--dtype", default="auto", show_default=True, help="Of the trunk: auto, bf16, fp16 or fp32.")
@click.option("--device", default="cpu", show_default=True, help="cpu or cuda.")
@click.option("--variants", default=",".join(VARIANTS), show_default=True, help="Heads to measure, a list.")
@click.option("--depth", default=3, show_default=True, type=click.IntRange(1, 8), help="Drafts a position.")
@click.option(
    "--mix",
    type=click.Choice(["balanced", "drawn"]),
    default="balanced",
    show_default=True,
    help=f"Exactly the training set's, {SHEET} chats a seed; or --chats of them, drawn from it.",
)
@click.option("--chats", "chat_count", default=150, show_default=True, type=click.IntRange(1), help="Drawn.")
@click.option("--seed", default=1, show_default=True, help="Of the chats: the first one.")
@click.option(
    "--seeds", default=3, show_default=True, type=click.IntRange(1), help="How many, from --seed on."
)
@click.option("--max-tokens", default=4096, show_default=True, help="Longer chats are cut there.")
@click.option("--batch", default=16, show_default=True, type=click.IntRange(1), help="Chats at once.")
@click.option("--threads", default=1, show_default=True, type=click.IntRange(1), help="On a CPU.")
@click.option("--json", "json_path", type=click.Path(path_type=Path), help="Write everything to this file.")
def main(
    model: str,
    dtype: str,
    device: str,
    variants: str,
    depth: int,
    mix: str,
    chat_count: int,
    seed: int,
    seeds: int,
    max_tokens: int,
    batch: int,
    threads: int,
    json_path: Path | None,
) -> None:
    """Measures the acceptance of a model's MTP head."""
    torch.set_num_threads(threads)
    set_threads(threads)
    try:
        loaded = OfflineModel(model, dtype, device)
        text = load_text(loaded.path)
        by_seed = {
            number: [
                encode_chat(text, chat.turns, max_tokens, chat.kind)
                for chat in (chats(chat_count, number) if mix == "drawn" else balanced_chats(number))
            ]
            for number in range(seed, seed + seeds)
        }
        results = []
        for variant in variants.split(","):
            head = loaded.head(variant)
            started = time.monotonic()
            shares = {
                number: measure(loaded, head, variant, samples, depth, batch)
                for number, samples in by_seed.items()
            }
            seconds = round(time.monotonic() - started, 1)
            results += [{"head": variant, "seconds": seconds, **row} for row in rows_of(shares, depth)]
    except (LoadError, KeyError) as error:
        raise click.ClickException(f"{error}") from error
    report = {
        "schema": 1,
        "model": model,
        "fingerprint": fingerprint(loaded.path),
        "planted": loaded.planted,
        "trunk_dtype": loaded.dtype_name,
        "mix": mix,
        "chats": {number: len(samples) for number, samples in by_seed.items()},
        "tokens": {number: sum(len(s.ids) for s in samples) for number, samples in by_seed.items()},
        "depth": depth,
        "results": results,
    }
    print_report(report, Console() if sys.stdout.isatty() else Console(width=120))
    if json_path is not None:
        json_path.write_text(json.dumps(report, indent=1) + "\n")


def rows_of(shares: dict[int, dict[str, Share]], depth: int) -> list[dict[str, Any]]:
    """One row a text: the mean of the seeds' rates, and each seed's own."""
    names = list(dict.fromkeys(name for own in shares.values() for name in own))
    rows = []
    for name in names:
        own = {seed: share[name] for seed, share in shares.items() if name in share}
        rates = [statistics.fmean(share.rates()[place] for share in own.values()) for place in range(depth)]
        rows.append(
            {
                "text": name,
                "positions": sum(share.positions for share in own.values()),
                "acceptance": rates,
                "tau": sum(rates),
                "by_seed": {seed: share.rates() for seed, share in own.items()},
            }
        )
    return rows


def encode_chat(text: TextModel, turns: Sequence[Turn], max_tokens: int, kind: str = "") -> Sample:
    """A rendered chat, and which of its tokens the assistant wrote."""
    ids = text.encode(render(turns))[:max_tokens]
    start, role, end = (text.encode(mark) for mark in ("<|im_start|>", "assistant\n", "<|im_end|>"))
    opening = start + role
    in_answer, inside = [False] * len(ids), False
    for index, token in enumerate(ids):
        in_answer[index] = inside
        if [token] == end:
            inside = False
        elif ids[index + 1 - len(opening) : index + 1] == opening:
            inside = True
    return Sample(ids, in_answer, kind)


@torch.inference_mode()
def measure(
    model: OfflineModel, head: MtpHead, head_dtype: str, samples: Sequence[Sample], depth: int, batch: int
) -> dict[str, Share]:
    """Acceptance by depth over whole chats, over assistants' turns alone, and over whole chats of each kind."""
    kinds = {sample.kind for sample in samples} - {""}
    shares = {name: Share(0, [0] * depth) for name in (WHOLE, ANSWERS, *sorted(kinds))}
    # chats of a batch are of like length, longest first: those that end leave at its tail
    ordered = sorted((s for s in samples if len(s.ids) > depth + 1), key=lambda s: -len(s.ids))
    for first in range(0, len(ordered), batch):
        _measure_batch(model, head, head_dtype, ordered[first : first + batch], depth, shares)
    return shares


def _measure_batch(
    model: OfflineModel,
    head: MtpHead,
    head_dtype: str,
    samples: Sequence[Sample],
    depth: int,
    shares: dict[str, Share],
) -> None:
    longest = len(samples[0].ids)
    rooms = model.rooms(len(samples), longest + depth + 1, depth, head_dtype)
    ids = torch.zeros(len(samples), longest + 1, dtype=torch.int64)
    for row, sample in enumerate(samples):
        ids[row, : len(sample.ids)] = torch.tensor(sample.ids)
    ids = ids.to(model.device)
    drafts = torch.empty(0)
    for position in range(longest - depth):
        live = sum(len(sample.ids) - depth > position for sample in samples)
        if position == 0:
            hidden = _first_rows(model, rooms, ids[:live, 0])
        else:
            hidden, agreed = _verify(model, rooms, ids[:live, position], drafts[:live], position)
            _count(samples[:live], position, agreed, shares)
        drafts = _draft(model, head, rooms, ids[:live, position + 1], hidden, position, depth)


def _first_rows(model: OfflineModel, rooms: Rooms, tokens: torch.Tensor) -> torch.Tensor:
    """Position 0 of every sequence, which clears its state: [seqs, hidden]."""
    seqs = tokens.shape[0]
    inputs = PrefillInputs(
        token_ids=tokens,
        positions=torch.zeros_like(tokens),
        slots=rooms.slots[:seqs],
        block_tables=rooms.tables[:seqs],
        cu_rows=tuple(range(seqs + 1)),
        starts=(0,) * seqs,
    )
    return model.trunk.prefill(inputs, rooms.layers)


def _verify(
    model: OfflineModel, rooms: Rooms, tokens: torch.Tensor, drafts: torch.Tensor, position: int
) -> tuple[torch.Tensor, torch.Tensor]:
    """One token and its drafts a sequence; no draft is kept.

    tokens: [seqs]; drafts: [seqs, depth]. Returns the tokens' hidden rows, [seqs, hidden], and how many of the
    drafts in a row are the trunk's own choice, [seqs].
    """
    seqs, depth = drafts.shape
    # the last draft needs no row of its own: the row before it checks it
    rows = torch.cat([tokens[:, None], drafts[:, :-1]], 1)
    inputs = DecodeInputs(
        token_ids=rows.flatten(),
        seq_lens=torch.full((seqs,), position + 1, dtype=torch.int32, device=model.device),
        slots=rooms.slots[:seqs],
        block_tables=rooms.tables[:seqs],
        counts=(depth,) * seqs,
        pending=torch.zeros(seqs, dtype=torch.int32, device=model.device),
    )
    hidden = model.trunk.decode(inputs, rooms.layers)
    chosen = model.logits(hidden).argmax(1).view(seqs, depth)
    agreed = (chosen == drafts).long().cumprod(1).sum(1)
    return hidden.view(seqs, depth, -1)[:, 0], agreed


def _draft(
    model: OfflineModel,
    head: MtpHead,
    rooms: Rooms,
    tokens: torch.Tensor,
    hidden: torch.Tensor,
    position: int,
    depth: int,
) -> torch.Tensor:
    """The chain from `position`, whose next tokens are known: [seqs, depth]. hidden: [seqs, hidden] there."""
    seqs = tokens.shape[0]
    hidden = hidden.to(rooms.head.k.dtype).contiguous()
    found = []
    for step in range(depth):
        rows = Rows(
            sequences=seqs,
            longest=1,
            rows_per_seq=1,
            cu_rows=torch.arange(seqs + 1, device=model.device),
            starts=torch.full((seqs,), position + step, dtype=torch.int64, device=model.device),
            slots=rooms.slots[:seqs],
            fresh=torch.zeros(seqs, dtype=torch.uint8, device=model.device),
            block_tables=rooms.tables[:seqs],
        )
        hidden = head(tokens, hidden, rooms.head, rows)
        tokens = head.draft(hidden)
        found.append(tokens)
    return torch.stack(found, 1)


def _count(samples: Sequence[Sample], position: int, agreed: torch.Tensor, shares: dict[str, Share]) -> None:
    """Adds one position of each sample: its drafts stand at position + 1 and after."""
    for sample, hits in zip(samples, agreed.tolist(), strict=True):
        names = [WHOLE, sample.kind] if sample.kind else [WHOLE]
        depth = len(shares[WHOLE].accepted)
        if all(sample.in_answer[position + 1 : position + 1 + depth]):
            names.append(ANSWERS)
        for name in names:
            shares[name].positions += 1
            for place in range(hits):
                shares[name].accepted[place] += 1


def print_report(report: dict[str, Any], console: Console) -> None:
    """The table: the share of positions whose first 1, 2, ... drafts were all accepted."""
    counts = sorted(set(report["chats"].values()))
    seeds = ", ".join(map(str, report["chats"]))
    console.print(
        f"{report['model']} ({report['fingerprint'][:12]}), trunk {report['trunk_dtype']}, "
        f"{counts[0]} chats a seed, {report['mix']}, seeds {seeds}{planted_note(report['planted'])}"
    )
    table = Table()
    table.add_column("head")
    table.add_column("over")
    for column in ("positions", *(f"first {d + 1}" for d in range(report["depth"])), "tau"):
        table.add_column(column, justify="right")
    for row in report["results"]:
        table.add_row(row["head"], row["text"], str(row["positions"]), *_rates(row), f"{row['tau']:.2f}")
    console.print(table)


def _rates(row: dict[str, Any]) -> list[str]:
    """Means over the seeds, with the seeds' range where there are several."""
    columns = list(zip(*row["by_seed"].values(), strict=True))
    ranges = [f" ({min(c):.3f}-{max(c):.3f})" if len(c) > 1 else "" for c in columns]
    return [f"{rate:.3f}{span}" for rate, span in zip(row["acceptance"], ranges, strict=True)]


if __name__ == "__main__":
    main()
