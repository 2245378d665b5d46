"""What a row of logits may be sampled to, written from the definition in numpy float64.

The order and the ties are those that `jorca.request.SamplingParams` states. Logits are finite.
Holtzman et al., The Curious Case of Neural Text Degeneration, 2020 (top-p); Fan et al., Hierarchical
Neural Story Generation, 2018 (top-k); Nguyen et al., Turning Up the Heat, 2024 (min-p).
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

import numpy as np

Array = np.ndarray[Any, Any]


def kept(logits: Array, temperature: float, top_k: int = 0, top_p: float = 1.0, min_p: float = 0.0) -> Array:
    """Returns which of the V tokens may be drawn, bool [V], for one row of logits [V].

    Args:
      logits: One row, [V].
      temperature: At least 0; 0 keeps the best token alone and reads none of the filters.
      top_k: Keep so many of the most probable tokens; 0 keeps all.
      top_p: Then keep the smallest set of most probable tokens whose share of what is left reaches this.
      min_p: Then keep tokens at least this times as probable as the best.
    """
    best_first = np.argsort(-np.asarray(logits, np.float64), kind="stable")  # ties by lowest id
    if temperature == 0:
        best_first = best_first[:1]
    else:
        scaled = np.asarray(logits, np.float64) / temperature
        if top_k > 0:
            best_first = best_first[:top_k]
        if top_p < 1:
            share = _softmax(scaled[best_first])
            reached = np.cumsum(share) >= top_p
            if reached.any():  # rounding may leave the whole sum just below p: then all are needed
                best_first = best_first[: np.argmax(reached) + 1]
        relative = np.exp(scaled[best_first] - scaled[best_first[0]])
        best_first = best_first[relative >= min_p]
    mask = np.zeros(len(logits), bool)
    mask[best_first] = True
    return mask


def probabilities(
    logits: Array, temperature: float, top_k: int = 0, top_p: float = 1.0, min_p: float = 0.0
) -> Array:
    """Returns the probability of each token, float64 [V]; what is not `kept` has exactly 0."""
    mask = kept(logits, temperature, top_k, top_p, min_p)
    result = np.zeros(len(logits))
    result[mask] = _softmax(np.asarray(logits, np.float64)[mask] / (temperature or 1))
    return result


def _softmax(x: Array) -> Array:
    weights = np.exp(x - x.max())
    return weights / weights.sum()


def adjusted(
    logits: Array,
    prompt_ids: Sequence[int],
    output_ids: Sequence[int],
    *,
    repetition_penalty: float = 1.0,
    frequency_penalty: float = 0.0,
    presence_penalty: float = 0.0,
    logit_bias: Mapping[int, float] | None = None,
    banned_ids: Sequence[int] = (),
    min_tokens: int = 0,
) -> Array:
    """Returns the logits that tokens are chosen from, float64 [V], one token after the other by definition.

    Keskar et al., CTRL, 2019 (repetition); OpenAI's API reference (frequency and presence).

    Args:
      logits: The model's, [V].
      prompt_ids: The prompt.
      output_ids: The output so far.
      repetition_penalty: Divides positive logits and multiplies negative ones of all tokens that were seen.
      frequency_penalty: Taken off for each time that the output holds the token.
      presence_penalty: Taken off if the output holds the token.
      logit_bias: Added, by token id.
      banned_ids: What cannot come before `min_tokens`.
      min_tokens: So many tokens must come first.
    """
    result = np.array(logits, np.float64)
    for token in range(len(result)):
        if token in prompt_ids or token in output_ids:
            result[token] *= repetition_penalty if result[token] < 0 else 1 / repetition_penalty
        count = list(output_ids).count(token)
        result[token] -= frequency_penalty * count + presence_penalty * (count > 0)
        result[token] += (logit_bias or {}).get(token, 0)
        if token in banned_ids and len(output_ids) < min_tokens:
            result[token] = -np.inf
    return result
