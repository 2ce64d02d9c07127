"""Gated DeltaNet's decode kernel: against the torch reference and float64, and against itself a row at a time."""

from dataclasses import replace

import pytest
import torch

from mstar.kernels.gdn import gdn_decode
from mstar.kernels.gdn.rings import ring_rows
from tests.support.gdn_decode import (
    WIDTH,
    Caches,
    Float64,
    beginnings,
    bits,
    make_rows,
    make_weights,
    relative,
    replay_cycles,
)

# (bound against float64, bound against the reference, which rounds at the same places). Triton's interpreter
# cuts float32 down to bfloat16 where a device rounds to the nearest: float16 is held tightly there instead.
BF16 = (2e-2, 6e-3) if torch.cuda.is_available() else (1e-1, 8e-2)
BOUNDS = {torch.float32: (2e-6, 2e-6), torch.bfloat16: BF16, torch.float16: (4e-3, 1e-3)}


@pytest.mark.parametrize(
    "dims, dtype, steps",
    [  # (key heads, value heads, key dim, value dim): groups of 1, 2 and 3, dims that are padded
        ((1, 2, 16, 32), torch.float32, 6),
        ((1, 2, 16, 32), torch.float16, 3),
        ((1, 2, 16, 32), torch.bfloat16, 2),
        ((2, 2, 32, 16), torch.float16, 2),
        ((1, 3, 16, 16), torch.float32, 2),
        ((1, 1, 24, 40), torch.float32, 2),
    ],
)
def test_plain_decode_is_that_of_the_reference_and_of_float64(device, dims, dtype, steps):
    generator = torch.Generator().manual_seed(sum(dims))
    w = make_weights(*dims, generator, device)
    slots, starts = [3, 1, 0], [5, 1, 0]  # out of order, one near its begin, one padding
    caches = Caches(w, 4, ring_rows(0), dtype, device, drafts=False)
    state, taps = beginnings(w, starts, generator, device, dtype)
    state[2], taps[2] = 0, 0
    for index in (0, 1):
        caches.start(slots[index], starts[index], state[index], taps[index])
    exact = Float64(w, state, taps)
    plain_state = torch.zeros(4, *state.shape[1:], device=device)
    plain_conv = torch.zeros(4, WIDTH - 1, w.channels, dtype=dtype, device=device)
    for index, slot in enumerate(slots):
        plain_state[slot], plain_conv[slot] = state[index], taps[index]
    no_window = torch.zeros(4, 0, w.channels + 2 * w.value_heads, dtype=dtype, device=device)
    to_exact, to_reference = BOUNDS[dtype]
    for step in range(steps):
        proj = torch.randn(3, w.proj_width, generator=generator).to(dtype).to(device)
        rows = make_rows(1, slots, [starts[0] + step, starts[1] + step, 0], device)
        out = caches.run(proj, rows)
        reference = gdn_decode(proj, w, plain_state, plain_conv, no_window, replace(rows, committed=None))
        want = exact.row(proj)
        assert out.dtype == dtype and torch.isfinite(out).all()
        assert relative(out, reference) < to_reference
        if dtype == torch.float16:  # rounded at the same places: all but a few are the same numbers
            assert (out == reference).float().mean() > 0.9
        assert (
            relative(out[:2], want[:2]) < to_exact
        )  # float64 has the padding go on, the kernel starts it anew
    assert relative(caches.state[[3, 1]], plain_state[[3, 1]]) < to_reference
    assert relative(caches.state[[3, 1]], exact.state[:2]) < to_exact
    assert torch.isnan(caches.state[2]).all() and torch.isnan(caches.conv[2]).all()


@pytest.mark.parametrize(
    "dtype", [torch.float32, torch.bfloat16] if torch.cuda.is_available() else [torch.float32]
)
def test_replay_of_accepted_drafts_is_plain_decode_to_the_bit(device, dtype):
    """Windows of four rows, zero to three drafts accepted, steps of one row between, sequences that skip steps."""
    replay_cycles((1, 1, 16, 16), dtype, device)


@pytest.mark.parametrize("drafts", [0, 3])
def test_rings_hold_the_inputs_at_their_positions_to_the_bit(device, drafts):
    """Rows are a slice of a wider tensor, one sequence is on the sink; nothing else in the caches moves."""
    generator = torch.Generator().manual_seed(drafts)
    w = make_weights(1, 2, 16, 32, generator, device)
    dtype, count, ring = torch.bfloat16, 1 + drafts, ring_rows(drafts)
    caches = Caches(w, 5, ring, dtype, device, drafts=drafts > 0)
    slots, starts = [3, 0, 1], [7, 0, 1022]
    state, taps = beginnings(w, starts, generator, device, dtype)
    for index in (0, 2):
        caches.start(slots[index], starts[index], state[index], taps[index])
    conv, window, states = caches.conv.clone(), caches.window.clone(), caches.state.clone()
    wide = torch.randn(3 * count, w.proj_width + 24, generator=generator).to(dtype).to(device)
    proj = wide[:, 8 : 8 + w.proj_width]
    out = caches.run(proj, make_rows(count, slots, starts, device, [0, 0, 0] if drafts else None))
    again = Caches(w, 5, ring, dtype, device, drafts=drafts > 0)
    for index in (0, 2):
        again.start(slots[index], starts[index], state[index], taps[index])
    rows = make_rows(count, slots, starts, device, [0, 0, 0] if drafts else None)
    assert torch.equal(out, again.run(proj.contiguous(), rows))
    for index, slot in enumerate(slots):
        for row in range(count):
            place = (starts[index] + row) % ring
            conv[slot, place] = proj[index * count + row, : w.channels]
            if drafts:
                window[slot, place] = proj[index * count + row, -2 * w.value_heads :]
    assert torch.equal(bits(caches.conv), bits(conv))
    assert torch.equal(bits(caches.window), bits(window))
    for slot in (0, 2, 4):  # the sink's state is not written either
        assert torch.equal(bits(caches.state[slot]), bits(states[slot]))
    assert torch.isfinite(caches.state[[1, 3]]).all()


def test_a_fresh_sequence_reads_nothing_of_its_slot(device):
    generator = torch.Generator().manual_seed(8)
    w = make_weights(2, 2, 16, 16, generator, device)
    caches = Caches(w, 3, ring_rows(3), torch.float32, device, drafts=True)
    rows = make_rows(4, [2], [0], device, [3])  # what is pending is the former owner's
    rows = replace(rows, fresh=torch.ones(1, dtype=torch.uint8, device=device))
    proj = torch.randn(4, w.proj_width, generator=generator).to(device)
    out = caches.run(proj, rows)
    exact = Float64(
        w,
        torch.zeros(1, 2, 16, 16, device=device),
        torch.zeros(1, WIDTH - 1, w.channels, device=device),
    )
    want = [exact.row(proj[:1])]
    state = exact.state
    want += [exact.row(proj[row : row + 1]) for row in range(1, 4)]
    assert relative(out, torch.cat(want)) < 2e-6
    assert relative(caches.state[2:], state) < 2e-6


@pytest.mark.parametrize("num_warps", [1, 2, 8])
def test_every_number_of_warps_gives_the_same_rows(device, num_warps):
    generator = torch.Generator().manual_seed(13)
    w = make_weights(1, 2, 32, 32, generator, device)
    state, taps = beginnings(w, [6], generator, device, torch.float32)
    proj = torch.randn(2, w.proj_width, generator=generator).to(device)
    exact = Float64(w, state, taps)
    want = torch.cat([exact.row(proj[:1]), exact.row(proj[1:], move=False)])
    caches = Caches(w, 2, ring_rows(1), torch.float32, device, drafts=True)
    caches.start(1, 6, state[0], taps[0])
    out = caches.run(proj, make_rows(2, [1], [6], device, [0]), num_warps)
    assert relative(out, want) < 2e-6
    assert relative(caches.state[1:], exact.state) < 2e-6


def test_a_narrower_conv_is_one_with_a_zero_tap_before(device):
    generator = torch.Generator().manual_seed(34)
    w = make_weights(1, 1, 16, 16, generator, device)
    w.conv[0] = 0
    state, taps = beginnings(w, [6], generator, device, torch.float32)
    proj = torch.randn(1, w.proj_width, generator=generator).to(device)
    results = []
    for weights in (w, replace(w, conv=w.conv[1:].contiguous())):
        caches = Caches(weights, 2, ring_rows(0), torch.float32, device, drafts=False)
        caches.start(1, 6, state[0], taps[0])
        results.append((caches.run(proj, make_rows(1, [1], [6], device)), caches.state[1]))
    assert torch.equal(results[0][0], results[1][0]) and torch.equal(results[0][1], results[1][1])


def test_gates_at_their_ends(device):
    """Softplus above torch's threshold and far below zero, where log(1 + e) alone would round to nothing."""
    generator = torch.Generator().manual_seed(21)
    w = make_weights(1, 2, 16, 16, generator, device)
    state, taps = beginnings(w, [6], generator, device, torch.float32)
    w = replace(w, decay=torch.tensor([-0.01, -4000.0], device=device), dt_bias=torch.zeros(2, device=device))
    for a in ([30.0, -12.0], [95.0, -18.0], [-90.0, 20.5]):
        caches = Caches(w, 2, ring_rows(0), torch.float32, device, drafts=False)
        caches.start(1, 6, state[0], taps[0])
        exact = Float64(w, state, taps)
        proj = torch.randn(1, w.proj_width, generator=generator).to(device)
        proj[0, -2:] = torch.tensor(a)
        assert relative(caches.run(proj, make_rows(1, [1], [6], device)), exact.row(proj)) < 2e-6
        assert relative(caches.state[1:], exact.state) < 2e-6


def test_what_the_kernel_is_not_built_for_is_refused(device):
    generator = torch.Generator().manual_seed(1)
    w = make_weights(1, 1, 16, 16, generator, device)
    rows = make_rows(4, [1], [6], device, [0])
    proj = torch.randn(4, w.proj_width, generator=generator).to(device)
    with pytest.raises(ValueError, match="ring of 8 rows for 3 drafts"):
        Caches(w, 2, 8, torch.float32, device, drafts=True).run(proj, rows)
    with pytest.raises(ValueError, match="gates' ring"):
        Caches(w, 2, 16, torch.float32, device, drafts=False).run(proj, rows)
    wide = replace(w, conv=torch.randn(5, w.channels))
    with pytest.raises(ValueError, match="conv of 5 taps"):
        Caches(wide, 2, 16, torch.float32, device, drafts=True).run(proj, rows)
