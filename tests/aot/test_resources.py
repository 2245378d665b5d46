"""What each form of the attention kernels needs, as compilers report and as the documentation says."""

import dataclasses
from pathlib import Path

import pytest

from jorca.planning.gpus import GPUS
from jorca.planning.resources import default_forms, format_table, measure_kernels

pytestmark = pytest.mark.aot

DOCS = Path(__file__).parents[2] / "docs" / "kernels.md"


@pytest.mark.parametrize(
    ("attention", "gpu"), [("triton", "a100-40gb"), ("mosaic", "h200"), ("triton", "h200")]
)
def test_no_default_form_spills_and_each_needs_what_the_documentation_says(attention, gpu):
    forms = default_forms(attention, gpu)
    resources = measure_kernels(forms)
    assert {r.spill_bytes for r in resources} == {0}
    assert all(r.shared_bytes <= GPUS[gpu].shared_bytes_per_block for r in resources)
    for line in format_table(forms, resources).splitlines():
        assert line in DOCS.read_text(), "benchmarks/attention.py prints the table anew"


@pytest.mark.slow
@pytest.mark.parametrize(
    ("attention", "gpu", "same"),
    [("triton", "a100-80gb", "a100-40gb"), ("mosaic", "h100", "h200"), ("triton", "h100", "h200")],
)
def test_gpus_of_a_kind_and_the_other_dtype_need_the_same(attention, gpu, same):
    ours = measure_kernels(default_forms(attention, gpu, "float16"))
    assert ours == measure_kernels(default_forms(attention, same))


@pytest.mark.slow
def test_on_l4_one_form_spills_two_registers():
    resources = measure_kernels(default_forms("triton", "l4"))
    assert sorted(r.spill_bytes for r in resources)[-2:] == [0, 8]


@pytest.mark.slow
def test_weights_in_registers_take_less_shared_memory_and_do_not_spill():
    forms = default_forms("mosaic", "h200")
    through_shared = measure_kernels(forms)
    in_registers = measure_kernels([dataclasses.replace(f, weights_in_registers=True) for f in forms])
    for ours, other in zip(in_registers, through_shared, strict=True):
        assert ours.spill_bytes == 0
        assert ours.shared_bytes == other.shared_bytes - 64 * 64 * 2
