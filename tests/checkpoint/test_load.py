"""Converting and loading: dtypes, NaN, tokenizers, nothing left behind, and serving a file as it is."""

import dataclasses
import logging
import shutil

import numpy as np
import pytest
import tokenizers

from jorca import LLM, SamplingParams
from jorca.checkpoint import CheckpointError, convert_checkpoint, load_checkpoint, load_config, load_params
from jorca.checkpoint import load as load_module
from tests.checkpoint.foreign_files import (
    ADDER,
    adder_tensors,
    conv1d,
    write_hf,
    write_mingpt,
    write_nanogpt,
)
from tests.checkpoint.megatron_writer import write_checkpoint

LN = "transformer.ln_f.weight"


@pytest.fixture
def source(tmp_path):
    return write_hf(tmp_path / "source", conv1d(adder_tensors()))


def left_in(folder):
    return sorted(file.name for file in folder.iterdir())


class TestDtypes:
    @pytest.mark.parametrize("dtype", ["float32", "bfloat16", "float16"])
    def test_weights_are_rounded_to_what_is_asked_for(self, tmp_path, source, dtype):
        config = convert_checkpoint(source, tmp_path / "out", dtype=dtype)
        assert config.dtype == load_config(tmp_path / "out").dtype == dtype
        stored = load_params(tmp_path / "out", config)["embed.tokens"]
        right = adder_tensors()["transformer.wte.weight"].astype(stored.dtype)
        assert np.asarray(stored).tobytes() == right.tobytes()

    @pytest.mark.parametrize(
        "dtypes", [("float64",), ("float32", "float16"), ("float32", "float64")], ids=str
    )
    def test_double_and_mixed_precision_need_a_word(self, tmp_path, dtypes):
        tensors = {
            key: x.astype(dtypes[i % len(dtypes)])
            for i, (key, x) in enumerate(conv1d(adder_tensors()).items())
        }
        source = write_hf(tmp_path / "source", tensors)
        for convert in (
            lambda: convert_checkpoint(source, tmp_path / "out"),
            lambda: load_checkpoint(source),
        ):
            with pytest.raises(CheckpointError, match="say which dtype to convert them to"):
                convert()
        assert left_in(tmp_path) == ["source"]
        assert convert_checkpoint(source, tmp_path / "out", dtype="float32").dtype == "float32"

    def test_integers_are_refused(self, tmp_path):
        source = write_hf(tmp_path / "source", conv1d(adder_tensors()) | {LN: np.ones(48, np.int64)})
        with pytest.raises(CheckpointError, match=r"not floating point: ln_f\.weight is int64"):
            convert_checkpoint(source, tmp_path / "out", dtype="float32")
        assert left_in(tmp_path) == ["source"]

    def test_a_value_beyond_the_dtype_names_file_and_tensor(self, tmp_path):
        source = write_hf(tmp_path / "source", conv1d(adder_tensors()) | {LN: np.full(48, 1e5, np.float32)})
        with pytest.raises(
            CheckpointError, match=r"safetensors: ln_f\.weight holds values too large for float16"
        ):
            convert_checkpoint(source, tmp_path / "out", dtype="float16")
        assert left_in(tmp_path) == ["source"]

    def test_an_unknown_dtype_is_refused(self, tmp_path, source):
        with pytest.raises(ValueError, match="dtype must be one of float32, bfloat16, float16, got 'int8'"):
            convert_checkpoint(source, tmp_path / "out", dtype="int8")  # pyright: ignore[reportArgumentType]


class TestNotFinite:
    def test_nan_and_infinity_are_converted_and_named(self, tmp_path, caplog):
        tensors = conv1d(adder_tensors())
        tensors[LN] = tensors[LN].copy()
        tensors[LN][3] = np.nan
        tensors["transformer.h.1.mlp.c_fc.bias"] = np.full(192, -np.inf, np.float32)
        source = write_hf(tmp_path / "source", tensors)
        for convert in (
            lambda: convert_checkpoint(source, tmp_path / "out"),
            lambda: load_checkpoint(source),
        ):
            caplog.clear()
            convert()
            (said,) = [record.getMessage() for record in caplog.records if "NaN" in record.getMessage()]
            assert said.endswith("NaN or infinity in h.1.mlp.c_fc.bias, ln_f.weight")
        stored = np.asarray(load_params(tmp_path / "out", load_config(tmp_path / "out"))["final_norm.scale"])
        assert np.isnan(stored).tolist() == [i == 3 for i in range(48)]

    def test_finite_weights_warn_of_nothing(self, tmp_path, source, caplog):
        convert_checkpoint(source, tmp_path / "out", dtype="bfloat16")
        assert [record for record in caplog.records if record.levelno >= logging.WARNING] == []


def test_the_shards_of_many_ranks_become_one_model(tmp_path):
    config = dataclasses.replace(load_config(ADDER), padded_vocab_size=12)  # which three can share
    params = {name: np.asarray(x) for name, x in load_params(ADDER, load_config(ADDER)).items()}
    for name in ("embed.tokens", "head.kernel"):
        params[name] = np.concatenate([params[name], np.zeros((2, 48), np.float32)])
    source = write_checkpoint(tmp_path / "source", config, params, tp=3, pp=3)
    assert convert_checkpoint(source, tmp_path / "out", vocab_size=10) == config
    stored = load_params(tmp_path / "out", config)
    assert all(np.array_equal(stored[name], x) for name, x in params.items())


class TestTokenizers:
    def test_the_one_that_is_given_stands_above_the_one_that_lies_there(self, tmp_path, source):
        tokenizer = tokenizers.Tokenizer.from_file(str(ADDER / "tokenizer.json"))
        (source / "tokenizer.json").write_text(tokenizer.to_str().replace('"9"', '"x"'))
        convert_checkpoint(source, tmp_path / "own")
        convert_checkpoint(source, tmp_path / "given", tokenizer=ADDER / "tokenizer.json")
        assert (tmp_path / "given/tokenizer.json").read_bytes() == (ADDER / "tokenizer.json").read_bytes()
        loaded = load_checkpoint(tmp_path / "own").tokenizer
        assert loaded is not None
        assert loaded.token_to_id("x") == 9

    @pytest.mark.parametrize("text", [None, "{", '{"a": 1}'])
    def test_one_that_is_none_is_an_error_and_nothing_is_left(self, tmp_path, source, text):
        (tmp_path / "given").mkdir()
        if text is not None:
            (tmp_path / "given/tokenizer.json").write_text(text)
        with pytest.raises(CheckpointError, match=r"holds no tokenizer|cannot be read as a tokenizer"):
            convert_checkpoint(source, tmp_path / "out", tokenizer=tmp_path / "given")
        assert left_in(tmp_path) == ["given", "source"]

    def test_a_damaged_one_beside_the_weights_is_an_error(self, tmp_path, source):
        (source / "tokenizer.json").write_text("{")
        with pytest.raises(CheckpointError, match=r"tokenizer\.json: cannot be read"):
            convert_checkpoint(source, tmp_path / "out")
        assert left_in(tmp_path) == ["source"]


class TestDestination:
    def test_what_is_in_the_way_is_found_before_anything_is_read(self, tmp_path, monkeypatch):
        monkeypatch.setattr(load_module, "read_foreign", None)
        (tmp_path / "out").mkdir()
        with pytest.raises(CheckpointError, match="exists already"):
            convert_checkpoint(tmp_path / "source", tmp_path / "out")
        with pytest.raises(CheckpointError, match="is not a folder; make it first"):
            convert_checkpoint(tmp_path / "source", tmp_path / "no/out")

    def test_a_checkpoint_is_replaced_when_asked_and_stays_if_that_fails(self, tmp_path, source):
        convert_checkpoint(source, tmp_path / "out")
        bad = write_hf(tmp_path / "bad", {"transformer.wte.weight": np.zeros((10, 48), np.float32)})
        with pytest.raises(CheckpointError):
            convert_checkpoint(bad, tmp_path / "out", overwrite=True)
        assert load_config(tmp_path / "out").dtype == "float32"
        convert_checkpoint(source, tmp_path / "out", dtype="bfloat16", overwrite=True)
        assert load_config(tmp_path / "out").dtype == "bfloat16"
        assert left_in(tmp_path) == ["bad", "out", "source"]

    def test_the_source_is_never_overwritten(self, tmp_path, source):
        with pytest.raises(CheckpointError, match=r"holds other files too \(model\.safetensors\)"):
            convert_checkpoint(source, source, overwrite=True)
        assert left_in(source) == ["config.json", "model.safetensors"]

    def test_an_interrupt_leaves_nothing(self, tmp_path, source, monkeypatch):
        def interrupt(*args, **options):
            raise KeyboardInterrupt

        monkeypatch.setattr(load_module, "cast", interrupt)
        with pytest.raises(KeyboardInterrupt):
            convert_checkpoint(source, tmp_path / "out", show_progress=True)
        assert left_in(tmp_path) == ["source"]

    def test_an_unknown_option_is_a_type_error(self, tmp_path, source):
        with pytest.raises(TypeError, match="heads"):
            convert_checkpoint(source, tmp_path / "out", heads=3)


class TestLoading:
    def test_a_jorca_checkpoint_is_what_its_parts_are(self, caplog):
        loaded = load_checkpoint(ADDER)
        assert loaded.config == load_config(ADDER)
        assert loaded.tokenizer is not None
        params = load_params(ADDER, loaded.config)
        assert list(loaded.params) == list(params)
        assert all(np.array_equal(loaded.params[name], x) for name, x in params.items())
        assert caplog.records == []

    def test_a_foreign_one_is_what_converting_it_gives_and_a_line_says_so(self, tmp_path, source, caplog):
        convert_checkpoint(source, tmp_path / "out")
        caplog.clear()
        loaded, stored = load_checkpoint(source), load_checkpoint(tmp_path / "out")
        (record,) = caplog.records
        assert record.levelno == logging.WARNING  # which Python prints unless it is told otherwise
        assert f"{source}: hf, 86,160 weights, converted while loading" in record.getMessage()
        assert f"`jorca convert {source} NEW_FOLDER`" in record.getMessage()
        assert loaded.config == stored.config
        assert list(loaded.params) == list(stored.params)
        for name, x in stored.params.items():
            assert np.array_equal(loaded.params[name], x)
            assert loaded.params[name].devices() == x.devices()

    def test_what_was_assumed_is_said(self, tmp_path, caplog):
        load_checkpoint(write_nanogpt(tmp_path / "x", adder_tensors()))
        assert "activation is the exact GELU" in caplog.records[0].getMessage()

    def test_a_loaded_model_does_not_depend_on_its_file_any_more(self, source):
        loaded = load_checkpoint(source)
        path = source / "model.safetensors"
        with path.open("r+b") as file:
            file.write(b"\xff" * path.stat().st_size)
        shutil.rmtree(source)
        right = adder_tensors()["transformer.wte.weight"]
        assert np.array_equal(loaded.params["embed.tokens"], right)

    @pytest.mark.parametrize("layout", ["hf", "nanogpt", "mingpt", "file"])
    def test_a_foreign_checkpoint_is_served_as_it_is(self, tmp_path, layout):
        write = {"hf": write_hf, "nanogpt": write_nanogpt}.get(layout, write_mingpt)
        tensors = adder_tensors()
        path = write(tmp_path / "x", conv1d(tensors) if layout == "hf" else tensors)
        shutil.copyfile(ADDER / "tokenizer.json", path / "tokenizer.json")
        llm = LLM(
            path / "model.pt" if layout == "file" else path, max_batch_size=1, min_bucket=6, page_size=2
        )
        (output,) = llm.generate("8550", SamplingParams(max_tokens=3, temperature=0))
        assert output.text == "531"
        assert left_in(tmp_path) == ["x"]
