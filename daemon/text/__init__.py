"""Everything about text: tokenizer, chat template, incremental detokenisation, stop strings, thinking split.

Ranks know ids only; clients that send prompts or messages know text only. This package is the border.
"""

from .emitter import Emitter, EmitterOutput, Piece
from .errors import TextError
from .tokenizer import TextModel, load_text

__all__ = ["Emitter", "EmitterOutput", "Piece", "TextError", "TextModel", "load_text"]
