"""From prompts to requests: text to ids, checks against the model, seeds, samples."""

from __future__ import annotations

import dataclasses
import itertools
from collections.abc import Sequence
from typing import Any

import numpy as np

from jorca.config import ModelConfig
from jorca.frontend.text import Tokenizer
from jorca.request import MAX_SEED, Request, RequestRejected, SamplingParams, TokenLogprobs
from jorca.scheduler import SchedulerLimits

Prompt = str | Sequence[int]
"""Text, or token ids."""


class InputProcessor:
    """Makes requests of prompts, and refuses what a model or its limits can never run. Needs no engine.

    Args:
      model: The model's config.
      tokenizer: None to take token ids alone.
      limits: What is known of an engine's limits: those of `jorca.engine.sizing.derive_sizes` until the
        engine is there, then its own.
      seed: Where the seeds of unseeded requests come from; None takes it from the system.

    Attributes:
      model: The model's config.
      tokenizer: The tokenizer, if there is one.
      limits: As given; to be replaced by those of the engine once it is there.
    """

    def __init__(
        self,
        model: ModelConfig,
        tokenizer: Tokenizer | None,
        limits: SchedulerLimits,
        *,
        seed: int | None = None,
    ):
        self.model, self.tokenizer, self.limits = model, tokenizer, limits
        self._seeds = np.random.default_rng(seed)
        self._ids = itertools.count()

    def requests(
        self,
        prompts: Prompt | Sequence[Prompt],
        params: SamplingParams | Sequence[SamplingParams] | None = None,
    ) -> list[Request]:
        """Returns the requests of some prompts, `n` next to each other for each.

        Args:
          prompts: One prompt or several; each is text or token ids.
          params: One for all, or one each. None means `SamplingParams()`.

        Raises:
          RequestRejected: A prompt can never run, or there are not as many params as prompts.
        """
        requests = []
        for index, (prompt, one) in enumerate(_pair(prompts, params)):
            try:
                requests += self._samples(prompt, one)
            except RequestRejected as error:
                raise RequestRejected(f"prompts[{index}]: {error}") from error
        return requests

    def request(
        self,
        prompt: Prompt,
        params: SamplingParams | None = None,
        *,
        request_id: str | None = None,
        output_ids: Sequence[int] = (),
        output_logprobs: Sequence[TokenLogprobs] = (),
    ) -> Request:
        """Returns the request of one prompt; for the arguments see `jorca.LLM.submit`.

        Raises:
          RequestRejected: It can never run.
        """
        params = SamplingParams() if params is None else params
        if isinstance(params, SamplingParams) and params.n != 1:
            raise RequestRejected(f"n must be 1 for submit, got {params.n}; submit n times, or use generate")
        (request,) = self._samples(prompt, params, request_id, tuple(output_ids), tuple(output_logprobs))
        return request

    def _samples(
        self,
        prompt: Prompt,
        params: SamplingParams,
        request_id: str | None = None,
        output_ids: tuple[int, ...] = (),
        output_logprobs: tuple[TokenLogprobs, ...] = (),
    ) -> list[Request]:
        """Makes the n requests of a prompt, each with its seed."""
        if not isinstance(params, SamplingParams):
            raise RequestRejected(f"params must be a SamplingParams, got {params!r}")
        prompt_ids = self._encode(prompt)
        if params.stop and self.tokenizer is None:
            raise RequestRejected(
                f"stop needs text, but this model has no tokenizer; got stop {params.stop!r}, "
                "use stop_token_ids"
            )
        request_id = f"request-{next(self._ids)}" if request_id is None else request_id
        seed = int(self._seeds.integers(MAX_SEED, endpoint=True)) if params.seed is None else params.seed
        requests = []
        for i in range(params.n):
            request = Request(
                id=request_id if params.n == 1 else f"{request_id}-{i}",
                prompt_ids=prompt_ids,
                params=dataclasses.replace(params, seed=sample_seed(seed, i)),
                output_ids=output_ids,
                output_logprobs=output_logprobs,
                sample=i,
            )
            request, _ = check_request(request, self.model)
            self.limits.check(request)
            requests.append(request)
        return requests

    def _encode(self, prompt: Prompt) -> tuple[int, ...]:
        if not isinstance(prompt, str):
            if not isinstance(prompt, Sequence | np.ndarray):
                raise RequestRejected(f"a prompt must be text or a list of token ids, got {prompt!r}")
            return tuple(prompt)
        if self.tokenizer is None:
            raise RequestRejected(f"this model has no tokenizer; give token ids, not the text {prompt!r}")
        return self.tokenizer.encode(prompt)


def check_request(request: Request, model: ModelConfig) -> tuple[Request, frozenset[int]]:
    """Checks a request against a model.

    Returns:
      The request, `max_tokens` a number; and the tokens that end it: its own stop tokens, and the model's
      end-of-text unless it is ignored.

    Raises:
      RequestRejected: An id is out of range (JAX would clamp it in silence), nothing could be chosen, or the
        context has no room.
    """
    params = request.params
    for name, ids in (
        ("prompt_ids", request.prompt_ids),
        ("output_ids", request.output_ids),
        ("stop_token_ids", params.stop_token_ids),
        ("logit_bias", list(dict(params.logit_bias))),
    ):
        if ids and max(ids) >= model.vocab_size:
            raise RequestRejected(
                f"{name} must be below vocab_size {model.vocab_size}, got {max(ids)}; "
                "was it made with another tokenizer?"
            )
    stop_ids = frozenset(params.stop_token_ids)
    if model.eos_token_id is not None and not params.ignore_eos:
        stop_ids |= {model.eos_token_id}
    if params.min_tokens and len(stop_ids) == model.vocab_size:
        raise RequestRejected(
            f"min_tokens must be 0 if every token ends the request, got {params.min_tokens}; "
            "name fewer stop_token_ids"
        )
    return request.to_end_of(model.max_positions), stop_ids


def sample_seed(seed: int, sample: int) -> int:
    """Returns the seed of a prompt's sample: the given one for the first, mixed with the number otherwise."""
    if sample == 0:
        return seed
    mixed = np.random.SeedSequence([seed, sample]).generate_state(1, np.uint64)[0]
    return int(mixed) & MAX_SEED


def _pair(
    prompts: Prompt | Sequence[Prompt], params: SamplingParams | Sequence[SamplingParams] | None
) -> list[tuple[Prompt, SamplingParams]]:
    """Lines prompts up with their parameters."""
    if not isinstance(prompts, str | Sequence | np.ndarray):
        raise RequestRejected(f"prompts must be text, token ids or a list of these, got {prompts!r}")
    single = isinstance(prompts, str) or (
        len(prompts) > 0 and not isinstance(prompts[0], str | Sequence | np.ndarray)
    )
    many: list[Any] = [prompts] if single else list(prompts)
    if params is None or isinstance(params, SamplingParams):
        return [(prompt, params or SamplingParams()) for prompt in many]
    if not isinstance(params, Sequence) or len(params) != len(many):
        got = len(params) if isinstance(params, Sequence) else repr(params)
        raise RequestRejected(
            f"params must be one SamplingParams or one for each of the {len(many)} prompts, got {got}"
        )
    return list(zip(many, params, strict=True))
