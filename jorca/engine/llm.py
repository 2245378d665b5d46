"""`LLM`: a model that answers prompts, as a Python object."""

from __future__ import annotations

import collections
import dataclasses
import itertools
import sys
from collections.abc import Iterable, Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any, Self

import jax
import numpy as np

from jorca.checkpoint import open_checkpoint
from jorca.config import EngineConfig, ModelConfig
from jorca.engine.build import Weights, build_engine
from jorca.engine.programs import use_compilation_cache
from jorca.engine.text import Tokenizer
from jorca.engine.worker import work
from jorca.request import MAX_SEED, Request, RequestOutput, RequestRejected, SamplingParams, TokenLogprobs
from jorca.sharding.hosts import join_hosts

Prompt = str | Sequence[int]
"""Text, or token ids."""


class LLM:
    """A model with its engine, in this process. Not safe for several threads at once.

    With `coordinator`, it runs on the devices of several processes (see `jorca.config.HostsConfig`). Each
    makes it with the same arguments; in all but process 0 this does not return: they work for process 0 and
    exit when it exits. If one is lost, `step`, `generate` and `stream` raise a `JorcaError` that names it,
    as does any later use; this process will exit with `jorca.sharding.hosts.EXIT_LOST`.

    Example:
      llm = LLM("checkpoints/adder", max_batch_size=8)
      outputs = llm.generate(["8550", "1234"], SamplingParams(max_tokens=3, temperature=0))

    Args:
      path: A jorca checkpoint directory; or a folder or file that `jorca convert` reads, which is then
        converted while it is loaded, with a line in the log that says so.
      show_progress: Whether start-up draws a progress bar; None does so on a terminal.
      **options: Engine options, named as the fields of the configs in `jorca.config`: max_batch_size,
        max_batch_tokens, page_size, num_pages, attention and so on. An unknown one is a TypeError.
    """

    def __init__(self, path: str | Path, *, show_progress: bool | None = None, **options: Any):
        engine_config = EngineConfig.from_options(**options)
        join_hosts(engine_config.hosts)
        if engine_config.compilation_cache_dir is not None:
            use_compilation_cache(engine_config.compilation_cache_dir)
        opened = open_checkpoint(path)
        tokenizer = None if opened.tokenizer is None else Tokenizer(opened.tokenizer)
        self._start(opened.config, opened.read, tokenizer, engine_config, show_progress)

    @classmethod
    def from_params(
        cls,
        config: ModelConfig,
        params: Mapping[str, jax.Array],
        tokenizer: Tokenizer | None = None,
        *,
        show_progress: bool | None = None,
        **options: Any,
    ) -> Self:
        """Serves weights that are in memory, by name as `jorca.model.params.param_table` lists them.

        Args:
          config: The model.
          params: Its weights.
          tokenizer: None to work with token ids alone.
          show_progress: As for `LLM`.
          **options: As for `LLM`.
        """
        llm = cls.__new__(cls)
        engine_config = EngineConfig.from_options(**options)
        join_hosts(engine_config.hosts)
        llm._start(config, params, tokenizer, engine_config, show_progress)
        return llm

    def _start(
        self,
        config: ModelConfig,
        weights: Weights,
        tokenizer: Tokenizer | None,
        engine_config: EngineConfig,
        show_progress: bool | None,
    ) -> None:
        self.config = config
        self.engine_config = engine_config
        self.tokenizer = tokenizer
        show = sys.stderr.isatty() if show_progress is None else show_progress
        if jax.process_index() > 0:
            work(config, weights, engine_config, show_progress=show)
        self.engine = build_engine(config, weights, tokenizer, engine_config, show_progress=show)
        self._seeds = np.random.default_rng(engine_config.seed)
        self._ids = itertools.count()
        # Outputs of requests that were submitted one by one, while generate() was driving the loop.
        self._kept: collections.deque[RequestOutput] = collections.deque()

    @property
    def has_work(self) -> bool:
        """Whether `step` has something to do or to give."""
        return self.engine.has_work or bool(self._kept)

    def generate(
        self,
        prompts: Prompt | Sequence[Prompt],
        params: SamplingParams | Sequence[SamplingParams] | None = None,
    ) -> list[RequestOutput]:
        """Answers prompts and returns when all are done.

        Args:
          prompts: One prompt or several; each is text or token ids.
          params: One for all, or one each. None means `SamplingParams()`.

        Returns:
          Final outputs in the order of the prompts, `n` of them for each prompt.

        Raises:
          RequestRejected: A prompt can never run; then none has been run.
        """
        outputs: dict[str, RequestOutput | None] = {}
        ids = self._submit_all(prompts, params)
        outputs = dict.fromkeys(ids)
        for output in self._run(ids):
            if output.finished:
                outputs[output.request_id] = output
        return [output for output in outputs.values() if output is not None]

    def stream(
        self,
        prompts: Prompt | Sequence[Prompt],
        params: SamplingParams | Sequence[SamplingParams] | None = None,
    ) -> Iterator[RequestOutput]:
        """Answers prompts and yields an output whenever a request gains tokens or ends.

        All prompts are submitted before this returns. Closing the iterator aborts what is unfinished.

        Args:
          prompts: As for `generate`.
          params: As for `generate`.

        Returns:
          An iterator of outputs; `new_text` and `new_token_ids` hold what is new, `request_id` numbers the
          prompts' requests in the order in which they were given.

        Raises:
          RequestRejected: A prompt can never run; then none has been run.
        """
        return self._run(self._submit_all(prompts, params))

    def submit(
        self,
        prompt: Prompt,
        params: SamplingParams | None = None,
        *,
        request_id: str | None = None,
        output_ids: Sequence[int] = (),
        output_logprobs: Sequence[TokenLogprobs] = (),
    ) -> str:
        """Adds one request for those who drive the loop themselves with `step`.

        Args:
          prompt: Text or token ids.
          params: None means `SamplingParams()`; `n` must be 1.
          request_id: Unique among live requests; None makes one.
          output_ids: Output that the request already has, from an earlier engine say: it goes on as if it had
            never stopped. Give the seed it had.
          output_logprobs: Those of `output_ids`, if `params.logprobs` asks for any.

        Returns:
          The request's id.

        Raises:
          RequestRejected: It can never run.
        """
        params = SamplingParams() if params is None else params
        if params.n != 1:
            raise RequestRejected(f"n must be 1 for submit, got {params.n}; submit n times, or use generate")
        (request,) = self._requests(prompt, params, request_id)
        request = dataclasses.replace(
            request, output_ids=tuple(output_ids), output_logprobs=tuple(output_logprobs)
        )
        self.engine.submit(request)
        return request.id

    def step(self) -> list[RequestOutput]:
        """Runs one iteration of the loop; returns an output for each request that moved."""
        if self._kept:
            outputs = list(self._kept)
            self._kept.clear()
            return outputs
        return self.engine.step()

    def abort(self, request_id: str) -> RequestOutput | None:
        """Ends a request at once; returns its final output, or None if it is not live."""
        return self.engine.abort(request_id)

    def _requests(self, prompt: Prompt, params: SamplingParams, request_id: str | None) -> list[Request]:
        """Makes the n requests of a prompt, each with its seed."""
        prompt_ids = self._encode(prompt)
        if params.stop and self.tokenizer is None:
            raise RequestRejected(
                f"stop needs text, but this model has no tokenizer; got stop {params.stop!r}, "
                "use stop_token_ids"
            )
        request_id = f"request-{next(self._ids)}" if request_id is None else request_id
        seed = int(self._seeds.integers(MAX_SEED, endpoint=True)) if params.seed is None else params.seed
        return [
            Request(
                id=request_id if params.n == 1 else f"{request_id}-{i}",
                prompt_ids=prompt_ids,
                params=dataclasses.replace(params, seed=sample_seed(seed, i)),
                sample=i,
            )
            for i in range(params.n)
        ]

    def _encode(self, prompt: Prompt) -> tuple[int, ...]:
        if not isinstance(prompt, str):
            if not isinstance(prompt, Sequence | np.ndarray):
                raise RequestRejected(f"a prompt must be text or a list of token ids, got {prompt!r}")
            return tuple(prompt)
        if self.tokenizer is None:
            raise RequestRejected(f"this model has no tokenizer; give token ids, not the text {prompt!r}")
        return self.tokenizer.encode(prompt)

    def _submit_all(
        self,
        prompts: Prompt | Sequence[Prompt],
        params: SamplingParams | Sequence[SamplingParams] | None,
    ) -> list[str]:
        """Submits everything, or nothing if one prompt is refused."""
        pairs = _pair(prompts, params)
        ids: list[str] = []
        for index, (prompt, one) in enumerate(pairs):
            try:
                for request in self._requests(prompt, one, None):
                    self.engine.submit(request)
                    ids.append(request.id)
            except RequestRejected as error:
                for request_id in ids:
                    self.engine.abort(request_id)
                raise RequestRejected(f"prompts[{index}]: {error}") from error
        return ids

    def _run(self, ids: Iterable[str]) -> Iterator[RequestOutput]:
        """Drives the loop until the requests are done; on the way out aborts those that are not."""
        waiting = set(ids)
        try:
            while waiting:
                for output in self.engine.step():
                    if output.request_id not in waiting:
                        self._kept.append(output)
                        continue
                    if output.finished:
                        waiting.discard(output.request_id)
                    yield output
        finally:
            for request_id in waiting:
                self.engine.abort(request_id)


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
    if len(params) != len(many):
        raise RequestRejected(
            f"params must be one SamplingParams or one for each of the {len(many)} prompts, got {len(params)}"
        )
    return list(zip(many, params, strict=True))
