"""What a row of logits may be sampled to, written from the definition in numpy float64.

The order and the ties are those that `jorca.request.SamplingParams` states. Logits are finite.
Holtzman et al., The Curious Case of Neural Text Degeneration, 2020 (top-p); Fan et al., Hierarchical
Neural Story Generation, 2018 (top-k); Nguyen et al., Turning Up the Heat, 2024 (min-p).
"""

from __future__ import annotations

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
