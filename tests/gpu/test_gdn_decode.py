"""Gated DeltaNet's decode kernel at the models' sizes, on a GPU; skipped, by this name, where there is none."""

from __future__ import annotations

import pytest
import torch

if not torch.cuda.is_available():
    pytest.skip("no GPU: decode at the models' sizes is not tested here", allow_module_level=True)

from mstar.kernels.gdn.gpu.decode import NUM_WARPS
from mstar.kernels.gdn.rings import ring_rows
from tests.support.gdn_decode import (
    Caches,
    Float64,
    beginnings,
    bits,
    make_rows,
    make_weights,
    relative,
    replay_cycles,
)

DEVICE = torch.device("cuda")
HEADS = {"0.8B": (16, 16), "9B": (16, 32), "27B": (16, 48)}
BOUNDS = {torch.float32: 5e-6, torch.bfloat16: 2e-2}


def beginning(model, sequences, count, dtype, seed=0):
    """(weights, caches, slots, starts, states, taps) of sequences that are a few tokens in, slots out of order."""
    generator = torch.Generator().manual_seed(seed)
    w = make_weights(*HEADS[model], 128, 128, generator, DEVICE)
    slots = (torch.randperm(sequences, generator=generator) + 1).tolist()
    starts = torch.randint(0, 5000, (sequences,), generator=generator).tolist()
    state, taps = beginnings(w, starts, generator, DEVICE, dtype)
    caches = Caches(w, sequences + 2, ring_rows(count - 1), dtype, DEVICE, drafts=count > 1)
    for index, slot in enumerate(slots):
        caches.start(slot, starts[index], state[index], taps[index])
    return w, caches, slots, starts, state, taps


@pytest.mark.parametrize("dtype", BOUNDS)
@pytest.mark.parametrize("count", [1, 4])
@pytest.mark.parametrize("sequences", [1, 16, 64])
@pytest.mark.parametrize("model", HEADS)
def test_rows_are_those_of_float64(model, sequences, count, dtype):
    """Three steps; with drafts, some of each step's are accepted and replayed by the next one."""
    w, caches, slots, starts, state, taps = beginning(model, sequences, count, dtype, seed=sequences)
    exact = Float64(w, state, taps)
    generator = torch.Generator(DEVICE).manual_seed(3)
    pending = [0] * sequences
    for step in range(3):
        proj = torch.randn(sequences, count, w.proj_width, generator=generator, device=DEVICE).to(dtype)
        rows = make_rows(count, slots, starts, DEVICE, pending if count > 1 else None)
        out = caches.run(proj.flatten(0, 1), rows).unflatten(0, (-1, count))
        want = [exact.row(proj[:, 0])]
        first = (exact.state, exact.taps)
        after = [first]
        for row in range(1, count):
            want.append(exact.row(proj[:, row]))
            after.append((exact.state, exact.taps))
        assert relative(out, torch.stack(want, 1)) < BOUNDS[dtype]
        assert relative(caches.state[slots], first[0]) < BOUNDS[dtype]
        pending = [(index + step) % count for index in range(sequences)]
        starts = [start + 1 + more for start, more in zip(starts, pending, strict=True)]
        exact.state = torch.stack([after[more][0][index] for index, more in enumerate(pending)])
        exact.taps = torch.stack([after[more][1][index] for index, more in enumerate(pending)])
    assert torch.isnan(caches.state[-1]).all() and torch.isnan(caches.state[0]).all()


@pytest.mark.parametrize("dtype", BOUNDS)
@pytest.mark.parametrize("dims", [(1, 2, 128, 128), (1, 1, 64, 64)])
def test_replay_is_plain_decode_to_the_bit(dims, dtype):
    replay_cycles(dims, dtype, DEVICE)


def test_replay_in_windows_of_nine_rows():
    replay_cycles((1, 2, 128, 128), torch.bfloat16, DEVICE, window=9)


@pytest.mark.parametrize("count", [1, 4])
@pytest.mark.parametrize("sequences", [1, 16, 64])
def test_a_graph_replays_the_bytes_of_the_launch(sequences, count):
    w, caches, slots, starts, *_ = beginning("9B", sequences, count, torch.bfloat16)
    rows = make_rows(count, slots, starts, DEVICE, [0] * sequences if count > 1 else None)
    proj = torch.randn(sequences * count, w.proj_width, device=DEVICE).to(torch.bfloat16)
    held = (caches.state, caches.conv, caches.window)
    before = [x.clone() for x in held]
    eager = caches.run(proj, rows).clone()
    after = [x.clone() for x in held]
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        out = caches.run(proj, rows)
    for _ in range(3):
        for x, kept in zip(held, before, strict=True):
            x.copy_(kept)
        out.fill_(7)
        graph.replay()
        assert torch.equal(bits(out), bits(eager))
        for x, want in zip(held, after, strict=True):
            assert torch.equal(bits(x), bits(want))


@pytest.mark.parametrize("num_warps", [2, 8])
def test_numbers_of_warps_agree(num_warps):
    results = []
    for given in (NUM_WARPS, num_warps):
        w, caches, slots, starts, *_ = beginning("0.8B", 16, 4, torch.float32)
        generator = torch.Generator(DEVICE).manual_seed(11)
        proj = torch.randn(64, w.proj_width, generator=generator, device=DEVICE)
        first = caches.run(proj, make_rows(4, slots, starts, DEVICE, [0] * 16), given)
        rows = make_rows(4, slots, [start + 3 for start in starts], DEVICE, [2] * 16)
        results.append((first, caches.run(proj.flip(0), rows, given), caches.state[slots]))
    for want, got in zip(*results, strict=True):
        assert relative(got, want) < 2e-6
