"""Requests, parameters and outputs as plain values, fit for JSON or msgpack: for other processes and logs.

Each dict says which version of the form it is in. Fields that have their default are left out. An output
carries what is new and where that belongs; whoever receives it keeps the request's `Transcript`, to which it
is added.
"""

from __future__ import annotations

import dataclasses
from typing import Any, Final

from jorca.output import RequestMetrics, RequestOutput, Transcript
from jorca.request import FinishReason, JorcaError, Request, SamplingParams, TokenLogprobs

VERSION: Final = 1
"""Of the form."""


class WireError(JorcaError, ValueError):
    """A message is of another version, or not what has to come next."""


def params_to_dict(params: SamplingParams) -> dict[str, Any]:
    """Returns parameters as plain values."""
    return {"version": VERSION, **_changed_fields(params)}


def params_from_dict(data: dict[str, Any]) -> SamplingParams:
    """Inverse of `params_to_dict`.

    Raises:
      WireError: The version is another.
      TypeError: `data` has a field that parameters do not have.
      ValueError: A value breaks its field's rule.
    """
    return SamplingParams(**_fields(data))


def request_to_dict(request: Request) -> dict[str, Any]:
    """Returns a request as plain values."""
    data = {"version": VERSION, **_changed_fields(request)}
    if "params" in data:
        data["params"] = _changed_fields(request.params)
    if "output_logprobs" in data:
        data["output_logprobs"] = list(map(_plain_logprobs, request.output_logprobs))
    return data


def request_from_dict(data: dict[str, Any]) -> Request:
    """Inverse of `request_to_dict`.

    Raises:
      WireError: The version is another.
      TypeError: `data` has a field that requests do not have.
      ValueError: A value breaks its field's rule.
    """
    fields = _fields(data)
    fields["params"] = SamplingParams(**fields.get("params", {}))
    fields["output_logprobs"] = tuple(map(_read_logprobs, fields.get("output_logprobs", ())))
    return Request(**fields)


def output_to_dict(output: RequestOutput) -> dict[str, Any]:
    """Returns what is new in an output as plain values. Logits stay in the process that made them."""
    start = output.num_tokens - output.num_new_tokens
    first_piece = output.num_pieces - output.num_new_pieces
    data: dict[str, Any] = {
        "version": VERSION,
        "request_id": output.request_id,
        "seed": output.seed,
        "position": start,
        "token_ids": list(output.new_token_ids),
        "text_position": output.transcript.num_chars(first_piece),
        "text": output.new_text,
        "metrics": output.metrics._asdict(),
    }
    if output.transcript.logprobs is not None:
        data["logprobs"] = list(map(_plain_logprobs, output.transcript.logprobs[start : output.num_tokens]))
    if output.transcript.prompt_logprobs is not None and start == len(output.transcript.request.output_ids):
        data["prompt_logprobs"] = list(map(_plain_logprobs, output.prompt_logprobs or ()))
    if output.finish_reason is not None:
        end = {"stop_reason": output.stop_reason, "error": output.error}
        data |= {"finish_reason": output.finish_reason.value, **end}
    return data


def output_from_dict(data: dict[str, Any], transcript: Transcript) -> RequestOutput:
    """Inverse of `output_to_dict`, for outputs in the order in which they were made.

    Args:
      data: What was sent.
      transcript: That of the request here, so far; what is new is added to it.

    Raises:
      WireError: The version is another, or this output does not follow on the transcript.
    """
    fields = _fields(data)
    text_position = transcript.num_chars(transcript.num_pieces)
    here = transcript.request.id, len(transcript.token_ids), text_position
    sent = fields["request_id"], fields["position"], fields["text_position"]
    if here != sent:
        raise WireError(
            "an output must follow on its transcript, which is (request, tokens, characters) "
            f"{here}, got {sent}; was one lost or given twice?"
        )
    num_pieces = transcript.num_pieces
    transcript.token_ids += fields["token_ids"]
    transcript.add_text(fields["text"])
    if transcript.logprobs is not None:
        transcript.logprobs += map(_read_logprobs, fields["logprobs"])
    if "prompt_logprobs" in fields:
        transcript.prompt_logprobs = [p and _read_logprobs(p) for p in fields["prompt_logprobs"]]
    reason = fields.get("finish_reason")
    return RequestOutput(
        transcript=transcript,
        num_tokens=len(transcript.token_ids),
        num_new_tokens=len(fields["token_ids"]),
        num_pieces=transcript.num_pieces,
        num_new_pieces=transcript.num_pieces - num_pieces,
        metrics=RequestMetrics(**fields["metrics"]),
        finish_reason=None if reason is None else FinishReason(reason),
        stop_reason=fields.get("stop_reason"),
        error=fields.get("error"),
    )


def _fields(data: dict[str, Any]) -> dict[str, Any]:
    """Returns a copy of a message without its version, which must be ours."""
    if not isinstance(data, dict) or data.get("version") != VERSION:
        got = data.get("version") if isinstance(data, dict) else data
        raise WireError(f"version must be {VERSION}, got {got!r}; both sides need the same jorca")
    return {name: value for name, value in data.items() if name != "version"}


def _changed_fields(record: Any) -> dict[str, Any]:
    values = ((f, getattr(record, f.name)) for f in dataclasses.fields(record))
    return {f.name: _plain(v) for f, v in values if v != f.default}


def _plain(value: Any) -> Any:
    return list(map(_plain, value)) if isinstance(value, tuple) else value


def _plain_logprobs(logprobs: TokenLogprobs | None) -> list[Any] | None:
    return None if logprobs is None else [logprobs.logprob, _plain(logprobs.top)]


def _read_logprobs(data: Any) -> TokenLogprobs:
    logprob, top = data
    return TokenLogprobs(logprob, tuple(map(tuple, top)))
