"""Running packed iterations on the devices of one process."""

from __future__ import annotations

import dataclasses
import itertools
from collections.abc import Callable, Mapping, Sequence
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from jorca.config import ModelConfig
from jorca.engine.packing import PackedBatch
from jorca.engine.programs import StageArrays, StagePrograms
from jorca.engine.step import StepOutputs
from jorca.request import TokenLogprobs
from jorca.scheduler import ItemResult, Iteration, StepResult
from jorca.sharding import Stage
from jorca.sharding.transfer import hand_over, place

Outputs = Mapping[str, np.ndarray]
"""What an iteration gave, on the host: fields of `StepOutputs` by name, as far as they are wanted."""


@dataclasses.dataclass(frozen=True, slots=True)
class Ticket:
    """An iteration under way.

    Attributes:
      packed: What was packed.
      outputs: What the last of this process's stages will give; rows, if the next one is elsewhere.
    """

    packed: PackedBatch
    outputs: StepOutputs | jax.Array


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
        self._is_alone = stage.whole.is_fully_addressable

    def run(self, packed: PackedBatch, x_td: jax.Array | None) -> Any:
        """Starts an iteration here; returns the rows for the next stage, or the outputs of the last.

        Args:
          packed: The iteration.
          x_td: The rows of the stage before, on this one's devices; None in the first.
        """
        if self.state is not None:
            for row, lists in packed.admitted:
                self.state = self._write_lists(
                    self.state, np.int32(row), lists.bias_ids_k, lists.bias_k, lists.banned_ids_j
                )
        program = self.programs[packed.bucket]
        buffer = packed.buffer if self._is_alone else place(packed.buffer, self.stage.whole)
        self.cache, self.state, out = program(self.params, self.cache, self.state, x_td, buffer)
        return out

    def reset(self) -> None:
        """Makes KV array and row state anew: a step that fails after donation has destroyed them."""
        self.cache, self.state = jax.tree.map(_renewed, (self.cache, self.state))

    def close(self) -> None:
        """Gives back the memory of KV array and row state, and lets go of weights and programs."""
        for x in jax.tree.leaves((self.cache, self.state)):
            if not x.is_deleted():
                x.delete()
        self.params, self.programs = {}, {}


class LocalExecutor:
    """Runs iterations on the devices of this process, stage after stage, without waiting in between.

    Args:
      model: The model.
      runners: The stages of this process at work, in the order in which an iteration passes them.
      stages: All stages, those of other processes too; None if there are no others.
      return_logits: Whether results carry the logits, if the programs return them.

    Attributes:
      stages: The runners.
      watch: Called, if set, with the iteration, the stage's index and the device arrays that it will
        return, as soon as the stage has been started; it must not wait for them.
    """

    def __init__(
        self,
        model: ModelConfig,
        runners: Sequence[StageRunner],
        *,
        stages: Sequence[Stage] | None = None,
        return_logits: bool = True,
    ):
        self.stages = tuple(runners)
        self.watch: Callable[[Iteration, int, Any], None] | None = None
        route = [runner.stage for runner in runners] if stages is None else stages
        runner_of = {runner.stage.index: runner for runner in runners}
        ways = [None, *(hand_over(source, target) for source, target in itertools.pairwise(route))]
        self._route = [(way, runner_of.get(stage.index)) for way, stage in zip(ways, route, strict=True)]
        self._model = model
        self._return_logits = return_logits

    def dispatch(self, packed: PackedBatch) -> Ticket:
        """Calls the bucket's program of each stage. The KV arrays are donated and come back in place.

        Raises:
          ValueError: An item feeds a token that the host has not seen, and that stands in the last of several
            stages, while the first would need it.
        """
        if len(self._route) > 1 and any(item.token_ids is None for item in packed.iteration.items):
            raise ValueError("with several stages, the first cannot feed tokens that only the last one has")
        like = jax.ShapeDtypeStruct((packed.bucket.num_tokens, self._model.d_model), self._model.dtype)
        out = x = None
        for way, runner in self._route:
            if way is not None:
                x = way(x, like)
            if runner is None:
                continue
            out = x = runner.run(packed, x)
            if self.watch is not None:
                self.watch(packed.iteration, runner.stage.index, out)
        assert out is not None, "a process without a stage cannot run anything"
        return Ticket(packed, out)

    def reset(self) -> None:
        """Makes all that the stages keep anew, after an iteration has failed."""
        for runner in self.stages:
            runner.reset()

    def close(self) -> None:
        """Gives back all that the stages hold."""
        for runner in self.stages:
            runner.close()

    def collect(self, ticket: Ticket) -> StepResult:
        """Waits for the tokens and hands them to their items."""
        return read_outputs(ticket.packed, self.fetch(ticket))

    def fetch(self, ticket: Ticket) -> Outputs:
        """Waits until this process has done its part; returns the outputs if its last stage is the last."""
        out = ticket.outputs
        if not isinstance(out, StepOutputs):
            jax.block_until_ready(out)
            return {}
        names = ["tokens_r2"]
        if ticket.packed.wants_logprobs:
            names += ["logprob_r", "top_logprobs_rk", "top_ids_rk"]
        if self._return_logits and out.logits_rv is not None:
            names.append("logits_rv")
        return {name: np.asarray(getattr(out, name)) for name in names}


def read_outputs(packed: PackedBatch, outputs: Outputs) -> StepResult:
    """Hands what an iteration gave to its items."""
    tokens_r2 = outputs["tokens_r2"].tolist()
    logits_rv = outputs.get("logits_rv")
    tops = _top_logprobs(outputs) if packed.wants_logprobs else None
    target_r = packed.target_r.tolist()
    results, row = [], 0
    for item in packed.iteration.items:
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
    return StepResult(packed.iteration.seq, tuple(results))


def _top_logprobs(outputs: Outputs) -> list[TokenLogprobs]:
    """Gathers the log-probabilities; the output stage cuts them to what each request asked for."""
    columns = (outputs[name].tolist() for name in ("logprob_r", "top_logprobs_rk", "top_ids_rk"))
    return [
        TokenLogprobs(logprob, tuple(zip(ids, values, strict=True)))
        for logprob, values, ids in zip(*columns, strict=True)
    ]


def _renewed(x: jax.Array) -> jax.Array:
    """Returns zeros like `x`, whose memory is free before they are made."""
    shape, dtype, sharding = x.shape, x.dtype, x.sharding
    if not x.is_deleted():
        x.delete()
    return jnp.zeros(shape, dtype, device=sharding)
