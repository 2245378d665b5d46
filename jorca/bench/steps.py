"""The engine's compiled steps without its loop."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

import jax

from jorca.config import EngineConfig, ModelConfig
from jorca.engine.build import build_stages
from jorca.engine.packing import PackedBatch
from jorca.engine.records import make_record
from jorca.request import Request, SamplingParams
from jorca.scheduler import Item, Iteration, StepResult


class Steps:
    """The engine's compiled steps, fed with hand-made iterations and waited for one by one.

    Args:
      config: The model.
      params: Its weights by name.
      **options: Engine options, as `LLM` takes them.
    """

    def __init__(self, config: ModelConfig, params: Mapping[str, jax.Array], **options: Any) -> None:
        built = build_stages(config, params, EngineConfig.from_options(**options))
        self.limits, self.ladder = built.sizes.limits, built.sizes.ladder
        self._executor = built.executor
        self._packer = built.sizes.packer()
        request = Request(id="0", prompt_ids=(0,), params=SamplingParams(temperature=0, seed=0))
        self._record = make_record(request, stop_ids=frozenset(), vocab_size=config.vocab_size)

    def run(self, items: Sequence[Item]) -> StepResult:
        """Packs and runs an iteration of greedy items, and waits for its tokens."""
        return self._executor.collect(self._executor.dispatch(self._pack(items)))

    def program_text(self, items: Sequence[Item]) -> str:
        """Returns the optimised HLO of the program that an iteration of these items takes."""
        (stage,) = self._executor.stages
        return stage.programs[self._pack(items).bucket].as_text()

    def _pack(self, items: Sequence[Item]) -> PackedBatch:
        records = {item.request_id: self._record for item in items}
        return self._packer.pack(Iteration(0, tuple(items)), records)

    def item(self, number: int, start: int, token_ids: Sequence[int], first_page: int) -> Item:
        """Returns a request's item that feeds `token_ids` from position `start` on, in a run of pages."""
        end = start + len(token_ids)
        pages = tuple(range(first_page, first_page - (-end // self.limits.page_size)))
        return Item(str(number), number, start, len(token_ids), tuple(token_ids), pages, 1)
