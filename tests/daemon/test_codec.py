"""Whatever bytes arrive, a typed request or ProtocolError comes out; events arrive as they left."""

import json
import math
import typing

import msgpack
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from mstar.daemon import codec
from mstar.daemon.protocol import (
    EVENTS,
    REQUESTS,
    Done,
    ErrorEvent,
    Generate,
    KvReport,
    Loaded,
    LoadedSpec,
    LoadProgress,
    ProtocolError,
    RankStatus,
    Reasoning,
    StatusEvent,
    Timings,
    Token,
    TokenLogprob,
    Usage,
)

GENERATE = {"type": "generate", "id": "a", "attempt_id": 3, "prompt": "héllo\n"}
LOADED = Loaded(
    "m", "f", "qwen3_5", 4, 64, 99, 1000, 2, "cpu", "bf16", 512, 8, KvReport("bf16", 9, 144),
    LoadedSpec(False, 0, None, "not built"), 12.5, id="l",
)  # fmt: skip
SAMPLES = [
    LOADED,
    LoadProgress("read", 1, 2, "bytes", "l"),
    Token("a", 0, "x\u2028y", [5], [TokenLogprob(5, -0.5, [(5, -0.5), (6, -1.0)])]),
    Reasoning(7, 0, "hm"),
    Done("a", 0, "stop", Usage(3, 4, 1), False, Timings(None, 1.0, 2.0, 3.0, 4.0, 5.0)),
    StatusEvent("ready", 1, 0, [RankStatus(0, 123, "cpu", 1 << 30, 4.0)], LOADED),
    ErrorEvent("busy", "unload first", False, "model", "a", 0),
]


def refusal(decode, data) -> ProtocolError:
    with pytest.raises(ProtocolError) as caught:
        decode(data)
    return caught.value


def test_both_faces_give_the_same_request():
    assert codec.decode_json(json.dumps(GENERATE).encode()) == codec.decode_msgpack(msgpack.packb(GENERATE))
    assert codec.decode_json(json.dumps(GENERATE).encode() + b"\r\n").prompt == "héllo\n"


@pytest.mark.parametrize("event", SAMPLES, ids=lambda e: e.type)
def test_events_survive_both_faces(event):
    assert codec.decode_event_msgpack(codec.encode_msgpack(event)) == event
    line = codec.encode_json(event)
    assert line.endswith(b"\n") and line.count(b"\n") == 1
    assert codec.decode_event_json(line) == event


def test_error_class_travels_as_class_and_absent_fields_are_left_out():
    assert json.loads(codec.encode_json(ErrorEvent("busy", "m"))) == {
        "type": "error", "class": "busy", "message": "m", "retryable": False,
    }  # fmt: skip
    assert json.loads(codec.encode_json(Token("a", 0, ""))) == {
        "type": "token",
        "id": "a",
        "attempt_id": 0,
        "text": "",
    }
    assert json.loads(codec.encode_json(LOADED))["spec"]["draft_head"] is None


def test_infinite_logprobs_are_null_in_json():
    line = codec.encode_json(Token("a", 0, "x", None, [TokenLogprob(1, -math.inf, [(1, -math.inf)])]))
    assert json.loads(line)["logprobs"] == [{"id": 1, "logprob": None, "top": [[1, None]]}]


def test_text_that_is_no_unicode_does_not_stop_an_event():
    for encode, decode in ((codec.encode_json, json.loads), (codec.encode_msgpack, msgpack.unpackb)):
        assert decode(encode(ErrorEvent("validation", "no such file: \udc80")))["message"].startswith(
            "no such"
        )


def test_requests_of_a_client_survive_both_faces():
    request = codec.decode_json(json.dumps({**GENERATE, "stop": ["a"], "spec": {"mtp": "off"}}).encode())
    assert codec.decode_msgpack(codec.encode_request_msgpack(request)) == request
    assert codec.decode_json(codec.encode_request_json(request)) == request


@pytest.mark.parametrize(
    "data",
    [
        b"", b"\n", b"{", b"nope", b"[1]", b"3", b'"ping"', b"null", b'{"type":"ping"} x', b'{"type":"ping"}{}',
        b'{"type":"ping",}', b"{'type':'ping'}", b"\xff\xfe", b'{"type":"\xff"}', b'{"type":"ping","id":"\\ud800"}',
        b'{"type":"ping","id":NaN}', b'{"type":"ping","id":Infinity}', b"[" * 100_000, b'{"a":' * 100_000,
        b"\xef\xbb\xbf{}", b"\x00",
    ],
)  # fmt: skip
def test_bad_json_is_malformed(data):
    assert refusal(codec.decode_json, data).error_class == "malformed"


@pytest.mark.parametrize(
    "data",
    [
        b"", b"\xc1", b"\x81", b"\x81\xa4type", msgpack.packb([1]), msgpack.packb("ping"), msgpack.packb(None),
        msgpack.packb({"type": "ping"}) + b"\x00", msgpack.packb({"type": "ping"}) * 2,
        msgpack.packb({b"type": "ping"}), msgpack.packb({1: "ping"}), msgpack.packb({"type": "ping", "id": {2: 3}}),
        b"\x81\xa4type\xa2\xff\xfe", msgpack.packb({"type": msgpack.ExtType(5, b"x")}),
        b"\x81\xa2id\xd6\xff\x00\x00\x00\x00", b"\x91" * 100_000, b"\xdd\xff\xff\xff\xff", b"\xdf\xff\xff\xff\xff",
        b"\xdb\xff\xff\xff\xff", b"\xdd\x00\x0f\xff\xff" * 2000, b"\x81\x80\x01", b"\x81\x90\x01",
    ],
)  # fmt: skip
def test_bad_msgpack_is_malformed(data):
    assert refusal(codec.decode_msgpack, data).error_class == "malformed"


@pytest.mark.parametrize("cut", range(len(msgpack.packb(GENERATE))))
def test_truncated_messages_are_malformed(cut):
    assert refusal(codec.decode_msgpack, msgpack.packb(GENERATE)[:cut]).error_class == "malformed"


@pytest.mark.parametrize("decode", [codec.decode_json, codec.decode_msgpack])
def test_a_message_over_the_limit_is_refused_with_the_limit(decode):
    error = refusal(decode, bytes(9 * 2**20))
    assert error.error_class == "malformed" and str(codec.MAX_MESSAGE_BYTES) in error.message


def test_huge_numbers_in_json_are_refused_with_the_field():
    for number in (b"1e999", b"9" * 5000, b"-" + b"9" * 30):
        data = b'{"type":"generate","id":"a","attempt_id":3,"prompt":"x","max_tokens":' + number + b"}"
        assert refusal(codec.decode_json, data).error_class in ("validation", "malformed")


def test_refusals_carry_the_keys():
    data = {**GENERATE, "top_p": 2}
    for error in (
        refusal(codec.decode_json, json.dumps(data).encode()),
        refusal(codec.decode_msgpack, msgpack.packb(data)),
    ):
        assert (error.error_class, error.field, error.id, error.attempt_id) == ("validation", "top_p", "a", 3)


@pytest.mark.parametrize(
    "fields",
    [
        {"spec": {f"k{i}": 0 for i in range(200_000)}},
        {f"k{i}": 0 for i in range(200_000)},
        {"prompt_ids": [-1] * 500_000},
        {"messages": [{}] * 500_000},
        {"messages": [{"role": "user", "content": [{}] * 500_000}]},
        {"stop": [1] * 500_000},
    ],
    ids=["spec", "fields", "prompt_ids", "messages", "parts", "stop"],
)
def test_one_message_with_a_million_faults_is_one_short_error(fields):
    error = refusal(
        codec.decode_json, json.dumps({"type": "generate", "id": "a", "attempt_id": 3, **fields}).encode()
    )
    assert error.error_class == "validation" and len(error.message) < 300 and error.id == "a"


scalars = (
    st.none() | st.booleans() | st.integers() | st.floats() | st.text(max_size=8)
    | st.sampled_from([*REQUESTS, *typing.cast(list, list(Generate.model_fields)), "text", "user", "on", "auto"])
)  # fmt: skip
json_values = st.recursive(
    scalars,
    lambda inner: (
        st.lists(inner, max_size=4)
        | st.dictionaries(
            st.sampled_from([*Generate.model_fields, "type", "role", "content"]), inner, max_size=5
        )
    ),
    max_leaves=12,
)
msgpack_values = st.recursive(
    scalars.filter(lambda v: not isinstance(v, int) or -(2**63) <= v < 2**64)
    | st.binary(max_size=4)
    | st.builds(msgpack.ExtType, st.integers(0, 127), st.binary(max_size=4)),
    lambda inner: (
        st.lists(inner, max_size=4) | st.dictionaries(scalars | st.binary(max_size=3), inner, max_size=4)
    ),
    max_leaves=10,
)
VALID = [
    GENERATE,
    {"type": "generate", "id": 1, "attempt_id": 0, "messages": [{"role": "user", "content": "a"}]},
    {"type": "load", "model": "m", "spec": {"mtp": "auto"}, "overrides": {"a": [1]}},
    {"type": "abort", "id": "a", "attempt_id": 0},
    {"type": "status", "id": 5},
]


def request_or_refusal(decode, data: bytes) -> None:
    try:
        request = decode(data)
    except ProtocolError as error:
        line = codec.encode_json(error.event())  # every refusal can be told, on both faces
        assert codec.decode_event_json(line) == codec.decode_event_msgpack(
            codec.encode_msgpack(error.event())
        )
        assert len(line) < 2000
    else:
        assert type(request) in REQUESTS.values()


@settings(max_examples=300, deadline=None)
@given(st.binary(max_size=200))
def test_fuzz_arbitrary_bytes(data):
    request_or_refusal(codec.decode_json, data)
    request_or_refusal(codec.decode_msgpack, data)


@settings(max_examples=300, deadline=None)
@given(st.sampled_from([*REQUESTS]) | st.text(max_size=4), json_values)
def test_fuzz_arbitrary_values(kind, value):
    message = {"type": kind, **value} if isinstance(value, dict) else value
    request_or_refusal(codec.decode_json, json.dumps(message).encode())


@settings(max_examples=300, deadline=None)
@given(
    st.sampled_from(VALID), st.sampled_from([*Generate.model_fields, "type", "model", "zz"]), msgpack_values
)
def test_fuzz_a_valid_message_with_one_field_replaced(message, field, value):
    changed = {**message, field: value}
    try:
        data = msgpack.packb(changed)
    except (UnicodeEncodeError, OverflowError):
        return
    request_or_refusal(codec.decode_msgpack, data)


@settings(max_examples=300, deadline=None)
@given(st.sampled_from(VALID), st.data())
def test_fuzz_a_valid_message_with_one_byte_replaced(message, data):
    for encoded, decode in (
        (json.dumps(message).encode(), codec.decode_json),
        (msgpack.packb(message), codec.decode_msgpack),
    ):
        at = data.draw(st.integers(0, len(encoded) - 1))
        request_or_refusal(decode, encoded[:at] + bytes([data.draw(st.integers(0, 255))]) + encoded[at + 1 :])


def test_unknown_events_are_malformed_and_newer_fields_are_dropped():
    assert refusal(codec.decode_event_msgpack, msgpack.packb({"type": "novel"})).error_class == "malformed"
    assert refusal(codec.decode_event_msgpack, msgpack.packb({"type": "token"})).error_class == "malformed"
    event = codec.decode_event_json(b'{"type":"pong","id":"a","clock":3}')
    assert event == EVENTS["pong"](id="a")
