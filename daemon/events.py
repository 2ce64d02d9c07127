"""What the daemon answers: plain dataclasses, so that a token costs no validation on its way out.

Wire rules, applied by the codec: every event has `type`; a field whose default is None is left
out when it is None, any other field is always there; `error_class` travels as `class`.
"""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Annotated, Any, ClassVar, Literal

from pydantic import Field

from mstar.daemon.requests import RequestId

ErrorClass = Literal[
    "malformed",
    "validation",
    "unsupported",
    "context_length",
    "overloaded",
    "no_model",
    "busy",
    "rank_lost",
    "out_of_memory",
    "deadline",
    "internal",
]
FinishReason = Literal["stop", "length", "abort", "tool_calls"]
State = Literal["empty", "loading", "ready", "failed"]

Id = Annotated[RequestId, Field(description="The request's `id`")]
AnswerId = Annotated[RequestId | None, Field(description="The request's `id`, when it had one")]
Attempt = Annotated[int, Field(description="The request's `attempt_id`")]


@dataclass(slots=True)
class LoadProgress:
    """A load goes on."""

    type: ClassVar[str] = "load_progress"
    stage: Annotated[
        Literal["read", "shard", "compile", "warmup", "capture"], Field(description="What is being done")
    ]
    done: Annotated[int, Field(description="How much of it, all ranks together")]
    total: Annotated[int, Field(description="Out of how much; of `compile` it grows at first")]
    unit: Annotated[str, Field(description="Of what: `bytes`, `tensors`, `kernels`, `graphs`, `steps`")]
    id: AnswerId = None


@dataclass(slots=True)
class KvReport:
    """The paged KV cache."""

    dtype: Annotated[str, Field(description="Number format")]
    blocks: Annotated[int, Field(description="Blocks, without the padding block")]
    tokens: Annotated[int, Field(description="Positions that the blocks hold")]


@dataclass(slots=True)
class LoadedSpec:
    """Speculation, as loaded."""

    mtp: Annotated[bool, Field(description="Whether multi-token prediction runs")]
    k: Annotated[int, Field(description="Drafts a step; 0 without")]
    draft_head: Annotated[str | None, Field(description="The draft head's number format; null without")]
    reason: Annotated[str | None, Field(description="Why it does not run; null when it does")]


@dataclass(slots=True)
class Loaded:
    """The load is over: the model serves. The last event of a load."""

    type: ClassVar[str] = "loaded"
    model: Annotated[str, Field(description="As the request named it")]
    fingerprint: Annotated[str, Field(description="Hash of the config and the safetensors headers")]
    arch: Annotated[str, Field(description="Architecture, from the config")]
    layers: Annotated[int, Field(description="Layers of the trunk")]
    hidden: Annotated[int, Field(description="Width of the trunk")]
    vocab: Annotated[int, Field(description="Rows of the embedding: every token id is below")]
    params: Annotated[int, Field(description="Parameters of the trunk, all ranks together")]
    tp: Annotated[int, Field(description="Ranks")]
    device: Annotated[str, Field(description="What the ranks run on")]
    dtype: Annotated[str, Field(description="Number format of weights and activations")]
    max_seq: Annotated[int, Field(description="Longest sequence, tokens")]
    max_num_seqs: Annotated[int, Field(description="Requests that run at once")]
    kv: Annotated[KvReport, Field(description="The KV cache")]
    spec: Annotated[LoadedSpec, Field(description="Speculation")]
    load_ms: Annotated[float, Field(description="From the request to this event")]
    memory: Annotated[dict[str, int], Field(description="Bytes of rank 0, by use")] = field(
        default_factory=dict
    )
    notes: Annotated[list[str], Field(description="What runs in place of what")] = field(default_factory=list)
    id: AnswerId = None


@dataclass(slots=True)
class GenStart:
    """A request was accepted and its prompt is known."""

    type: ClassVar[str] = "gen_start"
    id: Id
    attempt_id: Attempt
    prompt_tokens: Annotated[int, Field(description="Length of the prompt")]
    cached_tokens: Annotated[int, Field(description="Found in the cache; 0 until caching exists")]
    started_in_think: Annotated[bool, Field(description="Whether the prompt ends inside a thinking span")]
    seed: Annotated[int, Field(description="The seed in use, the client's or a drawn one")] = 0


@dataclass(slots=True)
class TokenLogprob:
    """The log-probability of one produced token."""

    id: Annotated[int, Field(description="The token")]
    logprob: Annotated[float | None, Field(description="Its log-probability (null where it is -inf)")]
    top: Annotated[
        list[tuple[int, float | None]], Field(description="`[id, logprob]` of the best tokens, best first")
    ]


@dataclass(slots=True)
class Token:
    """A piece of the answer."""

    type: ClassVar[str] = "token"
    id: Id
    attempt_id: Attempt
    text: Annotated[str, Field(description="May be empty where ids or logprobs come without text")]
    ids: Annotated[list[int] | None, Field(description="The piece's token ids, with `return_ids`")] = None
    logprobs: Annotated[list[TokenLogprob] | None, Field(description="One a token, with `logprobs`")] = None


@dataclass(slots=True)
class Reasoning:
    """A piece of the model's thinking."""

    type: ClassVar[str] = "reasoning"
    id: Id
    attempt_id: Attempt
    text: Annotated[str, Field(description="May be empty where ids or logprobs come without text")]
    ids: Annotated[list[int] | None, Field(description="The piece's token ids, with `return_ids`")] = None
    logprobs: Annotated[list[TokenLogprob] | None, Field(description="One a token, with `logprobs`")] = None


@dataclass(slots=True)
class Usage:
    """What a request used."""

    prompt_tokens: Annotated[int, Field(description="Length of the prompt")]
    completion_tokens: Annotated[int, Field(description="Produced, thinking and stop token included")]
    reasoning_tokens: Annotated[int, Field(description="Of these, inside thinking spans")]
    cached_tokens: Annotated[int, Field(description="Of the prompt, found in the cache")] = 0


@dataclass(slots=True)
class Timings:
    """Where a request's time went; null where it ended before."""

    queue_ms: Annotated[float | None, Field(description="Arrival to admission")]
    ttft_ms: Annotated[float | None, Field(description="Arrival to the first token")]
    prefill_ms: Annotated[float | None, Field(description="Admission to the first token")]
    prefill_tok_s: Annotated[float | None, Field(description="Prompt tokens over `prefill_ms`")]
    decode_ms: Annotated[float | None, Field(description="First token to the last")]
    decode_tok_s: Annotated[float | None, Field(description="Tokens after the first over `decode_ms`")]


@dataclass(slots=True)
class SpecReport:
    """What speculation did for a request."""

    mtp: Annotated[bool, Field(description="Whether drafts were made")] = False
    k: Annotated[int, Field(description="Drafts a step, at most")] = 0
    steps: Annotated[int, Field(description="Verify steps, those without a draft included")] = 0
    drafted: Annotated[int, Field(description="Drafts checked")] = 0
    accepted: Annotated[int, Field(description="Of these, accepted and in the answer")] = 0
    tau: Annotated[float, Field(description="Accepted drafts a step, the bonus not counted")] = 0.0
    tokens_per_step: Annotated[float, Field(description="tau + 1; the prefill's token is of no step")] = 1.0
    drafted_by_depth: Annotated[
        list[int], Field(description="`drafted`, the first draft of a step first")
    ] = field(default_factory=list)
    accepted_by_depth: Annotated[list[int], Field(description="`accepted`, likewise")] = field(
        default_factory=list
    )


@dataclass(slots=True)
class Done:
    """A request ended; nothing follows under its key."""

    type: ClassVar[str] = "done"
    id: Id
    attempt_id: Attempt
    finish_reason: Annotated[FinishReason, Field(description="What ended it; the earliest terminator wins")]
    usage: Annotated[Usage, Field(description="Tokens")]
    open_think: Annotated[bool, Field(description="Whether it ended inside a thinking span")]
    timings: Annotated[Timings, Field(description="Milliseconds and rates")]
    spec: Annotated[SpecReport, Field(description="Speculation")] = field(default_factory=SpecReport)
    text: Annotated[str | None, Field(description="The whole answer without its thinking, where sent")] = None


@dataclass(slots=True)
class RankStatus:
    """One rank of the load."""

    rank: Annotated[int, Field(description="0 decides, the others follow")]
    pid: Annotated[int, Field(description="Its process")]
    device: Annotated[str, Field(description="What it runs on")]
    memory_bytes: Annotated[int, Field(description="Resident (CPU) or allocated (GPU) memory")]
    last_heartbeat_ms: Annotated[float | None, Field(description="Time since its last sign of life")]


@dataclass(slots=True)
class StatusEvent:
    """What is loaded and how it is."""

    type: ClassVar[str] = "status"
    state: Annotated[State, Field(description="`failed` until the next load when a load or a rank was lost")]
    running: Annotated[int, Field(description="Requests in the batch")]
    waiting: Annotated[int, Field(description="Requests that wait for room")]
    ranks: Annotated[list[RankStatus], Field(description="The ranks; empty without a load")] = field(
        default_factory=list
    )
    loaded: Annotated[Loaded | None, Field(description="What `loaded` said, while a model is loaded")] = None
    reason: Annotated[str | None, Field(description="Why the state is `failed`")] = None
    version: Annotated[str | None, Field(description="The daemon's version")] = None
    id: AnswerId = None


@dataclass(slots=True)
class Pool:
    """How much of a pool is in use."""

    total: Annotated[int, Field(description="All")]
    used: Annotated[int, Field(description="Held by requests")]
    free: Annotated[int, Field(description="Free")]


@dataclass(slots=True)
class SpecStats:
    """Speculation since load."""

    k: Annotated[int, Field(description="Drafts a step in force now")] = 0
    steps: Annotated[int, Field(description="Verify steps, counted for each request")] = 0
    drafted: Annotated[list[int], Field(description="Drafts checked, by depth")] = field(default_factory=list)
    accepted: Annotated[list[int], Field(description="Of these, accepted")] = field(default_factory=list)
    tau: Annotated[float, Field(description="Accepted drafts a step, the bonus not counted")] = 0.0
    tokens_per_step: Annotated[float, Field(description="tau + 1")] = 1.0


@dataclass(slots=True)
class StatsEvent:
    """Counters since load."""

    type: ClassVar[str] = "stats"
    requests: Annotated[
        dict[str, int],
        Field(description="Ended requests, by finish reason or `error.<class>`"),
    ]
    tokens: Annotated[dict[str, int], Field(description="Tokens: `prompt`, `completion`, `reasoning`")]
    steps: Annotated[int, Field(description="Steps of the engine")]
    preemptions: Annotated[int, Field(description="Requests set back for want of blocks")]
    blocks: Annotated[Pool, Field(description="KV blocks")]
    slots: Annotated[Pool, Field(description="State slots")]
    queues: Annotated[dict[str, int], Field(description="Depths now, by queue")]
    spec: Annotated[SpecStats, Field(description="Speculation")] = field(default_factory=SpecStats)
    engine: Annotated[dict[str, Any], Field(description="Further counters of the engine")] = field(
        default_factory=dict
    )
    phases: Annotated[
        dict[str, list[float]],
        Field(
            description="Parts of the latest 512 steps: p50, p95 and mean in microseconds, and how many. `plan`, "
            "`launch`, `wait` and `send` are the host's, `device` and `gap` (between two steps) a GPU's, of one "
            "step in 16"
        ),
    ] = field(default_factory=dict)
    trace: Annotated[
        str | None,
        Field(description="The profile that `trace_steps` asked for; null where too few steps came"),
    ] = None
    id: AnswerId = None


@dataclass(slots=True)
class Unloaded:
    """The ranks are gone and the memory is free."""

    type: ClassVar[str] = "unloaded"
    id: AnswerId = None


@dataclass(slots=True)
class Pong:
    """The daemon is there, and the lease is renewed."""

    type: ClassVar[str] = "pong"
    id: AnswerId = None


@dataclass(slots=True)
class ResetDone:
    """Cached prefixes are dropped."""

    type: ClassVar[str] = "reset_done"
    id: AnswerId = None


@dataclass(slots=True)
class ShuttingDown:
    """The daemon ends; nothing is accepted any more."""

    type: ClassVar[str] = "shutting_down"
    id: AnswerId = None


@dataclass(slots=True)
class ErrorEvent:
    """A request failed. With both keys of a live `generate` it is that request's last event."""

    type: ClassVar[str] = "error"
    error_class: Annotated[ErrorClass, Field(alias="class", description="What kind of error")]
    message: Annotated[str, Field(description="What is wrong and what to do")]
    retryable: Annotated[bool, Field(description="Whether the same request may succeed later")] = False
    field: Annotated[str | None, Field(description="Path of the field: `messages[0].content`")] = None
    id: AnswerId = None
    attempt_id: Annotated[int | None, Field(description="The request's `attempt_id`, when it had one")] = None


Event = (
    LoadProgress | Loaded | GenStart | Token | Reasoning | Done | StatusEvent | StatsEvent
    | Unloaded | Pong | ResetDone | ShuttingDown | ErrorEvent
)  # fmt: skip
EVENTS: dict[str, type[Any]] = {
    cls.type: cls
    for cls in (
        LoadProgress, Loaded, GenStart, Token, Reasoning, Done, StatusEvent, StatsEvent,
        Unloaded, Pong, ResetDone, ShuttingDown, ErrorEvent,
    )
}  # fmt: skip
