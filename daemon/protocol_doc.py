"""Writes docs/protocol.md: a hand-written introduction, then tables made from the types.

`python -m mstar.daemon.protocol_doc` writes the page, `--check` exits 1 when it is stale.
"""

from __future__ import annotations

import dataclasses
import re
import sys
import types
import typing
from pathlib import Path
from typing import Annotated, Any, Literal, get_args, get_origin

import annotated_types
from pydantic import BaseModel
from pydantic.fields import FieldInfo

from mstar.daemon import codec, events, requests
from mstar.daemon.protocol import EVENTS, REQUESTS, ErrorClass

PAGE = Path(__file__).resolve().parent.parent / "docs" / "protocol.md"

INTRODUCTION = f"""# The protocol

<!-- Written by `python -m mstar.daemon.protocol_doc` from daemon/requests.py and daemon/events.py. -->

A client sends requests to the daemon and gets events back. Both are maps with a `type`. The daemon has
three faces, which speak the same messages:

| face | default | framing |
|---|---|---|
| ZeroMQ (`--bind`) | `tcp://127.0.0.1:5570`, or `ipc://` | ROUTER and DEALER; one msgpack map a message |
| lines (`--line`) | `tcp://127.0.0.1:5571`, `unix:/path` (mode 0600) or `off` | one JSON object a line, UTF-8, `\\n` |
| stdio (`--stdio`) | off | the same lines on the daemon's standard input and output |

The faces are for this machine only: another address than loopback is refused. There is no HTTP API.

A message may have up to {codec.MAX_MESSAGE_BYTES // 2**20} MiB. A longer one is refused and the connection
goes on; past {codec.HARD_LIMIT_BYTES // 2**20} MiB the connection is closed. Types are strict: an unknown field
is refused by its name, a wrong type or value by the field's path (`messages[0].content[1].text`), NaN and
infinities always; a boolean is no integer, and `"3"` is no number. What cannot be read as a map at all is
`malformed`. An `error` carries the `id` and `attempt_id` of the message at fault whenever they could be read.

## Rules

**Keys.** A generation is named by (`id`, `attempt_id`); the client makes both, and a retry of the same work
takes the next `attempt_id`. Text and integers are different ids: `1` is not `"1"`. Keys are global to the
daemon: any connection may abort any key. Events go to the connection that sent the request. A second live
request under one key is refused. Other requests may have an `id`, which comes back in their answer.

**One end.** A request that was sent gets `gen_start`, pieces, and exactly one `done` or `error`, whatever
happens to the model, its ranks or the daemon's queues; a request that is refused gets the `error` alone.
Nothing follows the end. `abort` has no answer of its own: the request ends with `done` and
`finish_reason: abort`, and an abort of an unknown or finished key is ignored.

**Leases.** A ZeroMQ client that leaves says nothing, so each holds a lease of 30 s, which any message renews;
a client that only waits sends `ping`. When the lease ends, or a line connection closes, the client's requests
are aborted. A client that does not read is cut off at a bounded backlog; others do not slow down.

**Stops.** The earliest of these ends an answer: an end-of-sequence token of the model (not with `ignore_eos`),
one of `stop_token_ids`, a `stop` string, `max_tokens` or the end of the context. What the model
had produced past it is dropped: it is in no text, no ids and no count. Stop strings match across token borders and
are not part of the text; text that may still become one is held back until that is known, and so are the bytes
of an incomplete character.

**Thinking.** What is inside `<think>` and `</think>` comes as `reasoning`, the rest as `token`. `gen_start` says
whether the prompt itself ends inside a thinking span. Thinking counts into `max_tokens`; `usage` tells the two
apart (`reasoning_tokens` is a part of `completion_tokens`). `max_think_tokens` bounds it: there `</think>` is
forced. `open_think` says that the answer ended while thinking.

**Drawing.** `temperature` 0 takes the best token. Otherwise penalties come first, then temperature, then `top_k`,
`top_p` and `min_p`. One seed gives one text, whatever else the daemon is doing. The repetition penalty sees
prompt and output; presence and frequency see the output. `logprobs` are those of the distribution after
penalties, before temperature and filters.

**Prompts.** `prompt` is encoded as it is. `messages` go through the model's chat template, to which `system` and
`thinking` belong: with another kind of prompt these two are refused, not ignored.

**Loads.** One model at a time: a second `load` is refused with `busy`, and a load that is refused leaves what
is loaded as it was. A rank that dies ends every live request with `rank_lost`; the daemon goes on, `status`
says why, and the next `load` works.

**Speculation.** With an MTP head (`mtp.*` weights, or one `*.mtp.safetensors` file beside the model) a load
drafts `spec.mtp_k` tokens a step and checks them in one pass: the text is that of plain decode, greedy and under a
seed (in bf16 on a GPU up to near-ties). `loaded.spec` says what was decided, and why not where it was not;
`spec.mtp: on` refuses a model without a head that can be used. A request's own `spec` narrows it: `mtp: off`, or
fewer drafts; more than `loaded.spec.k` is refused. `tau` is accepted drafts a verify step; the token that the
prompt's own step yields belongs to none. Drafts that a stop or a length cut off are in no count of accepted ones.

**Not built yet, so refused** as `unsupported` with the field's name: `tools` and tool messages, parts other than
text, `kv_dtype: q8`, `spec.draft_head: fp8`, `spec.ngram`, `spec.dflash` and `spec.dspark`.
`cached_tokens` is 0 until prefix caching exists.

**Errors.** `retryable` says whether the same request may succeed later. The classes:

| class | when |
|---|---|
"""

ERROR_CLASSES = {
    "malformed": "The bytes are no message, or too many",
    "validation": "A field is missing, unknown, of a wrong type or out of its range",
    "unsupported": "Known, but not built, or not possible with this model or device",
    "context_length": "The prompt does not fit the context",
    "overloaded": "A queue is full, or the client does not read",
    "no_model": "Nothing is loaded",
    "busy": "Something else has to end first: a load, the loaded model, running requests",
    "rank_lost": "A rank died or stopped answering",
    "out_of_memory": "The device's memory does not suffice",
    "deadline": "`deadline_ms` is over",
    "internal": "A fault of the daemon; its log says more",
}

SESSION = """
## A session

Lines with `>` are sent, those with `<` received (the figures are an
example, and long lines are broken here; on the wire a message is one line).

```
> {"type":"load","id":"l","model":"builtin:tiny"}
< {"type":"load_progress","stage":"read","done":4194304,"total":11534336,"unit":"bytes","id":"l"}
< {"type":"loaded","model":"builtin:tiny","fingerprint":"5f3a…","layers":4,…,"id":"l"}
> {"type":"generate","id":"a","attempt_id":0,"messages":[{"role":"user","content":"2 + 2?"}],"thinking":true}
< {"type":"gen_start","id":"a","attempt_id":0,"prompt_tokens":14,"cached_tokens":0,
   "started_in_think":true,"seed":7}
< {"type":"reasoning","id":"a","attempt_id":0,"text":"Add them."}
< {"type":"token","id":"a","attempt_id":0,"text":"4"}
< {"type":"done","id":"a","attempt_id":0,"finish_reason":"stop","usage":{"prompt_tokens":14,
   "completion_tokens":6,"reasoning_tokens":4,"cached_tokens":0},"open_think":false,"timings":{…},"spec":{…}}
> {"type":"generate","id":"b","attempt_id":0,"prompt":"x","top_p":2}
< {"type":"error","class":"validation","message":"top_p should be less than or equal to 1, not 2",
   "retryable":false,"field":"top_p","id":"b","attempt_id":0}
> {"type":"unload","id":"u"}
< {"type":"unloaded","id":"u"}
```
"""


def render() -> str:
    """The whole page."""
    lines = [INTRODUCTION.rstrip("\n")]
    lines += [f"| `{name}` | {ERROR_CLASSES[name]} |" for name in get_args(ErrorClass)]
    lines += ["", "## Requests", ""]
    for name, model in REQUESTS.items():
        lines += _section(f"`{name}`", model)
    lines += ["## Parts of requests", ""]
    for part in (requests.LoadSpecFields, requests.SpecRequest, requests.Message, requests.TextPart):
        lines += _section(f"{part.__name__}", part)
    lines += ["## Events", "", "Fields with `?` may be left out.", ""]
    for name, event in EVENTS.items():
        lines += _section(f"`{name}`", event)
    lines += ["## Parts of events", ""]
    for cls in vars(events).values():
        if isinstance(cls, type) and dataclasses.is_dataclass(cls) and cls not in EVENTS.values():
            lines += _section(cls.__name__, cls)
    return "\n".join(lines).rstrip("\n") + "\n" + SESSION


def main(arguments: list[str]) -> int:
    """Writes the page, or with --check says whether it is stale. Returns the exit code."""
    page = render()
    if arguments == ["--check"]:
        if PAGE.exists() and PAGE.read_text(encoding="utf-8") == page:
            return 0
        print(f"{PAGE} is stale: run python -m mstar.daemon.protocol_doc", file=sys.stderr)
        return 1
    if arguments:
        print("usage: python -m mstar.daemon.protocol_doc [--check]", file=sys.stderr)
        return 2
    PAGE.parent.mkdir(exist_ok=True)
    PAGE.write_text(page, encoding="utf-8")
    return 0


def _section(title: str, cls: type[Any]) -> list[str]:
    rows = _request_rows(cls) if issubclass(cls, BaseModel) else _event_rows(cls)
    summary = " ".join((cls.__doc__ or "").split())
    table = ["| field | type | default | meaning |", "|---|---|---|---|"] if issubclass(cls, BaseModel) else [
        "| field | type | meaning |", "|---|---|---|"
    ]  # fmt: skip
    return [f"### {title}", "", summary, "", *table, *rows, ""]


def _request_rows(cls: type[BaseModel]) -> list[str]:
    rows = []
    for name, info in cls.model_fields.items():
        if name == "type" and cls is not requests.TextPart:
            continue
        hint = typing.get_type_hints(cls, include_extras=True)[name]
        default = "required" if info.is_required() else _default(info.default)
        rows.append(_row(f"`{name}`", _type(hint) + _bounds(info.metadata), default, _meaning(info)))
    return rows


def _event_rows(cls: type[Any]) -> list[str]:
    hints = typing.get_type_hints(cls, include_extras=True)
    rows = []
    for field in dataclasses.fields(cls):
        info = next(m for m in _extras(hints[field.name]) if isinstance(m, FieldInfo))
        absent = field.default is None
        hint = _without_null(hints[field.name]) if absent else hints[field.name]
        rows.append(_row(f"`{info.alias or field.name}`{'?' if absent else ''}", _type(hint), _meaning(info)))
    return rows


def _row(*cells: str) -> str:
    return "| " + " | ".join(cell.replace("|", "\\|") for cell in cells) + " |"


def _meaning(info: FieldInfo) -> str:
    return info.description or ""


def _default(value: object) -> str:
    if isinstance(value, BaseModel):
        return "its defaults"
    if value is None or isinstance(value, bool):
        return f"`{str(value).lower()}`".replace("none", "null")
    return f"`{value:g}`" if isinstance(value, float) else f"`{value}`"


def _bounds(metadata: list[Any]) -> str:
    """`0..20`-like range, or the most characters or items, of a field's constraints."""
    limits: dict[str, Any] = {}
    for item in metadata:
        for kind in (annotated_types.Ge, annotated_types.Gt, annotated_types.Le, annotated_types.Lt):
            if isinstance(item, kind):
                limits[kind.__name__.lower()] = getattr(item, kind.__name__.lower())
        if isinstance(item, annotated_types.MinLen):
            limits["min"] = item.min_length
        if isinstance(item, annotated_types.MaxLen):
            limits["max"] = item.max_length
    text = ""
    if "gt" in limits:
        text += f", over {_number(limits['gt'])}, at most {_number(limits['le'])}"
    elif "ge" in limits:
        text += f", {_number(limits['ge'])}..{_number(limits['le'])}"
    if "min" in limits:
        text += ", not empty"
    if "max" in limits:
        text += f", at most {limits['max']}"
    return text


def _number(value: float) -> str:
    powers: dict[float, str] = {2**31 - 1: "2³¹-1", 2**63 - 1: "2⁶³-1"}
    return f"{value:g}" if isinstance(value, float) else powers.get(value, str(value))


_NAMES = {str: "text", int: "integer", float: "number", bool: "boolean", type(None): "null", Any: "anything"}


def _type(hint: Any) -> str:
    """A type hint in the words of the page."""
    if hint in _NAMES:
        return _NAMES[hint]
    if hint == requests.RequestId:
        return "text or integer"
    origin, args = get_origin(hint), get_args(hint)
    if origin is Annotated:
        return _type(args[0])
    if origin is Literal:
        return " or ".join(f"`{a}`" for a in args)
    if origin in (typing.Union, types.UnionType):
        return " or ".join(_type(a) for a in args)
    if origin is list:
        return f"list of {_type(args[0])}"
    if origin is tuple:
        return "[" + ", ".join(_type(a) for a in args) + "]"
    if origin is dict:
        return f"map of {_type(args[1])}"
    return f"[{hint.__name__}](#{re.sub(r'[^a-z]', '', hint.__name__.lower())})"


def _extras(hint: Any) -> tuple[Any, ...]:
    return get_args(hint)[1:] if get_origin(hint) is Annotated else ()


def _without_null(hint: Any) -> Any:
    if get_origin(hint) is Annotated:
        hint = get_args(hint)[0]
    left = [a for a in get_args(hint) if a is not type(None)]
    return typing.Union[tuple(left)]  # noqa: UP007


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
