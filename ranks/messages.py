"""What the daemon and the ranks say to each other: commands down, events up.

Plain dataclasses, packed as msgpack lists `[tag, field, ...]`: both ends are the same
version by construction (the daemon spawns the ranks), so there is nothing to negotiate,
and a step's tokens cost one short list. Client input never reaches this codec.
"""

from __future__ import annotations

from dataclasses import dataclass, field, fields
from typing import Any

import msgpack

# Of the region that the supervisor makes for the collectives of CPU ranks (zeroed, passed by its fd). Sparse:
# only what the largest tensors of a step need is ever touched.
SHM_REGION_BYTES = 64 * 2**20


@dataclass(frozen=True, slots=True)
class LoadSpec:
    """Everything a rank needs to build its shard; decided and checked by the daemon before the spawn."""

    model_dir: str
    tp_size: int
    device: str  # "cpu" or "cuda"
    dtype: str  # "bf16", "fp16" or "fp32", resolved from "auto"
    max_seq: int
    max_num_seqs: int
    memory_fraction: float
    overrides: dict[str, Any]
    threads: int  # CPU threads of each rank
    run_dir: str  # directory of this load's ipc sockets, mode 0700
    heartbeat_s: float = 1.0
    spec_k: int = 0  # drafts a step that the MTP head makes; 0: no speculation, and no head is read
    spec_fixed: bool = False  # k stays as loaded, whatever it costs: for checks and comparisons
    eager: bool = False  # GPU: the same shapes without captured graphs


@dataclass(frozen=True, slots=True)
class SamplingParams:
    """How one request draws its tokens, checked by the daemon. Meanings: docs/protocol.md, `generate`."""

    max_tokens: int
    seed: int  # always set; the daemon draws one where the client gave none
    temperature: float = 0.0
    top_p: float = 1.0
    top_k: int = 0
    min_p: float = 0.0
    repetition_penalty: float = 1.0
    presence_penalty: float = 0.0
    frequency_penalty: float = 0.0
    stop_ids: tuple[int, ...] = ()  # the request's stop_token_ids, honoured under ignore_eos too
    eos_ids: tuple[int, ...] = ()  # the model's; empty under ignore_eos
    min_tokens: int = 0
    logprobs: int | None = None
    think_start_id: int | None = None
    think_end_id: int | None = None
    starts_in_think: bool = False
    max_think_tokens: int | None = None
    spec_k: int | None = None  # drafts a step: None is the load's, 0 decodes plainly, else at most that many


@dataclass(frozen=True, slots=True)
class Submit:
    request_id: int  # the daemon's own number, never reused within a load
    prompt_ids: list[int]
    sampling: SamplingParams


@dataclass(frozen=True, slots=True)
class Abort:
    """Forget the request, whatever its state; unknown ids are ignored. Answered by nothing."""

    request_id: int


@dataclass(frozen=True, slots=True)
class QueryStats:
    query_id: int
    trace_path: str = ""  # a file to write a profile of the next steps to; answered when it is there
    trace_steps: int = 0


@dataclass(frozen=True, slots=True)
class Stop:
    """Finish the step in flight, stop the followers and exit 0."""


@dataclass(frozen=True, slots=True)
class Hello:
    rank: int
    pid: int


@dataclass(frozen=True, slots=True)
class Heartbeat:
    rank: int
    memory_bytes: int  # resident memory (CPU) or allocated device memory
    running: int
    waiting: int


@dataclass(frozen=True, slots=True)
class Progress:
    rank: int
    stage: str  # "read", "shard", "compile", "warmup", "capture"
    done: int
    total: int
    unit: str  # "bytes", "tensors", "kernels", "graphs", "steps"


@dataclass(frozen=True, slots=True)
class Ready:
    """Sent by rank 0 once every rank can run a step."""

    params: int
    dtype: str
    device: str  # as a person reads it: "cpu (2 threads a rank)", "NVIDIA H200"
    kv_blocks: int
    block_size: int
    slots: int
    memory: dict[str, int]  # bytes: weights, kv, states, workspace
    notes: list[str]  # what runs in place of what (a kernel's reference, say), for `loaded` and the log


@dataclass(frozen=True, slots=True)
class Failed:
    """A rank could not load or cannot go on, and the mesh ends. `error_class` is the protocol's."""

    rank: int
    error_class: str
    message: str
    field: str | None = None


@dataclass(frozen=True, slots=True)
class Started:
    """A request was admitted: its first chunk is in the step that is about to run, or runs already."""

    request_id: int
    cached_tokens: int
    at: float  # time.monotonic(), seconds; one clock for all processes of a machine


@dataclass(frozen=True, slots=True)
class Refused:
    """A request that can never run, or that failed alone; its terminal event."""

    request_id: int
    error_class: str
    message: str


@dataclass(frozen=True, slots=True)
class TokenRun:
    """What one step gave one request. Terminators are cut by the engine, and the stop id itself is included
    in `ids` as the last one (the daemon counts it and hides its text)."""

    request_id: int
    ids: list[int]
    finish: str | None = None  # "stop" or "length" with the last run
    # one entry an id when the request asked: [logprob of the id, [[id, logprob], ...] best first]
    logprobs: list[Any] | None = None
    # drafts that this step checked, 0 in a plain step; None with the token that prefill yields, of no step
    drafted: int | None = None
    # of these; the first `accepted` of `ids` are drafts, and the bonus follows unless a terminator cut it
    accepted: int = 0


@dataclass(frozen=True, slots=True)
class Tokens:
    runs: list[TokenRun]
    at: float  # time.monotonic() when the step's tokens were known


@dataclass(frozen=True, slots=True)
class EngineStats:
    query_id: int
    running: int
    waiting: int
    steps: int
    prefill_tokens: int
    decode_tokens: int
    preemptions: int
    blocks_total: int
    blocks_free: int
    slots_total: int
    slots_free: int
    extra: dict[str, Any] = field(default_factory=dict)
    # speculation since load
    spec_k: int = 0  # drafts a step in force now
    spec_steps: int = 0  # decode steps of requests that speculate, those without drafts too: tau is of these
    spec_drafted: list[int] = field(default_factory=list)  # drafts checked, by depth (the first draft first)
    spec_accepted: list[int] = field(default_factory=list)  # of these, accepted
    # of the latest steps, by part: [p50, p95, mean] in microseconds and the count
    phases: dict[str, list[float]] = field(default_factory=dict)
    trace_path: str = ""  # of the profile that was asked for; empty where no step came


Command = Submit | Abort | QueryStats | Stop
Event = Hello | Heartbeat | Progress | Ready | Failed | Started | Refused | Tokens | EngineStats

_TYPES: tuple[type[Any], ...] = (
    Submit, Abort, QueryStats, Stop, Hello, Heartbeat, Progress, Ready, Failed, Started, Refused, Tokens,
    EngineStats, LoadSpec,
)  # fmt: skip
_TAG = {cls: index for index, cls in enumerate(_TYPES)}
_FIELDS = {cls: tuple(f.name for f in fields(cls)) for cls in (*_TYPES, SamplingParams, TokenRun)}


def _flat(message: Any) -> list[Any]:
    return [getattr(message, name) for name in _FIELDS[type(message)]]


def pack(message: Command | Event | LoadSpec) -> bytes:
    """Encodes a message for the other side."""
    return bytes(msgpack.packb([_TAG[type(message)], *_flat(message)], default=_flat))


def unpack(data: bytes) -> Any:
    """Decodes what `pack` made; the result is one of `Command`, `Event` or `LoadSpec`."""
    tag, *values = msgpack.unpackb(data)
    cls = _TYPES[tag]
    if cls is Submit:
        sampling: list[Any] = [tuple(v) if isinstance(v, list) else v for v in values[2]]
        values[2] = SamplingParams(*sampling)
    elif cls is Tokens:
        values[0] = [TokenRun(*run) for run in values[0]]
    return cls(*values)
