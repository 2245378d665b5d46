"""The profile's arithmetic: nested events, and which part an operation belongs to."""

import pytest

from benchmarks.profile import OTHER, part_of, scopes_by_operation, self_times_ns


def test_an_events_own_time_is_what_the_events_within_it_leave():
    # A loop of 10 with bodies of 3 and 4, the second with something of 1 in it; then 2 on their own.
    events = [(0, 10, "while"), (1, 3, "a"), (5, 4, "b"), (6, 1, "c"), (10, 2, "d")]
    assert sorted(self_times_ns(events)) == [("a", 3), ("b", 3), ("c", 1), ("d", 2), ("while", 3)]
    assert sorted(self_times_ns(reversed(events))) == sorted(self_times_ns(events))


def test_a_fusion_has_the_scopes_of_what_is_fused():
    text = """
%fused (p: f32[2]) -> f32[2] {
  %p = f32[2] parameter(0)
  ROOT %e = f32[2] exponential(%p), metadata={op_name="jit(step)/layer_0/mlp/exp"}
}

ENTRY %main (x: f32[2]) -> f32[2] {
  %x = f32[2] parameter(0)
  %f = f32[2] fusion(%x), kind=kLoop, calls=%fused
  ROOT %g = f32[2] negate(%f), metadata={op_name="jit(step)/head/neg"}
}
"""
    scopes = scopes_by_operation(text)
    assert scopes["f"].strip() == "jit(step)/layer_0/mlp/exp"
    assert scopes["g"].strip() == "jit(step)/head/neg"


@pytest.mark.parametrize(
    ("operation", "part"),
    [
        ("while.3 jit(step)/layer_0/attention/attend/while/body/exp", "attention: walk over the KV array"),
        (
            "scatter.1 jit(step)/layer_0/attention/attend/scatter",
            "attention: writing keys and values, the rest",
        ),
        ("ynn.1 jit(step)/layer_3/attention/dot_general", "attention: products"),
        ("ynn.2 jit(step)/layer_3/mlp/dot_general jit(step)/layer_3/mlp/add", "mlp: products"),
        ("fusion.2 jit(step)/layer_3/mlp/tanh", "mlp: GELU, norm, sums"),
        ("fusion.3 jit(step)/head/rd,vd->rv/dot_general", "head"),
        ("dot.7 ", "products of a single row"),
        ("fusion.4 jit(step)/reduce_max", OTHER),
    ],
)
def test_an_operation_belongs_to_the_part_that_its_scopes_name(operation, part):
    assert part_of(operation) == part
