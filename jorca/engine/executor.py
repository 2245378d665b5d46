"""Running packed iterations: the interface, and the executor of one process."""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Sequence
from typing import Any, Protocol

import jax
import jax.numpy as jnp
import numpy as np

from jorca.engine.packing import PackedBatch
from jorca.engine.programs import StageArrays, StagePrograms
from jorca.engine.step import StepOutputs
from jorca.request import TokenLogprobs
from jorca.scheduler import ItemResult, Iteration, StepResult
from jorca.sharding import Stage


class Executor(Protocol):
    """Runs iterations in the order in which they are dispatched."""

    def dispatch(self, packed: PackedBatch) -> Any:
        """Starts an iteration and returns a ticket for it, without waiting for the device."""
        ...

    def collect(self, ticket: Any) -> StepResult:
        """Waits for the iteration of `ticket` and returns what it gave. Tickets come in order."""
        ...

    def reset(self) -> None:
        """Forgets whatever is in flight and begins with an empty KV array, after an iteration has failed."""
        ...


@dataclasses.dataclass(frozen=True, slots=True)
class Ticket:
    """An iteration under way: what was packed, and device arrays that will hold its outputs."""

    packed: PackedBatch
    outputs: StepOutputs


class StageRunner:
    """One stage at work: its arrays, and the programs that they go through.

    Args:
      stage: Where it runs.
      arrays: Its weights and what it keeps between iterations; owned by the runner from here on, since every
        step donates the latter.
      programs: Its compiled steps.

    Attributes:
      stage: Where it runs.
      params: The weights.
      programs: The executable of each bucket.
      cache: The KV array as it is now; each run replaces it by the array that comes back.
      state: The per-row state of the last stage, likewise.
    """

    def __init__(self, stage: Stage, arrays: StageArrays, programs: StagePrograms):
        self.stage = stage
        self.params = dict(arrays.params)
        self.cache, self.state = arrays.cache, arrays.state
        self.programs = programs.steps
        self._write_lists = programs.write_lists

    def run(self, packed: PackedBatch, x_td: jax.Array | None) -> Any:
        """Starts an iteration here; returns the rows for the next stage, or the outputs of the last."""
        if x_td is not None:
            x_td = jax.device_put(x_td, self.stage.whole)
        if self.state is not None:
            for row, lists in packed.admitted:
                self.state = self._write_lists(
                    self.state, np.int32(row), lists.bias_ids_k, lists.bias_k, lists.banned_ids_j
                )
        program = self.programs[packed.bucket]
        self.cache, self.state, out = program(self.params, self.cache, self.state, x_td, packed.buffer)
        return out

    def reset(self) -> None:
        """Makes KV array and row state anew: a step that fails after donation has destroyed them."""
        self.cache, self.state = jax.tree.map(_renewed, (self.cache, self.state))


class LocalExecutor:
    """Runs iterations on the devices of this process, stage after stage, without waiting in between.

    Args:
      stages: The runners, in the order in which an iteration passes them.
      return_logits: Whether results carry the logits, if the programs return them.

    Attributes:
      stages: The runners.
      watch: Called, if set, with the iteration, the stage's index and the device arrays that it will
        return, as soon as the stage has been started; it must not wait for them.
    """

    def __init__(self, stages: Sequence[StageRunner], *, return_logits: bool = True):
        self.stages = tuple(stages)
        self.watch: Callable[[Iteration, int, Any], None] | None = None
        self._return_logits = return_logits

    def dispatch(self, packed: PackedBatch) -> Ticket:
        """Calls the bucket's program of each stage. The KV arrays are donated and come back in place."""
        out = None
        for stage in self.stages:
            out = stage.run(packed, out)
            if self.watch is not None:
                self.watch(packed.iteration, stage.stage.index, out)
        assert isinstance(out, StepOutputs)
        return Ticket(packed, out)

    def reset(self) -> None:
        """Makes all that the stages keep anew, after an iteration has failed."""
        for stage in self.stages:
            stage.reset()

    def collect(self, ticket: Ticket) -> StepResult:
        """Waits for the tokens and hands them to their items."""
        outputs, iteration = ticket.outputs, ticket.packed.iteration
        tokens_r2 = np.asarray(outputs.tokens_r2).tolist()
        logits_rv = outputs.logits_rv if self._return_logits else None
        logits_rv = None if logits_rv is None else np.asarray(logits_rv)
        tops = _top_logprobs(outputs) if ticket.packed.wants_logprobs else None
        target_r = ticket.packed.target_r.tolist()
        results, row = [], 0
        for item in iteration.items:
            rows = range(row, row + item.num_logits)
            row += item.num_logits
            if not all(tokens_r2[r][1] for r in rows):
                error = f"the model's logits were not finite before position {item.end}"
                results.append(ItemResult(error=error))
                continue
            sampled = [r for r in rows if target_r[r] < 0]
            results.append(
                ItemResult(
                    tuple(tokens_r2[r][0] for r in sampled),
                    logprobs=None if tops is None else tuple(tops[r] for r in sampled),
                    prompt_logprobs=() if tops is None else tuple(tops[r] for r in rows if target_r[r] >= 0),
                    logits=None if logits_rv is None else logits_rv[sampled],
                )
            )
        return StepResult(iteration.seq, tuple(results))


def _renewed(x: jax.Array) -> jax.Array:
    """Returns zeros like `x`, whose memory is free before they are made."""
    shape, dtype, sharding = x.shape, x.dtype, x.sharding
    if not x.is_deleted():
        x.delete()
    return jnp.zeros(shape, dtype, device=sharding)


def _top_logprobs(outputs: StepOutputs) -> list[TokenLogprobs]:
    """Brings the log-probabilities over; the output stage cuts them to what each request asked for."""
    chosen = np.asarray(outputs.logprob_r).tolist()
    values, ids = np.asarray(outputs.top_logprobs_rk).tolist(), np.asarray(outputs.top_ids_rk).tolist()
    return [
        TokenLogprobs(logprob, tuple(zip(i, v, strict=True)))
        for logprob, v, i in zip(chosen, values, ids, strict=True)
    ]
