import pytest

from jorca.attention import get_attention
from jorca.bench import attention
from jorca.bench.attention import measure_attention


@pytest.fixture
def lines(monkeypatch):
    """What is measured of two batches on a machine that copies 1 GB and multiplies 1 TFLOP a second."""
    monkeypatch.setattr(attention, "_copy_bytes_per_s", lambda repeats: 1e9)
    monkeypatch.setattr(attention, "_product_flops_per_s", lambda repeats: 1e12)
    monkeypatch.setattr(attention, "_CALLS", 1)
    shapes = {"decode": (2, [(1, 70)] * 2), "mixed": (16, [(9, 9), (1, 64)])}
    monkeypatch.setattr(attention, "SHAPES", shapes)
    return list(measure_attention({"xla": get_attention("xla")}, repeats=1))


def test_the_machine_and_its_rates_come_first(lines):
    assert lines[0]["devices"]
    assert (lines[0]["copy_gb_per_s"], lines[0]["product_tflop_per_s"]) == (1, 1)


def test_the_floor_is_what_bytes_or_operations_take(lines):
    decode, _, mixed = lines[1:]
    # 140 positions of 16 heads of 128, keys and values, 2 bytes each; 45 + 64 scores and as many weights.
    assert decode["floor_us"] == pytest.approx(140 * 16 * 128 * 2 * 2 / 1e9 * 1e6, abs=0.1)
    assert mixed["floor_us"] == pytest.approx(73 * 16 * 128 * 2 * 2 / 1e9 * 1e6, abs=0.1)
    assert mixed["tflop_per_s"] == pytest.approx((45 + 64) * 4 * 16 * 128 / mixed["us"] / 1e6, abs=0.06)
    assert decode["of_floor"] == pytest.approx(decode["floor_us"] / decode["us"], abs=0.01)


def test_what_does_not_run_is_a_line_with_its_error_and_hides_nothing(lines):
    names = [(line["shape"], line["implementation"]) for line in lines[1:]]
    assert names == [("decode", "xla"), ("decode", "cudnn, dense"), ("mixed", "xla")]
    assert "us" not in lines[2]
    assert lines[2]["error"]
