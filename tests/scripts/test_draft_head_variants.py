"""The acceptance of a head over whole chats, over answers and by kind of chat."""

import pytest

from mstar.daemon.text import load_text
from mstar.scripts.draft_head_variants import Share, encode_chat, measure, rows_of
from mstar.scripts.offline_model import OfflineModel
from mstar.scripts.tasks import chats


def test_acceptance_is_the_mean_of_the_seeds_and_each_kind_is_told():
    shares = {
        1: {"whole chats": Share(100, [90, 50]), "fact": Share(10, [9, 5])},
        2: {"whole chats": Share(300, [210, 60])},
    }
    whole, fact = rows_of(shares, 2)
    assert (whole["text"], whole["positions"]) == ("whole chats", 400)
    assert whole["acceptance"] == pytest.approx([0.8, 0.35]) and whole["tau"] == pytest.approx(1.15)
    assert whole["by_seed"] == {1: [0.9, 0.5], 2: [0.7, 0.2]}
    assert (fact["text"], fact["acceptance"], list(fact["by_seed"])) == ("fact", [0.9, 0.5], [1])


def test_each_position_of_a_chat_counts_once_for_its_kind():
    model = OfflineModel("builtin:tiny")
    text, drawn = load_text(model.path), chats(5, 5)
    samples = [encode_chat(text, chat.turns, 60, chat.kind) for chat in drawn]
    shares = measure(model, model.head("bf16"), "bf16", samples, 2, 5)
    for kind in {chat.kind for chat in drawn}:
        lengths = [len(sample.ids) for sample in samples if sample.kind == kind]
        assert shares[kind].positions == sum(length - 3 for length in lengths)
    assert shares["whole chats"].positions == sum(len(sample.ids) - 3 for sample in samples)
