"""A prefill part padded to a shape against the same part as it is: hidden states, caches, registers."""

from __future__ import annotations

import pytest
import torch

from mstar.arch import Trunk, allocate_caches
from mstar.kernels.ops import Ops
from mstar.kernels.registry import Table
from mstar.loader.checkpoint import TORCH_DTYPES, load_shard
from mstar.loader.config import read_config
from mstar.ranks.collectives.solo import SoloCollective
from mstar.ranks.executor import Executor
from mstar.ranks.plan import Chunk, StepPlan, TableUpdate
from mstar.ranks.prefill_steps import MOST_OPERATIONS, ROWS, PrefillSteps, Shape, shapes
from mstar.scripts.make_checkpoint import make_config, write_virtual

BLOCK, SLOTS, MOST = 16, 8, 512
# sums of other shapes' products, and bf16's roundings of them, through four layers
BOUNDS = {"fp32": 2e-5, "bf16": 3e-2}


# in the interpreter bf16 takes 44 s and differs from float32 in its roundings alone
@pytest.fixture(scope="module", params=["fp32", "bf16"] if torch.cuda.is_available() else ["fp32"])
def engines(request, device, tmp_path_factory):
    """The dtype's name and two executors of one trunk, each with caches of its own."""
    from mstar.kernels.linear.gpu import candidates
    from mstar.kernels.triton_ops import TritonOps

    class Mixers(TritonOps):
        """Its mixers alone: the interpreter takes minutes for the rest, which pays no heed to borders."""

        linear, gated_linear, rms_norm = Ops.linear, Ops.gated_linear, Ops.rms_norm

    path = tmp_path_factory.mktemp("padded")
    # on a GPU the models' head dims, in the interpreter small ones
    scale = 1 if device.type == "cuda" else 8
    shape = make_config("0.8B", scale, request.param, None, layers=2, vocab=6143)
    shape["layer_types"] = ["linear_attention", "full_attention"]
    shape |= {"linear_num_key_heads": 2, "linear_num_value_heads": 4}
    shape |= {"num_attention_heads": 4, "num_key_value_heads": 1}
    write_virtual(path, shape, 5)
    config, dtype = read_config(path), TORCH_DTYPES[request.param]
    with pytest.MonkeyPatch.context() as patch:
        ops = Mixers(device, Table(candidates))
        patch.setattr("mstar.arch.trunk.select_ops", lambda *_: (ops, []))
        trunk = Trunk(
            config,
            load_shard(path, config, 0, 1, request.param, device=device),
            dtype=dtype,
            device=device,
            collective=SoloCollective(),
            block_size=BLOCK,
        )
    made = []
    for _ in range(2):
        blocks = SLOTS * MOST // BLOCK + 1
        caches = allocate_caches(
            config,
            1,
            blocks=blocks,
            block_size=BLOCK,
            slots=SLOTS,
            dtype=dtype,
            device=device,
            drafts=0,
            ring=True,
        )
        made.append(Executor(trunk, caches, slots=SLOTS, max_seq=MOST, device=device, uniform=True))
    return request.param, made


def part(*chunks: tuple[int, int, int, bool]) -> StepPlan:
    """A plan of chunks (slot, start, tokens, final); a slot's blocks come with its first chunk."""
    tables = []
    for slot, start, _, _ in chunks:
        if start == 0:
            first = 1 + (slot - 1) * (MOST // BLOCK)
            tables.append(TableUpdate(slot, 0, list(range(first, first + MOST // BLOCK))))
    runs = [
        Chunk(slot, start, [(31 * slot + 7 * (start + place)) % 6000 for place in range(count)], final)
        for slot, start, count, final in chunks
    ]
    return StepPlan(1, tables, runs, MOST // BLOCK, [], 0, 0, False)


# half as many rows in the interpreter, which takes a minute for these; there chunks of 64 end inside other tests
FIRST, SECOND, THIRD = (64, 30, 35) if torch.cuda.is_available() else (33, 15, 18)
PARTS = [
    part((2, 0, FIRST, False), (3, 0, 5, True)),
    # the same shape again, with fewer rows of what was there
    part((2, FIRST, SECOND, True), (4, 0, 1, True), (1, 0, THIRD, False)),
]


@torch.inference_mode()
def test_a_padded_part_is_the_part_as_it_is(engines):
    dtype, (plain, padded) = engines
    steps = PrefillSteps(padded, eager=True)
    steps.try_shape(Shape(64, 1))
    assert not padded.lengths.any()
    for executor in (plain, padded):
        executor.pending.fill_(2)
    for plan in PARTS:
        shape = steps.shape_of(plan)
        rows = sum(len(chunk.token_ids) for chunk in plan.chunks)
        assert shape is not None and (shape.rows > rows or shape.sequences > len(plan.chunks))
        want, got = plain.prefill(plan), steps.run(plan)
        assert (want is None) == (got is None) == (not any(chunk.final for chunk in plan.chunks))
        if want is not None:
            assert got.shape == want.shape and close(got, want, dtype)
    assert torch.equal(plain.lengths, padded.lengths)
    assert torch.equal(plain.pending[1:5], padded.pending[1:5])
    assert torch.equal(plain.block_table, padded.block_table)
    # of all but the sinks, which padding may write to
    for mine, theirs in zip(padded.caches, plain.caches, strict=True):
        for name in mine.__slots__:
            assert close(getattr(mine, name)[1:], getattr(theirs, name)[1:], dtype)


def close(got: torch.Tensor, want: torch.Tensor, dtype: str) -> bool:
    scale = max(1e-30, float(want.float().norm()))
    return float((got.float() - want.float()).norm()) <= BOUNDS[dtype] * scale


def test_what_no_shape_holds_runs_as_it_is(engines):
    _, (plain, _) = engines
    steps = PrefillSteps(plain, eager=True)
    assert steps.shape_of(part()) is None
    assert steps.shape_of(part(*((1, 0, 1, False) for _ in range(65)))) is None
    assert steps.shape_of(part((1, 0, 4097, False))) is None
    assert steps.shape_of(part(*((1, 0, 1, False) for _ in range(17)))) == Shape(256, 64)
    assert steps.shape_of(part((1, 0, 60, False), (2, 0, 5, False))) == Shape(128, 4)
    assert steps.shape_of(part(*((1, 0, 2, False) for _ in range(5)))) == Shape(64, 16)


def test_shapes_end_where_the_device_takes_longer_than_the_host():
    assert max(shapes(752_000_000)) == Shape(4096, 64)
    for params in (2 * 10**9, 4 * 10**9, 9 * 10**9, 27 * 10**9):
        kept = {shape.rows for shape in shapes(params)}
        assert kept == {rows for rows in ROWS if 2 * params * rows <= MOST_OPERATIONS}
    assert max(shapes(9 * 10**9)).rows == 1024 and max(shapes(27 * 10**9)).rows == 256
    assert shapes(10**12) == []
