"""Which kernel runs each linear layer of a decode step, by op and size.

A served size is a `GemmKey`, an implementation with its parameters a `KernelChoice`. The choice for a size comes
from the table of the device, kernels/tables/<arch>/<device>/decode_gemm.json, or else from the default rule of
kernels/linear/gpu/candidates.py. docs/kernels.md says how a table is made and changed.
"""

from __future__ import annotations

import json
import re
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any, Protocol

if TYPE_CHECKING:
    import torch

OP = "decode_gemm"
TABLES = Path(__file__).parent / "tables"
# Rows are padded up to one of these; 256 is the most that a decode step has.
ROW_BUCKETS = (1, 2, 4, 8, 16, 32, 64, 128, 256)
KINDS = ("plain", "norm", "residual", "gated", "f32")
DTYPES = ("bf16", "fp16", "fp32")

# In names, gated says that gate and up are one weight: `gated1-`.
_PREFIXES = {kind: "gated1" if kind == "gated" else kind for kind in KINDS}
_NAME = re.compile(
    rf"({'|'.join(_PREFIXES.values())})-r([1-9]\d*)-n([1-9]\d*)-k([1-9]\d*)-({'|'.join(DTYPES)})", re.ASCII
)
# Parameters that a launch may have or not, and those that Triton wants as powers of two.
OPTIONAL = frozenset({"AHEAD", "CARVEOUT", "NORM_FIRST", "PRELOAD", "SOON", "SUM_AFTER", "TOUCH"})
AMOUNTS = frozenset({"AHEAD", "CARVEOUT"})  # of those, what is not 0 or 1: MiB, percent
SIZES = frozenset({"BLOCK_N", "BLOCK_K", "num_warps"})
SHARED_BYTES = 227 << 10  # of shared memory that a program may have on Hopper
_MAKERS = re.compile(r"nvidia|amd|instinct|geforce|radeon|graphics")


@dataclass(frozen=True, slots=True)
class KernelChoice:
    """An implementation by name and its launch parameters, sorted by name."""

    kernel: str
    params: tuple[tuple[str, int], ...] = ()

    @property
    def name(self) -> str:
        """One word: the kernel, then its parameters, as in "dot-BLOCK_K256-BLOCK_N16"."""
        return "-".join([self.kernel, *(f"{param}{value}" for param, value in self.params)])


@dataclass(frozen=True, slots=True)
class GemmKey:
    """One served size of a linear layer."""

    kind: str  # one of KINDS: what is fused around the product
    rows: int  # a row bucket
    n: int  # outputs; a gated weight has 2n rows
    k: int  # inputs
    dtype: str  # of inputs and weight, one of DTYPES

    @property
    def name(self) -> str:
        """As tables have it: "norm-r4-n8224-k1024-bf16"."""
        return f"{_PREFIXES[self.kind]}-r{self.rows}-n{self.n}-k{self.k}-{self.dtype}"

    @classmethod
    def parse(cls, name: str) -> GemmKey:
        """The key of a name. Raises ValueError for what is none."""
        found = _NAME.fullmatch(name)
        if not found:
            raise ValueError(f"{name!r} names no size: they look like norm-r4-n8224-k1024-bf16")
        prefix, rows, n, k, dtype = found.groups()
        kind = next(kind for kind, written in _PREFIXES.items() if written == prefix)
        return cls(kind, int(rows), int(n), int(k), dtype)

    @property
    def weight_shape(self) -> tuple[int, int]:
        return (2 * self.n if self.kind == "gated" else self.n, self.k)


def row_bucket(rows: int) -> int | None:
    """The smallest bucket that holds `rows`, or None above the largest."""
    for bucket in ROW_BUCKETS:
        if rows <= bucket:
            return bucket
    return None


class Linears(Protocol):
    """What a table needs of kernels/linear/gpu/candidates.py."""

    def default(self, key: GemmKey) -> KernelChoice:
        """What runs where no table says otherwise."""
        ...

    def candidates(self, key: GemmKey) -> list[KernelChoice]:
        """What is worth timing."""
        ...

    def launches(self, choice: KernelChoice, key: GemmKey) -> int:
        """Nodes of a graph that one call makes."""
        ...


def linears() -> Linears:
    """The candidates that exist here. Raises ImportError where the GPU's kernels cannot be loaded."""
    from mstar.kernels.linear.gpu import candidates  # imports Triton, and this module

    return candidates


class Table:
    """The choices for one device; `notes` say what of its file was refused, and that there is none."""

    def __init__(
        self,
        defaults: Linears,
        choices: Mapping[GemmKey, KernelChoice] | None = None,
        notes: tuple[str, ...] = (),
    ):
        self.notes = notes
        self.choices: Mapping[GemmKey, KernelChoice] = dict(choices or {})
        self._defaults = defaults
        self._chosen = dict(self.choices)

    def choose(self, key: GemmKey) -> KernelChoice:
        """The table's choice, or the default of a size that it does not have."""
        choice = self._chosen.get(key)
        if choice is None:
            choice = self._chosen[key] = self._defaults.default(key)
        return choice


def device_name(device: torch.device) -> tuple[str, str]:
    """Architecture and model of a GPU as folders of tables are called: ("sm_90", "h200")."""
    import torch

    properties = torch.cuda.get_device_properties(device)
    if torch.version.hip:
        arch = str(properties.gcnArchName).split(":")[0]
    else:
        arch = f"sm_{properties.major}{properties.minor}"
    return arch, device_slug(properties.name)


def device_slug(marketing: str) -> str:
    """h200 of "NVIDIA H200": the makers' words left out, others kept, as they tell memories apart."""
    return "-".join(re.findall(r"[a-z0-9]+", _MAKERS.sub(" ", marketing.lower()))) or "unknown"


def stack() -> dict[str, str]:
    """What times depend on beside the device: torch and Triton, major and minor."""
    import torch
    import triton

    versions = {"torch": torch.__version__, "triton": triton.__version__}
    return {name: ".".join(str(version).split(".")[:2]) for name, version in versions.items()}


def table_path(arch: str, device: str, root: Path = TABLES) -> Path:
    return root / arch / device / f"{OP}.json"


def table_for(device: torch.device) -> Table:
    """The table of a GPU on the stack that runs."""
    return read_table(table_path(*device_name(device)), stack(), linears())


def read_table(path: Path, running: Mapping[str, str], defaults: Linears) -> Table:
    """The table in `path`. Nothing in it can fail a load: what does not fit is refused with a note.

    running: the stack, as `stack` gives it; a table tuned on another one is refused as a whole.
    """
    where = f"{OP} table {path.parent.parent.name}/{path.parent.name}"
    try:
        text = path.read_bytes()
    except FileNotFoundError:
        return Table(defaults, notes=(f"{where}: there is none, so defaults run",))
    except OSError as error:
        return Table(defaults, notes=(f"{where}: cannot be read ({error}), so defaults run",))
    try:
        written = json.loads(text)
        tuned, entries = dict(written["stack"]), dict(written["entries"])
    except (ValueError, KeyError, TypeError, RecursionError) as error:
        return Table(defaults, notes=(f"{where}: not a table ({error!r}), so defaults run",))
    if tuned != dict(running):
        note = f"{where}: tuned on {_versions(tuned)}, and this is {_versions(running)}, so defaults run"
        return Table(defaults, notes=(note,))
    choices: dict[GemmKey, KernelChoice] = {}
    refused: dict[str, list[str]] = {}
    for name, entry in entries.items():
        try:
            key = GemmKey.parse(name)
            choices[key] = _read_choice(key, entry, defaults)
        except (ValueError, KeyError, TypeError, AttributeError, ArithmeticError) as error:
            reason = str(error) if isinstance(error, ValueError) else f"not an entry ({error!r})"
            refused.setdefault(reason, []).append(name)
    return Table(defaults, choices, tuple(_note(where, reason, names) for reason, names in refused.items()))


def _read_choice(key: GemmKey, entry: Mapping[str, Any], defaults: Linears) -> KernelChoice:
    """Raises ValueError that says why an entry is refused."""
    chosen = entry["choice"]
    if chosen not in entry["candidates"]:
        raise ValueError(f"the choice {chosen!r} is not among the candidates")
    candidate = entry["candidates"][chosen]
    if "error" in candidate:
        raise ValueError(f"the choice {chosen!r} failed when it was measured")
    params = {str(param): value for param, value in candidate["params"].items()}
    choice = KernelChoice(str(candidate["kernel"]), tuple(sorted(params.items())))
    alike = [defaults.default(key), *defaults.candidates(key)]
    names = {param for other in alike if other.kernel == choice.kernel for param, _ in other.params}
    if choice.kernel not in {other.kernel for other in alike}:
        raise ValueError(f"no kernel {choice.kernel!r} here for such a size")
    wrong = sorted(param for param, value in params.items() if type(value) is not int or value < 0)
    if wrong or not names - OPTIONAL <= set(params) <= names - OPTIONAL | _optional(choice.kernel, key.kind):
        raise ValueError(f"not the parameters of {choice.kernel!r}: {', '.join(wrong) or sorted(params)}")
    if any(params[name] > 1 for name in OPTIONAL - AMOUNTS & set(params)):
        raise ValueError("what a launch may have or not is 0 or 1")
    if params.get("SPLIT_K", 1) < 1:
        raise ValueError("k is split into one part at least")
    if params.get("SPLIT_K", 1) > 1 and key.kind in ("norm", "gated"):
        raise ValueError("k is not split where a norm or a gate follows the product")
    odd = sorted(
        param for param in SIZES & set(params) if params[param] < 1 or params[param] & (params[param] - 1)
    )
    if odd:
        raise ValueError(f"not powers of two: {', '.join(odd)}")
    if choice.kernel == "mma" and (params["BLOCK_N"] < 16 or params["BLOCK_K"] % (32 * params["num_warps"])):
        raise ValueError("mma takes tiles of 16 outputs or more, and 32 values of k a warp or a multiple")
    if choice.kernel == "stream":
        _check_stream(key, params)
    return choice


def stream_ring(key: GemmKey, params: Mapping[str, int]) -> tuple[int, int]:
    """Of "stream": bytes of a place of its ring, a tile of weights and one of x; tiles of k that a program has."""
    outputs = params["BLOCK_N"] * (2 if key.kind == "gated" else 1)
    rows = max(8, min(64, key.rows))  # of a program
    place = (outputs + rows) * params["BLOCK_K"] * 2
    return place, -(-key.k // (params["BLOCK_K"] * params["SPLIT_K"]))


def _check_stream(key: GemmKey, params: Mapping[str, int]) -> None:
    """Raises ValueError for what its launch would not take, or its ring not end with."""
    warps, outputs, depth, ring = (params[name] for name in ("num_warps", "BLOCK_N", "BLOCK_K", "num_stages"))
    if warps not in (4, 8) or not 16 * warps <= outputs <= 256 or depth < 64 or key.k % 8:
        raise ValueError(
            "stream takes 4 or 8 warps, 16 outputs a warp to 256 in all, tiles of 64 values of k or more, and k in 8s"
        )
    if (key.kind == "residual") != bool(params.get("SUM_AFTER")) or (
        params["SPLIT_K"] > 1 and key.kind != "residual"
    ):
        raise ValueError("stream adds up no parts: a residual takes it with SUM_AFTER, others take it whole")
    if params.get("CARVEOUT", 0) > 100:
        raise ValueError("a carve-out is a percentage, 1 to 100")
    place, steps = stream_ring(key, params)
    if not min(2, steps) <= ring <= SHARED_BYTES // place:
        raise ValueError("stream's ring is of two tiles or more, or of all of k, and fits in 227 KiB")


def _optional(kernel: str, kind: str) -> frozenset[str]:
    """Parameters that a launch may have or not, of a kernel and kind."""
    if kernel == "cublas":
        return frozenset()
    own = {"SUM_AFTER"} if kind == "residual" else set()
    if kernel == "stream":
        return frozenset({"CARVEOUT", "SOON", *own})
    if kernel == "fma":
        own |= {"PRELOAD"}
    elif kind in ("norm", "gated"):
        own |= {"NORM_FIRST"}
    return frozenset({"AHEAD", "SOON", "TOUCH", *own})


def _note(where: str, reason: str, names: list[str]) -> str:
    others = f" and {len(names) - 1} more" if len(names) > 1 else ""
    return f"{where}: {names[0]}{others}: {reason}, so the default runs"


def _versions(stack: Mapping[str, str]) -> str:
    named = sorted((str(name), str(version)) for name, version in stack.items())
    return ", ".join(f"{name} {version}" for name, version in named) or "an unknown stack"
