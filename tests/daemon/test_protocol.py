"""A map becomes one typed request or one error that names the field."""

import math

import pytest

from mstar.daemon.protocol import (
    Abort,
    Generate,
    Load,
    Ping,
    ProtocolError,
    parse_request,
)

KEYS = {"id": "a", "attempt_id": 0}
GENERATE = {"type": "generate", **KEYS, "prompt": "hello"}
LOAD = {"type": "load", "model": "builtin:tiny"}


def refusal(message: object) -> ProtocolError:
    with pytest.raises(ProtocolError) as caught:
        parse_request(message)
    return caught.value


def test_defaults_are_those_of_the_design():
    request = parse_request(GENERATE)
    assert isinstance(request, Generate)
    assert (
        request.max_tokens == 4096 and request.temperature == 0 and request.top_p == 1 and request.top_k == 0
    )
    assert request.min_p == 0 and request.repetition_penalty == 1 and request.presence_penalty == 0
    assert request.frequency_penalty == 0 and request.seed is None and request.stop == []
    assert request.stop_token_ids == [] and request.min_tokens == 0 and request.ignore_eos is False
    assert request.return_ids is False and request.thinking is None and request.max_think_tokens is None
    assert request.logprobs is None and request.deadline_ms is None
    assert request.spec.mtp == "auto" and request.spec.mtp_k is None
    load = parse_request(LOAD)
    assert isinstance(load, Load)
    assert load.tp is None and load.dtype == "auto" and load.max_seq is None and load.max_num_seqs == 64
    assert load.kv_dtype == "auto" and load.memory_fraction == 0.9 and load.overrides == {}
    assert load.spec.model_dump() == {
        "mtp": "auto", "mtp_k": 3, "draft_head": "auto", "ngram": "off", "dflash": "off", "dspark": "off",
    }  # fmt: skip


@pytest.mark.parametrize("kind", ["unload", "reset", "ping", "status", "stats", "shutdown"])
def test_plain_requests_take_an_optional_id(kind):
    assert parse_request({"type": kind}).id is None
    assert parse_request({"type": kind, "id": 7}).id == 7
    assert refusal({"type": kind, "attempt_id": 1}).field == "attempt_id"


def test_ids_are_text_or_integers_and_attempts_integers():
    assert parse_request({"type": "abort", "id": "x", "attempt_id": 2**63 - 1}) == Abort(
        id="x", attempt_id=2**63 - 1
    )
    for bad in ("", "a" * 257, "a\nb", "\ud800", True, 1.0, -1, 2**63, None, [], {}):
        assert refusal({**GENERATE, "id": bad}).field == "id"
    for bad in ("1", True, 1.0, -1, 2**63, None):
        assert refusal({**GENERATE, "attempt_id": bad}).field == "attempt_id"


@pytest.mark.parametrize("message", [None, 1, "ping", [], [["type", "ping"]], True, 1.5])
def test_what_is_no_map_is_malformed(message):
    assert refusal(message).error_class == "malformed"


@pytest.mark.parametrize("kind", ["", "Generate", "foo", "x" * 10_000, None, 3, ["load"]])
def test_unknown_type_is_refused_by_name_with_the_known_ones(kind):
    error = refusal({"type": kind, **KEYS})
    assert (error.error_class, error.field) == ("validation", "type")
    assert "generate" in error.message and len(error.message) < 300
    assert (error.id, error.attempt_id) == ("a", 0)


def test_unknown_fields_are_refused_by_name():
    assert refusal({**GENERATE, "max_new_tokens": 3}).field == "max_new_tokens"
    assert refusal({**GENERATE, "spec": {"k": 3}}).field == "spec.k"
    assert refusal({**LOAD, "spec": {"eagle": "on"}}).field == "spec.eagle"
    assert "max_new_tokens" in refusal({**GENERATE, "max_new_tokens": 3}).message


BAD_FIELDS = [
    ("max_tokens", [0, -1, 1.0, "1", True, None, 2**31, 10**400]),
    ("temperature", [-0.1, math.nan, math.inf, -math.inf, "1", True, None, 101, 10**400]),
    ("top_p", [0, -1, 1.1, math.nan, "1", False]),
    ("top_k", [-1, 0.5, True, 2**31]),
    ("min_p", [-0.1, 1.1, math.inf]),
    ("repetition_penalty", [0, -1, math.inf, 101]),
    ("presence_penalty", [math.nan, 101, -101, "0"]),
    ("frequency_penalty", [math.nan, 101, -101, None]),
    ("seed", [-1, 2**63, 1.5, True, "1"]),
    ("stop", ["a", ["a"] * 17, None, 3]),
    ("stop_token_ids", [3, None]),
    ("min_tokens", [-1, True, 4097]),
    ("ignore_eos", [0, 1, "true", None]),
    ("return_ids", [1, "no"]),
    ("thinking", [0, "on"]),
    ("max_think_tokens", [-1, True, 1.5]),
    ("logprobs", [-1, 21, True, 1.0]),
    ("deadline_ms", [0, -5, 2**31, 1.5]),
    ("spec", [None, [], "auto"]),
    ("prompt", ["", 3, b"x", ["a"], "\ud800"]),
]


@pytest.mark.parametrize(("field", "value"), [(f, v) for f, values in BAD_FIELDS for v in values])
def test_wrong_types_and_values_of_generate_are_refused_with_the_field(field, value):
    error = refusal({**GENERATE, field: value})
    assert (error.error_class, error.field, error.retryable) == ("validation", field, False)
    assert (error.id, error.attempt_id) == ("a", 0)
    assert field in error.message and len(error.message) < 300


@pytest.mark.parametrize(
    ("field", "value"),
    [
        ("max_tokens", 1), ("temperature", 1), ("temperature", 0.0), ("top_p", 1), ("top_k", 50), ("min_p", 1),
        ("seed", 2**63 - 1), ("stop", ["a"] * 16), ("logprobs", 0), ("logprobs", 20), ("thinking", None),
        ("max_think_tokens", 0), ("tools", None), ("stop_token_ids", [0, 248319]), ("deadline_ms", 1),
        ("spec", {"mtp": "off", "mtp_k": 8}), ("min_tokens", 4096), ("presence_penalty", -2),
    ],
)  # fmt: skip
def test_the_ends_of_each_range_are_accepted(field, value):
    assert parse_request({**GENERATE, field: value}).type == "generate"


@pytest.mark.parametrize(
    ("field", "value"),
    [
        ("model", ""), ("model", None), ("model", "a\0b"), ("model", 3), ("tp", 0), ("tp", -1), ("tp", True),
        ("tp", 1.0), ("tp", 10**30), ("dtype", "int8"), ("dtype", None), ("max_seq", 1), ("max_seq", -1),
        ("max_num_seqs", 0), ("max_num_seqs", 5000), ("kv_dtype", "fp4"), ("memory_fraction", 0),
        ("memory_fraction", 1.1), ("memory_fraction", math.nan), ("overrides", []),
        ("overrides", {"a": math.nan}), ("overrides", {"a": b"x"}), ("spec", "on"), ("id", True),
    ],
)  # fmt: skip
def test_wrong_types_and_values_of_load_are_refused_with_the_field(field, value):
    error = refusal({**LOAD, field: value})
    assert error.error_class == "validation"
    assert error.field is not None and error.field.split(".")[0] == field


@pytest.mark.parametrize(("field", "value"), [("mtp_k", 0), ("mtp_k", 9), ("mtp_k", True), ("mtp", "yes")])
def test_spec_fields_are_bounded_in_both_requests(field, value):
    assert refusal({**LOAD, "spec": {field: value}}).field == f"spec.{field}"
    assert refusal({**GENERATE, "spec": {field: value}}).field == f"spec.{field}"


def test_overrides_nested_without_end_are_refused():
    nested: dict = {}
    for _ in range(500):
        nested = {"a": nested}
    assert refusal({**LOAD, "overrides": nested}).field == "overrides"


@pytest.mark.parametrize(
    ("message", "field"),
    [
        ({**LOAD, "kv_dtype": "q8"}, "kv_dtype"),
        ({**GENERATE, "tools": [{"type": "function"}]}, "tools"),
        ({**GENERATE, "tools": []}, "tools"),
    ],
)
def test_what_is_not_built_is_unsupported_by_name(message, field):
    error = refusal(message)
    assert (error.error_class, error.field) == ("unsupported", field)
    assert field in error.message


def chat(*messages: object) -> dict:
    return {"type": "generate", **KEYS, "messages": list(messages)}


def test_messages_hold_text_or_text_parts():
    parts = [{"type": "text", "text": "a"}, {"type": "text", "text": "b"}]
    request = parse_request(chat({"role": "user", "content": parts}, {"role": "assistant", "content": ""}))
    assert isinstance(request, Generate) and request.messages is not None
    assert [m.text for m in request.messages] == ["ab", ""]


def test_image_parts_are_unsupported_with_their_place():
    image = {"type": "image_url", "image_url": {"url": "data:"}}
    error = refusal(chat({"role": "user", "content": "a"}, {"role": "user", "content": [image]}))
    assert (error.error_class, error.field) == ("unsupported", "messages[1].content[0]")
    assert "image_url" in error.message and (error.id, error.attempt_id) == ("a", 0)


def test_tool_messages_are_unsupported():
    assert refusal(chat({"role": "tool", "content": "4"})).error_class == "unsupported"


@pytest.mark.parametrize(
    ("message", "field"),
    [
        ({"role": "user"}, "messages[0].content"),
        ({"content": "a"}, "messages[0].role"),
        ({"role": "bot", "content": "a"}, "messages[0].role"),
        ({"role": "user", "content": 3}, "messages[0].content"),
        ({"role": "user", "content": None}, "messages[0].content"),
        ({"role": "user", "content": [{"type": "text"}]}, "messages[0].content[0].text"),
        ({"role": "user", "content": ["a"]}, "messages[0].content[0]"),
        ({"role": "user", "content": "a", "name": "b"}, "messages[0].name"),
        ("hello", "messages[0]"),
    ],
)
def test_wrong_messages_are_refused_with_the_path(message, field):
    error = refusal(chat(message))
    assert (error.error_class, error.field) == ("validation", field)


def test_exactly_one_of_prompt_messages_and_prompt_ids():
    none = {"type": "generate", **KEYS}
    assert refusal(none).error_class == "validation"
    assert refusal({**GENERATE, "prompt_ids": [1]}).error_class == "validation"
    assert refusal({**chat({"role": "user", "content": "a"}), "prompt": "a"}).error_class == "validation"
    assert parse_request({**none, "prompt_ids": [1, 2]}).type == "generate"
    assert parse_request({**GENERATE, "messages": None, "prompt_ids": None}).type == "generate"


def test_empty_prompts_are_refused():
    none = {"type": "generate", **KEYS}
    assert refusal({**none, "prompt": ""}).field == "prompt"
    assert refusal({**none, "prompt_ids": []}).field == "prompt_ids"
    assert refusal({**none, "messages": []}).field == "messages"


@pytest.mark.parametrize("bad", [-1, True, 1.0, "1", 2**63, None])
def test_prompt_ids_are_token_ids(bad):
    error = refusal({"type": "generate", **KEYS, "prompt_ids": [1, bad]})
    assert (error.error_class, error.field) == ("validation", "prompt_ids[1]")


def test_template_fields_belong_to_messages():
    assert refusal({**GENERATE, "system": "be brief"}).field == "system"
    assert refusal({**GENERATE, "thinking": False}).field == "thinking"
    assert parse_request({**chat({"role": "user", "content": "a"}), "system": "s", "thinking": True})


def test_a_message_with_many_faults_tells_the_first_and_how_many():
    error = refusal({**GENERATE, "max_tokens": 0, "top_p": 9, "foo": 1})
    assert error.field == "max_tokens" and "2 more" in error.message


def test_a_wrong_field_goes_before_one_that_is_not_built():
    assert refusal({**GENERATE, "tools": [], "top_p": 9}).error_class == "validation"


def test_only_overloaded_is_retryable_unless_said():
    assert ProtocolError("overloaded", "full").event().retryable
    assert not ProtocolError("busy", "unload first").event().retryable
    assert ProtocolError("busy", "wait", retryable=True).event().retryable


def test_requests_do_not_change():
    with pytest.raises(ValueError, match="frozen"):
        Ping().id = "x"  # type: ignore[misc]
