"""Reading PyTorch's files without PyTorch: every layout of a tensor, every way to be damaged or hostile."""

import collections
import pickle
import re
import struct
import sys
import zipfile
from pathlib import Path

import ml_dtypes
import numpy as np
import pytest

from jorca.checkpoint.errors import CheckpointError
from jorca.checkpoint.pytorch import read_pickle, read_pytorch
from tests.checkpoint import torch_files as tf

ROOT = Path(__file__).parents[2]
ADDER = ROOT / "checkpoints/adder/source/model.pt"
BYHAND = ROOT / "tests/data/nanogpt_byhand/ckpt.pt"

FLOATS = np.arange(24, dtype=np.float32)


def read_tensor(tmp_path, shape, strides, offset=0, **options):
    stored = tf.storage("0", "FloatStorage", 24)
    program = tf.tensor(stored, shape, strides, offset)
    return read_pytorch(tf.write(tmp_path / "x.pt", program, {"0": FLOATS.tobytes()}, **options))


class TestRealFiles:
    def test_every_tensor_of_the_adder_has_the_bytes_of_its_storage(self):
        tensors = read_pytorch(ADDER)
        assert len(tensors) == 44
        with zipfile.ZipFile(ADDER) as archive:
            # This file numbers its storages in the order of its tensors, each of them contiguous.
            for i, tensor in enumerate(tensors.values()):
                assert tensor.tobytes() == archive.read(f"model/data/{i}")
        assert tensors["transformer.wpe.weight"].shape == (6, 48)
        assert tensors["transformer.h.2.attn.c_attn.weight"].shape == (144, 48)
        assert np.array_equal(tensors["transformer.h.0.attn.bias"][0, 0], np.tri(6, dtype=np.float32))

    def test_a_training_checkpoint_keeps_its_nest_of_plain_values(self):
        saved = read_pytorch(BYHAND)
        assert list(saved) == ["model", "optimizer", "model_args", "iter_num", "best_val_loss", "config"]
        assert saved["model_args"]["num_heads"] == 2
        assert saved["model_args"]["use_bias"] is False
        assert saved["best_val_loss"].shape == ()
        assert abs(float(saved["best_val_loss"]) - 1.50519) < 1e-5
        assert saved["model"]["transformer.h.0.ln_1.gamma"].shape == (16,)

    def test_tied_weights_share_their_memory(self):
        model = read_pytorch(BYHAND)["model"]
        assert np.shares_memory(model["transformer.wte.weight"], model["lm_head.weight"])

    def test_tensors_are_views_of_the_mapped_file_and_cannot_be_written(self):
        tensor = read_pytorch(ADDER)["lm_head.weight"]
        base = tensor
        while base.base is not None and not isinstance(base, np.memmap):
            base = base.base
        assert isinstance(base, np.memmap)
        with pytest.raises(ValueError, match="read-only"):
            tensor[0, 0] = 1


class TestLayouts:
    @pytest.mark.parametrize(
        ("shape", "strides", "offset", "expected"),
        [
            ((4, 6), (6, 1), 0, FLOATS.reshape(4, 6)),
            ((6, 4), (1, 6), 0, FLOATS.reshape(4, 6).T),
            ((2, 3), (12, 2), 5, FLOATS.reshape(2, 12)[:, 5:11:2]),
            ((3, 2), (0, 1), 22, np.broadcast_to(FLOATS[22:], (3, 2))),
            ((), (), 7, FLOATS[7]),
            ((1,), (999,), 23, FLOATS[23:]),
            ((0, 3), (3, 1), 24, np.empty((0, 3), np.float32)),
        ],
        ids=["contiguous", "transposed", "strided", "expanded", "scalar", "last", "empty"],
    )
    def test_a_view_of_a_storage_is_that_view(self, tmp_path, shape, strides, offset, expected):
        actual = read_tensor(tmp_path, shape, strides, offset)
        assert actual.dtype == np.float32
        assert np.array_equal(actual, expected)
        assert actual.shape == np.shape(expected)

    @pytest.mark.parametrize(
        ("kind", "dtype"),
        [
            ("FloatStorage", np.float32),
            ("HalfStorage", np.float16),
            ("BFloat16Storage", ml_dtypes.bfloat16),
            ("DoubleStorage", np.float64),
            ("LongStorage", np.int64),
            ("IntStorage", np.int32),
            ("ShortStorage", np.int16),
            ("CharStorage", np.int8),
            ("ByteStorage", np.uint8),
        ],
    )
    @pytest.mark.parametrize("byteorder", ["little", "big", None])
    def test_every_dtype_keeps_its_bits_in_either_byte_order(self, tmp_path, kind, dtype, byteorder):
        itemsize = np.dtype(dtype).itemsize
        bits = np.random.default_rng(0).integers(0, 256, 6 * itemsize, dtype=np.uint8)
        stored = bits.reshape(6, itemsize)[:, ::-1].tobytes() if byteorder == "big" else bits.tobytes()
        program = tf.tensor(tf.storage("0", kind, 6), (2, 3), (3, 1))
        actual = read_pytorch(tf.write(tmp_path / "x.pt", program, {"0": stored}, byteorder=byteorder))
        assert actual.dtype == np.dtype(dtype)
        assert actual.flags.aligned
        assert actual.tobytes() == bits.tobytes()

    def test_a_bfloat16_has_the_value_of_the_upper_half_of_a_float32(self, tmp_path):
        values = np.array([1.0, -2.5, 3.0e38], np.float32)
        upper = (values.view(np.uint32) >> 16).astype(np.uint16)
        program = tf.tensor(tf.storage("0", "BFloat16Storage", 3), (3,), (1,))
        actual = read_pytorch(tf.write(tmp_path / "x.pt", program, {"0": upper.tobytes()}))
        expected = (upper.astype(np.uint32) << 16).view(np.float32)
        assert np.array_equal(actual.astype(np.float32), expected)

    def test_two_views_of_a_storage_share_memory_and_parameters_are_their_data(self, tmp_path):
        stored = tf.storage("0", "FloatStorage", 24)
        hooks = tf.call(tf.name("collections", "OrderedDict"))
        parameter = tf.call(
            tf.name("torch._utils", "_rebuild_parameter"), tf.tensor(stored, (24,), (1,)), b"\x88", hooks
        )
        program = tf.mapping(a=parameter, b=tf.tensor(stored, (4,), (6,)))
        saved = read_pytorch(tf.write(tmp_path / "x.pt", program, {"0": FLOATS.tobytes()}))
        assert np.shares_memory(saved["a"], saved["b"])
        assert np.array_equal(saved["b"], [0, 6, 12, 18])

    def test_a_namespace_comes_back_as_an_inert_dict(self, tmp_path):
        namespace = tf.name("argparse", "Namespace") + b")\x81" + tf.mapping(hidden_size=tf.number(48)) + b"b"
        values = {
            "args": namespace,
            "size": tf.call(tf.name("torch", "Size"), tf.sequence(tf.number(2), tf.number(3))),
            "device": tf.call(tf.name("torch", "device"), tf.text("cuda"), tf.number(1)),
            "dtype": tf.name("torch", "bfloat16"),
        }
        saved = read_pytorch(tf.write(tmp_path / "x.pt", tf.mapping(**values)))
        assert saved == {
            "args": {"hidden_size": 48},
            "size": (2, 3),
            "device": "cuda:1",
            "dtype": "torch.bfloat16",
        }

    @pytest.mark.parametrize("protocol", [2, 3, 4])
    def test_random_states_and_enums_beside_the_weights_come_back_as_nothing(self, tmp_path, protocol):
        state = np.random.RandomState(0).get_state()
        (tmp_path / "state.pkl").write_bytes(pickle.dumps({"rng": [state, (3, 4)], "step": 7}, protocol))
        saved = read_pickle(tmp_path / "state.pkl")
        assert saved["step"] == 7
        (kind, inert, *position), others = saved["rng"]
        assert (kind, position, others) == ("MT19937", [624, 0, 0.0], (3, 4))
        assert not isinstance(inert, np.ndarray)
        assert not hasattr(inert, "__dict__")
        enum = tf.call(tf.name("megatron.core.enums", "ModelType"), tf.number(1))
        saved = read_pytorch(tf.write(tmp_path / "x.pt", tf.mapping(model_type=enum)))
        assert type(saved["model_type"]) is type(inert)

    def test_a_module_note_on_an_ordered_dict_is_dropped(self, tmp_path):
        program = tf.call(tf.name("collections", "OrderedDict")) + tf.mapping(items=tf.number(1)) + b"b"
        saved = read_pytorch(tf.write(tmp_path / "x.pt", program))
        assert list(saved.items()) == []


class TestDamage:
    @pytest.mark.parametrize(
        ("shape", "strides", "offset"),
        [((25,), (1,), 0), ((2,), (1,), 23), ((2, 2), (23, 1), 1), ((), (), 24), ((2**62, 2), (2**62, 1), 0)],
    )
    def test_a_view_past_its_storage_is_refused(self, tmp_path, shape, strides, offset):
        with pytest.raises(CheckpointError, match=r"reaches element \d+ of a storage that holds 24"):
            read_tensor(tmp_path, shape, strides, offset)

    @pytest.mark.parametrize(
        ("shape", "strides", "offset"),
        [((2,), (-1,), 5), ((-1,), (1,), 0), ((2,), (1,), -3), ((2, 2), (1,), 0)],
    )
    def test_negative_or_ragged_numbers_are_refused(self, tmp_path, shape, strides, offset):
        with pytest.raises(CheckpointError, match="a tensor has"):
            read_tensor(tmp_path, shape, strides, offset)

    def test_a_missing_storage_is_named(self, tmp_path):
        program = tf.tensor(tf.storage("7", "FloatStorage", 24), (24,), (1,))
        with pytest.raises(CheckpointError, match="no member 'data/7'; it is incomplete"):
            read_pytorch(tf.write(tmp_path / "x.pt", program, {"0": FLOATS.tobytes()}))

    @pytest.mark.parametrize("num_elements", [23, 25])
    def test_a_storage_of_another_size_than_stated_is_refused(self, tmp_path, num_elements):
        program = tf.tensor(tf.storage("0", "FloatStorage", num_elements), (2,), (1,))
        with pytest.raises(CheckpointError, match=f"should hold {num_elements} .*, but holds 24"):
            read_pytorch(tf.write(tmp_path / "x.pt", program, {"0": FLOATS.tobytes()}))

    def test_a_storage_that_ends_in_half_an_element_is_refused(self, tmp_path):
        program = tf.tensor(tf.storage("0", "FloatStorage", 23), (2,), (1,))
        with pytest.raises(CheckpointError, match="95 bytes"):
            read_pytorch(tf.write(tmp_path / "x.pt", program, {"0": FLOATS.tobytes()[:95]}))

    @pytest.mark.parametrize("share", [0.001, 0.3, 0.9, 0.999])
    def test_a_truncated_file_is_called_cut_short(self, tmp_path, share):
        data = ADDER.read_bytes()
        (tmp_path / "cut.pt").write_bytes(data[: int(len(data) * share)])
        with pytest.raises(CheckpointError, match="cut short"):
            read_pytorch(tmp_path / "cut.pt")

    def test_bytes_lost_in_the_middle_do_not_shift_tensors_in_silence(self, tmp_path):
        data = ADDER.read_bytes()
        (tmp_path / "cut.pt").write_bytes(data[:100_000] + data[100_064:])
        with pytest.raises(CheckpointError):
            read_pytorch(tmp_path / "cut.pt")

    def test_compressed_members_are_refused_with_the_remedy(self, tmp_path):
        with pytest.raises(CheckpointError, match="zip -0"):
            read_tensor(tmp_path, (24,), (1,), compress=True)

    def test_the_legacy_format_is_refused_by_name_with_the_remedy(self, tmp_path):
        legacy = pickle.dumps(0x1950A86A20F9469CFC6C, protocol=2) + pickle.dumps(1001, protocol=2)
        (tmp_path / "old.pt").write_bytes(legacy)
        with pytest.raises(CheckpointError, match=r"before version 1\.6.*save it again"):
            read_pytorch(tmp_path / "old.pt")

    @pytest.mark.parametrize("data", [b"", b"\x80\x04N.", b"not a checkpoint at all"])
    def test_other_files_are_refused(self, tmp_path, data):
        (tmp_path / "x.pt").write_bytes(data)
        with pytest.raises(CheckpointError, match="not a file that"):
            read_pytorch(tmp_path / "x.pt")

    def test_another_zip_archive_is_refused(self, tmp_path):
        with zipfile.ZipFile(tmp_path / "x.zip", "w") as archive:
            archive.writestr("readme.txt", "hello")
        with pytest.raises(CheckpointError, match="not one that"):
            read_pytorch(tmp_path / "x.zip")

    def test_a_missing_file_is_named(self, tmp_path):
        with pytest.raises(CheckpointError, match=r"none\.pt: cannot be read"):
            read_pytorch(tmp_path / "none.pt")

    @pytest.mark.parametrize(
        "program", [b"", b"0", b"h\x07", b"X\xff\xff\xff\xffab", b"}(K\x01u", b"\xee", b"(" * 3]
    )
    def test_a_malformed_pickle_is_called_that(self, tmp_path, program):
        with pytest.raises(CheckpointError, match="malformed"):
            read_pytorch(tf.write(tmp_path / "x.pt", program))

    def test_a_memo_index_that_would_fill_the_memory_is_refused(self, tmp_path):
        with pytest.raises(CheckpointError, match="memo index 2147483647"):
            read_pytorch(tf.write(tmp_path / "x.pt", b"}r" + struct.pack("<I", 2**31 - 1)))


class Touch:
    """Pickles to a call that makes a file."""

    def __init__(self, path):
        self.path = path

    def __reduce__(self):
        return Path.touch, (self.path,)


def stack_global(module, attribute):
    return tf.text(module) + tf.text(attribute) + b"\x93"


class TestHostilePickles:
    @pytest.mark.parametrize(
        ("module", "attribute"),
        [
            ("os", "system"),
            ("posix", "system"),
            ("builtins", "eval"),
            ("builtins", "getattr"),
            ("builtins", "__import__"),
            ("__builtin__", "exec"),
            ("torch.hub", "load"),
            ("torch", "load"),
            ("numpy", "load"),
            ("numpy.core.multiarray", "scalar"),
            ("functools", "partial"),
            ("copyreg", "_reconstructor"),
            ("collections", "OrderedDict.fromkeys"),
            ("collections", "OrderedDict.__class__"),
            ("argparse", "Namespace.__init__.__globals__"),
            ("argparse", "_sys.modules"),
            ("torch._utils", "_rebuild_tensor_v2.__globals__"),
            ("torch", "storage"),
            (" builtins", "eval"),
            ("jorca.checkpoint.pytorch", "read_pytorch"),
        ],
    )
    @pytest.mark.parametrize("opcode", [tf.name, stack_global])
    def test_any_other_name_is_refused_and_named(self, tmp_path, module, attribute, opcode):
        target = tmp_path / "made"
        program = tf.call(opcode(module, attribute), tf.text(f"touch {target}"))
        path = tf.write(tmp_path / "x.pt", program)
        with pytest.raises(CheckpointError, match=re.escape(f"asks for '{module}.{attribute}'")):
            read_pytorch(path)
        assert not target.exists()

    @pytest.mark.parametrize("protocol", range(6))
    def test_a_reduce_that_writes_a_file_does_not(self, tmp_path, protocol):
        target = tmp_path / "made"
        program = pickle.dumps({"model": {"a": [1, Touch(target)]}}, protocol)
        assert pickle.loads(program)
        assert target.exists()
        target.unlink()
        with zipfile.ZipFile(tmp_path / "x.pt", "w") as archive:
            archive.writestr("archive/data.pkl", program)
        with pytest.raises(CheckpointError, match="could run code; nothing was run"):
            read_pytorch(tmp_path / "x.pt")
        assert not target.exists()

    @pytest.mark.parametrize(
        "program",
        [
            tf.name("os", "system").replace(b"c", b"(i", 1),
            b"(" + tf.name("os", "system") + tf.text("true") + b"o",
            tf.name("os", "system") + b")\x81",
        ],
        ids=["INST", "OBJ", "NEWOBJ"],
    )
    def test_every_opcode_that_makes_an_object_is_covered(self, tmp_path, program):
        with pytest.raises(CheckpointError, match=r"'os\.system'"):
            read_pytorch(tf.write(tmp_path / "x.pt", program))

    @pytest.mark.parametrize(
        "victim",
        [
            tf.name("collections", "OrderedDict"),
            tf.name("argparse", "Namespace"),
            tf.name("torch", "Size"),
            tf.name("torch", "FloatStorage"),
            tf.name("torch", "float32"),
            tf.name("torch._utils", "_rebuild_tensor_v2"),
            tf.storage("0", "FloatStorage", 24),
            tf.tensor(tf.storage("0", "FloatStorage", 24), (24,), (1,)),
        ],
        ids=["dict", "namespace", "size", "kind", "dtype", "function", "storage", "tensor"],
    )
    @pytest.mark.parametrize("slots", [False, True])
    def test_a_pickle_cannot_set_attributes_of_what_it_is_given(self, tmp_path, victim, slots):
        from jorca.checkpoint import pytorch

        stand_ins = {key: (value, dir(value)) for key, value in pytorch._STAND_INS.items()}
        state = tf.mapping(__setstate__=tf.name("torch", "Size"), __call__=tf.number(1))
        program = victim + (tf.sequence(b"N", state) if slots else state) + b"b"
        with pytest.raises(CheckpointError, match="malformed"):
            read_pytorch(tf.write(tmp_path / "x.pt", program, {"0": FLOATS.tobytes()}))
        assert {key: (value, dir(value)) for key, value in pytorch._STAND_INS.items()} == stand_ins

    def test_a_storage_outside_the_archive_is_not_opened(self, tmp_path):
        (tmp_path / "secret").write_bytes(FLOATS.tobytes())
        program = tf.tensor(tf.storage("../../secret", "FloatStorage", 24), (24,), (1,))
        with pytest.raises(CheckpointError, match="no member"):
            read_pytorch(tf.write(tmp_path / "x.pt", program))

    def test_the_standard_library_stays_as_it_is(self, tmp_path):
        before = (set(vars(collections.OrderedDict)), set(sys.modules))
        read_pytorch(ADDER)
        assert (set(vars(collections.OrderedDict)), set(sys.modules)) == before
