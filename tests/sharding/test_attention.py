"""Attention by heads: every device attends with its own, and what comes out is what one device computes."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax.sharding import Mesh, NamedSharding

from attention.suite import LAYER, SCALE, Request, make_batch, same_bits
from jorca.attention import KVCache, get_attention
from jorca.sharding import AttentionByHeads
from jorca.sharding.rules import BY_HEADS, BY_KV_HEADS, KV_ARRAY


@pytest.mark.parametrize("tensor", [2, 4])
@pytest.mark.parametrize("group_size", [1, 2, 4, 8])
@pytest.mark.parametrize("implementation", ["reference", "xla"])
def test_each_device_has_key_value_heads_with_the_query_heads_that_share_them(
    implementation, group_size, tensor
):
    rng = np.random.default_rng(group_size)
    sizes = [(17, 40), (1, 65), (3, 3)]
    requests = [Request.random(rng, *s, num_heads=4, group_size=group_size) for s in sizes]
    batch = make_batch(requests, num_tokens=24, table_positions=80)
    mesh = Mesh(np.array(jax.devices()[:tensor]), ("tensor",))
    attention = AttentionByHeads(get_attention(implementation), mesh)

    @jax.jit
    def attend(q, k, v, cache):
        prepared = attention.prepare(batch.metadata, num_tokens=24, page_size=16)
        return attention(q, k, v, cache, LAYER, prepared, scale=SCALE)

    def put(x, spec):
        return jax.device_put(jnp.asarray(x), NamedSharding(mesh, spec))

    o, cache = attend(
        put(batch.q, BY_HEADS),
        *(put(x, BY_KV_HEADS) for x in (batch.k, batch.v)),
        KVCache(*(put(x, KV_ARRAY) for x in (batch.keys, batch.values))),
    )
    assert o.sharding.shard_shape(o.shape) == (24, 4 * group_size // tensor, 16)
    assert cache.keys_lpnsh.sharding.shard_shape(cache.keys_lpnsh.shape)[2] == 4 // tensor
    for b, request in enumerate(requests):
        np.testing.assert_allclose(batch.rows_of(np.asarray(o), b), request.expected(), rtol=1e-5, atol=1e-5)
    assert same_bits(cache.keys_lpnsh, batch.keys_after)
    assert same_bits(cache.values_lpnsh, batch.values_after)
