"""config.json: every layout that the family is published in, and every fault named."""

from __future__ import annotations

import json
import subprocess
import sys

import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from mstar.loader.config import (
    FULL,
    LINEAR,
    OVERRIDABLE,
    ModelConfig,
    parse_config,
    read_config,
    resolve_dtype,
)
from mstar.loader.errors import LoadError
from mstar.loader.resolve import resolve
from tests.support.checkpoints import SHAPES, text_config


def nested_config(**text):
    return {
        "architectures": ["Qwen3_5ForConditionalGeneration"],
        "model_type": "qwen3_5",
        "text_config": text_config(**text),
        "vision_config": {"depth": 27},
    }


def without(config, *names):
    return {name: value for name, value in config.items() if name not in names}


def refusal(config, overrides=None, generation=None) -> LoadError:
    with pytest.raises(LoadError) as caught:
        parse_config(config, generation or {}, overrides or {})
    return caught.value


def test_importing_the_loader_needs_no_torch():
    script = (
        "import sys, mstar.loader; "
        "heavy = [name for name in ('torch', 'transformers', 'huggingface_hub') if name in sys.modules]; "
        "sys.exit(f'imported {heavy}' if heavy else 0)"
    )
    done = subprocess.run([sys.executable, "-c", script], capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr


def test_the_built_in_model_reads_as_its_card_says():
    config = read_config(resolve("builtin:tiny"))
    assert (config.hidden_size, config.intermediate_size, config.vocab_size) == (256, 768, 6144)
    assert config.layer_types == (LINEAR, LINEAR, LINEAR, FULL) * 2
    assert (config.num_attention_heads, config.num_key_value_heads, config.head_dim) == (8, 2, 64)
    assert (config.rope_theta, config.rotary_dim, config.max_position_embeddings) == (1e5, 16, 4096)
    assert config.tie_word_embeddings and config.dtype == "bf16"
    assert config.mtp_num_hidden_layers == 1
    assert set(config.eos_token_ids) == {6137, 6139}


@pytest.mark.parametrize("shape", SHAPES)
def test_nested_and_flat_configs_read_alike(shape):
    assert parse_config(nested_config(shape=shape), {}, {}) == parse_config(text_config(shape), {}, {})


def test_layer_types_follow_from_the_interval_where_they_are_not_listed():
    config = without(text_config(num_hidden_layers=6), "layer_types")
    assert parse_config(config, {}, {}).layer_types == (LINEAR, LINEAR, LINEAR, FULL, LINEAR, LINEAR)
    config["full_attention_interval"] = 3
    assert parse_config(config, {}, {}).layer_types == (LINEAR, LINEAR, FULL) * 2


def test_rope_reads_alike_in_its_older_spellings():
    today = parse_config(text_config(), {}, {})
    older = without(text_config(), "rope_parameters")
    older |= {"rope_theta": 100000, "partial_rotary_factor": 0.25}
    assert parse_config(older, {}, {}) == today
    older["rope_scaling"] = {"type": "mrope", "mrope_section": [2, 1, 1]}
    assert parse_config(older, {}, {}) == today
    assert parse_config(without(older, "partial_rotary_factor"), {}, {}).partial_rotary_factor == 0.25


@pytest.mark.parametrize(
    ("top", "text", "tied"),
    [
        (True, None, True),
        (None, True, True),
        (False, True, True),
        (True, False, True),
        (False, None, False),
        (None, None, False),
    ],
)
def test_tying_is_found_at_either_level(top, text, tied):
    config = nested_config(tie_word_embeddings=text) | {"tie_word_embeddings": top}
    assert parse_config(config, {}, {}).tie_word_embeddings is tied


@pytest.mark.parametrize(
    ("fields", "dtype"),
    [
        ({"dtype": "bfloat16"}, "bf16"),
        ({"torch_dtype": "float16"}, "fp16"),
        ({"dtype": "float32", "torch_dtype": "float16"}, "fp32"),
        ({"torch_dtype": "torch.float32"}, "fp32"),
        ({}, "bf16"),
    ],
)
def test_dtype_reads_in_both_spellings_at_both_levels(fields, dtype):
    assert parse_config(text_config(**fields), {}, {}).dtype == dtype
    assert parse_config(nested_config(**fields), {}, {}).dtype == dtype
    assert parse_config(nested_config() | fields, {}, {}).dtype == dtype


def test_auto_dtype_is_the_checkpoints_and_others_are_taken_or_refused():
    config = parse_config(text_config(dtype="float16"), {}, {})
    assert resolve_dtype("auto", config) == "fp16"
    assert resolve_dtype("fp32", config) == "fp32"
    with pytest.raises(LoadError) as caught:
        resolve_dtype("int4", config)
    assert caught.value.field == "dtype"


def test_eos_ids_are_the_union_of_every_source():
    config = nested_config(eos_token_id=5) | {"eos_token_id": [7, 5]}
    assert parse_config(config, {"eos_token_id": [9, 7]}, {}).eos_token_ids == (5, 7, 9)
    assert parse_config(config, {"eos_token_id": [9, 7]}, {"eos_token_id": 3}).eos_token_ids == (3,)
    assert parse_config(text_config(eos_token_id=None), {}, {}).eos_token_ids == ()


def test_overrides_lie_on_top_of_nested_and_older_fields():
    for config in (text_config(), nested_config()):
        read = parse_config(
            config, {}, {"rope_theta": 5e6, "max_position_embeddings": 128, "tie_word_embeddings": True}
        )
        assert (read.rope_theta, read.max_position_embeddings, read.tie_word_embeddings) == (5e6, 128, True)
        interval = {"full_attention_interval": 2}
        assert parse_config(config, {}, interval).layer_types == (LINEAR, FULL) * 2


def test_unknown_override_is_refused_by_name_with_those_there_are():
    error = refusal(text_config(), {"hiden_size": 64})
    assert (error.error_class, error.field) == ("validation", "overrides.hiden_size")
    assert "hidden_size" in error.message and "rope_theta" in error.message


def test_wrong_override_names_the_load_request_and_not_the_file():
    error = refusal(text_config(), {"hidden_size": "64"})
    assert (error.error_class, error.field) == ("validation", "overrides.hidden_size")
    assert "load request" in error.message


@pytest.mark.parametrize(
    ("fields", "named"),
    [
        ({"model_type": "llama"}, "model_type"),
        ({"model_type": "qwen3_5_moe_text"}, "model_type"),
        ({"architectures": ["Qwen3_5ForSequenceClassification"]}, "architectures"),
        ({"num_experts": 64}, "num_experts"),
        ({"attention_bias": True}, "attention_bias"),
        ({"attn_output_gate": False}, "attn_output_gate"),
        ({"hidden_act": "gelu"}, "hidden_act"),
        ({"rope_parameters": {"rope_type": "yarn", "factor": 4.0}}, "rope_type"),
        ({"rope_parameters": {"type": "linear"}}, "rope_type"),
        ({"rope_scaling": {"type": "yarn"}}, "rope_type"),
        ({"rope_parameters": {"full_attention": {"rope_theta": 1e6}}}, "rope_parameters"),
        ({"quantization_config": {"quant_method": "fp8"}}, "quantization_config"),
        ({"layer_types": ["full_attention"] * 4}, "layer_types"),
    ],
)
def test_other_architectures_and_variants_are_refused_by_name(fields, named):
    for config in (text_config() | fields, nested_config() | {"text_config": text_config() | fields}):
        if "architectures" in fields and "text_config" in config:
            config["architectures"] = fields["architectures"]
        error = refusal(config)
        assert (error.error_class, error.field) == ("unsupported", named)
        assert named in error.message


@pytest.mark.parametrize(
    ("fields", "named"),
    [
        ({"hidden_size": None}, "hidden_size"),
        ({"hidden_size": "64"}, "hidden_size"),
        ({"hidden_size": True}, "hidden_size"),
        ({"hidden_size": 64.0}, "hidden_size"),
        ({"hidden_size": 0}, "hidden_size"),
        ({"hidden_size": 10**30}, "hidden_size"),
        ({"num_key_value_heads": 3}, "num_key_value_heads"),
        ({"linear_num_value_heads": 6}, "linear_num_value_heads"),
        ({"layer_types": ["linear_attention", "sliding_attention"]}, "layer_types"),
        ({"num_hidden_layers": 5}, "num_hidden_layers"),
        ({"rms_norm_eps": float("nan")}, "rms_norm_eps"),
        ({"rms_norm_eps": 0}, "rms_norm_eps"),
        ({"rope_parameters": {"rope_theta": -1}}, "rope_theta"),
        ({"rope_parameters": {"rope_theta": 10**400}}, "rope_theta"),
        ({"rope_parameters": {"partial_rotary_factor": 0.1}}, "partial_rotary_factor"),
        ({"rope_parameters": [1]}, "rope_parameters"),
        ({"tie_word_embeddings": "yes"}, "tie_word_embeddings"),
        ({"dtype": "float8"}, "dtype"),
        ({"eos_token_id": 331}, "eos_token_id"),
        ({"eos_token_id": ["2"]}, "eos_token_id"),
        ({"model_type": None}, "model_type"),
        ({"text_config": 5}, "text_config"),
    ],
)
def test_wrong_fields_are_refused_by_name(fields, named):
    error = refusal(text_config() | fields)
    assert (error.error_class, error.field) == ("validation", named)
    assert named in error.message


@pytest.mark.parametrize(
    "content", [b"", b"{", b"[]", b"\xff\xfe", b"[" * 100_000, b'{"a": ' + b"9" * 5000 + b"}"]
)
def test_unreadable_config_names_the_file(tmp_path, content):
    (tmp_path / "config.json").write_bytes(content)
    with pytest.raises(LoadError) as caught:
        read_config(tmp_path)
    assert caught.value.error_class == "validation"
    assert str(tmp_path / "config.json") in caught.value.message


def test_directory_without_config_is_refused(tmp_path):
    for path in (tmp_path, tmp_path / "absent"):
        with pytest.raises(LoadError) as caught:
            read_config(path)
        assert (caught.value.error_class, caught.value.field) == ("validation", "model")


def test_broken_generation_config_names_the_file(tmp_path):
    (tmp_path / "config.json").write_text(json.dumps(text_config()))
    (tmp_path / "generation_config.json").write_text("{")
    with pytest.raises(LoadError, match=r"generation_config\.json"):
        read_config(tmp_path)


@pytest.mark.parametrize(
    "older",
    [
        {},
        {"rope_parameters": None, "rope_theta": 5e6, "partial_rotary_factor": 0.5},
        {"rope_parameters": None, "rope_theta": 5e6, "rope_scaling": {"rope_type": "default"}},
        {"rope_parameters": {"rope_type": "default", "rope_theta": 2e6}, "partial_rotary_factor": 0.5},
        {"rope_parameters": None},
        {
            "head_dim": None,
            "rms_norm_eps": None,
            "linear_conv_kernel_dim": None,
            "max_position_embeddings": None,
        },
    ],
)
def test_spellings_and_defaults_read_as_transformers_reads_them(older):
    from transformers import Qwen3_5TextConfig

    config = {name: value for name, value in (text_config() | older).items() if value is not None}
    ours = parse_config(config, {}, {})
    theirs = Qwen3_5TextConfig(**config)
    assert ours.rope_theta == theirs.rope_parameters["rope_theta"]
    assert ours.partial_rotary_factor == theirs.rope_parameters["partial_rotary_factor"]
    assert list(ours.layer_types) == theirs.layer_types
    for name in (
        "head_dim",
        "rms_norm_eps",
        "linear_conv_kernel_dim",
        "max_position_embeddings",
        "vocab_size",
    ):
        assert getattr(ours, name) == getattr(theirs, name), name


JSON = st.recursive(
    st.none() | st.booleans() | st.integers() | st.floats() | st.text(max_size=8)
    | st.sampled_from([2, 4, 8, "default", "bfloat16", "qwen3_5_text", "silu", FULL, LINEAR]),
    lambda inner: st.lists(inner, max_size=4) | st.dictionaries(st.text(max_size=6), inner, max_size=3),
    max_leaves=6,
)  # fmt: skip
NAMES = sorted(
    {*OVERRIDABLE, *text_config(), "architectures", "text_config", "torch_dtype", "rope_scaling", "rope_type",
     "type", "num_experts", "quantization_config", "vision_config"}
)  # fmt: skip
MUTATIONS = st.dictionaries(st.sampled_from(NAMES), JSON, max_size=3)


@settings(max_examples=300, deadline=None, suppress_health_check=[HealthCheck.too_slow])
@given(
    top=MUTATIONS,
    text=MUTATIONS,
    rope=MUTATIONS,
    generation=MUTATIONS,
    overrides=MUTATIONS,
    nested=st.booleans(),
)
def test_any_config_reads_or_is_refused_and_never_crashes(top, text, rope, generation, overrides, nested):
    inner = text_config()
    inner["rope_parameters"] |= rope
    inner |= text
    config = (nested_config() | {"text_config": inner} if nested else inner) | top
    try:
        read = parse_config(config, generation, overrides)
    except LoadError as error:
        assert error.error_class in ("validation", "unsupported")
        assert error.field and error.message
    else:
        assert isinstance(read, ModelConfig)
        assert read.rotary_dim % 2 == 0 and 2 <= read.rotary_dim <= read.head_dim
        assert read.local(1).q_heads == read.num_attention_heads
        hash(read)


@settings(max_examples=100, deadline=None)
@given(value=JSON, name=st.sampled_from(OVERRIDABLE))
def test_any_override_reads_or_is_refused_by_its_name(value, name):
    try:
        parse_config(text_config(), {}, {name: value})
    except LoadError as error:
        assert error.field
