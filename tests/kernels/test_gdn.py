"""Gated DeltaNet's mixer against a float64 loop over tokens: chunked, recurrent and native."""

from dataclasses import replace

import pytest
import torch

from mstar.kernels.cpu import CpuOps
from mstar.kernels.gdn import GdnWeights
from mstar.kernels.gdn.reference import chunked_delta_rule
from mstar.kernels.ops import Ops
from mstar.kernels.rows import Rows

WIDTH = 4
NO_WINDOW = torch.zeros(5, 0, 1)


def make_weights(key_heads: int, value_heads: int, key_dim: int = 32, value_dim: int = 48) -> GdnWeights:
    channels = 2 * key_heads * key_dim + value_heads * value_dim
    return GdnWeights(
        key_heads=key_heads,
        value_heads=value_heads,
        key_dim=key_dim,
        value_dim=value_dim,
        conv=torch.randn(WIDTH, channels) * 0.5,
        decay=-torch.rand(value_heads) * 4,
        dt_bias=torch.randn(value_heads),
        norm=torch.rand(value_dim) + 0.5,
        eps=1e-6,
    )


def make_rows(counts: list[int], slots: list[int], fresh: list[int], decode: bool) -> Rows:
    borders = [0]
    for count in counts:
        borders.append(borders[-1] + count)
    return Rows(
        sequences=len(counts),
        longest=max(counts),
        rows_per_seq=1 if decode else 0,
        cu_rows=torch.tensor(borders),
        starts=torch.zeros(len(counts), dtype=torch.int64),
        slots=torch.tensor(slots, dtype=torch.int32),
        fresh=torch.tensor(fresh, dtype=torch.uint8),
        block_tables=torch.zeros(len(counts), 1, dtype=torch.int32),
        host_cu_rows=tuple(borders),
        host_starts=(0,) * len(counts),
    )


def float64_mixer(proj, w: GdnWeights, state, conv):
    """One sequence, token by token, straight from the formulas of the design's section 4."""
    proj, state, history = proj.double(), state.double().clone(), list(conv.double())
    keys, values = w.key_heads * w.key_dim, w.value_heads * w.value_dim
    outputs = []
    for row in proj:
        history.append(row[: w.channels])
        taps = history[-WIDTH:]
        u = torch.nn.functional.silu(sum(tap * c for tap, c in zip(taps, w.conv.double(), strict=True)))
        q, k, v = u[:keys].view(-1, w.key_dim), u[keys : 2 * keys].view(-1, w.key_dim), u[2 * keys :]
        v = v.view(-1, w.value_dim)
        z = row[w.channels : w.channels + values].view(-1, w.value_dim)
        b, a = row[w.channels + values :].view(2, -1)
        out = []
        for head in range(w.value_heads):
            source = head // (w.value_heads // w.key_heads)
            qh = q[source] / (q[source].square().sum() + 1e-6).sqrt() / w.key_dim**0.5
            kh = k[source] / (k[source].square().sum() + 1e-6).sqrt()
            g = w.decay[head].double() * torch.nn.functional.softplus(a[head] + w.dt_bias[head].double())
            s = state[head] * g.exp()
            d = torch.sigmoid(b[head]) * (v[head] - s.T @ kh)
            state[head] = s + torch.outer(kh, d)
            o = state[head].T @ qh
            o = o / (o.square().mean() + w.eps).sqrt() * w.norm.double()
            out.append(o * torch.nn.functional.silu(z[head]))
        outputs.append(torch.cat(out))
    return torch.stack(outputs), state, torch.stack(history[-(WIDTH - 1) :])


def relative(got, want):
    return float((got.double() - want).norm() / want.norm())


@pytest.mark.parametrize("name", ["native", "reference"])
@pytest.mark.parametrize(("dtype", "bound"), [(torch.float32, 5e-6), (torch.bfloat16, 1.5e-2)])
@pytest.mark.parametrize("heads", [(2, 2), (2, 4), (1, 3)])
def test_prefill_then_decode_match_float64(name, dtype, bound, heads):
    torch.manual_seed(sum(heads))
    ops = CpuOps() if name == "native" else Ops()
    w = make_weights(*heads)
    state = torch.randn(5, w.value_heads, w.key_dim, w.value_dim)
    conv = torch.randn(5, WIDTH - 1, w.channels).to(dtype)
    before = state.clone(), conv.clone()
    counts = [1, 130, 3]
    proj = torch.randn(sum(counts), w.proj_width).to(dtype)
    rows = make_rows(counts, [3, 1, 4], [0, 1, 0], decode=False)
    out = ops.gdn(proj, w, state, conv, NO_WINDOW, rows)
    begin = 0
    sequences = {}
    for count, slot, fresh in zip(counts, [3, 1, 4], [0, 1, 0], strict=True):
        keep = 0.0 if fresh else 1.0
        want, s, c = float64_mixer(
            proj[begin : begin + count], w, before[0][slot] * keep, before[1][slot] * keep
        )
        assert relative(out[begin : begin + count], want) < bound
        assert relative(state[slot], s) < bound
        assert torch.equal(conv[slot], c.to(dtype))
        sequences[slot] = (s, c)
        begin += count
    for untouched in (0, 2):
        assert torch.equal(state[untouched], before[0][untouched])
        assert torch.equal(conv[untouched], before[1][untouched])

    proj = torch.randn(3, w.proj_width).to(dtype)
    out = ops.gdn(proj, w, state, conv, NO_WINDOW, make_rows([1, 1, 1], [4, 3, 1], [0, 0, 0], decode=True))
    for index, slot in enumerate([4, 3, 1]):
        want, s, c = float64_mixer(proj[index : index + 1], w, *sequences[slot])
        assert relative(out[index : index + 1], want) < bound
        assert relative(state[slot], s) < bound


def test_native_prefill_and_decode_are_the_same_bits_however_a_sequence_is_cut():
    torch.manual_seed(3)
    w = make_weights(2, 4)
    proj = torch.randn(40, w.proj_width).to(torch.bfloat16)

    def run(cuts: list[int]):
        state = torch.zeros(2, w.value_heads, w.key_dim, w.value_dim)
        conv = torch.zeros(2, WIDTH - 1, w.channels, dtype=torch.bfloat16)
        parts, begin = [], 0
        for cut in cuts:
            rows = make_rows([cut], [1], [int(begin == 0)], decode=cut == 1)
            parts.append(CpuOps().gdn(proj[begin : begin + cut], w, state, conv, NO_WINDOW, rows))
            begin += cut
        return torch.cat(parts), state, conv

    whole = run([40])
    for cuts in ([1] * 40, [17, 1, 22], [2, 38]):
        assert all(torch.equal(a, b) for a, b in zip(run(cuts), whole, strict=True))


def test_chunked_form_stays_exact_where_powers_would_overflow():
    """The same key at every row with beta near one: products of powers of the system blow up, a solve does not."""
    torch.manual_seed(0)
    length, heads, dim = 200, 2, 32
    key = torch.nn.functional.normalize(torch.randn(heads, dim), dim=-1)
    k = key.expand(length, heads, dim).clone()
    v = torch.randn(length, heads, dim)
    beta = torch.full((length, heads), 0.999)
    log_decay = torch.full((length, heads), -1e-4)
    out, state = chunked_delta_rule(k * dim**-0.5, k, v, beta, log_decay, torch.zeros(heads, dim, dim))
    s = torch.zeros(heads, dim, dim, dtype=torch.float64)
    want = []
    for t in range(length):
        s = s * log_decay[t].double().exp()[:, None, None]
        d = beta[t].double()[:, None] * (v[t].double() - torch.einsum("hkv,hk->hv", s, k[t].double()))
        s = s + k[t].double()[..., None] * d[:, None]
        want.append(torch.einsum("hkv,hk->hv", s, k[t].double() * dim**-0.5))
    assert relative(out, torch.stack(want)) < 5e-6
    assert relative(state, s) < 5e-6


@pytest.mark.parametrize("name", ["native", "reference"])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_accepted_drafts_are_replayed_as_if_they_had_been_decoded(name, dtype):
    """Three sequences draft 3, 0 and 2 rows, accept 2, 0 and 0, and go on: states equal those of plain decode.

    Native ones to the bit; the reference's batched products differ from one batch size to another.
    """
    torch.manual_seed(9)
    ops = CpuOps() if name == "native" else Ops()
    w = make_weights(2, 4)
    slots, drafts, accepted = [3, 1, 2], [3, 0, 2], [2, 0, 0]
    start = torch.randn(4, w.value_heads, w.key_dim, w.value_dim)
    start_conv = torch.randn(4, WIDTH - 1, w.channels).to(dtype)
    window = torch.full((4, 3, w.channels + 2 * w.value_heads), float("nan"), dtype=dtype)
    first = [torch.randn(1 + count, w.proj_width).to(dtype) for count in drafts]
    then = [torch.randn(1, w.proj_width).to(dtype) for _ in slots]

    def plain(rows_of):
        state, conv = start.clone(), start_conv.clone()
        outs = []
        for slot, part in zip(slots, rows_of, strict=True):
            for row in part:
                step = make_rows([1], [slot], [0], decode=True)
                outs.append(ops.gdn(row[None], w, state, conv, window, step))
        return torch.cat(outs), state, conv

    def same(got, want):
        if name == "native":
            assert torch.equal(got, want)
        else:
            torch.testing.assert_close(got, want, atol=1e-5, rtol=2e-2 if dtype == torch.bfloat16 else 1e-5)

    state, conv = start.clone(), start_conv.clone()
    verify = make_rows([1 + count for count in drafts], slots, [0, 0, 0], decode=False)
    verify = replace(
        verify,
        rows_per_seq=4,
        pending=torch.zeros(3, dtype=torch.int32),
        committed=torch.ones(3, dtype=torch.int64),
    )
    out = ops.gdn(torch.cat(first), w, state, conv, window, verify)
    want_out, _, _ = plain(first)
    same(out, want_out)
    _, want_state, want_conv = plain([part[:1] for part in first])
    same(state, want_state)
    same(conv, want_conv)

    pending = torch.tensor(accepted, dtype=torch.int32)
    step = replace(make_rows([1, 1, 1], slots, [0, 0, 0], decode=True), pending=pending)
    out = ops.gdn(torch.cat(then), w, state, conv, window, step)
    kept = [
        torch.cat([part[: 1 + count], row]) for part, count, row in zip(first, accepted, then, strict=True)
    ]
    want_out, want_state, want_conv = plain(kept)
    lasts = torch.tensor([len(part) for part in kept]).cumsum(0) - 1
    same(out, want_out[lasts])
    same(state, want_state)
    same(conv, want_conv)
