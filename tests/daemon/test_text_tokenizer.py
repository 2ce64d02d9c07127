"""Text to ids: the built-in model's tokenizer and template against transformers' own AutoTokenizer."""

import json
import subprocess
import sys
import time
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import pytest

import mstar.loader.builtin as builtin
from mstar.daemon.text import TextError, load_text

TINY = Path(next(iter(builtin.__path__))) / "tiny"


@pytest.fixture(scope="module")
def model():
    return load_text(TINY)


@pytest.fixture(scope="module")
def oracle():
    from transformers import AutoTokenizer

    return AutoTokenizer.from_pretrained(str(TINY), local_files_only=True)


def with_template(tmp_path, template):
    """A copy of the built-in tokenizer with another chat template (None for none)."""
    config = json.loads((TINY / "tokenizer_config.json").read_text())
    config.pop("chat_template")
    if template is not None:
        config["chat_template"] = template
    (tmp_path / "tokenizer_config.json").write_text(json.dumps(config))
    (tmp_path / "tokenizer.json").write_bytes((TINY / "tokenizer.json").read_bytes())
    return load_text(tmp_path)


def test_prompt_ids_are_those_of_transformers(model, oracle):
    for text in ("", "What is 12 + 30?", "naïve 日本 👩‍👩‍👧\n\n", "<think>a</think><|im_end|>"):
        assert model.encode(text) == oracle.encode(text)


def test_a_long_text_in_a_thread_leaves_the_others_their_turns(model):
    turns = 0
    with ThreadPoolExecutor(1) as pool:
        ids = pool.submit(model.encode, "a b" * 300_000)
        while not ids.done():
            time.sleep(0.005)
            turns += 1
    assert len(ids.result()) >= 300_000
    assert turns > 10  # two or three where the tokenizer holds Python's lock


@pytest.mark.parametrize("thinking", [None, True, False])
def test_rendered_conversation_is_that_of_transformers(model, oracle, thinking):
    messages = [
        {"role": "user", "content": "Hi"},
        {"role": "assistant", "content": "<think>\nx\n</think>\n\nHello"},
        {"role": "user", "content": "What is the capital of France?"},
    ]
    switches = {} if thinking is None else {"enable_thinking": thinking}
    want = oracle.apply_chat_template(
        [{"role": "system", "content": "Be brief."}, *messages],
        add_generation_prompt=True,
        tokenize=True,
        return_dict=False,
        **switches,
    )
    ids = model.render(messages, system="Be brief.", thinking=thinking)
    assert ids == want
    assert model.starts_in_think(ids) is (thinking is True)


def test_text_parts_are_joined_into_one_content(model):
    parts = [{"type": "text", "text": "What is "}, {"type": "text", "text": "2 + 2?"}]
    whole = model.render([{"role": "user", "content": "What is 2 + 2?"}])
    assert model.render([{"role": "user", "content": parts}]) == whole


def test_other_parts_are_refused_by_name_and_place(model):
    parts = [{"type": "text", "text": "look"}, {"type": "image_url", "image_url": {"url": "x"}}]
    with pytest.raises(TextError, match="image_url") as caught:
        model.render([{"role": "user", "content": "a"}, {"role": "user", "content": parts}])
    assert caught.value.error_class == "unsupported"
    assert caught.value.field == "messages[1].content[1]"


def test_second_system_message_is_refused(model):
    with pytest.raises(TextError, match="system") as caught:
        model.render([{"role": "system", "content": "a"}, {"role": "user", "content": "b"}], system="c")
    assert (caught.value.error_class, caught.value.field) == ("validation", "system")


def test_empty_conversation_is_refused(model):
    with pytest.raises(TextError, match="empty"):
        model.render([])


def test_lone_surrogate_is_a_validation_error(model):
    with pytest.raises(TextError) as caught:
        model.encode("a\ud800b")
    assert (caught.value.error_class, caught.value.field) == ("validation", "prompt")
    with pytest.raises(TextError) as caught:
        model.render([{"role": "user", "content": "\udfff"}])
    assert caught.value.error_class == "validation"


def test_template_that_raises_says_what_it_said(tmp_path):
    model = with_template(tmp_path, "{{ raise_exception('roles must alternate') }}")
    with pytest.raises(TextError, match="roles must alternate") as caught:
        model.render([{"role": "user", "content": "Hi"}])
    assert (caught.value.error_class, caught.value.field) == ("validation", "messages")


@pytest.mark.parametrize(
    "template", ["{{ messages[7].content }}", "{% for", "{{ 1 / 0 }}", "{{ ''.__class__.x }}"]
)
def test_broken_template_is_a_typed_error(tmp_path, template):
    model = with_template(tmp_path, template)
    with pytest.raises(TextError, match="chat template"):
        model.render([{"role": "user", "content": "Hi"}])


def test_model_without_template_still_takes_prompts(tmp_path):
    model = with_template(tmp_path, None)
    assert model.encode("Hi")
    with pytest.raises(TextError, match="prompt") as caught:
        model.render([{"role": "user", "content": "Hi"}])
    assert caught.value.error_class == "unsupported"


def test_thinking_state_comes_from_the_prompts_last_turn(model):
    starts = {
        "no marker": False,
        "<|im_start|>assistant\n<think>\n": True,
        "<|im_start|>assistant\n<think>\n\n</think>\n\n": False,
        "<think>a</think>b<think>c": True,
        # What a user wrote opens nothing in the assistant's turn.
        "<|im_start|>user\nwhat does <think> do?<|im_end|>\n<|im_start|>assistant\n": False,
        "": False,
    }
    for text, want in starts.items():
        assert model.starts_in_think(model.encode(text)) is want, text


def test_special_tokens_and_think_ids_come_from_the_vocabulary(model):
    assert model.think_start_id == model.encode("<think>")[0] == 6140
    assert model.think_end_id == model.encode("</think>")[0] == 6141
    assert model.special_ids == {6137, 6138, 6139}
    assert model.vocab_size == 6144


@pytest.mark.parametrize("content", [None, "{not json", '{"model": {}}'])
def test_missing_or_broken_tokenizer_is_a_typed_error(tmp_path, content):
    if content is not None:
        (tmp_path / "tokenizer.json").write_text(content)
    with pytest.raises(TextError) as caught:
        load_text(tmp_path)
    assert (caught.value.error_class, caught.value.field) == ("validation", "model")


def test_text_side_imports_no_torch():
    code = (
        "import sys; from mstar.daemon.text import load_text\n"
        f"m = load_text({str(TINY)!r}); m.render([{{'role': 'user', 'content': 'Hi'}}])\n"
        "m.emitter().push([6140, 64], final=True); sys.exit('torch' in sys.modules)"
    )
    assert subprocess.run([sys.executable, "-c", code], check=False).returncode == 0
