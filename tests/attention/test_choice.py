import re
import sys
import types

import pytest

from jorca.attention import Abilities, abilities_of, choose_attention, get_attention, selfcheck
from jorca.attention.selfcheck import AttentionCheckError, prove_attention
from jorca.config import ATTENTIONS, ConfigError

SIZES = {"page_size": 64, "head_dim": 128, "dtype": "bfloat16", "group_size": 1}


def device(kind: str, capability: str | None = None, platform: str = "gpu"):
    facts = {} if capability is None else {"compute_capability": capability}
    return types.SimpleNamespace(platform=platform, device_kind=kind, **facts)


CPU = device("cpu", platform="cpu")
A100, L4, H100, B200 = (
    device(f"NVIDIA {kind}", capability)
    for kind, capability in (("A100", "8.0"), ("L4", "8.9"), ("H100", "9.0"), ("B200", "10.0"))
)
V100, MI300 = device("Tesla V100", "7.0"), device("AMD Instinct MI300X", "gfx942")


@pytest.mark.parametrize(
    ("on", "name"),
    [
        (CPU, "xla"),
        (A100, "triton"),
        (L4, "triton"),
        (H100, "mosaic"),
        (B200, "xla"),
        (V100, "xla"),
        (MI300, "xla"),
    ],
)
def test_the_device_decides(on, name):
    choice, reason = choose_attention("auto", on, **SIZES)
    assert choice == name
    assert reason


@pytest.mark.parametrize(
    ("field", "value", "taken"),
    [
        ("page_size", 16, "64, 128"),
        ("head_dim", 72, "64, 80, 96, 128"),
        ("dtype", "float32", "float16, bfloat16"),
        ("group_size", 4, "1"),
    ],
)
def test_what_the_kernel_does_not_take_goes_to_xla_unless_the_kernel_is_asked_for(field, value, taken):
    sizes = {**SIZES, field: value}
    choice, reason = choose_attention("auto", H100, **sizes)
    assert choice == "xla"
    assert f"{taken}, got {value}" in reason
    with pytest.raises(ConfigError, match=f"attention mosaic takes .* {taken}, got {value}; use one"):
        choose_attention("mosaic", H100, **sizes)


@pytest.mark.parametrize(
    ("name", "on"),
    [
        ("xla", H100),
        ("reference", H100),
        ("triton", H100),
        ("triton", A100),
        ("triton", B200),
        ("mosaic", H100),
    ],
)
def test_what_is_asked_for_runs(name, on):
    assert choose_attention(name, on, **SIZES) == (name, "asked for by name")


@pytest.mark.parametrize(
    ("name", "on", "message"),
    [
        ("mosaic", CPU, "attention mosaic needs a GPU of compute capability 9.x, got cpu; use auto or xla"),
        ("mosaic", A100, "9.x, got NVIDIA A100"),
        ("mosaic", B200, "9.x, got NVIDIA B200"),
        ("triton", CPU, "attention triton needs a GPU of compute capability 8.0 or newer, got cpu"),
        ("triton", V100, "8.0 or newer, got Tesla V100"),
        ("triton", MI300, "8.0 or newer, got AMD Instinct MI300X"),
    ],
)
def test_a_kernel_on_a_device_that_it_is_not_for_is_refused(name, on, message):
    with pytest.raises(ConfigError, match=message):
        choose_attention(name, on)


def test_a_backend_that_jax_has_removed_is_refused_by_name_and_left_out_by_auto(monkeypatch):
    monkeypatch.setitem(sys.modules, "jorca.attention.triton", None)
    message = r"attention triton does not work with JAX .*; use auto or xla"
    for ask in (get_attention, abilities_of, lambda name: choose_attention(name, A100)):
        with pytest.raises(ConfigError, match=message):
            ask("triton")
    choice, reason = choose_attention("auto", A100, **SIZES)
    assert choice == "xla"
    assert re.match(message, reason)
    assert choose_attention("auto", H100, **SIZES)[0] == "mosaic"


def test_a_cpu_is_served_without_the_kernels_being_imported(monkeypatch):
    for name in ("mosaic", "triton"):
        monkeypatch.setitem(sys.modules, f"jorca.attention.{name}", None)
    assert choose_attention("auto", CPU, **SIZES) == ("xla", "made for CPUs")


@pytest.mark.parametrize("name", ATTENTIONS)
def test_every_name_has_a_class_that_states_what_it_can_do_and_takes_its_own_options(name):
    abilities = abilities_of(name)
    assert isinstance(abilities, Abilities)
    assert isinstance(hash(get_attention(name, **abilities.one_order)), int)  # static under jit


@pytest.mark.parametrize(
    ("states", "on", "needs"),
    [
        ({}, CPU, None),
        ({"platforms": ("cpu", "tpu")}, CPU, None),
        ({"platforms": ("cpu", "tpu")}, A100, "one of the platforms cpu, tpu, got NVIDIA A100"),
        ({"compute_capability": (8, 9)}, L4, None),
        ({"compute_capability": (8, 9)}, H100, None),
        ({"compute_capability": (8, 9)}, B200, "a GPU of compute capability 8.0 to 9.x, got NVIDIA B200"),
        ({"compute_capability": (9, None)}, L4, "a GPU of compute capability 9.0 or newer, got NVIDIA L4"),
        ({"compute_capability": (9, None)}, MI300, "a GPU of compute capability 9.0 or newer, got AMD"),
    ],
)
def test_a_device_that_lacks_something_is_told_so(states, on, needs):
    got = Abilities(**states).why_not_on("it", on)
    assert got is None if needs is None else f"it needs {needs}" in str(got)


@pytest.mark.parametrize("group_size", [1, 4])
def test_the_self_check_passes_what_is_right(group_size):
    prove_attention(get_attention("xla"), "bfloat16", group_size=group_size)


@pytest.mark.parametrize("error", [float("nan"), float("inf"), 0.1])
def test_the_self_check_refuses_what_is_off(error, monkeypatch):
    monkeypatch.setattr(selfcheck, "_difference", lambda *_: error)
    with pytest.raises(AttentionCheckError, match="XlaAttention is wrong on cpu: a prompt, a piece"):
        prove_attention(get_attention("xla"), "float32")
