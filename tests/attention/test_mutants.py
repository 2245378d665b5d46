"""Faults planted in the kernels are found: by their results, or by the interpreter of Mosaic GPU."""

import jax
import numpy as np
import pytest
from jax.experimental.pallas import mosaic_gpu as plgpu

from attention.mutants import mutate
from attention.suite import Request, check, make_batch

pytestmark = pytest.mark.kernels


def is_wrong(implementation) -> bool:
    """Runs a piece, a long prompt and a short one, which fill tiles and pages unevenly, and padding."""
    rng = np.random.default_rng(0)
    sizes = [(3, 130), (70, 200), (20, 20)]
    requests = [Request.random(rng, *s, dtype=np.float16, num_heads=1, head_dim=64) for s in sizes]
    batch = make_batch(requests, page_size=64, num_tokens=112, num_slots=4, table_positions=256)
    try:
        check(batch, implementation, rtol=1e-3, atol=3e-3)
    except AssertionError:
        return True
    return False


TRITON = {
    "mask off by one": ("at_s[None, :] <= (position", "at_s[None, :] < (position"),
    "mask off by one, the other way": ("at_s[None, :] <= (position", "at_s[None, :] <= (1 + position"),
    "a row too many": ("mine_q1 = (row_q < num_rows)", "mine_q1 = (row_q <= num_rows)"),
    "a row too few": ("mine_q1 = (row_q < num_rows)", "mine_q1 = (row_q + 1 < num_rows)"),
    "a block too many without a mask": ("lax.div(position + 1, ", "lax.div(position + 1 + block_kv, "),
    "values behind the last position": ("mask=(at_s < kv_len)", "mask=(at_s <= kv_len)"),
    "a step too few": ("pl.cdiv(kv_len, block_kv)", "lax.div(kv_len, block_kv)"),
    "no decay": ("sum_q * decay_q + ", "sum_q + "),
    "another layer": ("layer = layer_1[0]", "layer = layer_1[0] - 1"),
}  # fmt: skip

MOSAIC = {
    "mask off by one": ("<= position - i * _BLOCK_KV", "< position - i * _BLOCK_KV"),
    "mask off by one, the other way": ("<= position - i * _BLOCK_KV", "<= 1 + position - i * _BLOCK_KV"),
    "a row too many": ("num_rows & size", "(num_rows + 1) & size"),
    "no wait for keys": ("            plgpu.barrier_wait(k_barriers.at[slot])\n", ""),
    "no wait for values": ("            plgpu.barrier_wait(v_barriers.at[slot])\n", ""),
    "a refill before the products are done": ("fetch(i + stages - 1)", "fetch(i + stages)"),
    "no fence before the store": ("        plgpu.commit_smem()\n        if log2", "        if log2"),
    "values behind the last position": ("_clear_rows(v_gsh.at[slot], ", "_clear_rows(v_gsh.at[slot], 1 + "),
    "a block too many without a mask": ("lax.div(position + 1, ", "lax.div(position + 1 + _BLOCK_KV, "),
    "a step too few": ("pl.cdiv(kv_len, _BLOCK_KV)", "lax.div(kv_len, _BLOCK_KV)"),
}  # fmt: skip


@pytest.mark.parametrize("fault", TRITON)
def test_a_fault_in_the_triton_kernel_is_found(fault):
    assert is_wrong(mutate("triton", *TRITON[fault]))


@pytest.mark.filterwarnings("ignore:invalid value encountered:RuntimeWarning")
@pytest.mark.parametrize("fault", MOSAIC)
def test_a_fault_in_the_mosaic_kernel_is_found(fault, capfd):
    watched = plgpu.InterpretGPUParams(detect_races=True)
    try:
        found = is_wrong(mutate("mosaic", *MOSAIC[fault], interpret=watched))
    except jax.errors.JaxRuntimeError:  # the interpreter refuses to go on
        found = True
    assert found or "RACE DETECTED" in capfd.readouterr().out  # JAX 0.11 prints and goes on


@pytest.mark.filterwarnings("ignore:invalid value encountered:RuntimeWarning")
def test_without_a_fault_nothing_is_found(capfd):
    same = ("def _kernel(", "def _kernel(")
    watched = plgpu.InterpretGPUParams(detect_races=True)
    assert not is_wrong(mutate("triton", *same))
    assert not is_wrong(mutate("mosaic", *same, interpret=watched))
    assert "RACE DETECTED" not in capfd.readouterr().out
