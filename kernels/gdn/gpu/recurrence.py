"""One token of Gated DeltaNet on the device: what replayed and new rows share, so that they agree to the bit.

Roundings are those of `mstar.kernels.gdn.reference`: the conv's sum and its silu are rounded to the model dtype,
gates, norms of q and k and the recurrence are float32, o is rounded before its norm.
"""

import triton
import triton.language as tl


@triton.jit
def rounded(x, DTYPE: tl.constexpr):
    """x through the model dtype and back, float32."""
    return x.to(DTYPE).to(tl.float32)


@triton.jit
def load_taps(conv_w, at, inside, CHANNELS: tl.constexpr, WIDTH: tl.constexpr):
    """The last four taps of channels `at`, oldest first; a narrower conv has zeros before."""
    SKIP: tl.constexpr = 4 - WIDTH
    w0 = tl.load(conv_w + (0 - SKIP) * CHANNELS + at, mask=inside & (SKIP < 1), other=0.0)
    w1 = tl.load(conv_w + (1 - SKIP) * CHANNELS + at, mask=inside & (SKIP < 2), other=0.0)
    w2 = tl.load(conv_w + (2 - SKIP) * CHANNELS + at, mask=inside, other=0.0)
    w3 = tl.load(conv_w + (3 - SKIP) * CHANNELS + at, mask=inside, other=0.0)
    return w0, w1, w2, w3


@triton.jit
def load_gates(at, there, VALUE_HEADS: tl.constexpr):
    """A row's b and a of the head that `at` points to."""
    return tl.load(at, mask=there, other=0.0), tl.load(at + VALUE_HEADS, mask=there, other=0.0)


@triton.jit
def inputs_before(ring, position, at, inside, kept, RING: tl.constexpr, CHANNELS: tl.constexpr):
    """The conv's three inputs before `position`, oldest first; zero before the sequence's begin.

    Past the first cache, since a decode step may read them before its wait.
    """
    before = (position - 3) & (RING - 1)
    x0 = tl.load(ring + before * CHANNELS + at, inside & kept & (position > 2), 0.0, cache_modifier=".cg")
    before = (position - 2) & (RING - 1)
    x1 = tl.load(ring + before * CHANNELS + at, inside & kept & (position > 1), 0.0, cache_modifier=".cg")
    before = (position - 1) & (RING - 1)
    x2 = tl.load(ring + before * CHANNELS + at, inside & kept & (position > 0), 0.0, cache_modifier=".cg")
    return x0, x1, x2


@triton.jit
def conv_silu(x0, x1, x2, x3, w, DTYPE: tl.constexpr):
    """silu of the causal conv at the newest of four inputs, oldest first; float32 that the model dtype holds."""
    u = x0.to(tl.float32) * w[0]
    u = tl.fma(x1.to(tl.float32), w[1], u)
    u = tl.fma(x2.to(tl.float32), w[2], u)
    u = rounded(tl.fma(x3.to(tl.float32), w[3], u), DTYPE)
    return rounded(u / (1.0 + tl.exp(-u)), DTYPE)


@triton.jit
def gates(b, a, decay, bias):
    """(beta, the factor that S is forgotten by), float32."""
    x = a.to(tl.float32) + bias
    e = tl.exp(x)
    # log1p: what 1 + e rounds away is made up for by the ratio (Higham, Accuracy and Stability, section 1.14.1)
    up = 1.0 + e
    log1p = tl.where(up == 1.0, e, tl.log(up) * (e / tl.where(up == 1.0, 1.0, up - 1.0)))
    softplus = tl.where(x > 20.0, x, log1p)
    return 1.0 / (1.0 + tl.exp(-b.to(tl.float32))), tl.exp(decay * softplus)


@triton.jit
def _sum3(a0, a1, a2, b0, b1, b2):
    return a0 + b0, a1 + b1, a2 + b2


@triton.jit
def _sum2(a0, a1, b0, b1):
    return a0 + b0, a1 + b1


@triton.jit
def unit_keys(qk, which, K: tl.constexpr):
    """(q / |q| / sqrt(K), k / |k|, their product), of qk [2, K]: an exchange among warps for each line."""
    q, k = tl.reduce((tl.where(which == 0, qk, 0.0), tl.where(which == 1, qk, 0.0)), 0, _sum2)
    qq, kk, qk = tl.reduce((q * q, k * k, q * k), 0, _sum3)
    q_scale = tl.rsqrt(qq + 1e-6) * (K**-0.5)
    k_scale = tl.rsqrt(kk + 1e-6)
    return q * q_scale, k * k_scale, qk * q_scale * k_scale


@triton.jit
def advance(s, q, k, v, along, beta, forget, READ: tl.constexpr):
    """S = forget S; d = beta (v - S^T k); S += k d^T; o = S^T q, as forget S_old^T q + (q . k) d.

    s: [lanes, warps, registers, columns]; q, k: [K]; v: [warps, columns]. Returns (S, o [warps, columns]);
    o means nothing without READ.
    """
    k = tl.reshape(k, (s.shape[0], s.shape[2]))[:, None, :, None]
    had = tl.sum(tl.sum(s * k, 2), 0)
    o = v
    if READ:
        q = tl.reshape(q, (s.shape[0], s.shape[2]))[:, None, :, None]
        o = tl.sum(tl.sum(s * q, 2), 0)
    d = beta * (v - forget * had)
    if READ:
        o = tl.fma(along, d, forget * o)
    # the product is named: which of two products becomes a fused one is no longer the compiler's choice
    s = tl.fma(k, d[None, :, None, :], forget * s)
    return s, o


@triton.jit
def gated_norm(o, z, w, inside, V: tl.constexpr, eps, DTYPE: tl.constexpr):
    """rms norm over the value dim, rounded, times w, rounded, times silu(z). o, z, w: [warps, columns]."""
    f = rounded(o, DTYPE)
    f = tl.where(inside, f, 0.0)
    scale = tl.rsqrt(tl.sum(tl.sum(f * f, 1), 0) / V + eps)
    normed = rounded(rounded(f * scale, DTYPE) * rounded(w, DTYPE), DTYPE)
    z = z.to(tl.float32)
    return normed * (z / (1.0 + tl.exp(-z)))
