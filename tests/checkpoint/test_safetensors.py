"""Reading safetensors: bits and dtypes as the library writes them, no copies, every way to be damaged."""

import json
import struct

import ml_dtypes
import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from hypothesis.extra import numpy as hnp
from safetensors.numpy import save, save_file

from jorca.checkpoint.errors import CheckpointError
from jorca.checkpoint.safetensors import read_safetensors


def write(path, entries, data=b"\0" * 24, *, length=None):
    """Writes a header of any kind before the data."""
    header = (entries if isinstance(entries, str) else json.dumps(entries)).encode()
    path.write_bytes(struct.pack("<Q", len(header) if length is None else length) + header + data)
    return path


def entry(shape, start, end, dtype="F32"):
    return {"dtype": dtype, "shape": shape, "data_offsets": [start, end]}


class TestReading:
    @pytest.mark.parametrize(
        "dtype",
        ["float64", "float32", "float16", "int64", "int32", "int16", "int8", "uint8", "bool"],
    )
    def test_what_the_library_writes_comes_back(self, tmp_path, dtype):
        x = np.random.default_rng(0).integers(0, 100, (3, 4)).astype(dtype)
        save_file(
            {"x": x, "empty": x[:0], "scalar": np.array(x[0, 0])},
            tmp_path / "x.safetensors",
            {"format": "pt"},
        )
        read = read_safetensors(tmp_path / "x.safetensors")
        assert sorted(read) == ["empty", "scalar", "x"]
        assert (read["empty"].shape, read["scalar"].shape) == ((0, 4), ())
        for name, right in (("x", x), ("scalar", x[0, 0])):
            assert read[name].dtype == x.dtype
            assert np.array_equal(read[name], right)

    def test_bfloat16_keeps_its_bits(self, tmp_path):
        bits = np.array([0x3F80, 0xC020, 0x7FC1, 0x0001], np.uint16)  # 1, -2.5, a NaN, the smallest
        write(tmp_path / "x.safetensors", {"x": entry([2, 2], 0, 8, "BF16")}, bits.tobytes())
        x = read_safetensors(tmp_path / "x.safetensors")["x"]
        assert x.dtype == ml_dtypes.bfloat16
        assert np.array_equal(x.view(np.uint16), bits.reshape(2, 2))
        assert np.array_equal(x[0].astype(np.float32), [1, -2.5])

    def test_tensors_are_views_of_the_mapped_file_and_cannot_be_written(self, tmp_path):
        save_file({"x": np.ones((4, 2), np.float32)}, tmp_path / "x.safetensors")
        x = read_safetensors(tmp_path / "x.safetensors")["x"]
        base = x
        while base.base is not None and not isinstance(base, np.memmap):
            base = base.base
        assert isinstance(base, np.memmap)
        with pytest.raises(ValueError, match="read-only"):
            x[0, 0] = 2

    def test_a_file_that_is_not_aligned_is_read_too(self, tmp_path):
        x = np.arange(6, dtype=np.float32)
        header = json.dumps({"x": entry([6], 0, 24)})
        for spaces in range(4):
            path = write(tmp_path / f"{spaces}.safetensors", header + " " * spaces, x.tobytes())
            read = read_safetensors(path)["x"]
            assert read.flags.aligned
            assert np.array_equal(read, x)

    @settings(max_examples=50, deadline=None)
    @given(
        st.dictionaries(
            st.text(min_size=1, max_size=8).filter(lambda name: name != "__metadata__"),
            hnp.arrays(np.float32, hnp.array_shapes(min_dims=0, max_dims=3, min_side=0, max_side=3)),
            max_size=4,
        )
    )
    def test_any_tensors_under_any_names_come_back(self, tmp_path_factory, tensors):
        path = tmp_path_factory.mktemp("any") / "x.safetensors"
        path.write_bytes(save(tensors))
        read = read_safetensors(path)
        assert read.keys() == tensors.keys()
        for name, x in tensors.items():
            assert read[name].shape == x.shape
            assert read[name].tobytes() == x.tobytes()


class TestDamage:
    @pytest.mark.parametrize(
        "entries",
        [
            {"x": entry([6], 0, 24), "y": entry([5], 0, 20)},
            {"x": entry([5], 0, 20), "y": entry([2], 16, 24)},
            {"x": entry([2], 0, 8), "y": entry([2], 16, 24)},
            {"x": entry([7], 0, 28)},
            {"x": entry([5], 0, 20)},
            {"x": entry([5], 0, 24)},
            {"x": entry([-6], 0, 24)},
            {"x": entry([2**62, 2**62, 16], 0, 24)},
            {"x": entry([6], 24, 0)},
            {"x": entry([6], 0, 24, "F33")},
            {"x": {"dtype": "F32", "shape": [6]}},
            {"x": [6]},
            ["x"],
            "{",
            "\xff",
        ],
        ids=[
            "overlap",
            "overlap at the end",
            "gap",
            "reaches past the end",
            "ends early",
            "size",
            "negative",
            "overflow",
            "reversed",
            "dtype",
            "no offsets",
            "no entry",
            "no object",
            "no JSON",
            "no UTF-8",
        ],
    )
    def test_a_header_that_does_not_fit_is_one_error(self, tmp_path, entries):
        path = write(tmp_path / "x.safetensors", entries)
        with pytest.raises(CheckpointError, match=r"x\.safetensors: cannot be read as safetensors"):
            read_safetensors(path)

    @pytest.mark.parametrize("length", [0, 2**40, 2**63, 2**64 - 1])
    def test_an_absurd_length_of_the_header_reads_nothing(self, tmp_path, length):
        path = write(tmp_path / "x.safetensors", {"x": entry([6], 0, 24)}, length=length)
        with pytest.raises(CheckpointError, match="cannot be read as safetensors"):
            read_safetensors(path)

    def test_a_file_cut_anywhere_is_an_error(self, tmp_path):
        whole = save({"a": np.ones((2, 3), np.float32), "b": np.ones(4, np.float16)})
        for size in range(len(whole)):
            (tmp_path / "x.safetensors").write_bytes(whole[:size])
            with pytest.raises(CheckpointError, match="cannot be read as safetensors"):
                read_safetensors(tmp_path / "x.safetensors")

    def test_a_name_that_comes_twice_is_named(self, tmp_path):
        one = json.dumps(entry([6], 0, 24))
        path = write(tmp_path / "x.safetensors", f'{{"wte": {one}, "wte": {one}}}')
        with pytest.raises(CheckpointError, match="wte more than once"):
            read_safetensors(path)

    def test_a_dtype_without_a_counterpart_is_named(self, tmp_path):
        path = write(tmp_path / "x.safetensors", {"wte": entry([24], 0, 24, "F8_E4M3")})
        with pytest.raises(CheckpointError, match=r"wte is F8_E4M3; dtypes .* F64, F32, F16, BF16"):
            read_safetensors(path)

    def test_a_missing_file_is_named(self, tmp_path):
        with pytest.raises(CheckpointError, match=r"x\.safetensors: cannot be read"):
            read_safetensors(tmp_path / "x.safetensors")
