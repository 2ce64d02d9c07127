"""Float32 products on bf16 tensor cores: an operand that is float32 goes as a sum of bf16 parts.

What a bf16 model computes from its activations is bf16 already and enters a product as it is. A float32
operand x goes as high + low, high = bf16(x) and low = bf16(x - high): 16 bits of mantissa and float32's range,
where one tf32 product, at the cost of two bf16 ones, keeps 11. Products of bf16 numbers are exact in float32
and are added up there. For models in float16 or float32 (SPLIT false) every operand is float32 and products
are IEEE: right, and many times slower.
"""

from __future__ import annotations

import triton
import triton.language as tl

from mstar.kernels.launch import interpreted

EMULATED = tl.constexpr(interpreted())


@triton.jit
def to_bf16(x):
    """float32 to the nearest bf16, ties to even, also in the interpreter, whose cast cuts bits off."""
    if EMULATED:
        bits = x.to(tl.uint32, bitcast=True)
        x = (bits + 0x7FFF + ((bits >> 16) & 1)).to(tl.float32, bitcast=True)
    return x.to(tl.bfloat16)


@triton.jit
def to_model(x, dtype: tl.constexpr):
    """float32 to the model dtype, rounded to nearest."""
    if dtype == tl.bfloat16:
        y = to_bf16(x)
    else:
        y = x.to(dtype)
    return y


@triton.jit
def operand(x, SPLIT: tl.constexpr):
    """What is loaded in the model dtype, or as a part of a float32 number, as an operand of `mma`."""
    if not SPLIT:
        x = x.to(tl.float32)
    return x


@triton.jit
def high(x, SPLIT: tl.constexpr):
    """The first part of a float32 number; without SPLIT all of it."""
    if SPLIT:
        x = to_bf16(x)
    return x


@triton.jit
def rest(x, part):
    """What a bf16 part leaves of a float32 number."""
    return x - part.to(tl.float32)


@triton.jit
def mma(a, b, acc):
    """acc + a b; both bf16 or both float32, acc float32."""
    if EMULATED:  # the interpreter holds bf16 as integers
        a = a.to(tl.float32)
        b = b.to(tl.float32)
    return tl.dot(a, b, acc, input_precision="ieee")


@triton.jit
def mma_left(a, b, acc, SPLIT: tl.constexpr):
    """acc + a b with a float32 and b an `operand`."""
    first = high(a, SPLIT)
    if SPLIT:
        acc = mma(to_bf16(rest(a, first)), b, acc)
    return mma(first, b, acc)


@triton.jit
def mma_right(a, b, acc, SPLIT: tl.constexpr):
    """acc + a b with b float32 and a an `operand`."""
    first = high(b, SPLIT)
    if SPLIT:
        acc = mma(a, to_bf16(rest(b, first)), acc)
    return mma(a, first, acc)


@triton.jit
def mma_both(a, b, acc, SPLIT: tl.constexpr):
    """acc + a b, both float32; split, without the product of the two low parts, 2^-17 of a b and less."""
    a0 = high(a, SPLIT)
    b0 = high(b, SPLIT)
    if SPLIT:
        acc = mma(to_bf16(rest(a, a0)), b0, acc)
        acc = mma(a0, to_bf16(rest(b, b0)), acc)
    return mma(a0, b0, acc)
