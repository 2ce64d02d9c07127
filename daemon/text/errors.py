"""The one error of the text side."""

from __future__ import annotations


class TextError(Exception):
    """Text that cannot become ids, or a model directory whose tokenizer cannot be used.

    error_class: the protocol's class of the `error` event (`validation` or `unsupported`).
    field: path of the request's field that is at fault, where there is one.
    """

    def __init__(self, error_class: str, message: str, field: str | None = None) -> None:
        super().__init__(message)
        self.error_class = error_class
        self.message = message
        self.field = field
