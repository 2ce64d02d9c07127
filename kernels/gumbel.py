"""Gumbel noise that depends on (seed, position, token id) and on nothing else.

The bits come from Philox4x32-10 (Salmon et al., "Parallel random numbers: as easy as 1, 2, 3", SC 2011): the
64-bit seed is its key, the counter names four neighbouring token ids at one position. Whoever computes a
token's noise, in whatever batch, order or shard, gets the same bits, so argmax(logits / temperature + noise)
draws the same token there (the Gumbel-max trick), and a speculative step draws what a plain one would.
"""

from __future__ import annotations

import ctypes
import functools
import importlib.util
from collections.abc import Callable
from ctypes import c_int64, c_void_p

import torch

from mstar.kernels.native import load_library

_MASK = 0xFFFFFFFF
_MULTIPLIERS = (0xD2511F53, 0xCD9E8D57)
_WEYL = (0x9E3779B9, 0xBB67AE85)
_ROUNDS = 10

# The counter's last word. Another use of a request's seed takes another constant.
_TOKEN_NOISE = 0x746F6B6E

# Counters a pass. On a CPU 16k int64 words are 128 KiB a temporary, so a round's handful stays in a core's cache
# (248,320 ids, one thread: 6.6 ms; 4k a pass take 13.4, all in one pass 7.6). On a GPU a pass costs some 130
# launches: there it is bounded by memory alone, 32 MiB a temporary.
_CPU_CHUNK = 2**14
_GPU_CHUNK = 2**22

_Words = tuple[torch.Tensor, torch.Tensor, torch.Tensor, torch.Tensor]
_Noise = Callable[[torch.Tensor, torch.Tensor, int], torch.Tensor]
_NoiseAt = Callable[[torch.Tensor, torch.Tensor, torch.Tensor], torch.Tensor]
_Kernels = tuple[_Noise, _NoiseAt]


def philox4x32(counter: _Words, key: tuple[torch.Tensor, torch.Tensor]) -> _Words:
    """Ten rounds of Philox4x32. Words are int64 tensors holding 32-bit values, and broadcast.

    Integer multiplies, shifts and exclusive ors only: the same bits on every device. A product of two words
    wraps around in int64, which leaves its 64 bits right; the mask after the shift drops the sign's copies.
    """
    c0, c1, c2, c3 = counter
    k0, k1 = key
    for _ in range(_ROUNDS):
        p0 = c0 * _MULTIPLIERS[0]
        p1 = c2 * _MULTIPLIERS[1]
        c0, c1, c2, c3 = (
            ((p1 >> 32) ^ c1 ^ k0).bitwise_and_(_MASK),
            p1 & _MASK,
            ((p0 >> 32) ^ c3 ^ k1).bitwise_and_(_MASK),
            p0 & _MASK,
        )
        k0 = (k0 + _WEYL[0]) & _MASK
        k1 = (k1 + _WEYL[1]) & _MASK
    return c0, c1, c2, c3


def gumbel(seeds: torch.Tensor, positions: torch.Tensor, vocab_size: int) -> torch.Tensor:
    """Noise of every token id.

    seeds: [rows] int64, the 64 bits of each row's seed. positions: [rows] int64.
    Returns [rows, vocab_size] float32 on the seeds' device.
    """
    if (kernels := _triton(seeds)) is not None:
        return kernels[0](seeds, positions, vocab_size)
    native = _native(seeds)
    if native is None:
        return _to_gumbel(words(seeds, positions, vocab_size))
    seeds, positions = seeds.contiguous(), positions.contiguous()
    rows, groups = seeds.shape[0], -(-vocab_size // 4)
    word = torch.empty(rows, groups * 4, dtype=torch.float32)
    native.mstar_gumbel_words(seeds.data_ptr(), positions.data_ptr(), rows, groups, word.data_ptr())
    return _to_gumbel(word)[:, :vocab_size]


def gumbel_at(seeds: torch.Tensor, positions: torch.Tensor, token_ids: torch.Tensor) -> torch.Tensor:
    """Noise of some token ids: the values that `gumbel` has in those columns.

    seeds, positions: [rows] int64. token_ids: [rows, n] int64. Returns [rows, n] float32.
    """
    if (kernels := _triton(seeds)) is not None:
        return kernels[1](seeds, positions, token_ids)
    native = _native(seeds)
    if native is None:
        return _to_gumbel(words_at(seeds, positions, token_ids))
    seeds, positions, token_ids = seeds.contiguous(), positions.contiguous(), token_ids.contiguous()
    rows, n = token_ids.shape
    word = torch.empty(rows, n, dtype=torch.float32)
    pointers = (seeds.data_ptr(), positions.data_ptr(), token_ids.data_ptr())
    native.mstar_gumbel_words_at(*pointers, rows, n, word.data_ptr())
    return _to_gumbel(word)


def words(seeds: torch.Tensor, positions: torch.Tensor, vocab_size: int) -> torch.Tensor:
    """The reference of the native words: [rows, vocab_size] float32 holding 32-bit integers, rounded."""
    rows, groups = seeds.shape[0], -(-vocab_size // 4)
    out = torch.empty(rows, groups, 4, dtype=torch.float32, device=seeds.device)
    chunk = _CPU_CHUNK if seeds.device.type == "cpu" else _GPU_CHUNK
    step = max(256, chunk // max(1, rows))
    for first in range(0, groups, step):
        last = min(first + step, groups)
        group = torch.arange(first, last, device=seeds.device).unsqueeze(0)
        for lane, word in enumerate(_philox_words(seeds, positions, group)):
            out[:, first:last, lane] = word
    return out.view(rows, groups * 4)[:, :vocab_size]


def words_at(seeds: torch.Tensor, positions: torch.Tensor, token_ids: torch.Tensor) -> torch.Tensor:
    """`words` of some ids. token_ids: [rows, n] int64. Returns [rows, n] float32."""
    lanes = torch.stack(_philox_words(seeds, positions, token_ids >> 2), dim=-1)
    return lanes.gather(-1, (token_ids & 3).unsqueeze(-1)).squeeze(-1).to(torch.float32)


def _philox_words(seeds: torch.Tensor, positions: torch.Tensor, group: torch.Tensor) -> _Words:
    """The four words of each group of four token ids; group: [1 or rows, n] int64, a token id over 4."""
    seeds, positions = seeds.unsqueeze(1), positions.unsqueeze(1)
    constant = torch.full_like(positions, _TOKEN_NOISE)
    counter = (group, positions & _MASK, (positions >> 32) & _MASK, constant)
    return philox4x32(counter, (seeds & _MASK, (seeds >> 32) & _MASK))


def _triton(seeds: torch.Tensor) -> _Kernels | None:
    """`gumbel` and `gumbel_at` in one launch on a GPU: the torch words take some 130, 10 ms a row at 248,320 ids."""
    return _gpu_kernels() if seeds.device.type == "cuda" else None


@functools.cache
def _gpu_kernels() -> _Kernels | None:
    if importlib.util.find_spec("triton") is None:
        return None
    from mstar.kernels.vocab.gpu.noise import gumbel_at_gpu, gumbel_gpu

    return gumbel_gpu, gumbel_at_gpu


def _native(seeds: torch.Tensor) -> ctypes.CDLL | None:
    """The compiled words for tensors on the CPU: with them 248,320 ids take 1.5 ms instead of 6.6."""
    return _library() if seeds.device.type == "cpu" else None


@functools.cache
def _library() -> ctypes.CDLL | None:
    library = load_library("gumbel")
    if library is not None:
        library.mstar_gumbel_words.argtypes = (c_void_p, c_void_p, c_int64, c_int64, c_void_p)
        library.mstar_gumbel_words.restype = None
        library.mstar_gumbel_words_at.argtypes = (c_void_p, c_void_p, c_void_p, c_int64, c_int64, c_void_p)
        library.mstar_gumbel_words_at.restype = None
    return library


def _to_gumbel(word: torch.Tensor) -> torch.Tensor:
    """Turns uniform words into Gumbel noise in place: E = -log1p(-v) is exponential, -log(E) is Gumbel.

    word: float32 holding integers below 2^32. The winner of an argmax nearly always has a large noise, that
    is an E close to 0, and there the noise must be fine: -log(u) of a float32 u near 1 would know E only in
    steps of 2^-24, and two of 248,320 ids would tie all the time. With v near 0 the float32 keeps all 24
    bits, log1p keeps them in E, and E goes down to 2^-33. At the other end v is held below 1, where E would
    be infinite.
    """
    v = word.add_(0.5).mul_(2.0**-32).clamp_(max=1.0 - 2.0**-24)
    exponential = v.neg_().log1p_().neg_()
    return exponential.log_().neg_()
