"""What a client may ask: one strict model a request type, the same for both faces.

Unknown fields, wrong types (a bool is no integer, "3" is no number), NaN and infinities are
refused. What the design knows but the daemon cannot do yet is typed here so that it can be
refused by name: such a field raises the error type `unsupported`.
"""

from __future__ import annotations

import math
from typing import Annotated, Any, Literal

from pydantic import (
    AfterValidator,
    BaseModel,
    BeforeValidator,
    ConfigDict,
    Discriminator,
    Field,
    PlainValidator,
    Tag,
    model_validator,
)
from pydantic_core import PydanticCustomError

INT32_MAX = 2**31 - 1
INT64_MAX = 2**63 - 1
MAX_ID_CHARS = 256
ID_FORM = f"printable text of 1 to {MAX_ID_CHARS} characters, or an integer in 0..2**63-1"
MAX_STOP_CHARS = 1024
MAX_FIELDS = 64


def is_request_id(value: object) -> bool:
    """Whether `value` can name a request: 1 to 256 characters of text, or an integer in 0..2**63-1."""
    if isinstance(value, str):
        return 0 < len(value) <= MAX_ID_CHARS and value.isprintable()
    return type(value) is int and 0 <= value <= INT64_MAX


def _request_id(value: object) -> str | int:
    if not is_request_id(value):
        raise PydanticCustomError("request_id", "should be {form}", {"form": ID_FORM})
    return value  # type: ignore[return-value]


def _unsupported(value: object, why: str) -> PydanticCustomError:
    return PydanticCustomError("unsupported", "{value} is not supported: {why}", {"value": value, "why": why})


def _refuse(refused: str, why: str) -> AfterValidator:
    def check(value: str | None) -> str | None:
        if value == refused:
            raise _unsupported(refused, why)
        return value

    return AfterValidator(check)


def _no_tools(value: object) -> None:
    if value is not None:
        raise _unsupported("tools", "tool calls are not built yet; leave the field out")


def _no_nul(value: str) -> str:
    if "\0" in value:
        raise PydanticCustomError("nul", "should not contain a NUL character")
    return value


def _json_values(value: Any, depth: int = 0) -> Any:
    """Passes what JSON can say, a few levels deep; a config has no more."""
    if depth > 8:
        raise PydanticCustomError("too_deep", "should not be nested deeper than 8 levels")
    if isinstance(value, dict):
        for key, inner in value.items():
            _json_values(key, depth + 1)
            _json_values(inner, depth + 1)
    elif isinstance(value, list):
        for inner in value:
            _json_values(inner, depth + 1)
    elif not _is_json_scalar(value):
        raise PydanticCustomError(
            "no_json", "should hold text, finite numbers, booleans, lists and maps only"
        )
    return value


def _is_json_scalar(value: object) -> bool:
    if isinstance(value, float):
        return math.isfinite(value)
    if type(value) is int:
        return -INT64_MAX <= value <= INT64_MAX
    return value is None or isinstance(value, bool | str)


RequestId = Annotated[str | int, PlainValidator(_request_id)]
AttemptId = Annotated[int, Field(ge=0, le=INT64_MAX)]
TokenId = Annotated[int, Field(ge=0, le=INT64_MAX)]
# two million bad ids fit 8 MiB: the first is enough to say so
TokenIds = Annotated[list[TokenId], Field(fail_fast=True)]
OffOn = Literal["off", "on"]


class Strict(BaseModel):
    """Base of every request: strict types, no unknown fields, no NaN; instances do not change."""

    model_config = ConfigDict(extra="forbid", strict=True, allow_inf_nan=False, frozen=True)

    @model_validator(mode="before")
    @classmethod
    def _not_too_many_fields(cls, data: Any) -> Any:
        # 600,000 unknown fields fit 8 MiB, and listing each would hold the daemon for seconds
        if isinstance(data, dict) and len(data) > MAX_FIELDS:
            raise PydanticCustomError("too_many", "has more than {limit} fields", {"limit": MAX_FIELDS})
        return data


class LoadSpecFields(Strict):
    """`load.spec`: speculative decoding of this load. What is not built is refused by `loader.policy`, by name."""

    mtp: Literal["off", "on", "auto"] = Field(
        default="auto",
        description="Multi-token prediction; `on` refuses a model without a head for it, `auto` serves without",
    )
    mtp_k: int = Field(default=3, ge=1, le=8, description="Drafts a step")
    draft_head: Literal["auto", "bf16", "fp8"] = Field(
        default="auto", description="Number format of the draft head; `fp8` is refused until it exists"
    )
    ngram: OffOn = Field(
        default="off", description="Drafts from the text so far; `on` is refused until it exists"
    )
    dflash: OffOn = Field(default="off", description="Block drafting; `on` is refused until it exists")
    dspark: OffOn = Field(default="off", description="Block drafting; `on` is refused until it exists")


class SpecRequest(Strict):
    """`generate.spec`: speculative decoding of one request, within what was loaded."""

    mtp: Literal["auto", "off"] = Field(default="auto", description="`off` decodes this request plainly")
    mtp_k: int | None = Field(
        default=None,
        ge=1,
        le=8,
        description="Drafts a step, at most (and by default) what was loaded",
    )


class Load(Strict):
    """Loads a model and starts its ranks; refused with `busy` while another is loaded."""

    type: Literal["load"] = "load"
    id: RequestId | None = Field(default=None, description="Comes back in every event of this load")
    model: Annotated[str, AfterValidator(_no_nul)] = Field(
        min_length=1, max_length=4096, description="Directory, hub id or `builtin:tiny`"
    )
    tp: int | None = Field(default=None, ge=1, le=1024, description="Ranks; null is the daemon's `--tp`")
    dtype: Literal["auto", "bf16", "fp16", "fp32"] = Field(
        default="auto", description="Number format of weights; without it the daemon's `--dtype`"
    )
    max_seq: int | None = Field(
        default=None,
        ge=2,
        le=INT32_MAX,
        description="Longest sequence (prompt and output), tokens; null is the config's, at most 65,536",
    )
    max_num_seqs: int = Field(
        default=64, ge=1, le=4096, description="Requests that run at once; without it the daemon's"
    )
    kv_dtype: Annotated[
        Literal["auto", "bf16", "q8"],
        _refuse("q8", "quantised KV is not built yet; use auto or bf16"),
        Field(description="Number format of the KV cache; `q8` is refused until it exists"),
    ] = "auto"
    memory_fraction: float = Field(
        default=0.9, gt=0, le=1, description="Share of the device's memory; without it the daemon's"
    )
    spec: LoadSpecFields = Field(default=LoadSpecFields(), description="Speculative decoding")
    overrides: Annotated[dict[str, Any], AfterValidator(_json_values)] = Field(
        default={}, description="Config fields to replace"
    )


class TextPart(Strict):
    """One part of a message's content."""

    type: Literal["text"] = Field(default="text", description="Other parts (images, …) are refused by name")
    text: str = Field(description="The text")


def _only_text_parts(value: object) -> object:
    kind = value.get("type") if isinstance(value, dict) else None
    if isinstance(kind, str) and kind != "text":
        raise _unsupported(f"a part of type {kind[:40]!r}", "send text parts only")
    return value


def _content_tag(value: object) -> str:
    return "<parts>" if isinstance(value, list) else "<text>"


class Message(Strict):
    """One turn of a conversation."""

    role: Annotated[
        Literal["system", "user", "assistant", "tool"],
        _refuse("tool", "tool calls are not built yet"),
        Field(description="Who speaks; `tool` is refused until tool calls exist"),
    ]
    content: Annotated[
        Annotated[str, Tag("<text>")]
        | Annotated[
            list[Annotated[TextPart, BeforeValidator(_only_text_parts)]],
            Field(fail_fast=True),
            Tag("<parts>"),
        ],
        Discriminator(_content_tag),
    ] = Field(description="Text, or a list of text parts")

    @property
    def text(self) -> str:
        """The content as one string, its parts joined."""
        if isinstance(self.content, str):
            return self.content
        return "".join(part.text for part in self.content)


MIN_TOKENS = (
    "No end before so many tokens: no end of sequence and no id of `stop_token_ids` is drawn, and no string of "
    "`stop` is looked for in their text"
)


class Generate(Strict):
    """Asks for an answer to exactly one of `prompt`, `messages` and `prompt_ids`."""

    type: Literal["generate"] = "generate"
    id: RequestId = Field(
        description=f"Names the request, together with `attempt_id`, in the whole daemon: {ID_FORM}"
    )
    attempt_id: AttemptId = Field(description="Tells a client's retries of one `id` apart")
    prompt: str | None = Field(default=None, min_length=1, description="Text, encoded as it is (no template)")
    messages: Annotated[list[Message], Field(fail_fast=True)] | None = Field(
        default=None, min_length=1, description="Conversation, rendered by the model's chat template"
    )
    prompt_ids: TokenIds | None = Field(default=None, min_length=1, description="Token ids, as they are")
    system: str | None = Field(default=None, description="System text put before `messages`")
    tools: Annotated[Any, AfterValidator(_no_tools)] = Field(
        default=None, description="Refused until tool calls are built"
    )
    max_tokens: int = Field(
        default=4096,
        ge=1,
        le=INT32_MAX,
        description="Most tokens, thinking included; cut to the room left",
    )
    temperature: float = Field(default=0.0, ge=0, le=100, description="0 is greedy")
    top_p: float = Field(default=1.0, gt=0, le=1, description="Fewest tokens of this probability; 1 is off")
    top_k: int = Field(default=0, ge=0, le=INT32_MAX, description="The k most probable tokens; 0 is off")
    min_p: float = Field(default=0.0, ge=0, le=1, description="Least share of the best token's probability")
    repetition_penalty: float = Field(
        default=1.0,
        gt=0,
        le=100,
        description="Divides positive, multiplies negative logits; prompt and output",
    )
    presence_penalty: float = Field(
        default=0.0, ge=-100, le=100, description="Subtracted from the logit of every token of the output"
    )
    frequency_penalty: float = Field(
        default=0.0, ge=-100, le=100, description="Subtracted once for every time the token is in the output"
    )
    seed: int | None = Field(
        default=None,
        ge=0,
        le=INT64_MAX,
        description="Fixes the draws; null draws a seed, told in `gen_start`",
    )
    stop: list[Annotated[str, Field(min_length=1, max_length=MAX_STOP_CHARS)]] = Field(
        default=[],
        max_length=16,
        description=f"Strings of up to {MAX_STOP_CHARS:,} characters that end the answer; they are cut from it",
    )
    stop_token_ids: TokenIds = Field(
        default=[], max_length=1024, description="Token ids that end the answer, `ignore_eos` or not"
    )
    min_tokens: int = Field(default=0, ge=0, le=INT32_MAX, description=MIN_TOKENS)
    ignore_eos: bool = Field(default=False, description="Go on past the model's end of sequence")
    return_ids: bool = Field(default=False, description="Put `ids` into `token` and `reasoning`")
    thinking: bool | None = Field(
        default=None, description="Asks the template of `messages` for thinking, or not; null is its default"
    )
    max_think_tokens: int | None = Field(
        default=None,
        ge=0,
        le=INT32_MAX,
        description="Thinking tokens at which `</think>` is forced; null is no cap",
    )
    logprobs: int | None = Field(
        default=None,
        ge=0,
        le=20,
        description="Log-probability of each token and of so many best, before temperature, after penalties",
    )
    spec: SpecRequest = Field(default=SpecRequest(), description="Speculative decoding of this request")
    deadline_ms: int | None = Field(
        default=None,
        ge=1,
        le=INT32_MAX,
        description="Time from arrival to an error of class `deadline`",
    )

    @model_validator(mode="after")
    def _consistent(self) -> Generate:
        given = [n for n in ("prompt", "messages", "prompt_ids") if getattr(self, n) is not None]
        if len(given) != 1:
            raise _inconsistent(
                given[1] if given else "prompt",
                f"give exactly one of prompt, messages and prompt_ids, not {' and '.join(given) or 'none'}",
            )
        for name in ("system", "thinking"):
            if self.messages is None and getattr(self, name) is not None:
                raise _inconsistent(name, f"{name} is for the chat template: send messages, not {given[0]}")
        if self.min_tokens > self.max_tokens:
            raise _inconsistent("min_tokens", f"min_tokens is over max_tokens ({self.max_tokens})")
        return self


def _inconsistent(field: str, message: str) -> PydanticCustomError:
    return PydanticCustomError("inconsistent", "{why}", {"field": field, "why": message})


class Abort(Strict):
    """Ends a request of any connection; ignored when the key is finished or unknown."""

    type: Literal["abort"] = "abort"
    id: RequestId = Field(description="The request's `id`")
    attempt_id: AttemptId = Field(description="The request's `attempt_id`")


class _Plain(Strict):
    id: RequestId | None = Field(default=None, description="Comes back in the answer")


class Unload(_Plain):
    """Ends every live request, the ranks and the load."""

    type: Literal["unload"] = "unload"


class Reset(_Plain):
    """Drops cached prefixes; refused with `busy` while requests run."""

    type: Literal["reset"] = "reset"


class Ping(_Plain):
    """Renews the connection's lease (so does any other message)."""

    type: Literal["ping"] = "ping"


class Status(_Plain):
    """Asks what is loaded and how its ranks are."""

    type: Literal["status"] = "status"


class Stats(_Plain):
    """Asks for the counters since load. With `trace_steps`, answered when so many further steps were profiled."""

    type: Literal["stats"] = "stats"
    trace_steps: int = Field(
        default=0, ge=0, le=1000, description="Steps to profile into a file that the answer names; 0 for none"
    )


class Shutdown(_Plain):
    """Ends the daemon as SIGTERM does."""

    type: Literal["shutdown"] = "shutdown"


Request = Load | Generate | Abort | Unload | Reset | Ping | Status | Stats | Shutdown
REQUESTS: dict[str, type[Strict]] = {
    "load": Load,
    "generate": Generate,
    "abort": Abort,
    "unload": Unload,
    "reset": Reset,
    "ping": Ping,
    "status": Status,
    "stats": Stats,
    "shutdown": Shutdown,
}
