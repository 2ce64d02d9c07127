"""The draft head's weights: from wherever the checkpoint keeps them, compared with safetensors read directly."""

from __future__ import annotations

import json

import pytest
import torch
from safetensors.torch import load_file, save_file

from mstar.arch.head import MtpHead
from mstar.kernels.cpu import CpuOps
from mstar.loader.checkpoint import TORCH_DTYPES, load_shard
from mstar.loader.config import read_config
from mstar.loader.errors import LoadError
from mstar.loader.head import load_head, load_vocab
from mstar.loader.resolve import resolve
from tests.support.checkpoints import SHAPES, edit_weights, write_checkpoint


@pytest.fixture(autouse=True, scope="module")
def _one_thread():
    threads = torch.get_num_threads()
    torch.set_num_threads(1)
    yield
    torch.set_num_threads(threads)


def head(path, dtype="fp32"):
    return load_head(path, read_config(path), dtype)


def directly(path, file="model.mtp.safetensors"):
    return {
        name.removeprefix("mtp."): value for name, value in load_file(path / file).items() if "mtp." in name
    }


def same(left, right):
    return left.keys() == right.keys() and all(torch.equal(left[name], right[name]) for name in left)


def refusal(path) -> LoadError:
    with pytest.raises(LoadError) as caught:
        head(path)
    return caught.value


@pytest.mark.parametrize("shape", SHAPES)
@pytest.mark.parametrize("source", ["bf16", "fp32"])
@pytest.mark.parametrize("wanted", ["bf16", "fp16", "fp32"])
def test_the_head_is_what_the_file_holds_in_the_dtype_of_the_load(tmp_path, shape, source, wanted):
    path = write_checkpoint(tmp_path, shape, with_mtp="sidecar", dtype=source)
    dtype = TORCH_DTYPES[wanted]
    assert same(head(path, wanted), {name: value.to(dtype) for name, value in directly(path).items()})


def test_every_place_of_the_head_gives_the_same_weights(tmp_path):
    plain = head(write_checkpoint(tmp_path / "plain", with_mtp="sidecar"))
    for name, options in {
        "beside": {"with_mtp": "beside"},
        "indexed": {"with_mtp": "beside", "sharded_files": 3},
        "beside an index": {"with_mtp": "sidecar", "sharded_files": 2},
        "nested": {"with_mtp": "beside", "nested": True, "with_vision": False},
        "bare trunk": {"with_mtp": "beside", "prefix": ""},
    }.items():
        assert same(head(write_checkpoint(tmp_path / name, **options)), plain), name


@pytest.mark.parametrize("prefix", ["", "mtp.", "model.mtp.", "model.language_model.mtp."])
def test_every_prefix_of_the_head_gives_the_same_weights(tmp_path, prefix):
    path = write_checkpoint(tmp_path, with_mtp="sidecar")
    plain = head(path)
    save_file({prefix + name: value for name, value in plain.items()}, path / "model.mtp.safetensors")
    assert same(head(path), plain)


def test_an_index_may_list_the_sidecar(tmp_path):
    path = write_checkpoint(tmp_path, with_mtp="sidecar", sharded_files=2)
    plain = head(path)
    file = path / "model.safetensors.index.json"
    index = json.loads(file.read_text())
    index["weight_map"] |= {f"mtp.{name}": "model.mtp.safetensors" for name in plain}
    file.write_text(json.dumps(index))
    assert same(head(path), plain)


def test_tensors_own_their_memory(tmp_path):
    path = write_checkpoint(tmp_path, with_mtp="sidecar", dtype="fp32")
    for value in head(path).values():
        assert value.is_contiguous() and value.untyped_storage().nbytes() == value.nbytes
        value.zero_()
    assert directly(path)["norm.weight"].abs().sum() > 0


def test_the_built_in_head_is_read_and_taken_whole():
    path = resolve("builtin:tiny")
    weights = head(path, "bf16")
    assert same(weights, directly(path))
    config = read_config(path)
    ops = CpuOps()
    embedding, _ = load_vocab(path, config, "bf16")
    MtpHead(config, weights, ops, embedding, ops.pack_linear(embedding))
    assert not weights


# The whole vocabulary


@pytest.mark.parametrize("tied", [True, False])
@pytest.mark.parametrize("nested", [True, False])
def test_the_vocabulary_comes_whole_where_a_shard_has_a_part(tmp_path, tied, nested):
    path = write_checkpoint(tmp_path, tied=tied, nested=nested, with_mtp="beside", dtype="fp32")
    config = read_config(path)
    embedding, lm_head = load_vocab(path, config, "fp32")
    files = load_file(path / "model.safetensors")
    prefix = "model.language_model." if nested else "model."
    assert torch.equal(embedding, files[f"{prefix}embed_tokens.weight"])
    assert (lm_head is None) == tied
    if lm_head is not None:
        assert torch.equal(lm_head, files["lm_head.weight"])
    shards = [load_shard(path, config, rank, 2, "fp32") for rank in range(2)]
    parts = torch.cat([shard["embed_tokens.weight"] for shard in shards])
    assert torch.equal(embedding, parts[: config.vocab_size])


# What is refused


def test_all_that_is_wrong_with_a_head_is_in_one_error(tmp_path):
    path = write_checkpoint(tmp_path, with_mtp="beside")
    edit_weights(
        path,
        mtp__fc__weight=None,
        mtp__norm__weight=None,
        mtp__embed_tokens__weight=torch.zeros(331, 64),
        mtp__layers__0__self_attn__q_proj__weight=torch.zeros(3, 64),
        mtp__layers__0__mlp__up_proj__weight=torch.zeros(144, 64, dtype=torch.int8),
    )
    error = refusal(path)
    assert (error.error_class, error.field) == ("validation", "model")
    for words in (
        "missing: fc.weight, norm.weight",
        "wrong shape: layers.0.self_attn.q_proj.weight (has [3, 64], the config says [512, 64])",
        "not part of this model: embed_tokens.weight",
        "layers.0.mlp.up_proj.weight (I8)",
    ):
        assert words in error.message
    load_shard(path, read_config(path), 0, 1, "fp32")  # the trunk is none the worse


def test_a_head_in_two_places_is_refused_by_name(tmp_path):
    path = write_checkpoint(tmp_path, with_mtp="beside")
    write_checkpoint(tmp_path / "other", with_mtp="sidecar")
    (tmp_path / "other" / "model.mtp.safetensors").rename(path / "model.mtp.safetensors")
    error = refusal(path)
    assert error.error_class == "validation"
    assert "there twice" in error.message and "fc.weight" in error.message


def test_no_head_is_refused_by_name(tmp_path):
    error = refusal(write_checkpoint(tmp_path))
    assert (error.error_class, error.field) == ("unsupported", "spec.mtp")


def test_a_second_sidecar_and_a_corrupt_one_are_refused_by_name(tmp_path):
    path = write_checkpoint(tmp_path, with_mtp="sidecar")
    data = (path / "model.mtp.safetensors").read_bytes()
    (path / "model.mtp.safetensors").write_bytes(data[:-1])
    assert "model.mtp.safetensors is cut short" in refusal(path).message
    (path / "other.mtp.safetensors").write_bytes(data)
    assert "several MTP sidecars" in refusal(path).message
