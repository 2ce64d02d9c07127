"""What tests of the GPU's Gated DeltaNet decode share: weights, caches as rings, the recurrence in float64."""

from __future__ import annotations

import torch
import torch.nn.functional as F

from mstar.kernels.gdn import GdnWeights
from mstar.kernels.gdn.gpu.decode import NUM_WARPS, gdn_decode_gpu
from mstar.kernels.gdn.rings import ring_rows
from mstar.kernels.rows import Rows

WIDTH = 4


def make_weights(
    key_heads: int,
    value_heads: int,
    key_dim: int,
    value_dim: int,
    generator: torch.Generator,
    device: torch.device,
) -> GdnWeights:
    channels = 2 * key_heads * key_dim + value_heads * value_dim

    def normal(*shape: int) -> torch.Tensor:
        return torch.randn(*shape, generator=generator)

    return GdnWeights(
        key_heads=key_heads,
        value_heads=value_heads,
        key_dim=key_dim,
        value_dim=value_dim,
        conv=(normal(WIDTH, channels) * 0.5).to(device),
        decay=-(torch.rand(value_heads, generator=generator) * 4).to(device),
        dt_bias=normal(value_heads).to(device),
        norm=(torch.rand(value_dim, generator=generator) + 0.5).to(device),
        eps=1e-6,
    )


def make_rows(
    rows_per_seq: int,
    slots: list[int],
    starts: list[int],
    device: torch.device,
    pending: list[int] | None = None,
) -> Rows:
    """Rows of a uniform decode part; sequences on the sink are fresh, as padding is."""
    count = len(slots)
    int32 = {"dtype": torch.int32, "device": device}
    return Rows(
        sequences=count,
        longest=rows_per_seq,
        rows_per_seq=rows_per_seq,
        cu_rows=torch.arange(count + 1, device=device) * rows_per_seq,
        starts=torch.tensor(starts, dtype=torch.int64, device=device),
        slots=torch.tensor(slots, **int32),
        fresh=torch.tensor([slot == 0 for slot in slots], dtype=torch.uint8, device=device),
        block_tables=torch.zeros(count, 1, **int32),
        pending=None if pending is None else torch.tensor(pending, **int32),
        committed=torch.ones(count, dtype=torch.int64, device=device),
    )


class Caches:
    """Rings, states and windows of a few slots, poisoned with NaN but where a slot starts."""

    def __init__(
        self,
        w: GdnWeights,
        slots: int,
        ring: int,
        dtype: torch.dtype,
        device: torch.device,
        *,
        drafts: bool,
    ):
        self.w, self.ring = w, ring
        nan = float("nan")
        self.state = torch.full((slots, w.value_heads, w.key_dim, w.value_dim), nan, device=device)
        self.conv = torch.full((slots, ring, w.channels), nan, dtype=dtype, device=device)
        rows = ring if drafts else 0
        self.window = torch.full((slots, rows, 2 * w.value_heads), nan, dtype=dtype, device=device)

    def start(self, slot: int, position: int, state: torch.Tensor, taps: torch.Tensor) -> None:
        """The slot as after `position` tokens; taps: [width - 1, channels], oldest first."""
        self.state[slot] = state
        for age in range(1, WIDTH):
            if position >= age:
                self.conv[slot, (position - age) % self.ring] = taps[WIDTH - 1 - age]

    def run(self, proj: torch.Tensor, rows: Rows, num_warps: int = NUM_WARPS) -> torch.Tensor:
        return gdn_decode_gpu(proj, self.w, self.state, self.conv, self.window, rows, num_warps=num_warps)


def beginnings(
    w: GdnWeights,
    positions: list[int],
    generator: torch.Generator,
    device: torch.device,
    dtype: torch.dtype,
) -> tuple[torch.Tensor, torch.Tensor]:
    """A state and taps for each position; inputs before a sequence's begin are zero."""
    state = torch.randn(len(positions), w.value_heads, w.key_dim, w.value_dim, generator=generator) * 0.3
    taps = torch.randn(len(positions), WIDTH - 1, w.channels, generator=generator).to(dtype)
    for index, position in enumerate(positions):
        taps[index, : max(0, WIDTH - 1 - position)] = 0
    return state.to(device), taps.to(device)


class Float64:
    """Sequences of Gated DeltaNet in float64 from the design's formulas, nothing rounded between.

    state: [seqs, value_heads, key_dim, value_dim]; taps: the last inputs of the conv, [seqs, width - 1, channels].
    """

    def __init__(self, w: GdnWeights, state: torch.Tensor, taps: torch.Tensor):
        self.w, self.state, self.taps = w, state.double(), taps.double()

    def row(self, proj: torch.Tensor, move: bool = True) -> torch.Tensor:
        """One row of each sequence, [seqs, proj_width] -> [seqs, value_heads * value_dim]."""
        w, p = self.w, proj.double()
        keys, values = w.key_heads * w.key_dim, w.value_heads * w.value_dim
        mixed, z, b, a = p.split([w.channels, values, w.value_heads, w.value_heads], -1)
        line = torch.cat([self.taps, mixed[:, None]], 1)
        u = (line * w.conv.double()).sum(1)
        q, k, v = (u * torch.sigmoid(u)).split([keys, keys, values], -1)
        heads = torch.arange(w.value_heads, device=p.device) // (w.value_heads // w.key_heads)
        q, k = (x.unflatten(-1, (w.key_heads, w.key_dim))[:, heads] for x in (q, k))
        q = q / (q.square().sum(-1, keepdim=True) + 1e-6).sqrt() / w.key_dim**0.5
        k = k / (k.square().sum(-1, keepdim=True) + 1e-6).sqrt()
        v, z = (x.unflatten(-1, (w.value_heads, w.value_dim)) for x in (v, z))
        forget = torch.exp(w.decay.double() * F.softplus(a + w.dt_bias.double()))
        s = self.state * forget[..., None, None]
        d = torch.sigmoid(b)[..., None] * (v - (s * k[..., None]).sum(-2))
        s = s + k[..., None] * d[..., None, :]
        o = (s * q[..., None]).sum(-2)
        o = o / (o.square().mean(-1, keepdim=True) + w.eps).sqrt() * w.norm.double()
        if move:
            self.state, self.taps = s, line[:, 1:]
        return (o * z * torch.sigmoid(z)).flatten(1)


def relative(got: torch.Tensor, want: torch.Tensor) -> float:
    return float((got.double() - want.double()).norm() / want.double().norm())


def bits(x: torch.Tensor) -> torch.Tensor:
    """The bytes of a tensor, so that NaNs and signed zeros compare too."""
    return x.contiguous().view(torch.uint8)


def replay_cycles(
    dims: tuple[int, int, int, int], dtype: torch.dtype, device: torch.device, window: int = 4
) -> None:
    """Asserts that steps with drafts give plain decode's outputs and states to the bit.

    Windows of `window` rows with zero to three accepted, steps of one row between, sequences that skip steps.
    dims: (key heads, value heads, key dim, value dim).
    """
    generator = torch.Generator().manual_seed(5)
    w = make_weights(*dims, generator, device)
    ring, slots, begin = ring_rows(window - 1), [4, 1], [0, 9]
    speculative = Caches(w, 5, ring, dtype, device, drafts=True)
    plain = Caches(w, 5, ring_rows(0), dtype, device, drafts=False)
    state, taps = beginnings(w, begin, generator, device, dtype)
    for index, slot in enumerate(slots):
        for caches in (speculative, plain):
            caches.start(slot, begin[index], state[index], taps[index])
    schedule: list[tuple[int, tuple[int | None, int | None]]] = [  # (rows, accepted; None: not in this step)
        (window, (3, 0)), (window, (2, None)), (1, (None, 0)), (window, (None, 1)), (window, (1, 3)),
        (1, (0, None)), (1, (0, 0)), (window, (None, 2)), (1, (None, 0)),
    ]  # fmt: skip
    steps = 13
    line = torch.randn(2, steps, w.proj_width, generator=generator).to(dtype).to(device)
    expected = []  # plain decode's outputs and states, by token
    for step in range(steps):
        outs = plain.run(line[:, step].contiguous(), make_rows(1, slots, [at + step for at in begin], device))
        expected.append((outs, plain.state[slots]))
    done, behind = [0, 0], [0, 0]  # tokens run, drafts that the state is behind by
    for count, accepted in schedule:
        active = [index for index in range(2) if accepted[index] is not None]
        proj = torch.randn(len(active), count, w.proj_width, generator=generator).to(dtype).to(device)
        for at, index in enumerate(active):
            kept = 1 + accepted[index]
            proj[at, :kept] = line[index, done[index] : done[index] + kept]
        starts = [begin[index] + done[index] for index in active]
        pending = [behind[index] for index in active]
        rows = make_rows(count, [slots[index] for index in active], starts, device, pending)
        out = speculative.run(proj.flatten(0, 1), rows).unflatten(0, (-1, count))
        for at, index in enumerate(active):
            for row in range(1 + accepted[index]):
                assert torch.equal(bits(out[at, row]), bits(expected[done[index] + row][0][index]))
            # what is written is the state after the first row: the drafts' moves are not in it
            assert torch.equal(speculative.state[slots[index]], expected[done[index]][1][index])
            done[index] += 1 + accepted[index]
            behind[index] = accepted[index]
    assert done == [11, 13] and behind == [0, 0]
    untouched = [0, 2, 3]
    assert (
        torch.isnan(speculative.state[untouched]).all() and torch.isnan(speculative.window[untouched]).all()
    )
