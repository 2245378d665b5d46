"""Helpers for tests that run the real compiled steps on a tiny model."""

from __future__ import annotations

from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from jorca.config import ModelConfig
from jorca.engine.executor import LocalExecutor, StageRunner
from jorca.engine.llm import LLM
from jorca.request import Request, SamplingParams
from oracle.numpy_gpt import random_params


def device_params(config: ModelConfig, seed: int = 0) -> dict[str, jax.Array]:
    """Random weights under which everything shows, in the model's dtype."""
    return {name: jnp.asarray(w, config.dtype) for name, w in random_params(config, seed).items()}


def tiny_llm(config: ModelConfig, params: dict[str, jax.Array] | None = None, **options: Any) -> LLM:
    """An LLM with random weights that returns its logits; a short ladder, since compiling takes its time."""
    options = {"min_bucket": 8, "bucket_ratio": 8.0, "max_batch_tokens": 64, "return_logits": True} | options
    return LLM.from_params(config, device_params(config) if params is None else params, **options)


def executor_of(llm: LLM) -> LocalExecutor:
    """The executor of real devices."""
    assert isinstance(llm.engine.executor, LocalExecutor)
    return llm.engine.executor


def stage_of(llm: LLM) -> StageRunner:
    """What runs the one stage of an engine, with its arrays and programs."""
    (stage,) = executor_of(llm).stages
    return stage


def greedy(name: str, prompt: list[int] | tuple[int, ...], max_tokens: int = 1, seed: int = 0) -> Request:
    """A greedy request."""
    params = SamplingParams(max_tokens=max_tokens, temperature=0, seed=seed)
    return Request(id=name, prompt_ids=tuple(prompt), params=params)


def run(llm: LLM, requests: list[Request]) -> dict[str, np.ndarray]:
    """Submits the requests in order and returns their logits [tokens, V] by id."""
    for request in requests:
        llm.engine.submit(request)
    logits = {}
    while llm.engine.has_work:
        for output in llm.engine.step():
            if output.finished:
                assert output.error is None
                logits[output.request_id] = output.logits
    return logits
