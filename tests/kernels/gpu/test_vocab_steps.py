"""What a captured decode step begins and ends with, against the registers of the torch path."""

from __future__ import annotations

import pytest
import torch

from mstar.kernels.step import PAGES
from mstar.kernels.vocab.gpu.begin import begin_step
from mstar.kernels.vocab.gpu.finish import finish_step
from mstar.ranks.messages import SamplingParams
from mstar.ranks.sampler.registers import LENGTH, RUNNING, STOP, Registers

SLOTS = 7


def step_registers(drafts: int, device: torch.device) -> tuple[torch.Tensor, torch.Tensor]:
    generator = torch.Generator().manual_seed(drafts)
    ahead = torch.randint(0, 50, (SLOTS, 1 + drafts), generator=generator)
    lengths = torch.randint(1, 9000, (SLOTS,), generator=generator).to(torch.int32)
    lengths[0] = 0
    return ahead.to(device), lengths.to(device)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16])
@pytest.mark.parametrize("rows_per_seq, hidden", [(1, 64), (3, 1100)])
def test_begin_looks_up_tokens_and_places(device, dtype, rows_per_seq, hidden):
    ahead, lengths = step_registers(3, device)
    wide = torch.randn(50, hidden + 8, generator=torch.Generator().manual_seed(1)).to(dtype).to(device)
    table = wide[:, :hidden]
    slots = torch.tensor([4, 0, 2, 6, 0], dtype=torch.int32, device=device)
    x, starts, fresh = begin_step(slots, ahead, lengths, table, rows_per_seq=rows_per_seq)
    ids = ahead[slots.long(), :rows_per_seq].reshape(-1)
    assert x.dtype == dtype and torch.equal(x, table[ids])
    assert starts.dtype == torch.int64 and starts.tolist() == lengths[slots.long()].tolist()
    assert fresh.dtype == torch.uint8 and fresh.tolist() == [0, 1, 0, 0, 1]


def test_begin_on_parts_of_the_embedding_sums_to_the_whole(device):
    ahead, lengths = step_registers(1, device)
    table = torch.randn(52, 100, generator=torch.Generator().manual_seed(2)).to(torch.bfloat16).to(device)
    slots = torch.tensor([1, 2, 3, 4, 5, 6], dtype=torch.int32, device=device)
    parts = []
    for start in (0, 26):
        part = table[start : start + 26].contiguous()
        arguments = {"rows_per_seq": 2, "vocab_start": start, "vocab_local": 26}
        parts.append(begin_step(slots, ahead, lengths, part, **arguments)[0].float())
    whole = begin_step(slots, ahead, lengths, table, rows_per_seq=2)[0].float()
    assert torch.equal(parts[0] + parts[1], whole)
    absent = ahead[slots.long()].reshape(-1) >= 26
    assert bool(absent.any()) and bool((~absent).any())
    assert not parts[0][absent].any() and not parts[1][~absent].any()


def test_begin_reads_no_row_outside_the_table_for_drafts_that_do_not_exist(device):
    """Rows beside the table hold NaN: a load that left it would show them."""
    ahead, lengths = step_registers(2, device)
    ahead[1] = torch.tensor([5, -1, 50])
    ahead[2] = torch.tensor([6, 2**40, -(2**40)])
    around = torch.full((60, 32), torch.nan, device=device)
    around[5:55] = torch.randn(50, 32, generator=torch.Generator().manual_seed(3)).to(device)
    slots = torch.tensor([1, 2], dtype=torch.int32, device=device)
    x, _, _ = begin_step(slots, ahead, lengths, around[5:55], rows_per_seq=3)
    assert bool(x.isfinite().all())
    assert torch.equal(x[0], around[10]) and torch.equal(x[3], around[11])
    part, _, _ = begin_step(slots, ahead, lengths, around[5:55], rows_per_seq=3, vocab_local=50)
    assert torch.equal(part[0], around[10]) and not part[[1, 2, 4, 5]].any()


def sampler(device: torch.device) -> Registers:
    """Slots of requests that stop at some ids or run out; slot 6 has more stop ids than the others."""
    registers = Registers(50, SLOTS, device)
    for slot, (stops, most) in enumerate(
        [((7,), 5), ((7, 8), 1), ((), 1), ((3,), 2), ((), 2**40), ((1, 2, 3, 4, 5, 9), 3)], start=1
    ):
        registers.admit(slot, SamplingParams(most, seed=0, stop_ids=stops), ())
    registers.settle()
    return registers


def pairs(tokens: list[int], splits: int, device: torch.device) -> tuple[torch.Tensor, torch.Tensor]:
    """Values and ids whose best is `tokens`: one other split ties with it at a higher id."""
    rows = len(tokens)
    generator = torch.Generator().manual_seed(splits)
    values = torch.rand(splits, rows, generator=generator) - 2.0
    ids = torch.randint(50, 2000, (splits, rows), generator=generator)
    for row, token in enumerate(tokens):
        winner = row % splits
        values[winner, row], ids[winner, row] = 1.0, token
        if splits > 1:
            values[(winner + 1) % splits, row] = 1.0
    return values.to(device), ids.to(device)


@pytest.mark.parametrize("splits", [1, 5, 64])
@pytest.mark.parametrize("tokens", [[7, 7, 4, 3, 9, 9], [1, 1, 1, 1, 1, 1], [8, 8, 7, 7, 3, 3]])
def test_finish_counts_and_ends_as_the_samplers_registers_do(device, splits, tokens):
    registers, reference = sampler(device), sampler(device)
    ahead, lengths = step_registers(2, device)
    pending = torch.arange(SLOTS, dtype=torch.int32, device=device) + 1
    before = ahead.clone(), lengths.clone(), pending.clone(), registers.left.clone()
    slots = torch.tensor([1, 2, 0, 3, 5, 6, 0], dtype=torch.int32, device=device)
    tokens = [*tokens[:2], 11, *tokens[2:5], 12]
    out = torch.full((7, 2), -99, dtype=torch.int64, device=device)
    for _ in range(2):
        values, ids = pairs(tokens, splits, device)
        finish_step(
            values, ids, slots, ahead, lengths, registers.left, registers.stop_ids, out, pending=pending
        )
        expected = reference.advance(torch.tensor(tokens, device=device), slots.long())
        owned = slots != 0
        assert out[:, 0].tolist() == tokens
        assert out[owned, 1].tolist() == expected[owned].tolist()
        assert out[~owned, 1].tolist() == [RUNNING, RUNNING]
    index = slots.long()[owned]
    assert torch.equal(registers.left[index], reference.left[index])
    assert ahead[index, 0].tolist() == [token for token, slot in zip(tokens, slots, strict=True) if slot]
    assert torch.equal(ahead[:, 1:], before[0][:, 1:])
    assert torch.equal(lengths[index], before[1][index] + 2)
    assert not pending[index].any()
    for other in (0, 4):  # the sink, and a slot that has no row
        assert torch.equal(ahead[other], before[0][other])
        assert lengths[other] == before[1][other]
        assert pending[other] == before[2][other]
        assert registers.left[other] == before[3][other]


def test_a_stop_id_at_the_limit_is_a_stop_and_every_code_occurs(device):
    registers = sampler(device)
    ahead, lengths = step_registers(0, device)
    slots = torch.tensor([1, 2, 3, 4, 5, 6], dtype=torch.int32, device=device)
    out = torch.empty(6, 2, dtype=torch.int64, device=device)
    values, ids = pairs([7, 8, 7, 7, 7, 9], 3, device)
    finish_step(values, ids, slots, ahead, lengths, registers.left, registers.stop_ids, out)
    assert out[:, 1].tolist() == [STOP, STOP, LENGTH, RUNNING, RUNNING, STOP]


@pytest.mark.parametrize("with_out", [True, False])
def test_a_rank_without_a_sampler_moves_tokens_and_lengths_alone(device, with_out):
    ahead, lengths = step_registers(1, device)
    before = ahead.clone(), lengths.clone()
    slots = torch.tensor([3, 0, 5], dtype=torch.int32, device=device)
    values, ids = pairs([20, 21, 22], 2, device)
    out = torch.full((3, 2), -99, dtype=torch.int64, device=device) if with_out else None
    finish_step(values, ids, slots, ahead, lengths, None, None, out)
    assert ahead[[3, 5], 0].tolist() == [20, 22]
    assert torch.equal(lengths[[3, 5]], before[1][[3, 5]] + 1)
    assert torch.equal(ahead[:, 1], before[0][:, 1])
    for other in (0, 1, 2, 4, 6):
        assert torch.equal(ahead[other], before[0][other]) and lengths[other] == before[1][other]
    if out is not None:
        assert out.tolist() == [[20, 0], [21, 0], [22, 0]]


def test_a_step_writes_to_the_page_whose_turn_it_is(device):
    """Two steps in flight leave their results side by side; each `begin_step` moves the turn, however many rows."""
    ahead, lengths = step_registers(1, device)
    turn = torch.tensor([PAGES - 2], dtype=torch.int64, device=device)
    table = torch.zeros(2000, 16, device=device)
    slots = torch.tensor([3, 0, 5], dtype=torch.int32, device=device)
    out = torch.full((PAGES, 4, 2), -99, dtype=torch.int64, device=device)
    for count, page in enumerate([PAGES - 1, 0, 1]):
        begin_step(slots, ahead, lengths, table, rows_per_seq=1, turn=turn)
        assert turn.tolist() == [page]
        values, ids = pairs([20 + count, 21, 22], 2, device)
        finish_step(values, ids, slots, ahead, lengths, None, None, out[:, :3], turn=turn)
        assert out[page].tolist() == [[20 + count, 0], [21, 0], [22, 0], [-99, -99]]
    begin_step(slots, ahead, lengths, table, rows_per_seq=1)
    assert turn.tolist() == [1]
