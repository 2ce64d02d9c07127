"""Command-line options made from a request's fields, so that help, types and names exist once."""

from __future__ import annotations

import typing
from collections.abc import Callable
from typing import Annotated, Any, Literal, TypeVar, get_args, get_origin

import click
from pydantic import BaseModel

F = TypeVar("F", bound=Callable[..., Any])
# of one request only, or given in another way
_NOT_OPTIONS = {
    "type",
    "id",
    "attempt_id",
    "prompt",
    "messages",
    "prompt_ids",
    "tools",
    "spec",
    "model",
    "overrides",
}


def field_options(model: type[BaseModel], spec: type[BaseModel]) -> Callable[[F], F]:
    """An option for each field of a request that a command line can give, with its help and its type."""

    def add(work: F) -> F:
        for owner in (spec, model):
            hints = typing.get_type_hints(owner, include_extras=True)
            for name, info in reversed(owner.model_fields.items()):
                if owner is model and name in _NOT_OPTIONS:
                    continue
                flag = "--" + name.replace("_", "-")
                kind, many = _option_type(hints[name])
                declaration = f"{flag}/--no-{flag[2:]}" if kind is click.BOOL else flag
                # no default here: what is not given is not sent, and the daemon's default holds
                work = click.option(
                    declaration,
                    name,
                    type=kind,
                    multiple=many,
                    default=None,
                    help=_help(info.description, info.default),
                )(work)
        return work

    return add


def fields_of(options: dict[str, Any], spec: type[BaseModel]) -> dict[str, Any]:
    """The fields that were given, those of `spec` put into it."""
    given = {
        k: list(v) if isinstance(v, tuple) else v for k, v in options.items() if v is not None and v != ()
    }
    nested = {k: given.pop(k) for k in list(given) if k in spec.model_fields}
    return {**given, "spec": nested} if nested else given


def _option_type(hint: Any) -> tuple[Any, bool]:
    """click's type (a ParamType) for a field's hint, and whether it may be given many times."""
    origin, args = get_origin(hint), get_args(hint)
    if origin is Annotated:
        return _option_type(args[0])
    if origin is Literal:
        return click.Choice([str(a) for a in args]), False
    if origin is list:
        return _option_type(args[0])[0], True
    if type(None) in args:
        return _option_type(next(a for a in args if a is not type(None)))
    return {int: click.INT, float: click.FLOAT, bool: click.BOOL}.get(hint, click.STRING), False


def _help(description: str | None, default: Any) -> str:
    text = (description or "").replace("`", "")
    shown = "" if default is None or default == [] or default is False else f"  [default: {default}]"
    return f"{text}.{shown}"
