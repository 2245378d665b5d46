"""Saving and restoring: bit for bit, onto any devices, wholly or not at all."""

import dataclasses
import json
import shutil
import subprocess
import sys
from pathlib import Path
from types import SimpleNamespace

import jax
import ml_dtypes
import numpy as np
import orbax.checkpoint as ocp
import pytest
from jax.sharding import Mesh, NamedSharding, PartitionSpec

from jorca.checkpoint import store
from jorca.checkpoint.errors import CheckpointError
from jorca.checkpoint.store import load_config, load_params, save_checkpoint
from jorca.config import ModelConfig
from jorca.model.params import param_table

CONFIG = ModelConfig(
    vocab_size=16, max_positions=8, num_layers=2, num_heads=4, d_model=16, eos_token_id=3, norm_epsilon=1e-6
)
MESH_AXIS_OF = {"vocab": "tensor", "heads": "tensor", "mlp": "tensor"}


def make_params(config=CONFIG, seed=0):
    rng = np.random.default_rng(seed)
    dtype = np.dtype(config.dtype)
    return {n: rng.standard_normal(i.shape).astype(dtype) for n, i in param_table(config).items()}


def make_shardings(num_devices, config=CONFIG):
    mesh = Mesh(np.array(jax.devices()[:num_devices]), ("tensor",))
    return {
        name: NamedSharding(mesh, PartitionSpec(*map(MESH_AXIS_OF.get, info.axes)))
        for name, info in param_table(config).items()
    }


def assert_same_bits(actual, expected):
    assert list(actual) == list(param_table(CONFIG))
    for name, x in actual.items():
        assert isinstance(x, jax.Array)
        assert x.dtype == expected[name].dtype
        assert np.asarray(x).tobytes() == np.asarray(expected[name]).tobytes(), name


class TestRoundTrip:
    @pytest.mark.parametrize("dtype", ["float32", "bfloat16", "float16"])
    @pytest.mark.parametrize("use_bias", [True, False])
    def test_config_and_bits_come_back(self, tmp_path, dtype, use_bias):
        config = ModelConfig(
            vocab_size=11,
            max_positions=8,
            num_layers=2,
            num_heads=2,
            d_model=6,
            dtype=dtype,
            use_bias=use_bias,
        )
        params = make_params(config)
        save_checkpoint(tmp_path / "model", config, params)
        assert load_config(tmp_path / "model") == config
        loaded = load_params(tmp_path / "model", config)
        assert all(np.asarray(loaded[n]).tobytes() == x.tobytes() for n, x in params.items())

    @pytest.mark.parametrize("num_devices", [1, 2, 4])
    def test_weights_go_straight_onto_the_shardings_asked_for(self, tmp_path, num_devices):
        params = make_params()
        save_checkpoint(tmp_path / "model", CONFIG, params)
        shardings = make_shardings(num_devices)
        loaded = load_params(tmp_path / "model", CONFIG, shardings=shardings)
        assert_same_bits(loaded, params)
        for name, x in loaded.items():
            assert x.sharding == shardings[name]
        shard = loaded["layers.0.attention.qkv.kernel"].addressable_shards[0].data
        assert shard.shape == (16, 3, 4 // num_devices, 4)

    @pytest.mark.parametrize("num_devices", [1, 2, 8])
    def test_what_four_devices_saved_fewer_and_more_can_restore(self, tmp_path, num_devices):
        config = dataclasses.replace(CONFIG, num_heads=8)
        params = make_params(config)
        four = make_shardings(4, config)
        save_checkpoint(
            tmp_path / "model", config, {n: jax.device_put(x, four[n]) for n, x in params.items()}
        )
        shardings = make_shardings(num_devices, config)
        assert_same_bits(load_params(tmp_path / "model", config, shardings=shardings), params)

    def test_the_default_is_the_first_device(self, tmp_path):
        save_checkpoint(tmp_path / "model", CONFIG, make_params())
        assert {d for x in load_params(tmp_path / "model", CONFIG).values() for d in x.devices()} == {
            jax.devices()[0]
        }

    def test_restoring_in_another_dtype_rounds_to_nearest(self, tmp_path):
        params = make_params()
        save_checkpoint(tmp_path / "model", CONFIG, params)
        loaded = load_params(tmp_path / "model", CONFIG, dtype="bfloat16")
        assert_same_bits(loaded, {n: x.astype(ml_dtypes.bfloat16) for n, x in params.items()})

    def test_views_are_stored_as_what_they_show(self, tmp_path):
        params = make_params()
        params["embed.positions"] = np.asfortranarray(params["embed.positions"])
        params["layers.1.mlp.up.kernel"] = np.broadcast_to(np.float32(3), (16, 64))
        save_checkpoint(tmp_path / "model", CONFIG, params)
        loaded = load_params(tmp_path / "model", CONFIG)
        assert all(np.array_equal(loaded[n], x) for n, x in params.items())

    def test_a_folder_can_be_moved_and_named_relatively(self, tmp_path, monkeypatch):
        monkeypatch.chdir(tmp_path)
        params = make_params()
        save_checkpoint("model", CONFIG, params)
        Path("model").rename("moved")
        assert_same_bits(load_params("moved", CONFIG), params)
        files = [file for file in Path("moved").rglob("*") if file.is_file()]
        assert not any(str(tmp_path).encode() in file.read_bytes() for file in files)

    def test_a_tokenizer_is_kept_beside_the_weights(self, tmp_path):
        save_checkpoint(tmp_path / "model", CONFIG, make_params(), tokenizer='{"a": 1}')
        assert (tmp_path / "model/tokenizer.json").read_text() == '{"a": 1}'
        assert sorted(file.name for file in (tmp_path / "model").iterdir()) == [
            "config.json",
            "params",
            "tokenizer.json",
        ]


class TestRefusals:
    def test_params_that_do_not_fit_are_listed_and_nothing_is_written(self, tmp_path):
        params = make_params()
        del params["final_norm.bias"]
        params["head.kernel"] = params["embed.tokens"]  # the head is tied
        params["embed.positions"] = params["embed.positions"][:5]
        params["layers.0.mlp.up.bias"] = params["layers.0.mlp.up.bias"].astype(np.float16)
        with pytest.raises(CheckpointError) as caught:
            save_checkpoint(tmp_path / "model", CONFIG, params)
        assert sorted(str(caught.value).splitlines()[1:]) == [
            "  missing: final_norm.bias",
            "  not part of this model: head.kernel",
            "  wrong dtype: layers.0.mlp.up.bias is float16",
            "  wrong shape: embed.positions is (5, 16), the config needs (8, 16)",
        ]
        assert list(tmp_path.iterdir()) == []

    def test_stored_weights_of_another_model_are_listed(self, tmp_path):
        save_checkpoint(tmp_path / "model", CONFIG, make_params())
        other = ModelConfig(
            vocab_size=17, max_positions=8, num_layers=2, num_heads=4, d_model=16, tie_embeddings=False
        )
        with pytest.raises(CheckpointError) as caught:
            load_params(tmp_path / "model", other)
        assert str(caught.value).splitlines()[1:] == [
            "  missing: head.kernel",
            "  wrong shape: embed.tokens is (16, 16), the config needs (17, 16)",
        ]

    def test_an_existing_folder_is_replaced_only_when_asked(self, tmp_path):
        save_checkpoint(tmp_path / "model", CONFIG, make_params(seed=0))
        with pytest.raises(CheckpointError, match="exists already"):
            save_checkpoint(tmp_path / "model", CONFIG, make_params(seed=1))
        assert_same_bits(load_params(tmp_path / "model", CONFIG), make_params(seed=0))
        save_checkpoint(tmp_path / "model", CONFIG, make_params(seed=1), overwrite=True)
        assert_same_bits(load_params(tmp_path / "model", CONFIG), make_params(seed=1))
        assert [file.name for file in tmp_path.iterdir()] == ["model"]

    def test_overwriting_never_removes_files_of_others(self, tmp_path):
        save_checkpoint(tmp_path / "model", CONFIG, make_params())
        (tmp_path / "model/notes.txt").write_text("keep me")
        with pytest.raises(CheckpointError, match=r"other files too \(notes\.txt\)"):
            save_checkpoint(tmp_path / "model", CONFIG, make_params(), overwrite=True)
        (tmp_path / "home").mkdir()
        with pytest.raises(CheckpointError, match="is no checkpoint"):
            save_checkpoint(tmp_path / "home", CONFIG, make_params(), overwrite=True)
        assert (tmp_path / "model/notes.txt").read_text() == "keep me"

    def test_a_damaged_index_is_an_error(self, tmp_path):
        save_checkpoint(tmp_path / "model", CONFIG, make_params())
        (tmp_path / "model/params/_METADATA").write_text("{")
        with pytest.raises(CheckpointError, match="index is damaged"):
            load_params(tmp_path / "model", CONFIG)

    @pytest.mark.parametrize(
        ("pattern", "message"),
        [("manifest.ocdbt", "the weights' index is damaged"), ("ocdbt.*/d/*", "the weights cannot be read")],
    )
    def test_files_cut_short_are_an_error_and_not_other_numbers(self, tmp_path, pattern, message):
        """Runs in a process of its own: Orbax leaves reads behind that complain at some later time."""
        save_checkpoint(tmp_path / "model", CONFIG, make_params())
        largest = max((tmp_path / "model/params").glob(pattern), key=lambda file: file.stat().st_size)
        largest.write_bytes(largest.read_bytes()[: largest.stat().st_size // 2])
        program = (
            "import sys, jax; jax.config.update('jax_platforms', 'cpu')\n"
            "from jorca.checkpoint import CheckpointError, load_config, load_params\n"
            "try: load_params(sys.argv[1], load_config(sys.argv[1]))\n"
            "except CheckpointError as error: print(error)\n"
        )
        command = [sys.executable, "-c", program, str(tmp_path / "model")]
        result = subprocess.run(command, capture_output=True, text=True, check=False)
        assert result.stdout.startswith(f"{tmp_path / 'model'}: {message}"), result.stderr

    def test_a_missing_parent_is_named(self, tmp_path):
        with pytest.raises(CheckpointError, match="none: is not a folder"):
            save_checkpoint(tmp_path / "none/model", CONFIG, make_params())

    @pytest.mark.parametrize(
        ("change", "message"),
        [
            ({"version": None}, "version must be 1, got None"),
            ({"version": 2}, "version must be 1, got 2"),
            ({"format": "other"}, "not a jorca checkpoint"),
            ({"extra": 1}, "unknown fields: extra"),
        ],
    )
    def test_a_config_of_another_version_or_format_is_refused(self, tmp_path, change, message):
        save_checkpoint(tmp_path / "model", CONFIG, make_params())
        data = json.loads((tmp_path / "model/config.json").read_text()) | change
        data = {key: value for key, value in data.items() if value is not None}
        (tmp_path / "model/config.json").write_text(json.dumps(data))
        with pytest.raises(CheckpointError, match=message):
            load_config(tmp_path / "model")

    @pytest.mark.parametrize(
        ("change", "message"),
        [
            ({"rotary": True}, "rotary"),
            ({"num_heads": 3}, "num_heads must divide d_model"),
            ({"vocab_size": "16"}, "vocab_size must be an integer"),
        ],
    )
    def test_unknown_or_wrong_model_fields_are_refused(self, tmp_path, change, message):
        save_checkpoint(tmp_path / "model", CONFIG, make_params())
        data = json.loads((tmp_path / "model/config.json").read_text())
        data["model"].update(change)
        (tmp_path / "model/config.json").write_text(json.dumps(data))
        with pytest.raises(CheckpointError, match=message):
            load_config(tmp_path / "model")

    @pytest.mark.parametrize("text", ["", "[]", "{", '"jorca"'])
    def test_a_config_that_is_no_config_is_refused(self, tmp_path, text):
        (tmp_path / "config.json").write_text(text)
        with pytest.raises(CheckpointError, match=r"config\.json"):
            load_config(tmp_path)

    def test_a_folder_without_a_model_says_what_makes_one(self, tmp_path):
        with pytest.raises(CheckpointError, match="jorca convert"):
            load_config(tmp_path)
        with pytest.raises(CheckpointError, match="holds no weights"):
            load_params(tmp_path, CONFIG)


class TestInterruption:
    @pytest.mark.parametrize("stage", ["weights", "config", "rename"])
    @pytest.mark.parametrize("existing", [False, True])
    def test_an_interrupted_save_leaves_nothing_that_loads(self, tmp_path, monkeypatch, stage, existing):
        path = tmp_path / "model"
        if existing:
            save_checkpoint(path, CONFIG, make_params(seed=0))

        def fail(*args, **kwargs):
            raise KeyboardInterrupt

        with monkeypatch.context() as patch:
            if stage == "weights":
                patch.setattr(ocp.Checkpointer, "save", fail)
            elif stage == "config":
                patch.setattr(store, "json", SimpleNamespace(dumps=fail))
            else:
                patch.setattr(store, "_replace", fail)
            with pytest.raises(KeyboardInterrupt):
                save_checkpoint(
                    path,
                    CONFIG,
                    make_params(seed=1),
                    tokenizer="{}",
                    overwrite=True,
                )
        if existing:
            assert_same_bits(load_params(path, CONFIG), make_params(seed=0))
        assert [file.name for file in tmp_path.iterdir()] == (["model"] if existing else [])

    def test_a_killed_save_leaves_a_folder_that_is_no_checkpoint(self, tmp_path, monkeypatch):
        """As a kill would, this stops before the last step and cleans up nothing."""
        with monkeypatch.context() as patch:
            patch.setattr(shutil, "rmtree", lambda *args, **kwargs: None)
            patch.setattr(store, "CONFIG_FILE", "no such folder/config.json")
            with pytest.raises(FileNotFoundError):
                save_checkpoint(tmp_path / "model", CONFIG, make_params())
        (partial,) = tmp_path.glob(".model.*")
        assert (partial / "params").is_dir()
        with pytest.raises(CheckpointError, match="not a jorca checkpoint"):
            load_config(partial)

    def test_a_failed_rename_puts_the_old_model_back(self, tmp_path, monkeypatch):
        save_checkpoint(tmp_path / "model", CONFIG, make_params(seed=0))
        rename = Path.rename

        def fail_for_partial(self, target):
            if self.suffix == ".partial":
                raise OSError("no")
            return rename(self, target)

        monkeypatch.setattr(Path, "rename", fail_for_partial)
        with pytest.raises(OSError, match="no"):
            save_checkpoint(tmp_path / "model", CONFIG, make_params(seed=1), overwrite=True)
        assert_same_bits(load_params(tmp_path / "model", CONFIG), make_params(seed=0))
        assert [file.name for file in tmp_path.iterdir()] == ["model"]
