"""Made weights: numbers from an independent formula, files and loads equal to the bit, and what is refused."""

from __future__ import annotations

import hashlib
import json
import math

import numpy
import pytest
import torch

from mstar.loader import LoadError, fingerprint, head_fault, read_config, read_manifest, read_recipe
from mstar.loader.checkpoint import TORCH_DTYPES, load_shard
from mstar.loader.counter import Stream
from mstar.loader.head import load_head, load_vocab
from mstar.loader.sharding import shard_bytes
from mstar.scripts.make_checkpoint import make_config, write_checkpoint, write_virtual
from tests.support.checkpoints import edit_config

KINDS = {"random": None, "planted": 0.7}


def small(acceptance=None, tied=True, dtype="bf16", size="4B", vocab=6143):
    config = make_config(size, 16, dtype, acceptance, layers=4, vocab=vocab)
    return {**config, "tie_word_embeddings": tied}


def both(folder, seed=3, **options):
    """The same checkpoint in files and without."""
    config = small(**options)
    write_checkpoint(folder / "files", config, seed, 1 << 20, lambda _: None)
    write_virtual(folder / "virtual", config, seed)
    return folder / "files", folder / "virtual"


def same(left, right):
    assert left.keys() == right.keys()
    for name, value in left.items():
        assert value.dtype == right[name].dtype and value.shape == right[name].shape, name
        assert torch.equal(value, right[name]), name


def formula(seed, name, indices, bound):
    """The numbers of `indices` by numpy's unsigned integers and float32."""
    digest = hashlib.sha256(f"{seed}\0{name}".encode()).digest()
    multiplier, offset = (int.from_bytes(digest[at : at + 4], "little") for at in (0, 4))
    x = (numpy.asarray(indices, dtype=numpy.uint64) * numpy.uint64(multiplier | 1)).astype(numpy.uint32)
    x = x + numpy.uint32(offset)
    x = (x ^ (x >> numpy.uint32(16))) * numpy.uint32(0x7FEB352D)
    x = (x ^ (x >> numpy.uint32(15))) * numpy.uint32(0x846CA68B)
    top = x.astype(numpy.int32) >> 8
    return torch.from_numpy(top.astype(numpy.float32) * numpy.float32(bound / 2**23))


@pytest.mark.parametrize("dtype", list(TORCH_DTYPES))
def test_numbers_are_those_of_the_formula(dtype):
    stored = TORCH_DTYPES[dtype]
    rows, width, first, columns = torch.tensor([0, 1, 7, 248_319]), 5_120, 100, 301
    out = torch.full((4, columns + 5), math.nan)
    Stream.of(9, "a").uniform_(out[:, 2:-3], rows, first, width, 0.03, stored)
    indices = rows.numpy()[:, None] * width + numpy.arange(first, first + columns)
    assert torch.equal(out[:, 2:-3], formula(9, "a", indices, 0.03).to(stored).float())
    assert out[:, :2].isnan().all() and out[:, -3:].isnan().all()


def test_numbers_are_uniform_and_streams_are_strangers():
    a, b, c = (torch.empty(1000, 1000) for _ in range(3))
    for value, seed, name in ((a, 0, "a"), (b, 0, "b"), (c, 1, "a")):
        Stream.of(seed, name).uniform_(value, torch.arange(1000), 0, 1000, 1.0, torch.float32)
        # 1e6 draws: a standard error is 6e-4 of the mean and 3e-4 of the variance
        assert float(value.mean()) == pytest.approx(0, abs=3e-3)
        assert float(value.var()) == pytest.approx(1 / 3, abs=1.5e-3)
        assert float(value.min()) >= -1 and float(value.max()) < 1
        counts = torch.histc(value, 64, -1, 1)
        assert float(((counts - 15_625) ** 2 / 15_625).sum()) < 120  # 63 degrees: 1 in 30,000 is above
        for other in (value.roll(1, 0), value.roll(1, 1), value.t()):
            assert abs(float((value * other).mean())) < 3e-3
    for left, right in ((a, b), (a, c)):
        assert abs(float((left * right).mean())) < 3e-3


def test_any_part_on_any_number_of_threads_is_cut_from_the_whole():
    stream = Stream.of(1, "w")
    threads = torch.get_num_threads()
    whole, alone = torch.empty(2100, 1024), torch.empty(2100, 1024)
    stream.uniform_(alone, torch.arange(2100), 0, 1024, 1.0, torch.bfloat16)
    try:
        torch.set_num_threads(2)
        with torch.inference_mode():
            stream.uniform_(whole, torch.arange(2100), 0, 1024, 1.0, torch.bfloat16)
            mine = torch.empty(2100, 1024)
            stream.uniform_(mine, torch.arange(2100), 0, 1024, 1.0, torch.bfloat16)
    finally:
        torch.set_num_threads(threads)
    assert torch.equal(whole, alone) and torch.equal(mine, alone)
    part = torch.empty(3, 50)
    stream.uniform_(part, torch.tensor([2000, 5, 6]), 700, 1024, 1.0, torch.bfloat16)
    assert torch.equal(part, whole[[2000, 5, 6], 700:750])


def test_permutations_hold_every_index_once():
    order = Stream.of(5, "cycle").permutation(248_320)
    assert torch.equal(order.sort().values, torch.arange(248_320))
    assert not torch.equal(order, Stream.of(6, "cycle").permutation(248_320))
    assert float((order[1:] - order[:-1] == 1).float().mean()) < 1e-3


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("tied", [True, False])
@pytest.mark.parametrize("dtype", ["bf16", "fp32"])
def test_files_hold_what_a_load_makes(tmp_path, kind, tied, dtype):
    files, virtual = both(tmp_path, acceptance=KINDS[kind], tied=tied, dtype=dtype)
    config = read_config(virtual)
    assert config == read_config(files) and not list(virtual.glob("*.safetensors"))
    for wanted in ("bf16", "fp16", "fp32"):
        made = load_shard(virtual, config, 0, 1, wanted)
        same(load_shard(files, config, 0, 1, wanted), made)
        assert ("lm_head.weight" in made) is not tied
        assert sum(value.nbytes for value in made.values()) == shard_bytes(config, 1, wanted)
        same(load_head(files, config, wanted), load_head(virtual, config, wanted))
    for left, right in zip(
        load_vocab(files, config, "bf16"), load_vocab(virtual, config, "bf16"), strict=True
    ):
        assert (left is None and right is None) or torch.equal(left, right)


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("size", [2, 4])
def test_a_rank_makes_its_slices_of_the_whole(tmp_path, kind, size):
    files, virtual = both(tmp_path, acceptance=KINDS[kind], tied=False)
    config = read_config(virtual)
    for rank in range(size):
        mine = load_shard(virtual, config, rank, size, "bf16")
        same(load_shard(files, config, rank, size, "bf16"), mine)
    assert torch.equal(mine["embed_tokens.weight"][-1], torch.zeros(config.hidden_size, dtype=torch.bfloat16))


def test_weights_keep_activations_near_one_and_differ_by_name(tmp_path):
    write_virtual(tmp_path, small(), 0)
    config = read_config(tmp_path)
    weights = load_shard(tmp_path, config, 0, 1, "fp32")
    for name, value in weights.items():
        if name.endswith("norm.weight"):
            wanted = 1.0 if "linear_attn" in name else 0.0
            assert torch.equal(value, torch.full_like(value, wanted)), name
        elif name.endswith("A_log"):
            assert (
                float(value.min()) >= 0
                and float(value.max()) <= math.log(16)
                and len(set(value.tolist())) > 8
            )
        elif name.endswith("dt_bias"):
            steps = torch.nn.functional.softplus(value)
            assert float(steps.min()) >= 1e-3 * 0.999 and float(steps.max()) <= 0.1 * 1.001
        else:
            wanted = 1.0 if "embed" in name else 0.5 if "conv1d" in name else value.shape[1] ** -0.5
            # the smallest has 32 x 160 numbers: a standard error is 1 %
            assert float(value.std()) == pytest.approx(wanted, rel=0.05), name
    projections = [value.flatten()[:64] for name, value in weights.items() if value.dim() > 1]
    projections += [v.flatten()[:64] for v in load_head(tmp_path, config, "fp32").values() if v.dim() > 1]
    assert len({tuple(start.sign().tolist()) for start in projections}) == len(projections)


def test_the_load_tells_its_progress(tmp_path):
    write_virtual(tmp_path, small(), 0)
    config, calls = read_config(tmp_path), []
    load_shard(tmp_path, config, 0, 2, "bf16", lambda *call: calls.append(call))
    assert len(calls) == len(read_manifest(tmp_path, config))
    assert calls[-1] == ("read", shard_bytes(config, 1, "bf16"), shard_bytes(config, 1, "bf16"), "bytes")


def test_another_seed_is_another_model(tmp_path):
    for seed in (1, 2):
        write_virtual(tmp_path / str(seed), small(), seed)
    one, two = tmp_path / "1", tmp_path / "2"
    assert fingerprint(one) != fingerprint(two)
    config = read_config(one)
    left, right = (load_shard(path, config, 0, 1, "bf16") for path in (one, two))
    assert all(torch.equal(left[name], right[name]) == ("norm" in name) for name in left)


def test_an_override_of_the_dtype_makes_the_same_weights(tmp_path):
    files, virtual = both(tmp_path)
    config = read_config(virtual, {"dtype": "float32"})
    same(load_shard(files, config, 0, 1, "fp32"), load_shard(virtual, config, 0, 1, "fp32"))


def test_the_recipe_says_what_the_weights_are(tmp_path):
    files, virtual = both(tmp_path, acceptance=0.7)
    recipe = read_recipe(virtual)
    assert recipe is not None and recipe.acceptance == 0.7
    assert (
        recipe.note == "no real model: its weights were made at the load from seed 3, PLANTED acceptance 0.7"
    )
    assert read_recipe(files) is None
    edit_config(virtual, mstar_planted=...)
    random = read_recipe(virtual)
    assert random is not None and "no real model" in random.note and "PLANTED" not in random.note


@pytest.mark.parametrize(
    ("fields", "error_class", "said"),
    [
        ({"mstar_weights": {"generator": 2, "seed": 0}}, "unsupported", "generator"),
        ({"mstar_weights": {"seed": 0}}, "unsupported", "generator"),
        ({"mstar_weights": {"generator": 1}}, "validation", "seed"),
        ({"mstar_weights": {"generator": 1, "seed": -1}}, "validation", "seed"),
        ({"mstar_weights": 5}, "validation", "mstar_weights"),
        ({"mstar_planted": 1.5}, "validation", "mstar_planted"),
    ],
)
def test_a_recipe_that_is_none_is_refused(tmp_path, fields, error_class, said):
    write_virtual(tmp_path, small(), 0)
    edit_config(tmp_path, **fields)
    for call in (read_recipe, fingerprint, lambda path: read_manifest(path, read_config(path))):
        with pytest.raises(LoadError, match=said) as caught:
            call(tmp_path)
        assert caught.value.error_class == error_class


def test_weight_files_beside_a_recipe_are_refused(tmp_path):
    files, _ = both(tmp_path)
    edit_config(files, mstar_weights={"generator": 1, "seed": 3})
    with pytest.raises(LoadError, match=r"model-00001\.safetensors"):
        read_manifest(files, read_config(files))


def test_a_head_of_two_layers_is_not_made(tmp_path):
    write_virtual(tmp_path, small(), 0)
    assert head_fault(tmp_path, read_config(tmp_path)) is None
    edit_config(tmp_path, mtp_num_hidden_layers=2)
    fault = head_fault(tmp_path, read_config(tmp_path))
    assert fault is not None and fault.error_class == "unsupported"


def test_the_config_of_a_virtual_directory_holds_the_recipe_alone(tmp_path):
    files, virtual = both(tmp_path)
    left, right = (json.loads((path / "config.json").read_text()) for path in (files, virtual))
    assert right.pop("mstar_weights") == {"generator": 1, "seed": 3} and left == right
    assert {file.name for file in virtual.iterdir()} == {
        "config.json", "generation_config.json", "tokenizer.json", "tokenizer_config.json"
    }  # fmt: skip
