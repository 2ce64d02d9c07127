"""GDN's prefill kernels at the models' shapes, against a float64 loop over tokens on the GPU."""

import pytest
import torch

pytest.importorskip("triton")

from mstar.kernels.gdn import GdnWeights
from mstar.kernels.gdn.gpu.prefill import DEFAULT, Prefill, Tuning, chunks_of, gdn_prefill_gpu
from mstar.kernels.rows import Rows

pytestmark = pytest.mark.skipif(
    not torch.cuda.is_available(), reason="no GPU: kernels at the models' shapes are not tested here"
)

MODELS = {"0.8B": (16, 16), "9B": (16, 32), "27B": (16, 48)}
DIM, WIDTH, RING, SLOTS = 128, 4, 4, 4


def make(heads, counts, starts, slots, dtype, seed=0):
    """Weights, proj, state, ring and rows on the GPU; slots that no sequence has are poisoned."""
    generator = torch.Generator("cuda").manual_seed(seed)

    def randn(*shape):
        return torch.randn(*shape, generator=generator, device="cuda")

    keys, values = heads
    channels = (2 * keys + values) * DIM
    w = GdnWeights(
        key_heads=keys, value_heads=values, key_dim=DIM, value_dim=DIM, conv=randn(WIDTH, channels) * 0.5,
        decay=-randn(values).exp(), dt_bias=randn(values), norm=randn(DIM).abs() + 0.5, eps=1e-6,
    )  # fmt: skip
    proj = randn(sum(counts), w.proj_width).to(dtype)
    state, ring = randn(SLOTS, values, DIM, DIM), randn(SLOTS, RING, channels).to(dtype)
    for slot in range(SLOTS):
        if slot not in slots or starts[slots.index(slot)] == 0:
            state[slot], ring[slot] = float("nan"), float("nan")
    return w, proj, state, ring, make_rows(counts, starts, slots)


def make_rows(counts, starts, slots) -> Rows:
    borders = torch.tensor([0, *counts]).cumsum(0)
    return Rows(
        sequences=len(counts), longest=max(counts), rows_per_seq=0, cu_rows=borders.cuda(),
        starts=torch.tensor(starts).cuda(), slots=torch.tensor(slots, dtype=torch.int32).cuda(),
        fresh=torch.tensor([int(start == 0) for start in starts], dtype=torch.uint8).cuda(),
        block_tables=torch.zeros(len(counts), 1, dtype=torch.int32).cuda(),
        host_cu_rows=tuple(borders.tolist()), host_starts=tuple(starts),
    )  # fmt: skip


def float64_u(part, w, taps):
    """silu of the conv without any rounding; taps: the WIDTH - 1 inputs before."""
    line = torch.cat([taps, part[:, : w.channels]]).double()
    summed = sum(line[tap : tap + len(part)] * w.conv[tap].double() for tap in range(WIDTH))
    return torch.nn.functional.silu(summed)


def float64_rule(u, part, w, state):
    """The recurrence, token by token, from u; returns what the gated norm gives, and the state after."""
    u, count = u.double(), len(part)
    q, k, v = u.split([w.key_heads * DIM, w.key_heads * DIM, w.value_heads * DIM], 1)
    group = w.value_heads // w.key_heads
    q, k = (
        (x / (x.square().sum(-1, keepdim=True) + 1e-6).sqrt()).repeat_interleave(group, 1)
        for x in (q.view(count, -1, DIM), k.view(count, -1, DIM))
    )
    v = v.view(count, -1, DIM)
    b, a = part[:, -2 * w.value_heads :].double().chunk(2, 1)
    beta = b.sigmoid()
    decay = (w.decay.double() * torch.nn.functional.softplus(a + w.dt_bias.double())).exp()
    s, out = state.double(), []
    for t in range(count):
        s = s * decay[t, :, None, None]
        delta = beta[t, :, None] * (v[t] - (k[t, :, None, :] @ s)[:, 0])
        s = s + k[t, :, :, None] * delta[:, None, :]
        out.append((q[t, :, None, :] @ s)[:, 0] * DIM**-0.5)
    o = torch.stack(out)
    z = part[:, w.channels : w.channels + w.value_heads * DIM].double().view_as(o)
    o = o / (o.square().mean(-1, keepdim=True) + w.eps).sqrt() * w.norm.double()
    return (o * torch.nn.functional.silu(z)).flatten(1), s


def relative(got, want):
    assert got.isfinite().all()
    return float((got.double() - want).norm() / want.norm())


def gates(kind, proj, w):
    """Edits the projection's b|a, and for `repeats` the keys, in place."""
    b, a = proj[:, -2 * w.value_heads :].chunk(2, 1)
    if kind == "forgets":
        a.fill_(80.0)
    if kind in ("keeps", "repeats"):
        a.fill_(-12.0)
        b.fill_(9.0)
    if kind == "mixed":
        a.fill_(-8.0)
        a[::7] = 90.0
    if kind == "repeats":  # the same key at every row: powers of the system would overflow
        keys = proj[:, : 2 * w.key_heads * DIM]
        keys.copy_(keys[:1].abs() + 0.5)


# From the kernel's own u the state holds float32 sums of numbers of 16 bits (interpreter: 3e-6 to 7e-6 at 128
# rows), the output the norm's bf16 roundings (4e-3). float32 models: IEEE products.
BOUNDS = {torch.bfloat16: (4e-3, 5e-5, 6e-3), torch.float32: (1e-6, 1e-5, 1e-5)}


def check(model, counts, starts, slots, dtype, kind="random", tuning=DEFAULT):
    w, proj, state, ring, rows = make(MODELS[model], counts, starts, slots, dtype)
    gates(kind, proj, w)
    old_state, old_ring = state.clone(), ring.clone()
    call = Prefill(proj, w, state, ring, rows, tuning)
    for stage in call.stages():
        stage()
    u_bound, state_bound, out_bound = BOUNDS[dtype]
    for index, (start, slot) in enumerate(zip(starts, slots, strict=True)):
        mine = slice(rows.host_cu_rows[index], rows.host_cu_rows[index + 1])
        part = proj[mine]
        taps = torch.stack([old_ring[slot, p % RING] for p in range(start - WIDTH + 1, start)])
        s = old_state[slot]
        if start == 0:
            taps, s = torch.zeros_like(taps), torch.zeros_like(s)
        assert relative(call.u[mine], float64_u(part, w, taps)) < u_bound
        want, want_s = float64_rule(call.u[mine], part, w, s)
        errors = relative(state[slot], want_s), relative(call.out[mine], want)
        print(f"{model} {kind} {dtype} {counts[index]} rows: state {errors[0]:.1e}, out {errors[1]:.1e}")
        assert errors[0] < state_bound and errors[1] < out_bound
        for p in range(max(start, start + counts[index] - RING), start + counts[index]):
            assert torch.equal(ring[slot, p % RING], part[p - start, : w.channels])
    others = [slot for slot in range(SLOTS) if slot not in slots]
    assert state[others].isnan().all() and ring[others].isnan().all()


@pytest.mark.parametrize("model", MODELS)
def test_2048_rows(model):
    check(model, [2048], [0], [1], torch.bfloat16)


@pytest.mark.parametrize("model", ["0.8B", "27B"])
def test_several_sequences_of_odd_lengths_some_begun_before(model):
    check(model, [65, 1, 700], [0, 129, 64], [3, 1, 2], torch.bfloat16)


@pytest.mark.parametrize("kind", ["forgets", "keeps", "mixed", "repeats"])
def test_extreme_gates(kind):
    check("9B", [1000], [64], [2], torch.bfloat16, kind)


@pytest.mark.timeout(400)
@pytest.mark.parametrize("kind", ["random", "repeats"])
def test_float32(kind):
    """Its first call compiles unrolled float32 products for a minute or so."""
    check("0.8B", [200, 7], [0, 5], [1, 3], torch.float32, kind)


@pytest.mark.parametrize("block_v, stages", [(16, 1), (16, 2), (32, 1)])
def test_state_and_output_do_not_depend_on_how_the_walk_is_cut(block_v, stages):
    w, proj, state, ring, rows = make(MODELS["0.8B"], [300], [64], [1], torch.bfloat16)
    other_state, other_ring = state.clone(), ring.clone()
    window = ring.new_zeros(SLOTS, 0, 0)
    out = gdn_prefill_gpu(proj, w, state, ring, window, rows)
    tuning = Tuning(block_v=block_v, walk_stages=stages)
    other = gdn_prefill_gpu(proj, w, other_state, other_ring, window, rows, tuning)
    assert relative(other_state[1], state[1].double()) < 1e-6
    assert relative(other, out.double()) < 1e-3


def test_a_prompt_in_parts_cut_at_a_chunk_has_the_bits_of_the_whole():
    w, proj, state, ring, rows = make(MODELS["0.8B"], [1500], [0], [1], torch.bfloat16)
    parts_state, parts_ring = state.clone(), ring.clone()
    window = ring.new_zeros(SLOTS, 0, 0)
    out = gdn_prefill_gpu(proj, w, state, ring, window, rows)
    pieces = [
        gdn_prefill_gpu(
            proj[begin:end], w, parts_state, parts_ring, window, make_rows([end - begin], [begin], [1])
        )
        for begin, end in ((0, 512), (512, 1024), (1024, 1500))
    ]
    assert torch.equal(torch.cat(pieces), out)
    assert torch.equal(parts_state[1], state[1]) and torch.equal(parts_ring[1], ring[1])


def test_a_call_does_not_wait_for_the_device():
    w, proj, state, ring, rows = make(MODELS["0.8B"], [130, 3], [0, 0], [1, 2], torch.bfloat16)
    window = ring.new_zeros(SLOTS, 0, 0)
    gdn_prefill_gpu(proj, w, state, ring, window, rows)
    chunks_of.cache_clear()
    torch.cuda.synchronize()
    torch.cuda.set_sync_debug_mode("error")
    try:
        gdn_prefill_gpu(proj, w, state, ring, window, rows)
    finally:
        torch.cuda.set_sync_debug_mode("default")
