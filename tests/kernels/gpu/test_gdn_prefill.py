"""GDN's prefill kernels against the torch reference and a float64 loop over tokens."""

import pytest
import torch

from mstar.kernels.gdn import GdnWeights
from mstar.kernels.gdn.gpu.prefill import DEFAULT, Tuning, chunks_of, gdn_prefill_gpu, unsupported
from mstar.kernels.gdn.reference import gdn_prefill
from mstar.kernels.rows import Rows
from tests.kernels.test_gdn import WIDTH, float64_mixer, make_weights

RING = 8
# What a bf16 model's own roundings (u, o, three in the norm) cost against float64, and float32's sums.
BOUND = {torch.float32: 5e-6, torch.float16: 2e-3, torch.bfloat16: 1.2e-2}
# Against the reference, which rounds in the same places: a few u differ in their last bit.
NEAR = {torch.float32: 5e-6, torch.float16: 5e-4, torch.bfloat16: 3e-3}


def relative(got, want):
    return float((got.double() - want.double()).norm() / want.double().norm())


def prefill_rows(counts: list[int], starts: list[int], slots: list[int], device) -> Rows:
    borders = [0]
    for count in counts:
        borders.append(borders[-1] + count)
    fresh = [int(start == 0) for start in starts]
    return Rows(
        sequences=len(counts),
        longest=max(counts),
        rows_per_seq=0,
        cu_rows=torch.tensor(borders, device=device),
        starts=torch.tensor(starts, device=device),
        slots=torch.tensor(slots, dtype=torch.int32, device=device),
        fresh=torch.tensor(fresh, dtype=torch.uint8, device=device),
        block_tables=torch.zeros(len(counts), 1, dtype=torch.int32, device=device),
        host_cu_rows=tuple(borders),
        host_starts=tuple(starts),
    )


def on(weights: GdnWeights, device) -> GdnWeights:
    fields = {name: getattr(weights, name) for name in weights.__slots__}
    return GdnWeights(**{n: x.to(device) if isinstance(x, torch.Tensor) else x for n, x in fields.items()})


def before_of(ring: torch.Tensor, start: int) -> torch.Tensor:
    """The WIDTH - 1 inputs before position `start` of one slot's ring; those before position 0 are zero."""
    positions = range(start - WIDTH + 1, start)
    return torch.stack([ring[p % RING] if p >= 0 else torch.zeros_like(ring[0]) for p in positions])


def setup(w, counts, starts, slots, dtype, device, seed):
    """proj, state, ring, rows; slots that no sequence has, and ring places before position 0, are poisoned."""
    torch.manual_seed(seed)
    proj = torch.randn(sum(counts), w.proj_width).to(dtype)
    state = torch.randn(8, w.value_heads, w.key_dim, w.value_dim)
    ring = torch.randn(8, RING, w.channels).to(dtype)
    for slot in range(8):
        if slot not in slots or starts[slots.index(slot)] == 0:
            state[slot], ring[slot] = float("nan"), float("nan")
    for start, slot in zip(starts, slots, strict=True):
        for place in range(start, RING):
            ring[slot, place] = float("nan")
    rows = prefill_rows(counts, starts, slots, device)
    return proj.to(device), state.to(device), ring.to(device), rows


def run(proj, w, state, ring, rows, tuning=DEFAULT):
    return gdn_prefill_gpu(proj, w, state, ring, ring.new_zeros(8, 0, 0), rows, tuning)


def check(
    counts, starts, slots, heads, dims, dtype, device, bound=None, near=None, tuning=DEFAULT, edit=None
):
    seed = sum(counts) + sum(heads)
    torch.manual_seed(seed)
    if device.type == "cuda":  # the models' dims: small ones are for the interpreter's sake
        dims = tuple(4 * dim for dim in dims)
    w = on(make_weights(*heads, *dims), device)
    proj, state, ring, rows = setup(w, counts, starts, slots, dtype, device, seed)
    if edit is not None:
        edit(proj, w)
    old_state, old_ring = state.clone(), ring.clone()
    out = run(proj, w, state, ring, rows, tuning)
    assert out.dtype == dtype and out.shape == (sum(counts), w.value_heads * w.value_dim)
    for index, (start, slot) in enumerate(zip(starts, slots, strict=True)):
        part = proj[rows.host_cu_rows[index] : rows.host_cu_rows[index + 1]]
        mine = out[rows.host_cu_rows[index] : rows.host_cu_rows[index + 1]]
        taps = before_of(old_ring[slot], start)
        s = torch.zeros_like(state[slot]) if start == 0 else old_state[slot]
        want, want_s, _ = float64_mixer(part, w, s, taps)
        assert relative(mine, want) < (bound or BOUND[dtype])
        assert relative(state[slot], want_s) < (bound or BOUND[dtype])
        one = prefill_rows([counts[index]], [start], [0], device)
        ref_s, ref_taps = s[None].clone(), taps[None].clone()
        ref = gdn_prefill(part, w, ref_s, ref_taps, one)
        assert relative(mine, ref) < (near or NEAR[dtype])
        assert relative(state[slot], ref_s[0]) < (near or NEAR[dtype])
        for place in range(RING):  # the last inputs by position, to the bit, and nothing else
            written = [p for p in range(start, start + counts[index]) if p % RING == place]
            kept = part[written[-1] - start, : w.channels] if written else old_ring[slot, place]
            torch.testing.assert_close(ring[slot, place], kept, rtol=0, atol=0, equal_nan=True)
    others = [slot for slot in range(8) if slot not in slots]
    assert state[others].isnan().all() and ring[others].isnan().all()


@pytest.mark.parametrize(
    "heads, dims, dtype",
    [
        ((1, 2), (16, 32), torch.bfloat16),
        ((1, 3), (32, 16), torch.float32),
        ((2, 2), (16, 16), torch.float32),
    ],
)
def test_chunks_of_several_sequences_match_float64_and_the_reference(device, heads, dims, dtype):
    check([1, 65, 2, 63], [0, 64, 7, 1], [3, 1, 6, 4], heads, dims, dtype, device)


@pytest.mark.parametrize("count", [64, 130])
def test_one_sequence_of_whole_and_partial_chunks(device, count):
    check([count], [0], [5], (1, 1), (16, 16), torch.bfloat16, device)


def test_float16(device):
    check([66, 4], [0, 2], [2, 7], (1, 1), (16, 16), torch.float16, device)


def test_outputs_from_one_bf16_part_of_the_states(device):
    """Half the traffic, left to a measurement: right, and less exact."""
    check([40], [3], [2], (1, 1), (16, 16), torch.bfloat16, device, tuning=Tuning(out_parts=1), near=6e-3)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_a_prompt_in_parts_cut_at_a_chunk_has_the_bits_of_the_whole(device, dtype):
    torch.manual_seed(0)
    dim = 64 if device.type == "cuda" else 16
    w = on(make_weights(1, 1, dim, dim), device)
    proj, state, ring, rows = setup(w, [70], [0], [3], dtype, device, 1)
    parts_state, parts_ring = state.clone(), ring.clone()
    out = run(proj, w, state, ring, rows)
    first = run(proj[:64], w, parts_state, parts_ring, prefill_rows([64], [0], [3], device))
    second = run(proj[64:], w, parts_state, parts_ring, prefill_rows([6], [64], [3], device))
    assert torch.equal(torch.cat([first, second]), out)
    assert torch.equal(parts_state[3], state[3]) and torch.equal(parts_ring[3], ring[3])


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("kind", ["forgets", "keeps", "mixed", "repeats"])
def test_extreme_gates_stay_finite_and_exact(device, kind, dtype):
    """Decay near 0, near 1, in turns; and the same key at every row with beta and decay near 1."""

    def edit(proj, w):
        b, a = proj[:, -2 * w.value_heads :].chunk(2, 1)  # views
        if kind == "forgets":
            a.fill_(80.0)
        if kind in ("keeps", "repeats"):
            a.fill_(-20.0)
            b.fill_(9.0)
        if kind == "mixed":  # sums of log decays of thousands, and steps of nearly nothing between them
            a.fill_(-8.0)
            a[::7] = 90.0
        if kind == "repeats":
            proj[:, : 2 * w.key_heads * w.key_dim] = proj[:1, : 2 * w.key_heads * w.key_dim].abs() + 0.5

    # the reference adds log decays in float32: among strong ones it loses the weak, by 1e-5
    near = 5e-5 if kind == "mixed" and dtype == torch.float32 else None
    check([66], [0], [2], (1, 1), (16, 16), dtype, device, near=near, edit=edit)


def test_rows_need_not_lie_side_by_side(device):
    torch.manual_seed(4)
    dim = 64 if device.type == "cuda" else 16
    w = on(make_weights(1, 1, dim, dim), device)
    proj, state, ring, rows = setup(w, [5], [0], [3], torch.float32, device, 4)
    wide = torch.full((5, w.proj_width + 9), float("nan"), device=device)
    wide[:, : w.proj_width] = proj
    other_state, other_ring = state.clone(), ring.clone()
    out = run(proj, w, state, ring, rows)
    assert torch.equal(run(wide[:, : w.proj_width], w, other_state, other_ring, rows), out)
    assert torch.equal(other_state[3], state[3])


def test_chunks_begin_at_a_sequence_s_first_row_and_are_made_once_a_pass(device):
    chunks = chunks_of((0, 1, 1, 130), device, 0)
    assert chunks.table.tolist() == [[0, 0], [2, 1], [2, 65], [2, 129]]
    assert chunks.borders.tolist() == [0, 1, 1, 4]
    assert chunks_of((0, 1, 1, 130), device, 0) is chunks


def test_dims_that_no_kernel_has_are_named():
    assert unsupported(make_weights(1, 1, 128, 64)) is None
    assert "48" in (unsupported(make_weights(1, 1, 32, 48)) or "")
