"""`LLM`: a model that answers prompts, as a Python object."""

from __future__ import annotations

import sys
import weakref
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any, Self

import jax

from jorca.checkpoint import OpenCheckpoint, open_checkpoint
from jorca.config import ConfigError, EngineConfig, ModelConfig
from jorca.engine.build import Weights, build_engine
from jorca.engine.handle import Handle
from jorca.engine.programs import use_compilation_cache
from jorca.engine.sizing import derive_sizes
from jorca.engine.worker import work
from jorca.frontend.inputs import InputProcessor, Prompt
from jorca.frontend.text import Tokenizer
from jorca.output import RequestOutput
from jorca.request import SamplingParams, TokenLogprobs
from jorca.scheduler import RecordingScheduler, Scheduler, SchedulerLimits, policy_of
from jorca.sharding.hosts import join_hosts


class LLM:
    """A model with its engine, in this process. Not safe for several threads at once.

    `with LLM(...) as llm:` closes it at the end of the block, as `close` does.

    With `coordinator`, it runs on the devices of several processes (see `jorca.config.HostsConfig`). Each
    makes it with the same arguments; in all but process 0 this does not return: they work for process 0 and
    exit when it closes or exits. If one is lost, `step`, `generate` and `stream` raise a `JorcaError` that
    names it, as does any later use; this process will exit with `jorca.sharding.hosts.EXIT_LOST`.

    Example:
      llm = LLM("checkpoints/adder", max_batch_size=8)
      outputs = llm.generate(["8550", "1234"], SamplingParams(max_tokens=3, temperature=0))

    Args:
      path: A jorca checkpoint directory; or a folder or file that `jorca convert` reads, which is then
        converted while it is loaded, with a line in the log that says so; or what `open_checkpoint` gave.
      record: A file to be made, to which the scheduler's calls are written as JSON lines, one each, for
        `jorca.scheduler.replay`; None writes nothing.
      show_progress: Whether start-up draws a progress bar; None does so on a terminal.
      **options: Engine options, named as the fields of the configs in `jorca.config`: max_batch_size,
        max_batch_tokens, page_size, num_pages, attention and so on. An unknown one is a TypeError.
    """

    def __init__(
        self,
        path: str | Path | OpenCheckpoint,
        *,
        record: str | Path | None = None,
        show_progress: bool | None = None,
        **options: Any,
    ):
        engine_config = EngineConfig.from_options(**options)
        join_hosts(engine_config.hosts)
        if engine_config.compilation_cache_dir is not None:
            use_compilation_cache(engine_config.compilation_cache_dir)
        opened = path if isinstance(path, OpenCheckpoint) else open_checkpoint(path)
        tokenizer = None if opened.tokenizer is None else Tokenizer(opened.tokenizer)
        self._start(opened.config, opened.read, tokenizer, engine_config, record, show_progress)

    @classmethod
    def from_params(
        cls,
        config: ModelConfig,
        params: Mapping[str, jax.Array],
        tokenizer: Tokenizer | None = None,
        *,
        record: str | Path | None = None,
        show_progress: bool | None = None,
        **options: Any,
    ) -> Self:
        """Serves weights that are in memory, by name as `jorca.model.params.param_table` lists them.

        Args:
          config: The model.
          params: Its weights. Those that lie where they shall are not copied, and stay the caller's.
          tokenizer: None to work with token ids alone.
          record: As for `LLM`, like the others.
          show_progress: As for `LLM`.
          **options: As for `LLM`.
        """
        llm = cls.__new__(cls)
        engine_config = EngineConfig.from_options(**options)
        join_hosts(engine_config.hosts)
        llm._start(config, params, tokenizer, engine_config, record, show_progress)
        return llm

    def _start(
        self,
        config: ModelConfig,
        weights: Weights,
        tokenizer: Tokenizer | None,
        engine_config: EngineConfig,
        record: str | Path | None,
        show_progress: bool | None,
    ) -> None:
        self.config = config
        self.engine_config = engine_config
        self.tokenizer = tokenizer
        show = sys.stderr.isatty() if show_progress is None else show_progress
        if jax.process_index() > 0:
            work(config, weights, engine_config, show_progress=show)
        self._close_record: Callable[[], object] = lambda: None
        make_scheduler = None if record is None else self._recording(Path(record))
        self.inputs = InputProcessor(
            config, tokenizer, derive_sizes(config, engine_config).limits, seed=engine_config.seed
        )
        self.engine = build_engine(
            config, weights, tokenizer, engine_config, make_scheduler=make_scheduler, show_progress=show
        )
        self.inputs.limits = self.engine.scheduler.limits

    def _recording(self, path: Path) -> Callable[[SchedulerLimits], Scheduler]:
        """Returns what makes a scheduler that writes to a new file, which is closed with this object."""
        if path.exists() or not path.parent.is_dir():
            problem = "exists already" if path.exists() else "lies in no folder"
            raise ConfigError(
                f"record must be a file to be made, got {path}, which {problem}; choose another"
            )

        def make(limits: SchedulerLimits) -> Scheduler:
            file = path.open("x", encoding="utf-8", buffering=1)  # whole lines, should this process die
            self._close_record = weakref.finalize(self, file.close)
            return RecordingScheduler(limits, policy_of(self.engine_config.scheduler), write=file.write)

        return make

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    def close(self) -> None:
        """Aborts what is unfinished, gives back the devices' memory, and lets workers in other processes end.

        Weights that were given as arrays stay the caller's. Any later use raises a JorcaError; closing again
        does nothing.
        """
        self.engine.close()
        self._close_record()

    @property
    def has_work(self) -> bool:
        """Whether `step` has something to do or to give."""
        return self.engine.has_work

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
        requests = self.inputs.requests(prompts, params)
        with Handle(self.engine, requests) as handle:
            finals = {output.request_id: output for output in handle if output.finished}
        return [finals[request.id] for request in requests]

    def stream(
        self,
        prompts: Prompt | Sequence[Prompt],
        params: SamplingParams | Sequence[SamplingParams] | None = None,
    ) -> Handle:
        """Answers prompts and gives an output whenever a request gains tokens or ends.

        All prompts are submitted before this returns. Several streams may be read in turns or inside each
        other, with `generate` and `step` in between. Outputs that are not read meanwhile are joined, one for
        each request. Closing a stream, or letting go of it, aborts what is unfinished.

        Args:
          prompts: As for `generate`.
          params: As for `generate`.

        Returns:
          An iterator of outputs; `new_text` and `new_token_ids` hold what is new, `request_id` numbers the
          prompts' requests in the order in which they were given.

        Raises:
          RequestRejected: A prompt can never run; then none has been run.
        """
        return Handle(self.engine, self.inputs.requests(prompts, params))

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
            never stopped. Give the seed it had, which its outputs tell.
          output_logprobs: Those of `output_ids`, if `params.logprobs` asks for any.

        Returns:
          The request's id.

        Raises:
          RequestRejected: It can never run.
        """
        request = self.inputs.request(
            prompt, params, request_id=request_id, output_ids=output_ids, output_logprobs=output_logprobs
        )
        self.engine.submit(request)
        return request.id

    def step(self) -> list[RequestOutput]:
        """Returns outputs of requests that were submitted one by one, and only those.

        Those that came while streams were read are given first, joined for each request; if there are none,
        one turn of the loop is run.
        """
        return self.engine.step()

    def abort(self, request_id: str) -> RequestOutput | None:
        """Ends a request at once; returns its final output, or None if it is not live.

        If it belongs to a stream, that gives the output, too.
        """
        return self.engine.abort(request_id)
