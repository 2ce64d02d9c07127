"""The emitter's promises: streams, stop strings, counts, and that chunking changes nothing."""

from pathlib import Path

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

import mstar.loader.builtin as builtin
from mstar.daemon.text import load_text

MODEL = load_text(Path(next(iter(builtin.__path__))) / "tiny")
EOS, THINK, UNTHINK = 6139, MODEL.think_start_id, MODEL.think_end_id


def collect(emitter, chunks, with_logprobs=False):
    """Fields of a whole request, each stream joined; logprobs are the ids' places, to tell them apart."""
    fields = {"token": "", "reasoning": "", "ids": [], "logprobs": []}
    place = 0
    output = None
    for number, chunk in enumerate(chunks):
        entries = [[place + i, chunk[i]] for i in range(len(chunk))] if with_logprobs else None
        output = emitter.push(chunk, entries, final=number == len(chunks) - 1)
        place += len(chunk)
        for piece in output.pieces:
            fields[piece.kind] += piece.text
            fields["ids"] += piece.ids or []
            fields["logprobs"] += piece.logprobs or []
            if piece.ids is not None and piece.logprobs is not None:
                assert len(piece.ids) == len(piece.logprobs)
        if output.stopped:
            break
    fields["counts"] = (output.completion_tokens, output.reasoning_tokens)
    fields["stopped"], fields["open_think"] = output.stopped, output.open_think
    return fields


def whole(ids, **options):
    return collect(MODEL.emitter(return_ids=True, **options), [ids], with_logprobs=True)


def reference(ids, stops, in_think):
    """The same fields from scratch: every prefix is decoded anew, and searched by brute force."""
    thinking, reasoned, spans = in_think, 0, [("reasoning" if in_think else "token", [])]
    shown = {"token": "", "reasoning": ""}

    def text_of(span):
        return MODEL.decode(span[1]).rstrip("\ufffd")  # what is incomplete at the end is not shown

    stopped = False
    taken = []
    for token_id in ids:
        taken.append(token_id)
        if token_id in (THINK, UNTHINK):
            if thinking != (token_id == THINK):
                thinking = not thinking
                spans.append(("reasoning" if thinking else "token", []))
            continue
        spans[-1][1].append(token_id)
        reasoned += thinking
        if not thinking:
            text = text_of(spans[-1])
            ends = [(text.index(stop) + len(stop), text.index(stop)) for stop in stops if stop in text]
            if ends:
                shown["token"] = text[: min(ends)[1]]
                spans.pop()
                stopped = True
                break
    for kind in ("token", "reasoning"):
        shown[kind] = "".join(text_of(span) for span in spans if span[0] == kind) + shown[kind]
    return shown | {
        "ids": taken,
        "logprobs": [[place, token_id] for place, token_id in enumerate(taken)],
        "counts": (len(taken), reasoned),
        "stopped": stopped,
        "open_think": thinking,
    }


WORDS = [
    "Hello",
    " world",
    "naïve",
    "日本語",
    "👩‍👩‍👧",
    "🇩🇪",
    "e\u0301",
    "\n\n",
    "STOP",
    "stop",
    "sto",
    "<|im_end|>",
]
WORDS += ["<think>", "</think>", "</think>\n\nThe", "123", "<tool_call>", "</thi", " ", "aab", "ab"]
STOPS = [
    "STOP",
    "\n\n",
    "op12",
    "llo w",
    "本語",
    "👧",
    "\u200d",
    "aab",
    "abab",
    "sto",
    "rld",
    "日",
    "3 ",
    "oo",
]
STREAM = st.lists(st.sampled_from(WORDS), max_size=14).map(lambda words: MODEL.encode("".join(words)))
STREAM |= st.lists(st.integers(0, 6143) | st.sampled_from([THINK, UNTHINK, EOS]), max_size=40)


@st.composite
def split(draw, stream=STREAM):
    ids = draw(stream)
    chunks = []
    while ids:
        size = draw(st.integers(0, len(ids)))
        chunks.append(ids[:size])
        ids = ids[size:]
        if len(chunks) > 12:
            chunks.append(ids)
            break
    return [*chunks, []]


@settings(max_examples=400, deadline=None)
@given(split(), st.lists(st.sampled_from(STOPS), max_size=16), st.booleans())
def test_any_chunking_gives_the_same_fields(chunks, stops, in_think):
    ids = [token_id for chunk in chunks for token_id in chunk]
    options = {"stop": stops, "in_think": in_think, "return_ids": True}
    at_once = collect(MODEL.emitter(**options), [ids], with_logprobs=True)
    assert collect(MODEL.emitter(**options), chunks, with_logprobs=True) == at_once
    assert collect(MODEL.emitter(**options), [*([i] for i in ids), []], with_logprobs=True) == at_once


@settings(max_examples=400, deadline=None)
@given(
    st.lists(st.sampled_from(WORDS), max_size=14).map(lambda words: MODEL.encode("".join(words))),
    st.lists(st.sampled_from(STOPS), max_size=16),
    st.booleans(),
)
def test_fields_are_those_of_decoding_from_scratch(ids, stops, in_think):
    assert whole(ids, stop=stops, in_think=in_think) == reference(ids, stops, in_think)


def test_end_of_thinking_next_to_text_in_one_chunk_goes_to_both_streams():
    ids = MODEL.encode("<think>\nlet me see</think>\n\nParis")
    got = MODEL.emitter(return_ids=True).push(ids, final=True)
    assert [(piece.kind, piece.text) for piece in got.pieces] == [
        ("reasoning", "\nlet me see"),
        ("token", "\n\nParis"),
    ]
    assert got.pieces[0].ids[0] == THINK and got.pieces[0].ids[-1] == UNTHINK
    assert not got.open_think


def test_think_marker_in_the_prompt_starts_the_reasoning_stream():
    got = whole(MODEL.encode("hm</think>ok"), in_think=True)
    assert (got["reasoning"], got["token"]) == ("hm", "ok")


def test_thinking_off_keeps_text_out_of_reasoning():
    prompt = MODEL.render([{"role": "user", "content": "Hi"}], thinking=False)
    got = whole(MODEL.encode("Hello there"), in_think=MODEL.starts_in_think(prompt))
    assert (got["token"], got["reasoning"], got["counts"][1]) == ("Hello there", "", 0)


def test_generation_that_ends_inside_an_open_span_says_so():
    got = whole(MODEL.encode("<think>still at it"))
    assert got["open_think"] and got["token"] == ""


def test_usage_tells_thinking_from_the_rest():
    thought, answer = MODEL.encode("one two"), MODEL.encode("three")
    got = whole([THINK, *thought, UNTHINK, *answer, EOS])
    assert got["counts"] == (len(thought) + len(answer) + 3, len(thought))


def test_stop_string_across_tokens_is_cut_with_ids_logprobs_and_counts():
    head, tail = MODEL.encode("The answer is 4"), MODEL.encode(" and nothing else")
    stop = MODEL.encode("END-OF-IT")
    assert len(stop) > 2
    got = whole([*head, *stop, *tail], stop=["END-OF-IT"])
    assert got["stopped"] and got["token"] == "The answer is 4"
    assert got["ids"] == [*head, *stop]
    assert got["logprobs"] == [[place, token_id] for place, token_id in enumerate(got["ids"])]
    assert got["counts"] == (len(head) + len(stop), 0)


def test_stop_string_inside_a_word_cuts_the_word():
    got = whole(MODEL.encode("a wonderful day"), stop=["nderf"])
    assert got["token"] == "a wo"


def test_first_completed_stop_string_wins_and_the_longest_where_two_end_together():
    assert whole(MODEL.encode("xx one two"), stop=["two", "one"])["token"] == "xx "
    assert whole(MODEL.encode("non-stop"), stop=["stop", "n-stop", "top"])["token"] == "no"


def test_text_that_could_become_a_stop_string_waits_and_comes_out_when_it_does_not():
    emitter = MODEL.emitter(stop=["12345"])
    ids = MODEL.encode("1234x")
    shown = ["".join(piece.text for piece in emitter.push([token_id]).pieces) for token_id in ids]
    assert shown == ["", "", "", "", "1234x"]
    emitter = MODEL.emitter(stop=["12345"])
    assert emitter.push(MODEL.encode("1234"), final=True).pieces[0].text == "1234"


def test_stop_strings_leave_thinking_alone_and_do_not_reach_across_it():
    ids = [
        THINK,
        *MODEL.encode("a STOP b"),
        UNTHINK,
        *MODEL.encode("ST"),
        THINK,
        UNTHINK,
        *MODEL.encode("OP"),
    ]
    got = whole(ids, stop=["STOP"])
    assert (got["reasoning"], got["token"], got["stopped"]) == ("a STOP b", "STOP", False)


def test_stop_strings_wait_for_min_tokens():
    ids = MODEL.encode("1 2 1 2")
    assert whole(ids, stop=["1"], min_tokens=1)["token"] == "1 2 "
    assert whole(ids, stop=["1"])["token"] == ""


def test_nothing_comes_after_a_stop_string():
    emitter = MODEL.emitter(stop=["x"])
    first = emitter.push(MODEL.encode("axb"))
    later = emitter.push(MODEL.encode("more"), final=True)
    assert first.stopped and later.stopped and later.pieces == []
    assert later.completion_tokens == first.completion_tokens


def test_end_of_text_is_hidden_but_counted_and_its_id_returned():
    ids = [*MODEL.encode("bye"), EOS]
    got = whole(ids)
    assert (got["token"], got["ids"], got["counts"][0]) == ("bye", ids, len(ids))


def test_stop_ids_are_hidden_like_special_tokens():
    ids = MODEL.encode("count: 7")
    assert whole(ids, stop_ids=[ids[-1]])["token"] == MODEL.decode(ids[:-1])


@pytest.mark.parametrize("ending", ["final", "marker"])
def test_bytes_left_incomplete_at_the_end_of_a_stream_are_dropped_and_counted(ending):
    ids = [*MODEL.encode("ok"), *MODEL.encode("👩")[:1]]
    if ending == "marker":
        ids.append(THINK)
    got = whole(ids)
    assert (got["token"], got["counts"][0], got["ids"]) == ("ok", len(ids), ids)


def test_ids_and_logprobs_come_only_when_asked_for():
    emitter = MODEL.emitter()
    pieces = emitter.push(MODEL.encode("plain"), final=True).pieces
    assert all(piece.ids is None and piece.logprobs is None for piece in pieces)
    assert emitter.push([], final=True).pieces == []


def test_hidden_tokens_give_a_piece_only_to_those_who_asked_for_ids():
    assert MODEL.emitter().push([EOS], final=True).pieces == []
    assert MODEL.emitter(return_ids=True).push([EOS], final=True).pieces[0].ids == [EOS]


@settings(max_examples=200, deadline=None)
@given(
    ids=st.lists(st.sampled_from([*range(260, 300), EOS, THINK, UNTHINK, 6143]), max_size=30),
    in_think=st.booleans(),
    return_ids=st.booleans(),
    stop=st.sampled_from([(), ("e",)]),
    stop_ids=st.sampled_from([(), (270,)]),
)
def test_one_token_at_a_time_takes_a_way_of_its_own_to_the_same_end(
    ids, in_think, return_ids, stop, stop_ids
):
    """A push of one id without logprobs is short-cut; with an entry that says nothing it is not."""
    options = {"in_think": in_think, "return_ids": return_ids, "stop": stop, "stop_ids": stop_ids}
    short, long = (MODEL.emitter(**options) for _ in range(2))
    for token_id in ids:
        assert short.push([token_id]) == long.push([token_id], [None])
    assert short.push([], final=True) == long.push([], final=True)
