"""Fresh weights, read off the parameter table."""

from __future__ import annotations

import math

import jax
import jax.numpy as jnp
from jaxtyping import Array

from jorca.config import ModelConfig
from jorca.model.params import param_table

_STDDEV = 0.02  # GPT-2's


def init_params(config: ModelConfig, seed: int = 0) -> dict[str, Array]:
    """Returns fresh weights by name, in the table's dtypes, on the default device.

    Weights are drawn as GPT-2's were: normal with deviation 0.02, divided by sqrt(2 L) where a product is
    added to the residual stream; biases zero, norm scales one.

    Args:
      config: The model.
      seed: At least 0. Equal seeds give equal weights.
    """
    key = jax.random.key(seed)
    residual = _STDDEV / math.sqrt(2 * config.num_layers)
    params: dict[str, Array] = {}
    for index, info in enumerate(param_table(config).values()):
        if info.init in ("zeros", "ones"):
            params[info.name] = jnp.full(info.shape, 0 if info.init == "zeros" else 1, info.dtype)
        else:
            stddev = residual if info.init == "residual" else _STDDEV
            draw = jax.random.normal(jax.random.fold_in(key, index), info.shape, jnp.float32)
            params[info.name] = (draw * stddev).astype(info.dtype)
    return params
