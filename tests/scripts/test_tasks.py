"""Tasks of the built-in model."""

import collections
import random

from mstar.scripts import tasks


def test_a_seed_draws_the_same_chats_and_another_one_others():
    assert tasks.chats(20, 3) == tasks.chats(20, 3) != tasks.chats(20, 4)


def test_chats_end_with_the_answer_that_is_expected():
    for chat in tasks.chats(200, 1):
        assert [turn.role for turn in chat.turns] == ["user", "assistant"] * (len(chat.turns) // 2)
        assert chat.messages[-1]["role"] == "user" and chat.expected == chat.turns[-1].text
        assert tasks.render(chat.turns).endswith(f"{chat.expected}<|im_end|>\n")


def test_all_kinds_are_drawn():
    assert {chat.kind for chat in tasks.chats(300)} == {kind.__name__ for kind, _ in tasks.KINDS}


def test_balanced_chats_have_the_training_sets_mix_whatever_the_seed():
    first, second = tasks.balanced_chats(1), tasks.balanced_chats(2)
    assert tasks.balanced_chats(1) == first != second
    assert len(first) == tasks.SHEET == 384
    for drawn in (first, second):
        kinds = collections.Counter(chat.kind for chat in drawn)
        assert kinds == {kind.__name__: 12 * weight for kind, weight in tasks.KINDS}
        lists = (chat.turns[0].text.split("\n\n")[0] for chat in drawn if chat.kind == "retrieval")
        sizes = collections.Counter(len(text.splitlines()) for text in lists)
        assert sizes == dict.fromkeys(tasks.RETRIEVAL_SIZES, 3)
    assert len(tasks.balanced_chats(1, sheets=2)) == 2 * tasks.SHEET


def test_retrieval_asks_for_codes_that_are_listed():
    turns = tasks.retrieval(random.Random(2), lines=12)
    listed = turns[0].text.split("\n\n")[0].splitlines()
    assert len(listed) == 12
    assert all(turn.text in listed for turn in turns if turn.role == "assistant")


def test_functions_that_the_model_was_taught_run():
    space = {}
    for function in tasks.FUNCTIONS:
        exec(function.source, space)
    assert space["merge_sorted"]([1, 4], [2, 3]) == [1, 2, 3, 4]
    assert space["balanced"]("([]{})") and not space["balanced"]("(]")
    assert space["to_fahrenheit"](100) == 212
