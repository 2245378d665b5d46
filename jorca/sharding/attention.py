"""Attention on a mesh: every device attends with its own heads, to its own part of the KV array."""

from __future__ import annotations

import dataclasses
from typing import Any

import jax
from jax.sharding import Mesh, PartitionSpec
from jaxtyping import Array, Float, Int

from jorca.attention import Attention, AttentionMetadata, KVCache
from jorca.sharding.rules import BY_HEADS, BY_KV_HEADS, KV_ARRAY

_WHOLE = PartitionSpec()


@dataclasses.dataclass(frozen=True, slots=True)
class AttentionByHeads:
    """An `Attention` that runs another one on each device, with the heads that the device has.

    A device has key/value heads and the query heads that share them. Nothing else depends on them, so nothing
    is exchanged.

    Attributes:
      attention: What each device runs.
      mesh: The devices; its axis "tensor" splits the heads, and divides the key/value heads.
    """

    attention: Attention
    mesh: Mesh

    def prepare(self, metadata: AttentionMetadata, *, num_tokens: int, page_size: int) -> Any:
        """See `Attention.prepare`."""
        return self.attention.prepare(metadata, num_tokens=num_tokens, page_size=page_size)

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
        """See `Attention.__call__`."""

        def attend(
            q_tnh: Array, k_tnh: Array, v_tnh: Array, cache: KVCache, prepared: Any
        ) -> tuple[Array, KVCache]:
            return self.attention(q_tnh, k_tnh, v_tnh, cache, layer, prepared, scale=scale)

        # Loops begin with plain zeros and go on with what devices differ in, which the check refuses.
        split = jax.shard_map(
            attend,
            mesh=self.mesh,
            in_specs=(BY_HEADS, BY_KV_HEADS, BY_KV_HEADS, KV_ARRAY, _WHOLE),
            out_specs=(BY_HEADS, KV_ARRAY),
            check_vma=False,
        )
        return split(q_tnh, new_k_tnh, new_v_tnh, cache, prepared)
