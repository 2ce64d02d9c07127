"""What a `generate` request becomes for the engine: its prompt's ids and its sampling, checked against the model."""

from __future__ import annotations

from mstar.daemon.loading import Model
from mstar.daemon.protocol import Generate, ProtocolError
from mstar.daemon.text import TextModel
from mstar.ranks.messages import SamplingParams


def text_chars(request: Generate) -> int:
    """Characters that must be encoded; 0 for a prompt of ids."""
    if request.prompt is not None:
        return len(request.prompt)
    texts = sum(len(message.text) for message in request.messages or ())
    return texts + len(request.system or "")


def prompt_ids(request: Generate, text: TextModel) -> list[int]:
    """The prompt's ids. Raises TextError. For a thread when the text is long."""
    if request.prompt_ids is not None:
        return request.prompt_ids
    if request.prompt is not None:
        return text.encode(request.prompt)
    turns = [{"role": message.role, "content": message.text} for message in request.messages or ()]
    return text.render(turns, request.system, request.thinking)


def check_request(request: Generate, model: Model) -> None:
    """What can be told without the prompt's ids. Raises ProtocolError."""
    loaded = model.loaded.spec
    if request.spec.mtp_k is not None and request.spec.mtp_k > loaded.k:
        why = "" if loaded.reason is None else f": {loaded.reason}"
        message = f"spec.mtp_k {request.spec.mtp_k} is over what was loaded ({loaded.k}{why})"
        raise ProtocolError("validation", message, field="spec.mtp_k")
    if request.max_think_tokens is not None and model.text.think_end_id is None:
        message = "this model has no thinking markers: leave max_think_tokens out"
        raise ProtocolError("unsupported", message, field="max_think_tokens")
    vocab = model.config.vocab_size
    for field, ids in (("prompt_ids", request.prompt_ids), ("stop_token_ids", request.stop_token_ids)):
        if ids and max(ids) >= vocab:
            place = next(index for index, token_id in enumerate(ids) if token_id >= vocab)
            message = f"{field}[{place}] is {ids[place]}, outside the vocabulary of {vocab} ids"
            raise ProtocolError("validation", message, field=f"{field}[{place}]")


def check_length(request: Generate, length: int, model: Model) -> None:
    """Raises ProtocolError where a prompt of `length` ids leaves no room for a token."""
    if length == 0:
        field = "prompt" if request.prompt is not None else "messages"
        raise ProtocolError("validation", "the prompt is empty: it has no tokens", field=field)
    if length > model.max_seq - 1:
        raise ProtocolError(
            "context_length",
            f"the prompt has {length} tokens, and at most {model.max_seq - 1} leave room for one more "
            f"(max_seq {model.max_seq}): shorten it, or load with a larger max_seq",
        )


def sampling_params(
    request: Generate, model: Model, length: int, seed: int, starts_in_think: bool
) -> SamplingParams:
    """The engine's side of the request; `max_tokens` is cut to the room that `length` prompt ids leave."""
    max_tokens = min(request.max_tokens, model.max_seq - length)
    return SamplingParams(
        max_tokens=max_tokens,
        seed=seed,
        temperature=request.temperature,
        top_p=request.top_p,
        top_k=request.top_k,
        min_p=request.min_p,
        repetition_penalty=request.repetition_penalty,
        presence_penalty=request.presence_penalty,
        frequency_penalty=request.frequency_penalty,
        stop_ids=tuple(request.stop_token_ids),
        eos_ids=() if request.ignore_eos else model.config.eos_token_ids,
        min_tokens=min(request.min_tokens, max_tokens),
        logprobs=request.logprobs,
        think_start_id=model.text.think_start_id,
        think_end_id=model.text.think_end_id,
        starts_in_think=starts_in_think,
        max_think_tokens=request.max_think_tokens,
        spec_k=0 if request.spec.mtp == "off" else request.spec.mtp_k,
    )
