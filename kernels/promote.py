"""Makes a device's table of what a bench stored: `python -m mstar.kernels.promote decode_gemm --store DIR`.

The table depends on the store alone: promoting it again writes the same bytes. An entry keeps every candidate
beside its choice, so moving a size is changing the word after "choice"; promoting again undoes that.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path
from statistics import median

import click

from mstar.kernels.bench.store import Json, Store, StoreError, write_json
from mstar.kernels.registry import OP, TABLES, GemmKey, table_path

# A choice must gain that share of the default's time ...
LEAST_GAIN = 0.02
# ... and that much a call: what one node of a graph costs on an H200. Less is lost in the step.
LEAST_GAIN_US = 0.8
# Passes that agree within this have seen the same winner.
SAME = 0.02


@dataclass(frozen=True, slots=True)
class Verdict:
    """What a size takes, and why in a few words."""

    choice: str
    reason: str


def decide(key: GemmKey, size: Json) -> Verdict:
    """The choice for a size of the store.

    A pass's winners are all within 2 % of its fastest; the choice is the fastest of those that won every pass.
    It leaves the default if it gains enough, more than the passes differ among themselves, and makes no more
    launches than the default. A fused gate and up in one launch needs the share alone: what it saves is a
    kernel of the step, and its rows' way through memory.
    """
    default, candidates = size["default"], size["candidates"]
    times: dict[str, list[float]] = {name: one["us"] for name, one in candidates.items() if one.get("us")}
    if default not in times:
        return Verdict(default, "the default failed")
    passes = len(times[default])
    times = {name: us for name, us in times.items() if len(us) == passes}
    if passes < 2:
        return Verdict(default, "one pass says too little")
    agreed = set(times)
    for number in range(passes):
        bar = min(us[number] for us in times.values()) * (1 + SAME)
        agreed &= {name for name, us in times.items() if us[number] <= bar}
    if not agreed:
        return Verdict(default, "the passes disagree")
    winner = min(agreed, key=lambda name: (median(times[name]), name))
    if winner == default:
        return Verdict(default, "the default is the fastest")
    gain = median(times[default]) - median(times[winner])
    share = gain / median(times[default])
    said = f"{winner} gains {gain:.2f} us, {100 * share:.1f} %"
    if share < LEAST_GAIN:
        return Verdict(default, f"{said}: too little")
    spread = max(max(times[name]) - min(times[name]) for name in (winner, default))
    if spread >= gain:
        return Verdict(default, f"{said}: the passes differ by {spread:.2f}")
    if key.kind == "gated" and candidates[winner]["launches"] == 1:
        return Verdict(winner, said)
    if gain < LEAST_GAIN_US:
        return Verdict(default, f"{said}: less than a node")
    if candidates[winner]["launches"] > candidates[default]["launches"]:
        return Verdict(default, f"{said}: more launches")
    return Verdict(winner, said)


def tables_of(store: Store) -> Iterator[tuple[str, str, Json, dict[str, Verdict]]]:
    """(architecture, device, table, verdicts) of every device in a store.

    Raises StoreError where one device's files are of different stacks. A size that two models share is taken
    from the first file by name.
    """
    devices: dict[tuple[str, str], Json] = {}
    for path, content in store.files():
        where = (content["arch"], content["device"])
        found = devices.setdefault(where, {"stack": content["stack"], "sizes": {}})
        if found["stack"] != content["stack"]:
            raise StoreError(f"{path} was measured on another stack than the files before it")
        found["sizes"] = {**content["sizes"], **found["sizes"]}
    for (arch, device), found in sorted(devices.items()):
        sizes: Mapping[str, Json] = found["sizes"]
        verdicts = {name: decide(GemmKey.parse(name), size) for name, size in sorted(sizes.items())}
        entries = {
            name: {
                "choice": verdicts[name].choice,
                "default": size["default"],
                "use": size.get("use", ""),
                "candidates": size["candidates"],
            }
            for name, size in sizes.items()
        }
        table = {"op": OP, "arch": arch, "device": device, "stack": found["stack"], "entries": entries}
        yield arch, device, table, verdicts


@click.group()
def main() -> None:
    """Makes tables of choices from measured times."""


@main.command(OP)
@click.option("--store", required=True, type=click.Path(exists=True, file_okay=False, path_type=Path))
@click.option("--tables", default=TABLES, type=click.Path(file_okay=False, path_type=Path), help="Where to.")
def decode_gemm(store: Path, tables: Path) -> None:
    """Writes <tables>/<arch>/<device>/decode_gemm.json of every device in STORE, in place of what is there."""
    try:
        made = list(tables_of(Store(store)))
    except (StoreError, KeyError, ValueError) as error:
        raise click.ClickException(f"nothing is written: {error}") from error
    if not made:
        raise click.ClickException(f"{store} has no measured sizes: run mstar.kernels.bench first")
    for arch, device, table, verdicts in made:
        path = table_path(arch, device, tables)
        path.parent.mkdir(parents=True, exist_ok=True)
        write_json(path, table)
        for name, verdict in verdicts.items():
            click.echo(f"{name:<34}{verdict.choice}  ({verdict.reason})")
        moved = sum(verdict.choice != table["entries"][name]["default"] for name, verdict in verdicts.items())
        click.echo(f"{path}: {len(verdicts)} sizes, {moved} leave the default")


if __name__ == "__main__":
    main()
