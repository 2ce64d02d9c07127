"""Reading checkpoints: every layout gives the same weights, and what is broken is named."""

from __future__ import annotations

import functools
import json
import subprocess
import sys
import tempfile
from pathlib import Path

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from safetensors.torch import load_file, save_file

from mstar.loader import checkpoint
from mstar.loader.checkpoint import load_shard
from mstar.loader.config import parse_config, read_config
from mstar.loader.errors import LoadError
from mstar.loader.fingerprint import fingerprint
from mstar.loader.headers import find_sidecar
from mstar.loader.manifest import head_fault, read_manifest
from mstar.loader.resolve import resolve
from mstar.loader.sharding import shard_bytes
from tests.support import checkpoints
from tests.support.checkpoints import SHAPES, load_oracle, text_config, write_checkpoint


@pytest.fixture(autouse=True, scope="module")
def _one_thread():
    threads = torch.get_num_threads()
    torch.set_num_threads(1)
    yield
    torch.set_num_threads(threads)


def load(path, dtype="fp32"):
    return load_shard(path, read_config(path), 0, 1, dtype)


def same(left, right):
    return left.keys() == right.keys() and all(torch.equal(left[name], right[name]) for name in left)


def refusal(path) -> LoadError:
    with pytest.raises(LoadError) as caught:
        load(path)
    assert caught.value.error_class == "validation"
    return caught.value


@pytest.mark.parametrize("shape", SHAPES)
@pytest.mark.parametrize(("tied", "nested"), [(True, False), (False, True)])
def test_weights_are_those_that_transformers_reads(tmp_path, shape, tied, nested):
    path = write_checkpoint(tmp_path, shape, tied=tied, nested=nested, with_mtp="beside")
    theirs = load_oracle(path).state_dict()
    ours = load(path)
    assert len(ours) == len(theirs) - (1 if tied else 0)
    for name, value in ours.items():
        assert torch.equal(value, theirs.get(f"model.{name}", theirs.get(name))), name


def test_every_layout_of_the_files_gives_the_same_weights(tmp_path):
    plain = load(write_checkpoint(tmp_path / "plain", tied=False))
    layouts = {
        "indexed": {"sharded_files": 3},
        "nested": {"nested": True, "sharded_files": 2},
        "bare": {"prefix": ""},
        "language": {"prefix": "model.language_model."},
        "vision": {"with_vision": True},
        "head": {"with_mtp": "beside"},
        "sidecar": {"with_mtp": "sidecar", "sharded_files": 2},
    }
    for name, options in layouts.items():
        path = write_checkpoint(tmp_path / name, tied=False, **options)
        assert same(load(path), plain), name


def test_several_files_without_an_index_are_read_together(tmp_path):
    path = write_checkpoint(tmp_path, sharded_files=2, with_mtp="sidecar")
    indexed = load(path)
    (path / "model.safetensors.index.json").unlink()
    assert same(load(path), indexed)


@pytest.mark.parametrize("source", ["bf16", "fp16", "fp32"])
@pytest.mark.parametrize("wanted", ["bf16", "fp16", "fp32"])
def test_weights_come_in_the_dtype_of_the_load_and_decays_in_float32(tmp_path, source, wanted):
    path = write_checkpoint(tmp_path, dtype=source)
    files = load_file(path / "model.safetensors")
    for name, value in load(path, wanted).items():
        kept = name.endswith(("A_log", "dt_bias"))
        dtype = torch.float32 if kept else checkpoint.TORCH_DTYPES[wanted]
        assert value.dtype == dtype
        assert torch.equal(value, files[f"model.{name}"].to(dtype))


def test_decays_stored_in_bf16_are_widened(tmp_path):
    path = write_checkpoint(tmp_path)
    name = "model.layers.0.linear_attn.A_log"
    rounded = load_file(path / "model.safetensors")[name].bfloat16()
    checkpoints.edit_weights(path, **{name.replace(".", "__"): rounded})
    assert torch.equal(load(path)["layers.0.linear_attn.A_log"], rounded.float())


def test_a_head_changes_nothing_in_the_trunk(tmp_path):
    """Norms stay zero-centred whether or not mtp.* weights are there: no +1 is ever applied at load."""
    alone = load(write_checkpoint(tmp_path / "alone"))
    for where in ("beside", "sidecar"):
        path = write_checkpoint(tmp_path / where, with_mtp=where)
        assert head_fault(path, read_config(path)) is None
        assert same(load(path), alone)
    assert head_fault(tmp_path / "alone", read_config(tmp_path / "alone"))


def test_sidecar_is_found_and_left_unread(tmp_path):
    path = write_checkpoint(tmp_path, with_mtp="sidecar")
    plain = load(path)
    sidecar = find_sidecar(path)
    assert sidecar == path / "model.mtp.safetensors"
    trunk = load_file(path / "model.safetensors")
    save_file({name: value + 1 for name, value in trunk.items()}, sidecar)  # looks like a trunk
    assert same(load(path), plain)
    sidecar.write_bytes(b"nothing that can be read")
    assert same(load(path), plain)


def test_two_sidecars_are_refused_by_name(tmp_path):
    path = write_checkpoint(tmp_path, with_mtp="sidecar")
    (path / "other.mtp.safetensors").write_bytes(b"")
    with pytest.raises(LoadError, match=r"model\.mtp\.safetensors, other\.mtp\.safetensors"):
        find_sidecar(path)


def test_sidecar_alone_is_no_trunk(tmp_path):
    path = write_checkpoint(tmp_path, with_mtp="sidecar")
    (path / "model.safetensors").unlink()
    assert "no *.safetensors" in refusal(path).message


def test_tied_config_ignores_an_lm_head_in_the_file(tmp_path):
    path = write_checkpoint(tmp_path, tied=True, lm_head=True)
    assert "lm_head.weight" not in load(path)


def test_untied_config_without_lm_head_names_it(tmp_path):
    path = write_checkpoint(tmp_path, tied=False, lm_head=False)
    assert "missing: lm_head.weight" in refusal(path).message


def test_missing_extra_and_misshapen_weights_are_named_in_one_error(tmp_path):
    path = write_checkpoint(tmp_path)
    checkpoints.drop_tensor(path, "model.layers.0.mlp.up_proj.weight")
    checkpoints.drop_tensor(path, "model.norm.weight")
    checkpoints.misshape_tensor(path, "model.layers.3.self_attn.k_proj.weight")
    checkpoints.edit_weights(
        path,
        model__layers__4__mlp__up_proj__weight=torch.zeros(2, 2),
        model__layers__1__linear_attn__A_log=torch.zeros(4, dtype=torch.int32),
    )
    message = refusal(path).message
    assert "missing: layers.0.mlp.up_proj.weight, norm.weight" in message
    assert "wrong shape: layers.3.self_attn.k_proj.weight (has [65, 64], the config says [64, 64])" in message
    assert "layers.1.linear_attn.A_log (I32)" in message
    assert "not part of this model: layers.4.mlp.up_proj.weight" in message


def test_weights_under_two_prefixes_are_refused(tmp_path):
    path = write_checkpoint(tmp_path)
    checkpoints.edit_weights(path, model__language_model__norm__weight=torch.zeros(64))
    assert "two prefixes: norm.weight" in refusal(path).message


def test_an_override_that_the_weights_do_not_fit_is_refused(tmp_path):
    path = write_checkpoint(tmp_path)
    config = read_config(path, {"intermediate_size": 72})
    with pytest.raises(
        LoadError, match=r"mlp\.down_proj\.weight \(has \[64, 144\], the config says \[64, 72\]\)"
    ):
        read_manifest(path, config)


@pytest.mark.parametrize("drop", [1, 5000, 10**9])
def test_truncated_file_is_named(tmp_path, drop):
    path = write_checkpoint(tmp_path)
    checkpoints.truncate_weights(path, min(drop, (path / "model.safetensors").stat().st_size - 4))
    assert str(path / "model.safetensors") in refusal(path).message


def test_corrupt_and_empty_files_are_named(tmp_path):
    path = write_checkpoint(tmp_path)
    checkpoints.corrupt_header(path)
    assert str(path / "model.safetensors") in refusal(path).message
    for content in (b"", b"\0" * 8, b"\xff" * 64, (2).to_bytes(8, "little") + b"[]"):
        (path / "model.safetensors").write_bytes(content)
        assert "model.safetensors" in refusal(path).message


@pytest.mark.parametrize(
    "entry",
    [
        5,
        {"dtype": "F32", "shape": [2], "data_offsets": [0, 4]},
        {"dtype": "F32", "shape": [-1], "data_offsets": [0, -4]},
        {"dtype": "F32", "shape": [1], "data_offsets": [4, 8]},
        {"dtype": "F99", "shape": [1], "data_offsets": [0, 4]},
        {"dtype": "F32", "shape": [1 << 40, 1 << 40], "data_offsets": [0, 4]},
        {"dtype": "F32", "shape": [True], "data_offsets": [0, 4]},
    ],
)
def test_lying_headers_are_refused(tmp_path, entry):
    path = write_checkpoint(tmp_path)
    header = json.dumps({"a": entry}).encode()
    (path / "model.safetensors").write_bytes(len(header).to_bytes(8, "little") + header + b"\0" * 4)
    with pytest.raises(LoadError, match=r"model\.safetensors"):
        load(path)


@pytest.mark.parametrize(
    "weight_map",
    [
        None,
        [],
        {},
        {"model.norm.weight": 5},
        {"model.norm.weight": "../model.safetensors"},
        {"model.norm.weight": "absent.safetensors"},
        {
            "model.norm.weight": "model-00001-of-00002.safetensors",
            "model.ghost": "model-00001-of-00002.safetensors",
        },
    ],
)
def test_wrong_index_is_refused(tmp_path, weight_map):
    path = write_checkpoint(tmp_path, sharded_files=2)
    (path / "model.safetensors.index.json").write_text(json.dumps({"weight_map": weight_map}))
    assert refusal(path).message


def test_progress_counts_to_the_whole(tmp_path):
    path = write_checkpoint(tmp_path, sharded_files=2)
    calls = []
    load_shard(path, read_config(path), 0, 2, "bf16", lambda *call: calls.append(call))
    stages, done, totals, units = zip(*calls, strict=True)
    assert set(stages) == {"read"} and set(units) == {"bytes"} and len(set(totals)) == 1
    assert list(done) == sorted(done) and done[-1] == totals[0]


def test_fingerprint_tells_config_and_layout_apart_and_nothing_else(tmp_path):
    first = write_checkpoint(tmp_path / "first", seed=1)
    second = write_checkpoint(tmp_path / "second", seed=2)
    assert fingerprint(first) == fingerprint(second)
    others = [
        write_checkpoint(tmp_path / "wide", seed=1, intermediate_size=160),
        write_checkpoint(tmp_path / "fp32", seed=1, dtype="fp32"),
        write_checkpoint(tmp_path / "head", seed=1, with_mtp="sidecar"),
        write_checkpoint(tmp_path / "theta", seed=1, max_position_embeddings=64),
    ]
    assert len({fingerprint(path) for path in (first, *others)}) == 5
    assert len(fingerprint(resolve("builtin:tiny"))) == 64


@settings(max_examples=150, deadline=None)
@given(data=st.data())
def test_any_damage_to_a_file_reads_or_is_refused_by_its_name(tmp_path_factory, data):
    """Bytes overwritten, cut out or cut off: never another exception, never a read past the file's end."""
    path = tmp_path_factory.mktemp("damaged")
    whole = _whole_file()
    header_end = 8 + int.from_bytes(whole[:8], "little")
    at = data.draw(st.integers(0, 8) | st.integers(0, header_end) | st.integers(0, len(whole)))
    damage = data.draw(st.binary(max_size=12))
    cut_bytes = data.draw(st.sampled_from([0, len(damage), len(damage), 1, 1 << 30]))
    (path / "model.safetensors").write_bytes(whole[:at] + damage + whole[at + cut_bytes :])
    config = parse_config(text_config(), {}, {})
    try:
        shard = load_shard(path, config, 0, 1, "bf16")
    except LoadError as error:
        assert error.error_class in ("validation", "unsupported")
        assert str(path) in error.message
    else:
        assert sum(value.nbytes for value in shard.values()) == shard_bytes(config, 1, "bf16")


@functools.cache
def _whole_file():
    with tempfile.TemporaryDirectory() as directory:
        path = write_checkpoint(Path(directory), tied=False, dtype="fp32")
        return (path / "model.safetensors").read_bytes()


def test_truncated_file_of_several_is_named(tmp_path):
    path = write_checkpoint(tmp_path, sharded_files=3)
    file = path / "model-00002-of-00003.safetensors"
    file.write_bytes(file.read_bytes()[:-7])
    assert str(file) in refusal(path).message


PEAK_SCRIPT = """
import re, sys
import torch
from mstar.loader import read_config
from mstar.loader.checkpoint import load_shard

def status(field):
    return int(re.search(field + r":\\s+(\\d+) kB", open("/proc/self/status").read())[1]) << 10

torch.set_num_threads(1)
path, warm, rank, size, dtype = sys.argv[1], sys.argv[2], int(sys.argv[3]), int(sys.argv[4]), sys.argv[5]
load_shard(warm, read_config(warm), 0, 1, dtype)  # what a first call imports and allocates once
config = read_config(path)
open("/proc/self/clear_refs", "w").write("5")  # the peak counts from here
before = status("VmRSS")
shard = load_shard(path, config, rank, size, dtype)
print(status("VmHWM") - before, sum(value.nbytes for value in shard.values()))
"""


@pytest.fixture(scope="module")
def large(tmp_path_factory):
    """A checkpoint of 95 MB, large beside what an interpreter's own memory does meanwhile."""
    path = tmp_path_factory.mktemp("large")
    return write_checkpoint(path, tied=False, hidden_size=384, intermediate_size=4096, vocab_size=40_001)


@pytest.mark.skipif(not sys.platform.startswith("linux"), reason="reads /proc")
@pytest.mark.parametrize(("rank", "size", "dtype"), [(0, 1, "bf16"), (3, 4, "fp32")])
def test_peak_memory_of_a_rank_is_its_shard_and_a_tenth(tmp_path, large, rank, size, dtype):
    warm = write_checkpoint(tmp_path)
    command = [sys.executable, "-c", PEAK_SCRIPT, str(large), str(warm), str(rank), str(size), dtype]
    done = subprocess.run(command, capture_output=True, text=True, check=True)
    peak, shard = map(int, done.stdout.split())
    assert shard == shard_bytes(read_config(large), size, dtype)
    assert peak <= 1.1 * shard, f"peak {peak} bytes, shard {shard}"
