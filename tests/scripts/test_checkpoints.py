"""Made checkpoints: what is planted is there, and says so; and the acceptance that the head's measure finds."""

import json

import pytest
import torch
from click.testing import CliRunner

from mstar.daemon.text import load_text
from mstar.loader import read_config, resolve
from mstar.scripts import draft_head_variants, make_checkpoint
from mstar.scripts.draft_head_variants import Sample, encode_chat
from mstar.scripts.offline_model import OfflineModel
from mstar.scripts.planted import planted_acceptance, planted_note
from mstar.scripts.tasks import Turn, chats
from tests.support.checkpoints import load_oracle


def make(path, *options):
    arguments = [str(path), "--size", "0.8B", "--scale", "8", "--layers", "4", "--vocab", "6144", *options]
    result = CliRunner().invoke(make_checkpoint.main, arguments)
    assert result.exit_code == 0, result.output
    return result.output


@pytest.fixture(scope="module")
def planted(tmp_path_factory):
    path = tmp_path_factory.mktemp("planted") / "m"
    output = make(path, "--acceptance", "0.8", "--dtype", "fp32", "--file-gb", "0.005")
    assert "PLANTED acceptance 0.8" in output
    return path


@pytest.fixture(scope="module")
def virtual(tmp_path_factory):
    path = tmp_path_factory.mktemp("virtual") / "m"
    output = make(path, "--acceptance", "0.8", "--dtype", "fp32", "--virtual")
    assert "PLANTED acceptance 0.8" in output and "no weight files" in output
    return path


@torch.inference_mode()
def test_next_tokens_follow_one_cycle_whatever_stands_before(planted):
    model = OfflineModel(str(planted))
    oracle = load_oracle(planted)
    ids = torch.randint(0, 6144, (1, 300), generator=torch.Generator().manual_seed(1))
    logits = oracle(ids).logits[0].float()
    successor = dict(zip(ids[0].tolist(), logits.argmax(1).tolist(), strict=True))
    margins = logits.topk(2, dim=1).values
    assert float((margins[:, 0] - margins[:, 1]).min()) > 1, "no near-ties"
    for token in ids[0, :20].tolist():
        for before in ([], [3, 1, 4], [token]):
            assert int(model.next_logits([*before, token]).argmax()) == successor[token]


@pytest.mark.parametrize(("fixture", "head"), [("planted", "fp32"), ("planted", "bf16"), ("virtual", "fp32")])
def test_planted_acceptance_is_met_by_depth(request, fixture, head):
    model = OfflineModel(str(request.getfixturevalue(fixture)))
    generator = torch.Generator().manual_seed(5)
    ids = torch.randint(0, 6144, (12, 120), generator=generator).tolist()
    samples = [Sample(row, [True] * len(row)) for row in ids]
    share = draft_head_variants.measure(model, model.head(head), head, samples, 3, 12)["whole chats"]
    assert share.positions == 12 * (120 - 4)
    # 1,392 draws: a standard deviation is 0.011 at the first and 0.013 at the third draft
    assert share.rates() == pytest.approx([0.8, 0.64, 0.512], abs=0.05)


def test_planted_checkpoints_say_so(planted, virtual):
    assert planted_acceptance(planted) == planted_acceptance(virtual) == 0.8
    assert json.loads((planted / "config.json").read_text())["mstar_planted"] == 0.8
    assert not read_config(planted).tie_word_embeddings
    assert "PLANTED" in planted_note(0.8) and planted_note(None) == ""
    assert planted_acceptance(resolve("builtin:tiny")) is None


def test_files_hold_what_the_index_says_and_are_many(planted):
    index = json.loads((planted / "model.safetensors.index.json").read_text())
    files = {file.name for file in planted.glob("*.safetensors")}
    assert set(index["weight_map"].values()) == files and len(files) > 1
    assert index["metadata"]["total_size"] == sum(w.numel() * w.element_size() for w in tensors(planted))


def tensors(path):
    from safetensors.torch import load_file

    return [tensor for file in path.glob("*.safetensors") for tensor in load_file(file).values()]


def test_a_random_checkpoint_is_tied_as_its_size_and_stays_near_one(tmp_path):
    make(tmp_path / "m")
    model = OfflineModel(str(tmp_path / "m"))
    assert model.config.tie_word_embeddings and model.planted is None
    assert 1 < float(model.next_logits([1, 2, 3]).std()) < 100
    assert len(model.head("bf16").draft(torch.zeros(1, 128, dtype=torch.bfloat16))) == 1


def test_equal_seeds_write_equal_weights(tmp_path):
    for name, seed in (("a", "1"), ("b", "1"), ("c", "2")):
        make(tmp_path / name, "--seed", seed)
    a, b, c = (tensors(tmp_path / name) for name in "abc")
    assert all(torch.equal(x, y) for x, y in zip(a, b, strict=True))
    assert not all(torch.equal(x, y) for x, y in zip(a, c, strict=True))


def test_a_directory_with_files_is_left_alone(tmp_path):
    (tmp_path / "mine").write_text("x")
    result = CliRunner().invoke(make_checkpoint.main, [str(tmp_path)])
    assert result.exit_code == 2 and [file.name for file in tmp_path.iterdir()] == ["mine"]


@pytest.mark.parametrize("size", list(make_checkpoint.SIZES))
def test_real_sizes_have_the_published_parameters(size, tmp_path):
    config = make_checkpoint.make_config(size)
    (tmp_path / "config.json").write_text(json.dumps(config))
    parsed = read_config(tmp_path)
    from mstar.arch.trunk import count_params

    published = {"0.8B": 0.75e9, "2B": 1.88e9, "4B": 4.2e9, "9B": 8.95e9, "27B": 26.9e9}[size]
    assert count_params(parsed) == pytest.approx(published, rel=0.05)


def test_answers_are_told_from_questions():
    text = load_text(resolve("builtin:tiny"))
    chat = [Turn("user", "What is 1 + 1?"), Turn("assistant", "1 + 1 = 2")]
    sample = encode_chat(text, chat, 1000)
    marked = [token for token, inside in zip(sample.ids, sample.in_answer, strict=True) if inside]
    assert (
        text._backend.decode(marked, skip_special_tokens=False)
        == "<think>\n\n</think>\n\n1 + 1 = 2<|im_end|>"
    )


def test_the_builtin_head_is_accepted_in_answers():
    """The whole of it is a check of its own; this is to see that the measure works."""
    model = OfflineModel("builtin:tiny")
    text = load_text(model.path)
    samples = [encode_chat(text, chat.turns, 200) for chat in chats(12, 5)]
    shares = draft_head_variants.measure(model, model.head("bf16"), "bf16", samples, 3, 12)
    rates = shares["assistant turns"].rates()
    assert rates == sorted(rates, reverse=True) and rates[0] > 0.95 and rates[2] > 0.88
    assert shares["whole chats"].positions > shares["assistant turns"].positions > 300
