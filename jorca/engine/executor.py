"""Running packed iterations: the interface, and the executor of one process."""

from __future__ import annotations

import dataclasses
from collections.abc import Mapping
from typing import Any, Protocol

import jax
import numpy as np

from jorca.attention import KVCache
from jorca.engine.packing import PackedBatch
from jorca.engine.programs import Programs
from jorca.engine.step import RowState, StepOutputs
from jorca.request import TokenLogprobs
from jorca.scheduler import ItemResult, StepResult


class Executor(Protocol):
    """Runs iterations in the order in which they are dispatched."""

    def dispatch(self, packed: PackedBatch) -> Any:
        """Starts an iteration and returns a ticket for it, without waiting for the device."""
        ...

    def collect(self, ticket: Any) -> StepResult:
        """Waits for the iteration of `ticket` and returns what it gave. Tickets come in order."""
        ...


@dataclasses.dataclass(frozen=True, slots=True)
class Ticket:
    """An iteration under way: what was packed, and device arrays that will hold its outputs."""

    packed: PackedBatch
    outputs: StepOutputs


class LocalExecutor:
    """Runs iterations on the devices of this process.

    Args:
      params: Weights by name, on the device.
      cache: The KV array; owned by the executor from here on, since every step donates it.
      state: The per-row state; likewise.
      programs: The compiled steps.

    Attributes:
      params: The weights.
      programs: The executable of each bucket.
      cache: The KV array as it is now; each dispatch replaces it by the array that comes back.
      state: The per-row state, likewise.
    """

    def __init__(self, params: Mapping[str, jax.Array], cache: KVCache, state: RowState, programs: Programs):
        self.params = dict(params)
        self.programs = programs.compiled
        self.cache = cache
        self.state = state

    def dispatch(self, packed: PackedBatch) -> Ticket:
        """Calls the bucket's program. The KV array is donated and comes back in place."""
        program = self.programs[packed.bucket]
        self.cache, self.state, outputs = program(self.params, self.cache, self.state, packed.buffer)
        return Ticket(packed, outputs)

    def collect(self, ticket: Ticket) -> StepResult:
        """Waits for the tokens and hands them to their items."""
        outputs, iteration = ticket.outputs, ticket.packed.iteration
        tokens_r2 = np.asarray(outputs.tokens_r2).tolist()
        logits_rv = None if outputs.logits_rv is None else np.asarray(outputs.logits_rv)
        tops = _top_logprobs(outputs) if ticket.packed.wants_logprobs else None
        results, row = [], 0
        for item in iteration.items:
            if not item.num_logits:
                results.append(ItemResult())
                continue
            token, finite = tokens_r2[row]
            if finite:
                results.append(
                    ItemResult(
                        (token,),
                        logprobs=None if tops is None else (tops[row],),
                        logits=None if logits_rv is None else logits_rv[row : row + 1],
                    )
                )
            else:
                results.append(
                    ItemResult(error=f"the model's logits were not finite at position {item.end - 1}")
                )
            row += 1
        return StepResult(iteration.seq, tuple(results))


def _top_logprobs(outputs: StepOutputs) -> list[TokenLogprobs]:
    """Brings the log-probabilities over; the output stage cuts them to what each request asked for."""
    chosen = np.asarray(outputs.logprob_r).tolist()
    values, ids = np.asarray(outputs.top_logprobs_rk).tolist(), np.asarray(outputs.top_ids_rk).tolist()
    return [
        TokenLogprobs(logprob, tuple(zip(i, v, strict=True)))
        for logprob, v, i in zip(chosen, values, ids, strict=True)
    ]
