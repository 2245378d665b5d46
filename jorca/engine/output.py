"""The output stage: from tokens to what the caller reads, between collect and commit.

It detokenises, sees stop tokens and stop strings, and writes the ends it sees into the StepResult; the
scheduler never sees text.
"""

from __future__ import annotations

import dataclasses

from jorca.frontend.text import StopMatcher, TextStream, Tokenizer
from jorca.output import RequestMetrics, RequestOutput, Transcript
from jorca.request import FinishReason, Request, RequestRejected, TokenLogprobs
from jorca.scheduler import Event, ItemResult, Iteration, StepResult


class _Progress:
    """One request on its way: its transcript, and what is needed to go on with it."""

    def __init__(self, request: Request, stop_ids: frozenset[int], tokenizer: Tokenizer | None, now: float):
        self.stop_ids = stop_ids
        # What becomes a RequestMetrics, as plain attributes: they change in every iteration.
        self.submitted_s = now
        self.first_scheduled_s: float | None = None
        self.first_token_s: float | None = None
        self.num_iterations = 0
        self.first_iteration: int | None = None
        self.last_iteration: int | None = None
        self.stop_reason: str | int | None = None
        self.has_ended = False
        self._stream = None if tokenizer is None else TextStream(tokenizer)
        self._matcher = StopMatcher(request.params.stop)
        self._min_tokens = request.params.min_tokens
        self._num_taken = 0
        self._fresh_text = ""
        # What it came with is replayed, so that stop strings and text go on as if it had never stopped.
        if self.take(request.output_ids) < len(request.output_ids) or self.stop_reason is not None:
            raise RequestRejected(
                f"output_ids must not hold an end, got one that stops at {self.stop_reason!r} after "
                f"{self._num_taken} of {len(request.output_ids)} tokens; nothing is left to generate"
            )
        self.transcript = Transcript(request, self._fresh_text)
        self._fresh_text = ""
        self._told_tokens = len(request.output_ids)
        self._told_pieces = self.transcript.num_pieces

    @property
    def wants_prompt_logprobs(self) -> bool:
        """Whether log-probabilities of the prompt are still missing."""
        logprobs = self.transcript.prompt_logprobs
        return logprobs is not None and len(logprobs) < len(self.transcript.request.prompt_ids)

    def take(self, token_ids: tuple[int, ...]) -> int:
        """Follows tokens until one of them ends the request; returns how many were followed."""
        for count, token in enumerate(token_ids, start=1):
            self._num_taken += 1
            if token in self.stop_ids:
                self.stop_reason = token
                return count
            if self._stream is not None:
                self._match(self._stream.feed((token,)))
                if self.stop_reason is not None:
                    return count
        return len(token_ids)

    def _match(self, text: str) -> None:
        if self._num_taken <= self._min_tokens:
            self._fresh_text += text
            return
        self._fresh_text += self._matcher.feed(text)
        if self._matcher.matched is not None:
            self.stop_reason = self._matcher.matched

    def _end(self) -> None:
        """Gives out the text that was held back, now that no more tokens come."""
        self.has_ended = True
        if self._stream is not None:
            self._match(self._stream.finish())
        self._fresh_text += self._matcher.flush()

    def output(self, event: Event, now: float) -> RequestOutput:
        """Returns what there is now, with what is new since the last one."""
        done = event.finish_reason is not None
        if done:
            self._end()
        transcript = self.transcript
        transcript.add_text(self._fresh_text)
        self._fresh_text = ""
        num_tokens, num_pieces = len(transcript.token_ids), transcript.num_pieces
        output = RequestOutput(
            transcript=transcript,
            num_tokens=num_tokens,
            num_new_tokens=num_tokens - self._told_tokens,
            num_pieces=num_pieces,
            num_new_pieces=num_pieces - self._told_pieces,
            finish_reason=event.finish_reason,
            stop_reason=self.stop_reason if event.finish_reason == FinishReason.STOP else None,
            error=event.error,
            metrics=RequestMetrics(
                self.submitted_s,
                self.first_scheduled_s,
                self.first_token_s,
                now if done else None,
                self.num_iterations,
                self.first_iteration,
                self.last_iteration,
            ),
        )
        self._told_tokens, self._told_pieces = num_tokens, num_pieces
        return output


class OutputProcessor:
    """The output stage of an engine that answers in text. See `jorca.engine.interfaces.OutputStage`.

    Args:
      tokenizer: None if the checkpoint has none; outputs then have no text.
    """

    def __init__(self, tokenizer: Tokenizer | None):
        self._tokenizer = tokenizer
        self._progress: dict[str, _Progress] = {}

    def open(self, request: Request, stop_ids: frozenset[int], now: float) -> None:
        """Begins to follow a request that the scheduler has accepted; `stop_ids` are tokens that end it.

        Raises:
          RequestRejected: The output that it came with has a stop token or a stop string in it.
        """
        self._progress[request.id] = _Progress(request, stop_ids, self._tokenizer, now)

    def close(self, request_id: str) -> None:
        """Forgets a request, if it is known."""
        self._progress.pop(request_id, None)

    def restarted(self) -> None:
        """Notes that all requests are fed again from their start."""
        for progress in self._progress.values():
            if progress.wants_prompt_logprobs:
                progress.transcript.prompt_logprobs = [None]

    def dispatched(self, iteration: Iteration, now: float) -> None:
        """Notes which requests ran for the first time."""
        for item in iteration.items:
            progress = self._progress[item.request_id]
            if progress.first_iteration is None:
                progress.first_iteration, progress.first_scheduled_s = iteration.seq, now

    def read(self, iteration: Iteration, result: StepResult, now: float) -> StepResult:
        """Takes in what an iteration gave, before the scheduler commits it.

        Returns:
          The result with finish "stop" where a stop token or a stop string was seen, and without tokens
          behind it.
        """
        items = [
            self._read_one(self._progress[item.request_id], iteration.seq, got, now)
            for item, got in zip(iteration.items, result.items, strict=True)
        ]
        return StepResult(result.seq, tuple(items))

    def outputs(self, events: list[Event], now: float) -> list[RequestOutput]:
        """Turns the scheduler's events into outputs."""
        return [self._progress[event.request_id].output(event, now) for event in events]

    @staticmethod
    def _read_one(progress: _Progress, seq: int, got: ItemResult, now: float) -> ItemResult:
        if progress.has_ended:  # aborted in flight: the scheduler drops its result
            return got
        progress.num_iterations += 1
        progress.last_iteration = seq
        transcript = progress.transcript
        params = transcript.request.params
        if transcript.prompt_logprobs is not None and progress.wants_prompt_logprobs:
            transcript.prompt_logprobs += _cut(got.prompt_logprobs, params.prompt_logprobs)
        if not got.token_ids:
            return got
        if progress.first_token_s is None:
            progress.first_token_s = now
        try:
            num_taken = progress.take(got.token_ids)
        except Exception as error:  # of a tokenizer: nobody else shall suffer from it
            return ItemResult(error=f"its tokens cannot be turned into text: {error!r}")
        transcript.token_ids += got.token_ids[:num_taken]
        if transcript.logprobs is not None and got.logprobs is not None:
            transcript.logprobs += _cut(got.logprobs[:num_taken], params.logprobs)
        if got.logits is not None:
            transcript.logits += list(got.logits[:num_taken])
        if progress.stop_reason is None:
            return got
        return dataclasses.replace(got, token_ids=got.token_ids[:num_taken], finish=FinishReason.STOP)


def _cut(logprobs: tuple[TokenLogprobs, ...], num_top: int | None) -> list[TokenLogprobs]:
    """Leaves as many alternatives as were asked for."""
    return [TokenLogprobs(p.logprob, p.top[:num_top]) for p in logprobs]
