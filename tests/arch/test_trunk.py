"""The trunk against transformers, and a mesh against one rank; logits, not only text."""

import threading

import pytest
import torch

from mstar.arch import DecodeInputs, PrefillInputs, Trunk, allocate_caches
from mstar.kernels import cpu
from mstar.loader import read_config, resolve
from mstar.loader.checkpoint import load_shard
from tests.support.checkpoints import SHAPES, load_oracle, write_checkpoint

PROMPT, STEPS = 200, 64
BOUND = 5e-6  # relative error in norm in float32; transformers' own against float64 is up to 4.6e-6 here


class Solo:
    rank, size = 0, 1

    def all_reduce(self, x):
        return x


class ThreadMesh:
    """Ranks as threads of one process: sums in rank order, as the real collectives do."""

    def __init__(self, rank, size, shared):
        self.rank, self.size = rank, size
        self.barrier, self.parts = shared

    def all_reduce(self, x):
        self.parts[self.rank] = x.clone()
        self.barrier.wait()
        total = self.parts[0].float()
        for part in self.parts[1:]:
            total = total + part.float()
        self.barrier.wait()
        return x.copy_(total.to(x.dtype))


@torch.inference_mode()
def run(path, ids, dtype, mesh, chunks=(PROMPT,)):
    """Logits of the last prompt row and of every decode step, [1 + steps, vocab_local]."""
    config = read_config(path, {})
    weights = load_shard(path, config, mesh.rank, mesh.size, dtype)
    cpu_device = torch.device("cpu")
    trunk = Trunk(config, weights, dtype=dtype, device=cpu_device, collective=mesh)
    blocks = -(-len(ids) // 16)
    caches = allocate_caches(
        config, mesh.size, blocks=blocks + 1, block_size=16, slots=3, dtype=dtype, device=cpu_device
    )
    table = torch.arange(blocks, 0, -1, dtype=torch.int32)[None]
    slot = torch.tensor([2], dtype=torch.int32)
    start = 0
    for count in chunks:
        part = PrefillInputs(
            ids[start : start + count], torch.arange(start, start + count), slot, table, (0, count), (start,)
        )
        hidden = trunk.prefill(part, caches)
        start += count
    logits = [trunk.logits(hidden)]
    for position in range(start, len(ids)):
        length = torch.tensor([position + 1], dtype=torch.int32)
        step = DecodeInputs(ids[position : position + 1], length, slot, table)
        logits.append(trunk.logits(trunk.decode(step, caches)))
    return torch.cat(logits)


def run_mesh(path, ids, dtype, size):
    shared = threading.Barrier(size, timeout=60), [None] * size
    parts = [None] * size

    def rank(index):
        parts[index] = run(path, ids, dtype, ThreadMesh(index, size, shared))

    threads = [threading.Thread(target=rank, args=(index,)) for index in range(size)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    vocab = read_config(path, {}).vocab_size
    return torch.cat(parts, -1)[:, :vocab]


def oracle_logits(path, ids):
    with torch.no_grad():
        return load_oracle(path)(ids[None]).logits[0, PROMPT - 1 :].float()


def relative(got, want):
    return float((got - want).norm() / want.norm())


def random_ids(vocab, seed=0):
    generator = torch.Generator().manual_seed(seed)
    return torch.randint(0, vocab, (PROMPT + STEPS,), generator=generator)


@pytest.fixture(params=["native", "reference"])
def operations(request, monkeypatch):
    if request.param == "reference":
        monkeypatch.setattr(
            cpu.CpuOps, "unavailable", staticmethod(lambda *_: "the test wants the reference")
        )
    return request.param


@pytest.mark.parametrize("shape", list(SHAPES))
@pytest.mark.parametrize(("tied", "nested"), [(True, False), (False, True)])
def test_logits_are_those_of_transformers(tmp_path, operations, shape, tied, nested):
    path = write_checkpoint(tmp_path, shape, tied=tied, nested=nested, dtype="fp32")
    ids = random_ids(331)
    assert relative(run(path, ids, torch.float32, Solo()), oracle_logits(path, ids)) < BOUND


def test_logits_of_the_builtin_model_are_those_of_transformers(operations):
    path = resolve("builtin:tiny")
    ids = random_ids(6144)
    assert relative(run(path, ids, torch.float32, Solo()), oracle_logits(path, ids)) < BOUND


@pytest.mark.parametrize("shape", list(SHAPES))
@pytest.mark.parametrize(("size", "tied"), [(2, True), (4, False)])
def test_a_mesh_gives_the_logits_of_one_rank(tmp_path, operations, shape, size, tied):
    """Every head ratio: a projection cut at the wrong place (b|a at its middle, say) shows here."""
    path = write_checkpoint(tmp_path, shape, tied=tied, dtype="fp32")
    ids = random_ids(331)[: PROMPT + 8]
    one = run(path, ids, torch.float32, Solo())
    many = run_mesh(path, ids, torch.float32, size)
    # of the largest logit: these random weights pass on a rounding error up to 16-fold more than trained ones
    assert float((many - one).abs().max()) < 1e-4 * float(one.abs().max())
    assert torch.equal(many.argmax(-1), one.argmax(-1))


@pytest.mark.parametrize("size", [2, 4])
def test_a_mesh_gives_the_builtin_models_logits(size):
    path = resolve("builtin:tiny")
    ids = random_ids(6144)
    one = run(path, ids, torch.float32, Solo())
    many = run_mesh(path, ids, torch.float32, size)
    assert float((many - one).abs().max()) < 1e-4
    assert torch.equal(many.argmax(-1), one.argmax(-1))


def test_an_mtp_head_in_the_checkpoint_changes_nothing_in_the_trunk(tmp_path):
    plain = write_checkpoint(tmp_path / "plain", "4B-scaled", dtype="fp32")
    headed = write_checkpoint(tmp_path / "headed", "4B-scaled", dtype="fp32", with_mtp="beside")
    ids = random_ids(331)
    assert torch.equal(run(plain, ids, torch.float32, Solo()), run(headed, ids, torch.float32, Solo()))


def test_chunk_borders_change_no_bit_of_native_logits():
    path = resolve("builtin:tiny")
    ids = random_ids(6144)[: PROMPT + 4]
    whole = run(path, ids, torch.bfloat16, Solo())
    for chunks in ((64, 136), (1, 63, 100, 36), (199, 1)):
        assert torch.equal(run(path, ids, torch.bfloat16, Solo(), chunks), whole)


def test_bf16_is_no_further_from_float32_than_transformers_in_bf16_is():
    path = resolve("builtin:tiny")
    ids = random_ids(6144)
    exact = oracle_logits(path, ids)
    with torch.no_grad():
        theirs = load_oracle(path, torch.bfloat16)(ids[None]).logits[0, PROMPT - 1 :].float()
    ours = run(path, ids, torch.bfloat16, Solo())
    assert float((ours - exact).norm()) < 1.1 * float((theirs - exact).norm())
