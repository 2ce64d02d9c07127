"""Ids to text one at a time, against decoding all of them at once."""

from pathlib import Path

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from tokenizers import Tokenizer, decoders
from tokenizers.models import BPE

import mstar.loader.builtin as builtin
from mstar.daemon.text import load_text
from mstar.daemon.text.detokenizer import MAX_PENDING_IDS, ByteDetokenizer, ByteVocabulary, WindowDetokenizer
from mstar.daemon.text.stops import MAX_STOP_CHARS, StopMatcher

TINY = Path(next(iter(builtin.__path__))) / "tiny"
MODEL = load_text(TINY)
BYTES = ByteVocabulary(Tokenizer.from_file(str(TINY / "tokenizer.json")).id_to_token)

LINE = st.text(st.sampled_from("aé日👩‍👧🇩🇪 \n\u0301xyz\ufffd"), max_size=30)


def fallback_tokenizer() -> Tokenizer:
    """A sentencepiece-like vocabulary: words with a leading mark, and single bytes for everything else."""
    entries = [f"<0x{byte:02X}>" for byte in range(256)] + ["▁", "▁he", "llo", "▁wor", "ld"]
    tokenizer = Tokenizer(BPE({entry: i for i, entry in enumerate(entries)}, [], byte_fallback=True))
    tokenizer.decoder = decoders.Sequence(
        [
            decoders.Replace("▁", " "),
            decoders.ByteFallback(),
            decoders.Fuse(),
            decoders.Strip(" ", 1, 0),
        ]
    )
    return tokenizer


FALLBACK = fallback_tokenizer()


@given(LINE)
def test_bytes_become_the_text_that_was_encoded(text):
    detokenizer = ByteDetokenizer(BYTES)
    assert "".join(map(detokenizer.push, MODEL.encode(text))) == text


@given(st.lists(st.integers(0, 6136), max_size=40))
def test_any_ids_give_the_tokenizers_text_without_what_is_incomplete_at_the_end(ids):
    detokenizer = ByteDetokenizer(BYTES)
    text = "".join(map(detokenizer.push, ids))
    whole = MODEL.decode(ids)
    assert whole in (text, text + "\ufffd")


def test_incomplete_characters_are_held_back_and_never_replaced():
    emoji = MODEL.encode("👩")
    assert len(emoji) > 1, "the test needs a character of several ids"
    detokenizer = ByteDetokenizer(BYTES)
    assert [detokenizer.push(token_id) for token_id in emoji] == [""] * (len(emoji) - 1) + ["👩"]


def test_bytes_that_can_become_nothing_do_not_swallow_what_follows():
    lead = next(i for i in range(6136) if BYTES.bytes_of(i) == b"\xe6")
    detokenizer = ByteDetokenizer(BYTES)
    assert detokenizer.push(lead) + detokenizer.push(MODEL.encode("a")[0]) == "\ufffda"


def test_ids_outside_the_vocabulary_have_no_text():
    detokenizer = ByteDetokenizer(BYTES)
    assert detokenizer.push(10_000_000) == ""


def test_added_tokens_keep_characters_outside_the_byte_alphabet():
    vocabulary = ByteVocabulary({0: "<a b>", 1: "<日>"}.get)
    assert vocabulary.bytes_of(0) == b"<a b>"
    assert vocabulary.bytes_of(1) == "<日>".encode()


@given(st.lists(st.integers(0x61, 0x7A) | st.integers(256, 260) | st.just("日") | st.just("👩"), max_size=30))
def test_window_gives_the_tokenizers_text_for_any_other_vocabulary(parts):
    ids = []
    for part in parts:
        ids += part.encode() if isinstance(part, str) else [part]
    detokenizer = WindowDetokenizer(FALLBACK.decode)
    assert "".join(map(detokenizer.push, ids)) == FALLBACK.decode(ids)


def test_window_stays_bounded_on_bytes_that_never_become_text():
    widest = 0

    def decode(ids):
        nonlocal widest
        widest = max(widest, len(ids))
        return FALLBACK.decode(ids)

    detokenizer = WindowDetokenizer(decode)
    for _ in range(200):
        detokenizer.push(0xFF)
    assert widest <= 2 * MAX_PENDING_IDS
    assert "".join(map(detokenizer.push, [257, 258])).endswith(" hello")


def first_stop(text, stops):
    """By brute force: where the first completed stop string (the longest of those) starts, or None."""
    for end in range(1, len(text) + 1):
        found = [end - len(stop) for stop in stops if text[:end].endswith(stop)]
        if found:
            return min(found)
    return None


@settings(max_examples=300)
@given(
    st.lists(st.text("abc", max_size=4), max_size=12),
    st.lists(st.text("abc", min_size=1, max_size=5), min_size=1, max_size=16),
)
def test_stop_strings_are_found_as_by_brute_force_and_no_more_is_held_than_must_be(chunks, stops):
    matcher = StopMatcher(stops)
    shown, seen = "", ""
    for chunk in chunks:
        seen += chunk
        text, matched = matcher.feed(chunk)
        shown += text
        start = first_stop(seen, stops)
        assert matched is (start is not None)
        if matched:
            assert shown == seen[:start]
            return
        held = max(n for stop in stops for n in range(len(stop)) if seen.endswith(stop[:n]))
        assert shown == seen[: len(seen) - held]
    assert shown + matcher.flush() == seen


def test_stop_strings_have_a_length():
    for stop in ("", "x" * (MAX_STOP_CHARS + 1)):
        with pytest.raises(ValueError, match="characters"):
            StopMatcher([stop])
