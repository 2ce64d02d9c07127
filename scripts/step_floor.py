"""What a plain decode step costs at least: every operation's bytes and launches, from the model's shape alone.

A step's floor is the bytes that it must move (weights, recurrent states, KV) at the rate that one H200 copies, plus
0.8 us a launch inside a captured graph; both rates were measured there. Activations are listed and not in the
floor: they stay in the second cache, and so do most of the logits.
"""

from __future__ import annotations

from dataclasses import dataclass, replace

from mstar.loader.config import FULL, ModelConfig

BYTES_PER_S = 4.2e12
LAUNCH_S = 0.8e-6
_ITEM_BYTES = {"bf16": 2, "fp16": 2, "fp32": 4}


@dataclass(frozen=True, slots=True)
class StepOp:
    """One operation of a step; all but `calls` are of one call on one rank."""

    name: str
    kind: str  # what its kernels are, see mstar.scripts.step_trace
    calls: int
    weight_bytes: int = 0
    kv_bytes: int = 0
    state_bytes: int = 0
    activation_bytes: int = 0
    launches: int = 1

    @property
    def floor_bytes(self) -> int:
        return self.weight_bytes + self.kv_bytes + self.state_bytes

    @property
    def floor_s(self) -> float:
        """Of all its calls."""
        return self.calls * (self.floor_bytes / BYTES_PER_S + self.launches * LAUNCH_S)


@dataclass(frozen=True, slots=True)
class StepShape:
    """A plain decode step of `sequences`, each with `rows` rows (more than one where drafts are checked).

    context: tokens of a sequence whose KV the step reads, its own included. dtype: "bf16", "fp16" or "fp32".
    """

    sequences: int
    context: int
    dtype: str
    rows: int = 1
    tp: int = 1


def layer_ops(config: ModelConfig, shape: StepShape, kind: str) -> list[StepOp]:
    """The operations of one layer of `kind`, in the order in which they run; `calls` is 1."""
    local, item = config.local(shape.tp), _ITEM_BYTES[shape.dtype]
    hidden, dim, rows = config.hidden_size, config.head_dim, shape.sequences * shape.rows

    def linear(name: str, n: int, k: int, *, outputs: int | None = None, norm: bool = False) -> StepOp:
        moved = rows * (k + (n if outputs is None else outputs)) * item
        # norms' weights are float32
        return StepOp(
            name,
            "linear",
            1,
            weight_bytes=n * k * item + (4 * hidden if norm else 0),
            activation_bytes=moved,
        )

    def row_parallel(name: str, k: int) -> list[StepOp]:
        meeting = [StepOp("all_reduce", "collective", 1, activation_bytes=rows * hidden * 4)]
        return [linear(name, hidden, k)] + (meeting if shape.tp > 1 else [])

    if kind == FULL:
        heads = 2 * local.q_heads + 2 * local.kv_heads
        kv_row = 2 * local.kv_heads * dim * item
        queries = local.q_heads * dim
        mixer = [
            linear("attention in_proj", heads * dim, hidden, norm=True),
            StepOp("qkv_norm_rope_cache", "qkv", 1, kv_bytes=rows * kv_row, activation_bytes=2 * rows * queries * item),
            StepOp(
                "attention",
                "attention",
                1,
                kv_bytes=shape.sequences * shape.context * kv_row,
                activation_bytes=3 * rows * queries * item,
                launches=2,  # keys are split over programs, whose parts then meet
            ),
            *row_parallel("attention out_proj", queries),
        ]  # fmt: skip
    else:
        values = local.linear_value_heads * config.linear_value_head_dim
        columns = local.conv_channels + values + 2 * local.linear_value_heads
        state = local.linear_value_heads * config.linear_key_head_dim * config.linear_value_head_dim * 4
        kept = config.linear_conv_kernel_dim - 1
        window = (kept + shape.rows) * local.conv_channels * item
        mixer = [
            linear("gdn in_proj", columns, hidden, norm=True),
            StepOp(
                "gdn",
                "gdn",
                1,
                weight_bytes=4 * local.conv_channels * config.linear_conv_kernel_dim,
                state_bytes=shape.sequences * (2 * state + window),
                activation_bytes=rows * (columns + values) * item,
            ),
            *row_parallel("gdn out_proj", values),
        ]
    width = local.intermediate
    return [
        *mixer,
        linear("gate_up", 2 * width, hidden, outputs=width, norm=True),
        *row_parallel("down", width),
    ]


def step_sequence(config: ModelConfig, shape: StepShape) -> list[StepOp]:
    """Every operation of a step in order, each with one call: what a captured graph holds."""
    item, rows = _ITEM_BYTES[shape.dtype], shape.sequences * shape.rows
    vocab = config.local(shape.tp).vocab
    embedded = rows * config.hidden_size * item
    meeting = [StepOp("all_reduce", "collective", 1, activation_bytes=embedded)] if shape.tp > 1 else []
    layers = {kind: layer_ops(config, shape, kind) for kind in set(config.layer_types)}
    return [
        StepOp("embedding", "begin", 1, weight_bytes=embedded, activation_bytes=embedded),
        *meeting,
        *(op for kind in config.layer_types for op in layers[kind]),
        StepOp(
            "final norm, lm_head",
            "linear",
            1,
            weight_bytes=vocab * config.hidden_size * item + 4 * config.hidden_size,
            activation_bytes=rows * (config.hidden_size * item + 4 * vocab),
            launches=2,
        ),
        StepOp("draw", "draw", 1, activation_bytes=rows * vocab * 4),
        StepOp("finish", "finish", 1),
    ]


def step_ops(config: ModelConfig, shape: StepShape) -> list[StepOp]:
    """The operations of a step, those of one name counted together, in the order of their first call."""
    found: dict[str, tuple[StepOp, int]] = {}
    for op in step_sequence(config, shape):
        first, calls = found.get(op.name, (op, 0))
        found[op.name] = (first, calls + 1)
    return [replace(op, calls=calls) for op, calls in found.values()]


def step_floor_s(config: ModelConfig, shape: StepShape) -> float:
    """The least that a step takes on one H200 (or on each of `tp`, whose exchange costs a launch here)."""
    return sum(op.floor_s for op in step_ops(config, shape))
