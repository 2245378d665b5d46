"""The output stage: from tokens to what the caller reads, between collect and commit.

It detokenises, sees stop tokens and stop strings, and writes the ends it sees into the StepResult; the
scheduler never sees text.
"""

from __future__ import annotations

import dataclasses

import numpy as np

from jorca.engine.text import StopMatcher, TextStream, Tokenizer
from jorca.request import FinishReason, Request, RequestMetrics, RequestOutput, RequestRejected, TokenLogprobs
from jorca.scheduler import Event, ItemResult, Iteration, StepResult


class _Progress:
    """What one live request has produced so far."""

    def __init__(self, request: Request, stop_ids: frozenset[int], tokenizer: Tokenizer | None, now: float):
        self.request = request
        self.stop_ids = stop_ids
        # What becomes a RequestMetrics, as plain attributes: they change in every iteration.
        self.submitted_s = now
        self.first_scheduled_s: float | None = None
        self.first_token_s: float | None = None
        self.finished_s: float | None = None
        self.num_iterations = 0
        self.first_iteration: int | None = None
        self.last_iteration: int | None = None
        self.token_ids: list[int] = []
        wanted = request.params.logprobs
        self.logprobs: list[TokenLogprobs] | None = None if wanted is None else [*request.output_logprobs]
        wanted = request.params.prompt_logprobs
        self.prompt_logprobs: list[TokenLogprobs | None] | None = None if wanted is None else [None]
        self.logits: list[np.ndarray] = []
        self.text = ""
        self.fresh_text = ""
        self.stop_reason: str | int | None = None
        self._stream = None if tokenizer is None else TextStream(tokenizer)
        self._matcher = StopMatcher(request.params.stop)
        if request.output_ids:  # replayed, so that stop strings and text go on as if it had never stopped
            self.accept(request.output_ids)
            self.fresh_text = ""

    @property
    def has_prompt_logprobs(self) -> bool:
        """Whether the log-probabilities of the prompt are complete."""
        return self.prompt_logprobs is not None and len(self.prompt_logprobs) == len(self.request.prompt_ids)

    def accept(self, token_ids: tuple[int, ...]) -> int:
        """Takes tokens until one of them ends the request; returns how many were taken."""
        for count, token in enumerate(token_ids, start=1):
            self.token_ids.append(token)
            if token in self.stop_ids:
                self.stop_reason = token
                return count
            if self._stream is not None:
                self._match(self._stream.feed((token,)))
                if self.stop_reason is not None:
                    return count
        return len(token_ids)

    def close(self) -> None:
        """Gives out the text that was held back, once no more tokens come."""
        if self._stream is not None:
            self._match(self._stream.finish())
        self._emit(self._matcher.flush())

    def _match(self, text: str) -> None:
        if len(self.token_ids) <= self.request.params.min_tokens:
            self._emit(text)
            return
        self._emit(self._matcher.feed(text))
        if self._matcher.matched is not None:
            self.stop_reason = self._matcher.matched

    def _emit(self, text: str) -> None:
        self.text += text
        self.fresh_text += text

    def output(self, event: Event, *, sample: int) -> RequestOutput:
        """Returns a snapshot, with what is new since the last one."""
        fresh, self.fresh_text = self.fresh_text, ""
        done = event.finish_reason is not None
        return RequestOutput(
            request_id=self.request.id,
            sample=sample,
            prompt_ids=self.request.prompt_ids,
            token_ids=tuple(self.token_ids),
            text=self.text,
            finish_reason=event.finish_reason,
            stop_reason=self.stop_reason if event.finish_reason == FinishReason.STOP else None,
            error=event.error,
            logprobs=None if self.logprobs is None else tuple(self.logprobs),
            prompt_logprobs=None if self.prompt_logprobs is None else tuple(self.prompt_logprobs),
            logits=np.concatenate(self.logits) if done and self.logits else None,
            new_token_ids=event.token_ids,
            new_text=fresh,
            metrics=RequestMetrics(
                submitted_s=self.submitted_s,
                first_scheduled_s=self.first_scheduled_s,
                first_token_s=self.first_token_s,
                finished_s=self.finished_s,
                num_iterations=self.num_iterations,
                first_iteration=self.first_iteration,
                last_iteration=self.last_iteration,
            ),
        )


class OutputStage:
    """Follows every live request from submission to its end.

    Args:
      tokenizer: None if the checkpoint has none; outputs then have no text.
    """

    def __init__(self, tokenizer: Tokenizer | None):
        self._tokenizer = tokenizer
        self._live: dict[str, _Progress] = {}

    def open(self, request: Request, stop_ids: frozenset[int], now: float) -> None:
        """Begins to follow a request that the scheduler has accepted; `stop_ids` are tokens that end it.

        Raises:
          RequestRejected: The output that it came with has a stop token or a stop string in it.
        """
        progress = _Progress(request, stop_ids, self._tokenizer, now)
        if progress.stop_reason is not None:
            raise RequestRejected(
                f"output_ids must not hold an end, got one that stops at {progress.stop_reason!r} after "
                f"{len(progress.token_ids)} of {len(request.output_ids)} tokens; nothing is left to generate"
            )
        self._live[request.id] = progress

    def restarted(self) -> None:
        """Notes that all requests are fed again from their start."""
        for progress in self._live.values():
            if progress.prompt_logprobs is not None and not progress.has_prompt_logprobs:
                progress.prompt_logprobs = [None]

    def dispatched(self, iteration: Iteration, now: float) -> None:
        """Notes which requests ran for the first time."""
        for item in iteration.items:
            progress = self._live.get(item.request_id)
            if progress is not None and progress.first_iteration is None:
                progress.first_iteration, progress.first_scheduled_s = iteration.seq, now

    def read(self, iteration: Iteration, result: StepResult, now: float) -> StepResult:
        """Takes in what an iteration gave, before the scheduler commits it.

        Returns:
          The result with finish "stop" where a stop token or a stop string was seen, and without tokens
          behind it.
        """
        items = []
        for item, got in zip(iteration.items, result.items, strict=True):
            progress = self._live.get(item.request_id)
            # A request that was aborted in flight is followed no more; the scheduler drops its result.
            items.append(got if progress is None else _read_one(progress, iteration.seq, got, now))
        return StepResult(result.seq, tuple(items))

    def outputs(self, events: list[Event], now: float) -> list[RequestOutput]:
        """Turns the scheduler's events into outputs; requests that ended are forgotten."""
        outputs = []
        for event in events:
            progress = self._live[event.request_id]
            if event.finish_reason is not None:
                del self._live[event.request_id]
                progress.close()
                progress.finished_s = now
            outputs.append(progress.output(event, sample=progress.request.sample))
        return outputs


def _read_one(progress: _Progress, seq: int, got: ItemResult, now: float) -> ItemResult:
    progress.num_iterations += 1
    progress.last_iteration = seq
    params = progress.request.params
    if progress.prompt_logprobs is not None and not progress.has_prompt_logprobs:
        wanted = params.prompt_logprobs
        progress.prompt_logprobs += [TokenLogprobs(p.logprob, p.top[:wanted]) for p in got.prompt_logprobs]
    if not got.token_ids:
        return got
    if progress.first_token_s is None:
        progress.first_token_s = now
    taken = progress.accept(got.token_ids)
    if progress.logprobs is not None and got.logprobs is not None:
        wanted = params.logprobs
        progress.logprobs += [TokenLogprobs(p.logprob, p.top[:wanted]) for p in got.logprobs[:taken]]
    if got.logits is not None:
        progress.logits.append(got.logits[:taken])
    if progress.stop_reason is None:
        return got
    return dataclasses.replace(got, token_ids=got.token_ids[:taken], finish=FinishReason.STOP)
