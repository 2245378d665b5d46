"""One op, several implementations."""

from __future__ import annotations

import importlib
from typing import Any, Protocol

import jax
from jaxtyping import Array, Float, Int

from jorca.attention.abilities import Abilities
from jorca.attention.cache import KVCache
from jorca.attention.metadata import AttentionMetadata
from jorca.config import ATTENTIONS, ConfigError


class Attention(Protocol):
    """An implementation of selective attention.

    What depends on the metadata alone is prepared once per iteration, and used by every layer:

        prepared = attention.prepare(metadata, num_tokens=T, page_size=S)
        for layer in range(L):
            o_tnh, cache = attention(q_tnh, k_tnh, v_tnh, cache, layer, prepared, scale=scale)

    Implementations are frozen and hashable, hence static for `jax.jit`. The class of one that is in
    `jorca.config.ATTENTIONS` states what it can do in an attribute `abilities`.
    """

    def prepare(self, metadata: AttentionMetadata, *, num_tokens: int, page_size: int) -> Any:
        """Returns a pytree of what the layers need to know about an iteration.

        Args:
          metadata: Which flat rows are whose, and where their keys and values lie.
          num_tokens: Flat rows, T, padding included.
          page_size: Positions in a page of the KV array, S.

        Raises:
          NotImplementedError: The implementation does not take this page size; the message has the
            sizes that it takes.
        """
        ...

    def __call__(
        self,
        q_tnh: Float[Array, "T N H"],
        new_k_tnh: Float[Array, "T N_kv H"],
        new_v_tnh: Float[Array, "T N_kv H"],
        cache: KVCache,
        layer: int | Int[Array, ""],
        prepared: Any,
        *,
        scale: float,
    ) -> tuple[Float[Array, "T N H"], KVCache]:
        """Writes the new keys and values of one layer, then attends with every row.

        Args:
          q_tnh: Queries, float32, bfloat16 or float16. N is a multiple of N_kv: head i reads key/value head
            i // (N / N_kv).
          new_k_tnh: Keys of the same rows.
          new_v_tnh: Values of the same rows.
          cache: The KV array; donate it to the jitted step, and it is updated in place.
          layer: The layer, from 0, an integer or a traced scalar.
          prepared: What `prepare` returned for this iteration.
          scale: What scores are multiplied by, in float32.

        Returns:
          The attended values in the dtype of `q_tnh`, zero for padding rows, and the cache.

        Raises:
          NotImplementedError: The implementation does not take this head width, dtype or number of query
            heads per key/value head; the message has those that it takes.
          ValueError: N is no multiple of N_kv.
        """
        ...


def get_attention(name: str, **options: Any) -> Attention:
    """Returns the implementation of that name.

    Args:
      name: In `jorca.config.ATTENTIONS`.
      **options: Its own, see its class.

    Raises:
      ConfigError: There is none, or this JAX does not have what it is written in.
    """
    return _class_of(name)(**options)


def abilities_of(name: str) -> Abilities:
    """Returns what the implementation of that name states of itself; raises as `get_attention` does."""
    return _class_of(name).abilities


def _class_of(name: str) -> Any:
    if name not in ATTENTIONS:
        raise ConfigError(f"attention must be one of {', '.join(ATTENTIONS)}, got {name!r}")
    module, _, class_name = ATTENTIONS[name].partition(":")
    try:
        return getattr(importlib.import_module(module), class_name)
    except ImportError as error:
        raise ConfigError(
            f"attention {name} does not work with JAX {jax.__version__} ({error}); use auto or xla"
        ) from error


def selective_attention(
    q_tnh: Float[Array, "T N H"],
    new_k_tnh: Float[Array, "T N_kv H"],
    new_v_tnh: Float[Array, "T N_kv H"],
    cache: KVCache,
    layer: int | Int[Array, ""],
    metadata: AttentionMetadata,
    *,
    scale: float,
    implementation: str | Attention = "xla",
) -> tuple[Float[Array, "T N H"], KVCache]:
    """Attends with the flat rows of an iteration, each to its own request (Orca, OSDI 2022, section 3.2).

    Prepares and calls in one go; a model of several layers prepares once, see `Attention`.

    Args:
      q_tnh: Queries, float32, bfloat16 or float16. N is a multiple of N_kv: head i reads key/value head
        i // (N / N_kv).
      new_k_tnh: Keys of the same rows.
      new_v_tnh: Values of the same rows.
      cache: The KV array. All new keys and values are written before any row attends.
      layer: The layer, from 0.
      metadata: Which flat rows are whose, and where their keys and values lie.
      scale: What scores are multiplied by, in float32.
      implementation: A name, or an implementation with options of its own.

    Returns:
      The attended values in the dtype of `q_tnh`, zero for padding rows, and the cache.
    """
    attention = get_attention(implementation) if isinstance(implementation, str) else implementation
    prepared = attention.prepare(metadata, num_tokens=q_tnh.shape[0], page_size=cache.page_size)
    return attention(q_tnh, new_k_tnh, new_v_tnh, cache, layer, prepared, scale=scale)
