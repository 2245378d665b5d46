"""Running packed iterations: the interface, and the executor of one process."""

from __future__ import annotations

import dataclasses
from collections.abc import Mapping
from typing import Any, Protocol

import jax
import jax.numpy as jnp
import numpy as np

from jorca.attention import KVCache
from jorca.engine.packing import PackedBatch
from jorca.engine.programs import Programs
from jorca.engine.step import StepOutputs
from jorca.model.adjust import RowState
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

    def reset(self) -> None:
        """Forgets whatever is in flight and begins with an empty KV array, after an iteration has failed."""
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
      return_logits: Whether results carry the logits, if the programs return them.

    Attributes:
      params: The weights.
      programs: The executable of each bucket.
      cache: The KV array as it is now; each dispatch replaces it by the array that comes back.
      state: The per-row state, likewise.
    """

    def __init__(
        self,
        params: Mapping[str, jax.Array],
        cache: KVCache,
        state: RowState,
        programs: Programs,
        *,
        return_logits: bool = True,
    ):
        self.params = dict(params)
        self.programs = programs.compiled
        self._write_lists = programs.write_lists
        self._return_logits = return_logits
        self.cache = cache
        self.state = state

    def dispatch(self, packed: PackedBatch) -> Ticket:
        """Calls the bucket's program. The KV array is donated and comes back in place."""
        for row, lists in packed.admitted:
            self.state = self._write_lists(
                self.state, np.int32(row), lists.bias_ids_k, lists.bias_k, lists.banned_ids_j
            )
        program = self.programs[packed.bucket]
        self.cache, self.state, outputs = program(self.params, self.cache, self.state, packed.buffer)
        return Ticket(packed, outputs)

    def reset(self) -> None:
        """Makes KV array and row state anew: a step that fails after donation has destroyed them."""
        self.cache, self.state = jax.tree.map(_renewed, (self.cache, self.state))

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
