"""How weights are cut: against formulas that reshape by head, for every rule and every tp."""

from __future__ import annotations

import pytest
import torch

from mstar.loader.checkpoint import load_shard
from mstar.loader.config import parse_config, read_config
from mstar.loader.errors import LoadError
from mstar.loader.resolve import resolve
from mstar.loader.sharding import RULES, check_tp, fitting_tp, shard_bytes
from tests.support.checkpoints import text_config, write_checkpoint

# Twice the heads of the named shapes, so that tp 8 fits too; 4B's kv heads stay below it and are replicated.
WIDE = {
    "0.8B-scaled": {"num_attention_heads": 32, "num_key_value_heads": 8, "linear_num_key_heads": 8,
                    "linear_num_value_heads": 8},
    "4B-scaled": {"num_attention_heads": 16, "num_key_value_heads": 4, "linear_num_key_heads": 8,
                  "linear_num_value_heads": 16},
    "27B-scaled": {"num_attention_heads": 24, "num_key_value_heads": 4, "linear_num_key_heads": 8,
                   "linear_num_value_heads": 24},
}  # fmt: skip


def by_head(weight, heads, rank, size):
    """Rows of a rank's heads; a head is replicated where there are fewer than ranks."""
    grouped = weight.reshape(heads, -1, *weight.shape[1:])
    if size > heads:
        grouped = grouped.repeat_interleave(size // heads, dim=0)
    return grouped.chunk(size)[rank].flatten(0, 1)


def expected_slice(name, full, config, rank, size):
    """A rank's slice of the weight `name`, from its meaning alone."""
    kind = name.split(".")[-2] if name.endswith(".weight") else name.split(".")[-1]
    key_rows = config.linear_num_key_heads * config.linear_key_head_dim
    key_heads, value_heads = config.linear_num_key_heads, config.linear_num_value_heads
    if kind in ("in_proj_qkv", "conv1d"):
        q, k, v = full[:key_rows], full[key_rows : 2 * key_rows], full[2 * key_rows :]
        heads = (key_heads, key_heads, value_heads)
        return torch.cat(
            [by_head(part, count, rank, size) for part, count in zip((q, k, v), heads, strict=True)]
        )
    if kind in ("in_proj_z", "in_proj_b", "in_proj_a", "A_log", "dt_bias"):
        return by_head(full, value_heads, rank, size)
    if kind == "q_proj":
        return by_head(full, config.num_attention_heads, rank, size)
    if kind in ("k_proj", "v_proj"):
        return by_head(full, config.num_key_value_heads, rank, size)
    if kind in ("gate_proj", "up_proj"):
        return full.chunk(size)[rank]
    if kind in ("o_proj", "out_proj", "down_proj"):
        return full.chunk(size, dim=1)[rank]
    if kind in ("embed_tokens", "lm_head"):
        rows = -(-full.shape[0] // size)
        padded = torch.zeros(rows * size, full.shape[1], dtype=full.dtype)
        padded[: full.shape[0]] = full
        return padded[rank * rows : (rank + 1) * rows]
    assert "norm" in kind
    return full


@pytest.mark.parametrize("shape", WIDE)
def test_every_rank_holds_the_slices_that_its_heads_mean(tmp_path, shape):
    path = write_checkpoint(tmp_path, shape, tied=False, **WIDE[shape])
    config = read_config(path)
    full = load_shard(path, config, 0, 1, "bf16")
    for size in (1, 2, 4, 8):
        local = config.local(size)
        for rank in range(size):
            shard = load_shard(path, config, rank, size, "bf16")
            assert shard.keys() == full.keys()
            for name, value in shard.items():
                wanted = expected_slice(name, full[name], config, rank, size)
                assert torch.equal(value, wanted), (name, rank, size)
                assert value.is_contiguous() and value.dtype == full[name].dtype
            assert sum(value.nbytes for value in shard.values()) == shard_bytes(config, size, "bf16")
            assert shard["embed_tokens.weight"].shape == (local.vocab, config.hidden_size)
            qkv = shard["layers.0.linear_attn.in_proj_qkv.weight"]
            assert qkv.shape == (local.conv_channels, config.hidden_size)
            k_proj = shard["layers.3.self_attn.k_proj.weight"]
            assert k_proj.shape == (local.kv_heads * config.head_dim, config.hidden_size)


def test_every_rule_is_seen_by_the_checkpoints_of_these_tests(tmp_path):
    path = write_checkpoint(tmp_path, tied=False)
    config = read_config(path)
    names = set(load_shard(path, config, 0, 1, "bf16"))
    assert {rule.name.format(i=0) for rule in RULES if rule.layers != "full_attention"} <= names
    assert {rule.name.format(i=3) for rule in RULES if rule.layers != "linear_attention"} <= names


@pytest.mark.parametrize("shape", ["0.8B-scaled", "4B-scaled", "27B-scaled"])
@pytest.mark.parametrize("size", [2, 4])
def test_gates_of_the_recurrence_stay_with_their_value_heads(tmp_path, shape, size):
    """b and a are one row a value head: cut at a midpoint, or like the key heads, rank 1 gets another's gates."""
    path = write_checkpoint(tmp_path, shape, dtype="fp32")
    config = read_config(path)
    full = load_shard(path, config, 0, 1, "fp32")
    x = torch.randn(5, config.hidden_size, generator=torch.Generator().manual_seed(1))
    heads = config.linear_num_value_heads // size
    ratio = config.linear_num_value_heads // config.linear_num_key_heads
    for rank in range(size):
        shard = load_shard(path, config, rank, size, "fp32")
        for gate in ("in_proj_b", "in_proj_a"):
            name = f"layers.1.linear_attn.{gate}.weight"
            mine = slice(rank * heads, (rank + 1) * heads)
            torch.testing.assert_close(x @ shard[name].T, (x @ full[name].T)[:, mine])
        # value head i reads key head i // ratio: a rank's value heads find theirs on the rank itself
        name = "layers.1.linear_attn.in_proj_qkv.weight"
        keys = (x @ full[name].T)[:, config.linear_num_key_heads * config.linear_key_head_dim :]
        local = (x @ shard[name].T)[:, config.local(size).linear_key_heads * config.linear_key_head_dim :]
        for head in range(heads):
            whole_at = (rank * heads + head) // ratio * config.linear_key_head_dim
            local_at = head // ratio * config.linear_key_head_dim
            width = config.linear_key_head_dim
            torch.testing.assert_close(
                local[:, local_at : local_at + width], keys[:, whole_at : whole_at + width]
            )


@pytest.mark.parametrize("size", [2, 4])
def test_row_parallel_outputs_of_all_ranks_add_up(tmp_path, size):
    path = write_checkpoint(tmp_path, "27B-scaled", dtype="fp32")
    config = read_config(path)
    full = load_shard(path, config, 0, 1, "fp32")
    shards = [load_shard(path, config, rank, size, "fp32") for rank in range(size)]
    for name in ("layers.0.mlp.down_proj.weight", "layers.3.self_attn.o_proj.weight"):
        x = torch.randn(3, full[name].shape[1], generator=torch.Generator().manual_seed(2))
        total = sum(part @ shard[name].T for part, shard in zip(x.chunk(size, dim=1), shards, strict=True))
        torch.testing.assert_close(total, x @ full[name].T)


def test_query_heads_find_their_kv_head_on_their_rank_when_kv_heads_are_replicated(tmp_path):
    path = write_checkpoint(tmp_path, "27B-scaled", dtype="fp32")  # 12 q heads over 2 kv heads
    config = read_config(path)
    full = load_shard(path, config, 0, 1, "fp32")["layers.3.self_attn.k_proj.weight"]
    for rank in range(4):
        shard = load_shard(path, config, rank, 4, "fp32")["layers.3.self_attn.k_proj.weight"]
        q_heads = range(rank * 3, rank * 3 + 3)
        kv_head = {head // 6 for head in q_heads}
        assert len(kv_head) == 1
        assert torch.equal(shard, full.view(2, config.head_dim, -1)[kv_head.pop()])


def test_tp_that_fits_is_taken():
    tiny = read_config(resolve("builtin:tiny"))
    assert fitting_tp(tiny) == [1, 2, 4]
    for tp in (1, 2, 4):
        check_tp(tiny, tp)
    wide = parse_config(text_config(**WIDE["27B-scaled"]), {}, {})
    assert fitting_tp(wide) == [1, 2, 4, 8]


@pytest.mark.parametrize(
    ("fields", "tp", "named"),
    [
        ({}, 8, "linear_num_key_heads"),
        ({"num_attention_heads": 6}, 4, "num_attention_heads"),
        ({"intermediate_size": 145}, 2, "intermediate_size"),
        ({"num_attention_heads": 12, "num_key_value_heads": 3}, 2, "num_key_value_heads"),
    ],
)
def test_tp_that_does_not_fit_is_refused_naming_those_that_do(fields, tp, named):
    config = parse_config(text_config(**fields), {}, {})
    with pytest.raises(LoadError) as caught:
        check_tp(config, tp)
    assert (caught.value.error_class, caught.value.field) == ("validation", "tp")
    assert named in caught.value.message
    assert f"tp can be {', '.join(map(str, fitting_tp(config)))}" in caught.value.message


@pytest.mark.parametrize("tp", [0, -1, 17, 1 << 40, True])
def test_tp_out_of_range_is_refused(tp):
    with pytest.raises(LoadError):
        check_tp(read_config(resolve("builtin:tiny")), tp)


def test_tp_is_refused_before_any_weight_is_read(tmp_path):
    path = write_checkpoint(tmp_path)
    config = read_config(path)
    (path / "model.safetensors").unlink()
    with pytest.raises(LoadError) as caught:
        load_shard(path, config, 0, 3, "bf16")
    assert caught.value.field == "tp"
