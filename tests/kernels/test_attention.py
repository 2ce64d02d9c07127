"""Paged attention's mixer against float64: chunks, decode rows, block order, long positions."""

import pytest
import torch

from mstar.kernels.attention import AttentionWeights
from mstar.kernels.attention.reference import rope
from mstar.kernels.cpu import CpuOps
from mstar.kernels.ops import Ops
from mstar.kernels.rows import Rows

BLOCK = 16


def make_weights(q_heads: int, kv_heads: int, dim: int = 32, rotary: int = 8) -> AttentionWeights:
    return AttentionWeights(
        q_heads=q_heads,
        kv_heads=kv_heads,
        head_dim=dim,
        q_norm=torch.rand(dim) + 0.5,
        k_norm=torch.rand(dim) + 0.5,
        inv_freq=1.0 / (1e5 ** (torch.arange(0, rotary, 2).float() / rotary)),
        eps=1e-6,
    )


def float64_sequence(proj, w: AttentionWeights):
    """All rows of one sequence from position 0: no cache, no blocks."""
    proj = proj.double()
    rows, dim = proj.shape[0], w.head_dim
    q_gate = proj[:, : 2 * w.q_heads * dim].view(rows, w.q_heads, 2, dim)
    k, v = proj[:, 2 * w.q_heads * dim :].view(rows, 2, w.kv_heads, dim).unbind(1)
    half = w.inv_freq.shape[0]
    angle = (torch.arange(rows)[:, None].float() * w.inv_freq).double()[:, None]

    def turn(x, norm):
        x = x / (x.square().mean(-1, keepdim=True) + w.eps).sqrt() * norm.double()
        low, high = x[..., :half], x[..., half : 2 * half]
        turned = (low * angle.cos() - high * angle.sin(), high * angle.cos() + low * angle.sin())
        return torch.cat([*turned, x[..., 2 * half :]], -1)

    q, k = turn(q_gate[:, :, 0], w.q_norm), turn(k, w.k_norm)
    k, v = (x.repeat_interleave(w.q_heads // w.kv_heads, 1) for x in (k, v))
    scores = torch.einsum("qhd,khd->hqk", q, k) / dim**0.5
    scores = scores.masked_fill(torch.ones(rows, rows, dtype=torch.bool).triu(1), float("-inf"))
    out = torch.einsum("hqk,khd->qhd", scores.softmax(-1), v)
    return (out * torch.sigmoid(q_gate[:, :, 1])).flatten(1)


def make_rows(starts: list[int], counts: list[int], tables: torch.Tensor, decode: bool) -> Rows:
    borders = [0]
    for count in counts:
        borders.append(borders[-1] + count)
    return Rows(
        sequences=len(counts),
        longest=max(counts),
        rows_per_seq=counts[0] if decode else 0,
        cu_rows=torch.tensor(borders),
        starts=torch.tensor(starts),
        slots=torch.arange(1, len(counts) + 1, dtype=torch.int32),
        fresh=torch.zeros(len(counts), dtype=torch.uint8),
        block_tables=tables,
        host_cu_rows=tuple(borders),
        host_starts=tuple(starts),
    )


@pytest.mark.parametrize("name", ["native", "reference"])
@pytest.mark.parametrize(("dtype", "bound"), [(torch.float32, 3e-6), (torch.bfloat16, 1.2e-2)])
@pytest.mark.parametrize("heads", [(4, 1), (4, 2), (6, 1), (2, 2)])
def test_chunks_and_decode_rows_match_float64(name, dtype, bound, heads):
    torch.manual_seed(heads[0])
    ops = CpuOps() if name == "native" else Ops()
    w = make_weights(*heads)
    lengths = [300, 41]
    projs = [torch.randn(length, w.proj_width).to(dtype) for length in lengths]
    want = [float64_sequence(proj, w) for proj in projs]
    order = torch.randperm(40)[:26].to(torch.int32) + 1  # blocks lie anywhere
    tables = torch.zeros(2, 19, dtype=torch.int32)
    tables[0], tables[1, :4] = order[:19], order[19:23]
    k = torch.randn(42, w.kv_heads, w.head_dim, BLOCK).to(dtype)
    v = torch.randn(42, w.kv_heads, BLOCK, w.head_dim).to(dtype)
    used = set(order[:23].tolist())
    others = [b for b in range(42) if b not in used]
    before = k[others].clone(), v[others].clone()
    # chunks of both sequences in one part, with offsets, one of them a single row; then decode to the end
    steps = [([0, 0], [100, 1]), ([100, 1], [37, 20]), ([137, 21], [161, 18])]
    for starts, counts in steps:
        part = torch.cat([p[s : s + c] for p, s, c in zip(projs, starts, counts, strict=True)])
        out = ops.attention(part, w, k, v, make_rows(starts, counts, tables, decode=False))
        for x, s, c, got in zip(want, starts, counts, out.split(counts), strict=True):
            assert float((got.double() - x[s : s + c]).norm() / x[s : s + c].norm()) < bound
    for starts in ([298, 39], [299, 40]):
        part = torch.cat([p[s : s + 1] for p, s in zip(projs, starts, strict=True)])
        out = ops.attention(part, w, k, v, make_rows(starts, [1, 1], tables, decode=True))
        for x, s, got in zip(want, starts, out, strict=True):
            assert float((got.double() - x[s]).norm() / x[s].norm()) < bound
    assert torch.equal(k[others], before[0])
    assert torch.equal(v[others], before[1])


def test_native_rows_are_the_same_bits_alone_and_in_any_chunk():
    torch.manual_seed(5)
    w = make_weights(4, 2)
    proj = torch.randn(150, w.proj_width).to(torch.bfloat16)
    tables = torch.arange(1, 11, dtype=torch.int32)[None]

    def run(cuts: list[int]):
        k = torch.zeros(11, 2, w.head_dim, BLOCK, dtype=torch.bfloat16)
        v = torch.zeros(11, 2, BLOCK, w.head_dim, dtype=torch.bfloat16)
        parts, start = [], 0
        for cut in cuts:
            rows = make_rows([start], [cut], tables, decode=cut == 1)
            parts.append(CpuOps().attention(proj[start : start + cut], w, k, v, rows))
            start += cut
        return torch.cat(parts), k, v

    whole = run([150])
    for cuts in ([1] * 150, [16, 16, 118], [3, 1, 146]):
        assert all(torch.equal(a, b) for a, b in zip(run(cuts), whole, strict=True))


@pytest.mark.parametrize("position", [0, 4095, 32768, 65535, 262143])
def test_angles_hold_against_float64_at_long_positions(position):
    """float32 position times float32 frequency, exactly as trained; the sine itself in double."""
    w = make_weights(1, 1, dim=64, rotary=16)
    x = torch.randn(1, 1, 64)
    angle = (torch.tensor(float(position)) * w.inv_freq).double()
    low, high = x[0, 0, :8].double(), x[0, 0, 8:16].double()
    want = torch.cat([low * angle.cos() - high * angle.sin(), high * angle.cos() + low * angle.sin()])
    got = rope(x, torch.tensor([position]), w.inv_freq)[0, 0]
    assert torch.allclose(got[:16].double(), want, atol=1e-6)
    assert torch.equal(got[16:], x[0, 0, 16:])


def test_native_rope_is_the_references_at_long_positions():
    """One row far out, alone with its own key: what it writes to the cache is the reference's key."""
    torch.manual_seed(0)
    w = make_weights(2, 1, dim=64, rotary=16)
    proj = torch.randn(1, w.proj_width)
    blocks = 65536 // BLOCK
    tables = torch.zeros(1, blocks, dtype=torch.int32)
    tables[0, -1] = 1
    caches = []
    for ops in (CpuOps(), Ops()):
        k = torch.zeros(2, 1, 64, BLOCK)
        v = torch.zeros(2, 1, BLOCK, 64)
        ops.attention(proj, w, k, v, make_rows([65535], [1], tables, decode=True))
        caches.append((k[1], v[1]))
    assert torch.allclose(caches[0][0], caches[1][0], atol=2e-6)
    assert torch.equal(caches[0][1], caches[1][1])
