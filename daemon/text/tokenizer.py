"""Text to ids: a model directory's tokenizer and chat template, without torch and without a network."""

from __future__ import annotations

import os
from collections.abc import Callable, Collection, Mapping, Sequence
from pathlib import Path
from typing import Any

from .detokenizer import ByteDetokenizer, ByteVocabulary, Detokenizer, WindowDetokenizer
from .emitter import Emitter, Vocabulary
from .errors import TextError

THINK_START = "<think>"
THINK_END = "</think>"


def load_text(model_dir: str | Path) -> TextModel:
    """Loads tokenizer.json, its configuration and the chat template of a local directory.

    Takes about a second the first time (the import of transformers): call it from a thread.
    Raises TextError (`validation`, field `model`) when the directory has none or a broken one.
    """
    directory = Path(model_dir)
    if not (directory / "tokenizer.json").is_file():
        raise TextError("validation", f"{directory} has no tokenizer.json: is it a complete model?", "model")
    # a text has one thread; and threads of the tokenizer's own would make it warn at each process that starts
    os.environ.setdefault("TOKENIZERS_PARALLELISM", "false")
    # Not AutoTokenizer: that one imports torch, which the daemon must not. This class reads the same
    # files, and a path that is a directory is never looked up on a hub.
    from transformers import PreTrainedTokenizerFast

    try:
        tokenizer = PreTrainedTokenizerFast.from_pretrained(str(directory), local_files_only=True)
    except Exception as error:  # the tokenizers library raises bare Exception for a broken file
        raise TextError(
            "validation", f"the tokenizer of {directory} does not load: {_reason(error)}", "model"
        ) from error
    return TextModel(tokenizer)


class TextModel:
    """A model's text side. Immutable once loaded, so its methods may run in any thread."""

    def __init__(self, tokenizer: Any) -> None:
        """tokenizer: a transformers fast tokenizer (use `load_text`)."""
        self._tokenizer = tokenizer
        self._backend = tokenizer.backend_tokenizer
        self._backend.no_truncation()
        self._backend.no_padding()
        added = self._backend.get_added_tokens_decoder()
        self.vocab_size: int = len(tokenizer)  # the tokenizer's own; a model may pad its embedding past it
        self.special_ids = frozenset(token_id for token_id, token in added.items() if token.special)
        self.think_start_id: int | None = self._backend.token_to_id(THINK_START)
        self.think_end_id: int | None = self._backend.token_to_id(THINK_END)
        if self.think_start_id is None or self.think_end_id is None:
            self.think_start_id = self.think_end_id = None
        self._vocabulary = Vocabulary(self.special_ids, self.think_start_id, self.think_end_id)
        self._new_detokenizer = self._detokenizer_factory()

    def encode(self, text: str) -> list[int]:
        """Ids of a bare prompt. Control tokens written in the text become their ids.

        Raises TextError for text that is not Unicode (a lone surrogate).
        """
        return self._encode(text, "prompt", add_special_tokens=True)

    def render(
        self,
        messages: Sequence[Mapping[str, Any]],
        system: str | None = None,
        thinking: bool | None = None,
    ) -> list[int]:
        """Ids of a conversation through the chat template, up to where the assistant's answer starts.

        messages: `role` and `content`, a string or a list of `{"type": "text", "text": ...}` parts, which
        are joined without a separator as Qwen's own template does; other keys go to the template as they are.
        system: put before the messages as one of role `system`.
        thinking: the template's `enable_thinking`; None leaves it to the template.
        Raises TextError: the field at fault, or what the template said.
        """
        template = self._tokenizer.chat_template
        if not template:
            raise TextError("unsupported", "this model has no chat template: send `prompt`", "messages")
        conversation = [_plain(message, index) for index, message in enumerate(messages)]
        if not conversation:
            raise TextError("validation", "messages is empty", "messages")
        if system is not None:
            if conversation[0].get("role") == "system":
                raise TextError("validation", "`system` is given and messages begin with one too", "system")
            conversation.insert(0, {"role": "system", "content": system})
        switches = {} if thinking is None else {"enable_thinking": thinking}
        try:
            text = self._tokenizer.apply_chat_template(
                conversation, tokenize=False, add_generation_prompt=True, **switches
            )
        except Exception as error:  # a template may raise anything: it is a program of the checkpoint
            raise TextError(
                "validation", f"the chat template refused the messages: {_reason(error)}", "messages"
            ) from error
        return self._encode(text, "messages", add_special_tokens=False)

    def decode(self, ids: Sequence[int]) -> str:
        """Text of ids at once, special tokens hidden."""
        return str(self._backend.decode(list(ids), skip_special_tokens=True))

    def starts_in_think(self, prompt_ids: Sequence[int]) -> bool:
        """Whether generation starts inside a thinking span: one that the prompt's last turn leaves open.

        A special token after `<think>` (a turn mark) closes it, so that a user's "<think>" opens nothing.
        """
        if self.think_start_id is None or self._vocabulary.marks.isdisjoint(prompt_ids):
            return False
        for token_id in reversed(prompt_ids):
            if token_id == self.think_start_id:
                return True
            if token_id == self.think_end_id or token_id in self.special_ids:
                return False
        return False

    def emitter(
        self,
        stop: Sequence[str] = (),
        in_think: bool = False,
        return_ids: bool = False,
        stop_ids: Collection[int] = (),
        min_tokens: int = 0,
    ) -> Emitter:
        """A new emitter for one request; its fields are those of `Emitter`."""
        return Emitter(
            self._new_detokenizer(),
            self._vocabulary,
            stop=stop,
            in_think=in_think,
            return_ids=return_ids,
            stop_ids=stop_ids,
            min_tokens=min_tokens,
        )

    def _encode(self, text: str, field: str, *, add_special_tokens: bool) -> list[int]:
        try:
            text.encode()
        except UnicodeEncodeError as error:
            raise TextError("validation", f"text is not valid Unicode: {error.reason}", field) from error
        # a batch of one, because `encode` holds Python's lock: megabytes in a thread would stop all other requests
        return list(self._backend.encode_batch([text], add_special_tokens=add_special_tokens)[0].ids)

    def _detokenizer_factory(self) -> Callable[[], Detokenizer]:
        if type(self._backend.decoder).__name__ == "ByteLevel":
            vocabulary = ByteVocabulary(self._backend.id_to_token)
            return lambda: ByteDetokenizer(vocabulary)
        return lambda: WindowDetokenizer(self.decode)


def _plain(message: Mapping[str, Any], index: int) -> dict[str, Any]:
    """A message whose content is one string, which every template understands."""
    content = message.get("content")
    if content is None or isinstance(content, str):
        return dict(message)
    if not isinstance(content, list | tuple):
        raise TextError(
            "validation", "content is a string or a list of text parts", f"messages[{index}].content"
        )
    texts = []
    for place, part in enumerate(content):
        kind = part.get("type", "text") if isinstance(part, Mapping) else type(part).__name__
        if kind != "text" or not isinstance(part.get("text"), str):
            raise TextError(
                "unsupported",
                f"content part of type {kind!r}: only text parts are served",
                f"messages[{index}].content[{place}]",
            )
        texts.append(part["text"])
    return {**message, "content": "".join(texts)}


def _reason(error: Exception) -> str:
    return f"{error}" or type(error).__name__
