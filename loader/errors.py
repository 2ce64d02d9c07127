"""The one exception of the loader: typed, so that the daemon can answer it as an error event."""

from __future__ import annotations


class LoadError(Exception):
    """A model that cannot be loaded, and what to do about it.

    error_class: the protocol's error class ("validation" for what the caller or the checkpoint got wrong,
    "unsupported" for what is not built). field: the field of the `load` request or of config.json at fault.
    """

    def __init__(self, error_class: str, message: str, field: str | None = None) -> None:
        super().__init__(error_class, message, field)
        self.error_class = error_class
        self.message = message
        self.field = field

    def __str__(self) -> str:
        return self.message


def shown(value: object) -> str:
    """A value as an error message shows it: its repr, cut to 300 characters: a path's end tells most."""
    try:
        text = repr(value)
    except (ValueError, RecursionError):  # an integer of thousands of digits, a list in itself
        text = f"a {type(value).__name__}"
    return text if len(text) <= 300 else text[:297] + "..."


def listed(names: list[str], limit: int = 16) -> str:
    """Names as one line of an error message, at most `limit` of them."""
    more = len(names) - limit
    return ", ".join(names[:limit]) + (f" and {more} more" if more > 0 else "")
