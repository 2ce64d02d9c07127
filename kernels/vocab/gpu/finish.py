"""The tail of a captured decode step: the best of the splits becomes each slot's next token, in one launch."""

from __future__ import annotations

import torch
import triton
import triton.language as tl

from mstar.kernels.aot import AotCase
from mstar.kernels.launch import launch_options
from mstar.kernels.step import LENGTH, STOP
from mstar.kernels.vocab.gpu.draw import merged

_STOP = tl.constexpr(STOP)
_LENGTH = tl.constexpr(LENGTH)


def finish_step(
    values: torch.Tensor,
    ids: torch.Tensor,
    slots: torch.Tensor,
    ahead: torch.Tensor,
    lengths: torch.Tensor,
    left: torch.Tensor | None,
    stop_ids: torch.Tensor | None,
    out: torch.Tensor | None,
    *,
    pending: torch.Tensor | None = None,
    turn: torch.Tensor | None = None,
) -> None:
    """Moves each row's slot past the token that it drew; one row a slot.

    values [splits, rows] float32, ids likewise int64: `partial_draws`, or one pair a rank. The largest value
    wins, the lowest id of equal ones. slots: [rows] int32. ahead [slots, 1 + drafts] int64: column 0 becomes the
    token. lengths [slots] int32: one more. pending [slots] int32 or None: none (a step of one row a slot leaves
    no draft to replay).

    With the sampler's registers left [slots] int64 and stop_ids [slots, width] int64 (both or neither; ranks
    without a sampler have none): `left` becomes one less, and the code is that of Registers.advance: STOP for a
    stop id, else LENGTH where none is left. A captured step keeps the stop_ids it was captured with: a wider
    tensor needs a new capture.

    out: [rows, 2] int64, receives (token, code), code 0 without registers; None where nobody reads it. With turn, [1]
    int64, it is [pages, rows, 2] and turn says which page. It may be pinned memory of the host.
    Rows of slot 0 change no register: the sink stays as it is, and their code is 0.
    """
    splits, rows = values.shape
    assert (left is None) == (stop_ids is None), "left and stop_ids are both of the sampler"
    assert values.is_contiguous() and ids.is_contiguous() and slots.is_contiguous()
    assert out is None or (out.dim() == (2 if turn is None else 3) and out.stride()[-2:] == (2, 1))
    width = 1 if stop_ids is None else stop_ids.shape[1]
    _finish_step[(rows,)](
        values, ids, slots, ahead, lengths, left, stop_ids, pending, out, turn,
        rows, splits, ahead.stride(0), width, 0 if out is None or turn is None else out.stride(0),
        SPLITS=triton.next_power_of_2(splits), WIDTH=triton.next_power_of_2(width),
        SAMPLER=left is not None, PENDING=pending is not None, OUT=out is not None, TURN=turn is not None,
        num_warps=1, **launch_options(values.device),
    )  # fmt: skip


@triton.jit(do_not_specialize=["rows", "splits"])
def _finish_step(
    values, ids, slots, ahead, lengths, left, stop_ids, pending, out, turn,
    rows, splits, ahead_stride, width, page,
    SPLITS: tl.constexpr, WIDTH: tl.constexpr,
    SAMPLER: tl.constexpr, PENDING: tl.constexpr, OUT: tl.constexpr, TURN: tl.constexpr, PDL: tl.constexpr,
):  # fmt: skip
    row = tl.program_id(0)
    if PDL:
        tl.extra.cuda.gdc_launch_dependents()
        tl.extra.cuda.gdc_wait()
    slot = tl.load(slots + row).to(tl.int64)
    _best, token = merged(values, ids, row, rows, splits, SPLITS)
    owned = slot != 0
    tl.store(ahead + slot * ahead_stride, token, mask=owned)
    tl.store(lengths + slot, tl.load(lengths + slot) + 1, mask=owned)
    if PENDING:
        tl.store(pending + slot, 0, mask=owned)
    code = token * 0
    if SAMPLER:
        remaining = tl.load(left + slot) - 1
        tl.store(left + slot, remaining, mask=owned)
        each = tl.arange(0, WIDTH)
        stops = tl.load(stop_ids + slot * width + each, mask=each < width, other=-1)
        stopped = tl.sum((stops == token).to(tl.int32), 0) > 0
        ended = tl.where(stopped, _STOP, tl.where(remaining <= 0, _LENGTH, 0))
        code = tl.where(owned, ended, 0).to(tl.int64)
    if OUT:
        if TURN:
            out += tl.load(turn) * page
        tl.store(out + row * 2, token)
        tl.store(out + row * 2 + 1, code)


def _case(sampler: bool, pending: bool, out: bool, turn: bool) -> AotCase:
    kinds = {
        "values": "*fp32",
        "ids": "*i64",
        "slots": "*i32",
        "ahead": "*i64",
        "lengths": "*i32",
        "left": "*i64" if sampler else "constexpr",
        "stop_ids": "*i64" if sampler else "constexpr",
        "pending": "*i32" if pending else "constexpr",
        "out": "*i64" if out else "constexpr",
        "turn": "*i64" if turn else "constexpr",
        "rows": "i32",
        "splits": "i32",
        "ahead_stride": "i32",
        "width": "i32",
        "page": "i32",
    }
    absent = {name: None for name, kind in kinds.items() if kind == "constexpr"}
    constants = {"SPLITS": 64, "WIDTH": 4, "SAMPLER": sampler, "PENDING": pending, "OUT": out, "TURN": turn}
    signature = {**kinds, **dict.fromkeys((*constants, "PDL"), "constexpr")}
    return AotCase(_finish_step, signature, {**absent, **constants}, num_warps=1, pdl=True)


AOT_CASES = [
    _case(True, False, True, True),
    _case(True, True, True, True),
    _case(False, False, False, False),
]
