"""Layers of attention compiled for meshes that are not there: nothing is copied, nothing is gathered."""

from functools import partial
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax.sharding import Mesh, NamedSharding, PartitionSpec

from jorca.attention import AttentionMetadata, KVCache, choose_attention, get_attention
from jorca.planning import COLLECTIVES, GPUS, compile_for, count_launches, make_devices, read_operations

pytestmark = pytest.mark.aot

LAYERS, PAGES, HEADS, PAGE_SIZE, HEAD_DIM, ROWS, REQUESTS = 6, 128, 16, 64, 128, 64, 32
KV_BYTES = 2 * LAYERS * PAGES * HEADS * PAGE_SIZE * HEAD_DIM * 2
WHOLE, BY_HEADS = PartitionSpec(), PartitionSpec(None, None, "tensor")


def compile_layers(attention: str, gpu: str, num_devices: int, *, optimize: bool = False):
    """Compiles layers of projections and attention whose heads are split over a mesh."""
    implementation = get_attention(attention)
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
    arguments = array(ROWS, 512), weights, KVCache(pages, pages), metadata
    return compile_for(mesh, lambda: jax.jit(step, donate_argnums=2).lower(*arguments), optimize=optimize)


def check_in_place(compiled, num_devices, attention):
    """Checks bytes, copies and launches, and returns the exchanges."""
    kv_bytes = KV_BYTES // num_devices
    memory = compiled.memory_analysis()
    assert memory.alias_size_in_bytes == kv_bytes
    assert memory.temp_size_in_bytes < kv_bytes / 16
    text = compiled.as_text()
    shape = f"bf16[{LAYERS},{PAGES},{HEADS // num_devices},{PAGE_SIZE},{HEAD_DIM}]"
    assert shape in text
    operations = read_operations(text)
    assert not any(shape in op.shapes for op in operations if op.kind == "copy")
    for backend in ("triton", "mosaic"):
        assert count_launches(operations, backend) == (LAYERS if backend == attention else 0)
    return [op.kind for op in operations if op.kind in COLLECTIVES]


@pytest.mark.parametrize(
    ("attention", "gpu"), [("triton", "a100-40gb"), ("mosaic", "h200"), ("triton", "h200")]
)
def test_heads_on_four_devices_are_summed_once_per_layer_and_nothing_is_gathered(attention, gpu):
    compiled = compile_layers(attention, gpu, 4)
    assert check_in_place(compiled, 4, attention) == ["all-reduce"] * LAYERS


@pytest.mark.parametrize("gpu", GPUS)
def test_every_gpu_can_be_compiled_for_and_updates_the_kv_array_in_place(gpu):
    device, *_ = make_devices(gpu)
    attention, _ = choose_attention("auto", device)
    if gpu == "a10g":  # JAX's Triton backend does not know it by name; it asks the device where there is one.
        attention = "xla"
    compiled = compile_layers(attention, gpu, 1)
    assert GPUS[gpu].device_kind == device.device_kind
    assert "{}.{}".format(*GPUS[gpu].compute_capability) == device.compute_capability
    assert check_in_place(compiled, 1, attention) == []


@pytest.mark.parametrize(("attention", "gpu"), [("triton", "a100-40gb"), ("mosaic", "h200")])
def test_optimising_machine_code_changes_neither_the_program_nor_its_memory(attention, gpu):
    fast, full = (compile_layers(attention, gpu, 4, optimize=optimize) for optimize in (False, True))
    assert fast.as_text() == full.as_text()
    assert str(fast.memory_analysis()) == str(full.memory_analysis())
