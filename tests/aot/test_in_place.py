"""Layers of attention compiled for meshes that are not there: nothing is copied, nothing is gathered."""

import re
from functools import partial
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax.sharding import Mesh, NamedSharding, PartitionSpec

from jorca.attention import AttentionMetadata, KVCache, choose_attention, get_attention
from jorca.planning import GPUS, compile_for, make_devices

pytestmark = pytest.mark.aot

LAYERS, PAGES, HEADS, PAGE_SIZE, HEAD_DIM, ROWS, REQUESTS = 6, 128, 16, 64, 128, 64, 32
KV_BYTES = 2 * LAYERS * PAGES * HEADS * PAGE_SIZE * HEAD_DIM * 2
WHOLE, BY_HEADS = PartitionSpec(), PartitionSpec(None, None, "tensor")


def compile_layers(attention: str, gpu: str, num_devices: int):
    """Compiles layers of projections and attention whose heads are split over a mesh."""
    implementation = get_attention(attention)  # pyright: ignore[reportArgumentType]
    mesh = Mesh(np.array(make_devices(gpu, num_devices)), ("tensor",))

    def attend(q, k, v, cache, prepared, *, layer):
        return implementation(q, k, v, cache, layer, prepared, scale=HEAD_DIM**-0.5)

    def step(x_td, weights, cache, metadata):
        prepared = implementation.prepare(metadata, num_tokens=ROWS, page_size=PAGE_SIZE)
        for layer, (in_dcnh, out_nhd) in enumerate(weights):
            qkv_tcnh = jnp.einsum("td,dcnh->tcnh", x_td, in_dcnh)
            heads = PartitionSpec(None, "tensor")
            o_tnh, cache = jax.shard_map(
                partial(attend, layer=layer),
                mesh=mesh,
                in_specs=(heads, heads, heads, BY_HEADS, WHOLE),
                out_specs=(heads, BY_HEADS),
                check_vma=False,
            )(qkv_tcnh[:, 0], qkv_tcnh[:, 1], qkv_tcnh[:, 2], cache, prepared)
            x_td = x_td + jnp.einsum("tnh,nhd->td", o_tnh, out_nhd)
        return x_td, cache

    def array(*shape, dtype: Any = jnp.bfloat16, spec=WHOLE) -> Any:
        return jax.ShapeDtypeStruct(shape, dtype, sharding=NamedSharding(mesh, spec))

    numbers_b = array(REQUESTS, dtype=jnp.int32)
    metadata = AttentionMetadata(numbers_b, numbers_b, numbers_b, array(REQUESTS, 32, dtype=jnp.int32))
    pages = array(LAYERS, PAGES, HEADS, PAGE_SIZE, HEAD_DIM, spec=BY_HEADS)
    weights = [
        (
            array(512, 3, HEADS, HEAD_DIM, spec=BY_HEADS),
            array(HEADS, HEAD_DIM, 512, spec=PartitionSpec("tensor")),
        )
        for _ in range(LAYERS)
    ]
    return compile_for(mesh, step, array(ROWS, 512), weights, KVCache(pages, pages), metadata, donate=[2])


def count(text: str, operation: str) -> int:
    """How often an HLO operation stands in the program, the start of an asynchronous one counted as one."""
    return len(re.findall(rf" {operation}(?:-start)?\(", text))


@pytest.mark.parametrize("num_devices", [1, 4])
@pytest.mark.parametrize(
    ("attention", "gpu"),
    [("triton", "a100-40gb"), ("mosaic", "h100"), ("mosaic", "h200"), ("triton", "h200")],
)
def test_the_kv_array_is_updated_in_place_and_each_layer_launches_once(attention, gpu, num_devices):
    compiled = compile_layers(attention, gpu, num_devices)
    kv_bytes = KV_BYTES // num_devices
    memory = compiled.memory_analysis()
    assert memory.alias_size_in_bytes == kv_bytes
    assert memory.temp_size_in_bytes < kv_bytes / 16
    text = compiled.as_text()
    shape = f"bf16[{LAYERS},{PAGES},{HEADS // num_devices},{PAGE_SIZE},{HEAD_DIM}]"
    assert shape in text
    assert not re.findall(rf"= {re.escape(shape)}\S* copy", text)
    target = {"triton": "__gpu$xla.gpu.triton", "mosaic": "mosaic_gpu"}[attention]
    assert text.count(f'custom_call_target="{target}') == LAYERS
    assert count(text, "all-reduce") == (LAYERS if num_devices > 1 else 0)
    for operation in ("all-gather", "all-to-all", "collective-permute", "reduce-scatter"):
        assert count(text, operation) == 0


@pytest.mark.parametrize("gpu", GPUS)
def test_every_gpu_can_be_compiled_for(gpu):
    device, *_ = make_devices(gpu)
    attention, _ = choose_attention("auto", device)
    if gpu == "a10g":  # JAX's Triton backend does not know it by name; it asks the device where there is one.
        attention = "xla"
    compiled = compile_layers(attention, gpu, 1)
    assert GPUS[gpu].device_kind == device.device_kind
    assert "{}.{}".format(*GPUS[gpu].compute_capability) == device.compute_capability
    assert compiled.memory_analysis().alias_size_in_bytes == KV_BYTES
