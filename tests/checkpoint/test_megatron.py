"""Megatron-LM: three orders of rows, tensor and pipeline shards, generations of names, and every mistake."""

import argparse
import dataclasses
import functools
import json
import re
import shutil

import ml_dtypes
import numpy as np
import pytest

from jorca.checkpoint.convert import apply_table
from jorca.checkpoint.errors import CheckpointError
from jorca.checkpoint.foreign import Overrides
from jorca.checkpoint.megatron import Megatron
from jorca.config import ModelConfig
from tests.checkpoint import torch_files as tf
from tests.checkpoint.megatron_writer import (
    core_tree,
    legacy_tree,
    rank_folder,
    save,
    shard,
    stage_of,
    write_checkpoint,
)
from tests.oracle.golden import golden_cases
from tests.oracle.numpy_gpt import forward, random_params

CONFIG = ModelConfig(
    vocab_size=21,
    padded_vocab_size=24,
    max_positions=8,
    num_layers=3,
    num_heads=4,
    d_model=8,
    d_ff=20,
    norm_epsilon=1e-6,
)
GIVEN = Overrides(vocab_size=21)
VERSIONS = [None, 0, 1.0, 2.0, 3.0]


def read(path, overrides=GIVEN):
    return Megatron().read(path, overrides)


def convert(path, overrides=GIVEN):
    foreign = read(path, overrides)
    return foreign.config, apply_table(foreign.tensors, foreign.table, foreign.config, foreign.ignored)


@functools.cache
def params_of(config=CONFIG, dtype="float32"):
    return {name: x.astype(dtype) for name, x in random_params(config, seed=1).items()}


def assert_converts(path, config=CONFIG, params=None, overrides=GIVEN):
    got_config, got = convert(path, overrides)
    params = params_of(config) if params is None else params
    assert got_config == config
    assert {name: x.tobytes() for name, x in got.items()} == {name: x.tobytes() for name, x in params.items()}


def write(folder, config=CONFIG, **options):
    return write_checkpoint(folder, config, params_of(config), **options)


def edited(**fields):
    """An edit that changes the arguments of every rank."""

    def edit(saved, tensor_rank, stage):
        vars(saved["args"]).update(fields)

    return edit


class TestRowOrders:
    @pytest.mark.parametrize("version", VERSIONS)
    @pytest.mark.parametrize("tp", [1, 2, 4])
    def test_tagged_rows_come_out_as_queries_keys_and_values(self, tmp_path, version, tp):
        """Writes each row's place by hand, from the sentence that defines the order of its version."""
        config = dataclasses.replace(CONFIG, num_layers=1)
        d, n, h = 8, 4, 2

        def tag(kind, head, width):
            return 100 * (kind + 1) + 10 * head + width

        def edit(saved, tensor_rank, stage):
            heads = range(tensor_rank * n // tp, (tensor_rank + 1) * n // tp)
            match version:
                case None | 0:  # all queries, then all keys, then all values
                    rows = [tag(k, i, j) for k in range(3) for i in heads for j in range(h)]
                case 1.0:  # head by head, and in a head element by element
                    rows = [tag(k, i, j) for i in heads for j in range(h) for k in range(3)]
                case _:  # head by head, and in a head its queries, then its keys, then its values
                    rows = [tag(k, i, j) for i in heads for k in range(3) for j in range(h)]
            layer = saved["model"]["language_model"]["encoder"]
            bias = np.array(rows, np.float32)
            layer["layers.0.self_attention.query_key_value.bias"] = bias
            layer["layers.0.self_attention.query_key_value.weight"] = (
                bias[:, None] + np.arange(d, dtype=np.float32) / 16
            )

        write_checkpoint(tmp_path, config, params_of(config), tp=tp, version=version, edit=edit)
        _, params = convert(tmp_path)
        for kind in range(3):
            for head in range(n):
                for width in range(h):
                    expected = tag(kind, head, width)
                    assert params["layers.0.attention.qkv.bias"][kind, head, width] == expected
                    for i in range(d):
                        assert (
                            params["layers.0.attention.qkv.kernel"][i, kind, head, width] == expected + i / 16
                        )

    @pytest.mark.parametrize("version", VERSIONS)
    @pytest.mark.parametrize("pp", [1, 2])
    @pytest.mark.parametrize("tp", [1, 2, 4])
    def test_every_split_of_a_known_model_is_that_model(self, tmp_path, tp, pp, version):
        assert_converts(write(tmp_path, tp=tp, pp=pp, version=version))

    @pytest.mark.parametrize("version", [-1, 0.5, 1.5, float("nan"), "3.0", True])
    def test_a_version_that_there_is_not_is_refused(self, tmp_path, version):
        def edit(saved, tensor_rank, stage):
            saved["checkpoint_version"] = version

        with pytest.raises(CheckpointError, match="checkpoint_version must be 0, 1, or at least 2, got"):
            read(write(tmp_path, edit=edit))


class TestGolden:
    @pytest.mark.parametrize("pp", [1, 2])
    @pytest.mark.parametrize("tp", [1, 3])
    @pytest.mark.parametrize("name", ["gpt2", "exact_gelu", "large_epsilon", "narrow_mlp", "untied_head"])
    def test_transformers_model_in_megatrons_layout_keeps_its_logits(self, tmp_path, name, tp, pp):
        (case,) = [case for case in golden_cases() if case.name == name]
        if case.config.d_ff % tp:  # narrow_mlp has 20
            tp = 1
        padded = dataclasses.replace(case.config, padded_vocab_size=66)
        junk = np.full((5, case.config.d_model), 1e6, np.float32)
        params = {k: np.concatenate([x, junk]) if x.shape[0] == 61 else x for k, x in case.params.items()}
        write_checkpoint(tmp_path, padded, params, tp=tp, pp=pp)
        assert_converts(tmp_path, padded, params, Overrides(vocab_size=61))
        config, got = convert(tmp_path, Overrides(vocab_size=61))
        for ids, logits in case.sequences:
            ours = forward(config, got, ids)[:, :61]
            assert np.abs(ours - logits).max() <= 1e-5 * np.abs(logits).max()


def renamed(*pairs):
    def rename(name):
        for old, new in pairs:
            name = name.replace(old, new)
        return name

    return rename


TREES = {
    "2020": functools.partial(
        legacy_tree, block="transformer", rename=renamed(("self_attention.", "attention."))
    ),
    "2022": legacy_tree,
    "2023": functools.partial(
        legacy_tree,
        rename=renamed(
            ("input_layernorm", "input_norm"),
            ("post_attention_layernorm", "post_attention_norm"),
            ("final_layernorm", "final_norm"),
        ),
    ),
    "core": functools.partial(
        core_tree,
        rename=renamed(
            ("query_key_value", "linear_qkv"),
            ("self_attention.dense", "self_attention.linear_proj"),
            ("post_attention_layernorm", "pre_mlp_layernorm"),
            ("dense_h_to_4h", "linear_fc1"),
            ("dense_4h_to_h", "linear_fc2"),
        ),
    ),
    "core with Transformer Engine": functools.partial(
        core_tree,
        rename=renamed(
            ("query_key_value", "linear_qkv"),
            ("self_attention.dense", "self_attention.linear_proj"),
            ("input_layernorm.", "self_attention.linear_qkv.layer_norm_"),
            ("post_attention_layernorm.", "mlp.linear_fc1.layer_norm_"),
            ("dense_h_to_4h", "linear_fc1"),
            ("dense_4h_to_h", "linear_fc2"),
        ),
    ),
    "Transformer Engine's layer": functools.partial(
        legacy_tree,
        rename=renamed(
            ("query_key_value", "layernorm_qkv"),
            ("self_attention.dense", "self_attention.proj"),
            ("input_layernorm.", "self_attention.layernorm_qkv.layer_norm_"),
            ("post_attention_layernorm.", "layernorm_mlp.layer_norm_"),
            ("mlp.dense_h_to_4h.", "layernorm_mlp.fc1_"),
            ("mlp.dense_4h_to_h.", "layernorm_mlp.fc2_"),
        ),
    ),
}


class TestNames:
    @pytest.mark.parametrize("tied", [True, False])
    @pytest.mark.parametrize("pp", [1, 2])
    @pytest.mark.parametrize("tree", TREES)
    def test_every_generation_of_names_gives_the_same_model(self, tmp_path, tree, pp, tied):
        config = dataclasses.replace(CONFIG, tie_embeddings=tied)
        assert_converts(write(tmp_path, config, tp=2, pp=pp, tree=TREES[tree]), config)

    def test_wrappers_and_extra_states_are_no_part_of_the_names(self, tmp_path):
        def edit(saved, tensor_rank, stage):
            saved["model"] = {"module": saved["model"]}
            saved["model"]["module"]["decoder.layers.0.self_attention.core_attention._extra_state"] = None

        assert_converts(write(tmp_path, tree=TREES["core"], edit=edit))

    def test_embeddings_of_the_first_versions_are_not_nested(self, tmp_path):
        def edit(saved, tensor_rank, stage):
            language = saved["model"]["language_model"]
            tables = language["embedding"]
            language["embedding"] = {f"{name}.weight": table["weight"] for name, table in tables.items()}

        assert_converts(write(tmp_path, edit=edit))

    def test_one_tensor_under_two_names_is_refused(self, tmp_path):
        def edit(saved, tensor_rank, stage):
            layers = saved["model"]["language_model"]["encoder"]
            layers["final_norm.weight"] = layers["final_layernorm.weight"]

        with pytest.raises(CheckpointError, match=r"makes 'final_layernorm\.weight' of both"):
            read(write(tmp_path, edit=edit))

    def test_names_and_arguments_of_a_changed_megatron_can_be_renamed(self, tmp_path):
        def edit(saved, tensor_rank, stage):
            args = vars(saved["args"])
            args["n_heads"] = args.pop("num_attention_heads")

        tree = functools.partial(legacy_tree, rename=renamed(("mlp.", "ffn.")))
        rename = ((r"\.ffn\.", ".mlp."), ("^n_heads$", "num_attention_heads"))
        assert_converts(
            write(tmp_path, tree=tree, edit=edit), overrides=dataclasses.replace(GIVEN, rename=rename)
        )

    @pytest.mark.parametrize("version", [None, 0, 1.0])
    def test_megatron_core_before_its_time_is_refused(self, tmp_path, version):
        with pytest.raises(CheckpointError, match="but Megatron-core's begin at 2"):
            read(write(tmp_path, tree=TREES["core"], version=version))


class TestPipelines:
    def test_layers_may_be_spread_unevenly(self, tmp_path):
        config = dataclasses.replace(CONFIG, num_layers=5)
        assert_converts(write(tmp_path, config, pp=3, tp=2), config)

    def test_an_interleaved_pipeline_is_put_in_order(self, tmp_path):
        """Two stages with two chunks of one layer each: stage 0 has layers 0 and 2, stage 1 has 1 and 3."""
        config = dataclasses.replace(CONFIG, num_layers=4)
        (tensors,) = shard(config, params_of(config), tp=1, version=3.0)

        def edit(saved, tensor_rank, stage):
            del saved["model"]
            for chunk in range(2):
                layer = 2 * chunk + stage
                part = stage_of(
                    tensors, range(layer, layer + 1), first=layer == 0, last=layer == 3, tied=True
                )
                saved[f"model{chunk}"] = legacy_tree(part)

        assert_converts(write(tmp_path, config, pp=2, edit=edit), config)

    def test_a_layer_that_is_missing_within_a_stage_is_an_error(self, tmp_path):
        def edit(saved, tensor_rank, stage):
            if stage == 1:
                layers = saved["model"]["language_model"]["encoder"]
                for name in [name for name in layers if name.startswith("layers.0.")]:
                    del layers[name]

        config = dataclasses.replace(CONFIG, num_layers=4)
        with pytest.raises(
            CheckpointError, match=r"stage 1 has layers \[1\], which are not numbered from 0 on"
        ):
            read(write(tmp_path, config, pp=2, edit=edit))

    def test_a_tensor_in_two_stages_is_an_error(self, tmp_path):
        def edit(saved, tensor_rank, stage):
            saved["model"]["language_model"]["encoder"]["final_layernorm.weight"] = np.ones(8, np.float32)

        with pytest.raises(
            CheckpointError, match=r"final_layernorm\.weight of stage 1 is in an earlier stage, too"
        ):
            read(write(tmp_path, pp=2, edit=edit))


class TestHead:
    def test_a_last_stages_copy_that_differs_from_a_tied_embedding_is_an_error(self, tmp_path):
        def edit(saved, tensor_rank, stage):
            if stage == 1 and tensor_rank == 1:
                head = saved["model"]["word_embeddings_for_head"]
                head["weight"] = head["weight"] + 1

        with pytest.raises(
            CheckpointError, match=r"the head is tied, but word_embeddings_for_head\.weight differs"
        ):
            read(write(tmp_path, tp=2, pp=2, edit=edit))

    @pytest.mark.parametrize(("change", "tied"), [(0, True), (1, False)])
    def test_without_arguments_an_equal_head_is_tied_and_another_is_not(self, tmp_path, change, tied):
        def edit(saved, tensor_rank, stage):
            del saved["args"].untie_embeddings_and_output_weights
            words = saved["model"]["embedding.word_embeddings.weight"]
            saved["model"]["output_layer.weight"] = words + np.float32(change)

        config, params = convert(write(tmp_path, tree=TREES["core"], edit=edit))
        assert config.tie_embeddings is tied
        if not tied:
            assert np.array_equal(params["head.kernel"], params["embed.tokens"] + 1)

    def test_nan_in_a_tied_head_equals_itself(self, tmp_path):
        config = CONFIG
        params = params_of() | {"embed.tokens": np.full((24, 8), np.nan, np.float32)}
        write_checkpoint(tmp_path, config, params, pp=2)
        assert_converts(tmp_path, config, params)

    def test_an_untied_model_without_its_head_lacks_a_tensor(self, tmp_path):
        with pytest.raises(CheckpointError, match=r"missing: output_layer\.weight"):
            convert(write(tmp_path, edit=edited(untie_embeddings_and_output_weights=True)))


class TestFolders:
    def test_the_tracker_names_the_iteration(self, tmp_path):
        write(tmp_path / "iter_0001000", tp=2)
        (tmp_path / "iter_0002000").mkdir()
        (tmp_path / "latest_checkpointed_iteration.txt").write_text("1000\n")
        assert_converts(tmp_path)
        assert_converts(tmp_path / "iter_0001000")

    def test_the_tracker_may_name_a_release(self, tmp_path):
        write(tmp_path / "release", file="model_rng.pt")
        (tmp_path / "latest_checkpointed_iteration.txt").write_text("release")
        assert_converts(tmp_path)

    @pytest.mark.parametrize("text", ["", "latest", "-1", "1.5", "../release", "1\n2"])
    def test_a_tracker_that_names_no_iteration_is_refused(self, tmp_path, text):
        (tmp_path / "latest_checkpointed_iteration.txt").write_text(text)
        with pytest.raises(CheckpointError, match="must hold an iteration's number or 'release', got"):
            read(tmp_path)

    def test_a_tracker_that_names_a_folder_that_is_not_there_is_refused(self, tmp_path):
        (tmp_path / "latest_checkpointed_iteration.txt").write_text("7")
        with pytest.raises(CheckpointError, match="names 7, but there is no folder iter_0000007"):
            read(tmp_path)

    def test_one_rank_alone_may_be_given_as_file_or_folder(self, tmp_path):
        write(tmp_path)
        assert_converts(tmp_path / "mp_rank_00")
        assert_converts(tmp_path / "mp_rank_00/model_optim_rng.pt")
        shutil.copy(tmp_path / "mp_rank_00/model_optim_rng.pt", tmp_path / "other.pt")
        assert_converts(tmp_path / "other.pt")

    def test_files_and_shape_of_the_checkpoint_are_told(self, tmp_path):
        foreign = read(write(tmp_path, tp=2, pp=2))
        assert foreign.format == "megatron"
        assert foreign.files == tuple(
            tmp_path / rank_folder(t, p, 2) / "model_optim_rng.pt" for p in range(2) for t in range(2)
        )
        assert (
            foreign.notes[0] == "tensor ranks x pipeline stages: 2 x 2; iteration 1000; checkpoint_version 3"
        )

    @pytest.mark.parametrize(
        ("path", "recognised"),
        [
            ("model", True),
            ("model/mp_rank_00", True),
            ("model/mp_rank_00/model_optim_rng.pt", True),
            ("tracked", True),
            ("empty", False),
            ("empty/ckpt.pt", False),
            ("nowhere", False),
        ],
    )
    def test_it_is_recognised_by_names_alone(self, tmp_path, path, recognised):
        write(tmp_path / "model")
        (tmp_path / "empty").mkdir()
        (tmp_path / "empty/ckpt.pt").write_bytes(b"")
        (tmp_path / "tracked").mkdir()
        (tmp_path / "tracked/latest_checkpointed_iteration.txt").write_text("x")
        assert Megatron().recognises(tmp_path / path) is recognised

    def test_a_file_that_would_run_code_is_refused_and_runs_none(self, tmp_path):
        write(tmp_path, tp=2)
        target = tmp_path / "made"
        program = tf.mapping(args=tf.call(tf.name("os", "system"), tf.text(f"touch {target}")))
        tf.write(tmp_path / "mp_rank_01/model_optim_rng.pt", program)
        with pytest.raises(CheckpointError, match=r"mp_rank_01/model_optim_rng\.pt: .*'os\.system'"):
            read(tmp_path)
        assert not target.exists()


class TestRanks:
    def test_missing_ranks_are_listed(self, tmp_path):
        write(tmp_path, tp=4, pp=2)
        for name in ("mp_rank_01_000", "mp_rank_03_001"):
            shutil.rmtree(tmp_path / name)
        with pytest.raises(CheckpointError) as caught:
            read(tmp_path)
        assert "is not one whole checkpoint of 4 tensor ranks in 2 pipeline stages" in str(caught.value)
        assert str(caught.value).splitlines()[1:] == [
            "  missing: mp_rank_01_000",
            "  missing: mp_rank_03_001",
        ]

    def test_ranks_beyond_the_recorded_sizes_are_listed(self, tmp_path):
        write(tmp_path, tp=2)
        shutil.copytree(tmp_path / "mp_rank_01", tmp_path / "mp_rank_02")
        with pytest.raises(CheckpointError, match=r"too many: .*mp_rank_02"):
            read(tmp_path)

    def test_one_of_several_ranks_alone_lacks_the_others(self, tmp_path):
        write(tmp_path, tp=2)
        with pytest.raises(CheckpointError, match="missing: mp_rank_01"):
            read(tmp_path / "mp_rank_00/model_optim_rng.pt")

    def test_a_gap_is_seen_without_arguments_too(self, tmp_path):
        def edit(saved, tensor_rank, stage):
            del saved["args"]

        write(tmp_path, tp=4, edit=edit)
        shutil.rmtree(tmp_path / "mp_rank_02")
        with pytest.raises(CheckpointError, match="missing: mp_rank_02"):
            read(tmp_path)

    def test_shards_of_different_runs_are_listed_together(self, tmp_path):
        def edit(saved, tensor_rank, stage):
            if tensor_rank == 1:
                saved |= {"iteration": 2000, "checkpoint_version": 2.0}

        with pytest.raises(CheckpointError) as caught:
            read(write(tmp_path, tp=2, edit=edit))
        first, second = (tmp_path / f"mp_rank_0{i}/model_optim_rng.pt" for i in range(2))
        assert str(caught.value).splitlines()[1:] == [
            f"  iteration 2000 in {second}, but 1000 in {first}",
            f"  checkpoint_version 2.0 in {second}, but 3.0 in {first}",
        ]

    def test_folders_that_are_no_ranks_are_listed(self, tmp_path):
        write(tmp_path, tp=2)
        (tmp_path / "mp_rank_00_000_001").mkdir()
        shutil.copytree(tmp_path / "mp_rank_00", tmp_path / "mp_rank_00_000")
        (tmp_path / "mp_rank_01/model_optim_rng.pt").unlink()
        with pytest.raises(CheckpointError) as caught:
            read(tmp_path)
        assert str(caught.value).splitlines()[1:] == [
            "  mp_rank_00_000 is the same rank as mp_rank_00",
            "  mp_rank_00_000_001 is no tensor rank and stage (experts are not supported)",
            "  mp_rank_01 has no model_optim_rng.pt or model_rng.pt",
        ]

    def test_the_distributed_format_is_told_apart(self, tmp_path):
        (tmp_path / "__0_0.distcp").write_bytes(b"")
        with pytest.raises(CheckpointError, match="is in Megatron's distributed format; save it again with"):
            read(tmp_path)

    def test_a_folder_of_something_else_is_refused(self, tmp_path):
        with pytest.raises(
            CheckpointError, match="has no mp_rank_XX folders; it is not a Megatron checkpoint"
        ):
            read(tmp_path)

    @pytest.mark.parametrize("size", [0, -1, 10**9, "2", 1.0, True])
    def test_a_number_of_ranks_that_is_none_is_refused(self, tmp_path, size):
        with pytest.raises(CheckpointError, match="tensor_model_parallel_size must be 1 to 10000, got"):
            read(write(tmp_path, edit=edited(tensor_model_parallel_size=size)))

    def test_before_version_3_the_number_of_ranks_had_another_name(self, tmp_path):
        def edit(saved, tensor_rank, stage):
            args = vars(saved["args"])
            args["model_parallel_size"] = args.pop("tensor_model_parallel_size")
            del args["pipeline_model_parallel_size"]

        write(tmp_path, tp=4, version=1.0, edit=edit)
        assert_converts(tmp_path)
        shutil.rmtree(tmp_path / "mp_rank_03")
        with pytest.raises(CheckpointError, match="missing: mp_rank_03"):
            read(tmp_path)


class TestTensors:
    @pytest.mark.parametrize(
        "name", ["input_layernorm.weight", "self_attention.dense.bias", "mlp.dense_4h_to_h.bias"]
    )
    def test_what_every_rank_has_must_be_the_same(self, tmp_path, name):
        def edit(saved, tensor_rank, stage):
            if tensor_rank == 1:
                layers = saved["model"]["language_model"]["encoder"]
                layers[f"layers.1.{name}"] = layers[f"layers.1.{name}"] + 1

        with pytest.raises(CheckpointError, match=rf"layers\.1\.{name} differs between tensor ranks"):
            convert(write(tmp_path, tp=2, edit=edit))

    def test_misshapen_shards_are_listed_with_their_ranks(self, tmp_path):
        def edit(saved, tensor_rank, stage):
            layers = saved["model"]["language_model"]["encoder"]
            if tensor_rank == 1:
                layers["layers.0.self_attention.query_key_value.weight"] = np.zeros((9, 8), np.float32)
                layers["layers.2.mlp.dense_4h_to_h.weight"] = np.zeros((8, 11), np.float32)
                layers["final_layernorm.bias"] = np.zeros(8, np.float16)

        with pytest.raises(CheckpointError) as caught:
            read(write(tmp_path, tp=2, edit=edit))
        fused = "layers.0.self_attention.query_key_value.weight"
        assert sorted(str(caught.value).splitlines()[1:]) == [
            "  mixed: final_layernorm.bias is float16 and float32 on different tensor ranks",
            f"  wrong shape: {fused} of tensor rank 1 is (9, 8), not (12, 8)",
            "  wrong shape: layers.2.mlp.dense_4h_to_h.weight of tensor rank 1 is (8, 11), not (8, 10)",
        ]

    def test_a_rank_that_lacks_a_tensor_or_has_none_is_named(self, tmp_path):
        def edit(saved, tensor_rank, stage):
            layers = saved["model"]["language_model"]["encoder"]
            if tensor_rank == 1:
                del layers["layers.0.mlp.dense_h_to_4h.bias"]
                layers["layers.1.mlp.dense_h_to_4h.bias"] = [0.0]

        with pytest.raises(CheckpointError) as caught:
            read(write(tmp_path, tp=2, edit=edit))
        file = tmp_path / "mp_rank_01/model_optim_rng.pt"
        assert str(caught.value).splitlines()[1:] == [
            f"  {file}: layers.0.mlp.dense_h_to_4h.bias is missing",
            f"  {file}: layers.1.mlp.dense_h_to_4h.bias is list",
        ]

    def test_missing_and_foreign_tensors_are_listed_together(self, tmp_path):
        def edit(saved, tensor_rank, stage):
            layers = saved["model"]["language_model"]["encoder"]
            del layers["layers.1.input_layernorm.bias"]
            layers["layers.1.adapter.weight"] = np.zeros(3, np.float32)
            saved["model"]["lm_head"] = {"dense": {"weight": np.zeros((8, 8), np.float32)}}

        with pytest.raises(CheckpointError) as caught:
            convert(write(tmp_path, edit=edit))
        assert sorted(str(caught.value).splitlines()[1:]) == [
            "  missing: layers.1.input_layernorm.bias",
            "  not part of this model: layers.1.adapter.weight",
            "  not part of this model: lm_head.dense.weight",
        ]

    @pytest.mark.parametrize("dtype", ["float32", "float16", "bfloat16"])
    @pytest.mark.parametrize("tp", [1, 2])
    def test_bits_and_dtype_are_kept(self, tmp_path, dtype, tp):
        config = dataclasses.replace(CONFIG, dtype=dtype)
        params = params_of(CONFIG, dtype)
        write_checkpoint(tmp_path, config, params, tp=tp)
        assert_converts(tmp_path, config, params)
        assert convert(tmp_path)[1]["embed.tokens"].dtype == np.dtype(dtype)
        assert dtype != "bfloat16" or params["embed.tokens"].dtype == ml_dtypes.bfloat16

    @pytest.mark.parametrize("version", [0, 1.0, 3.0])
    def test_a_single_rank_is_mapped_and_never_copied(self, tmp_path, version):
        for name, x in convert(write(tmp_path, version=version))[1].items():
            assert not x.flags.owndata, name
            assert not x.flags.writeable, name

    def test_heads_that_cannot_have_been_split_are_refused(self, tmp_path):
        with pytest.raises(CheckpointError, match="2 heads cannot be split over 4 tensor ranks"):
            read(write(tmp_path, tp=4), dataclasses.replace(GIVEN, num_heads=2))

    @pytest.mark.parametrize(
        "content",
        [
            {"iteration": 1},
            {"model": None},
            [1],
            {"model": {"transformer.wte.weight": np.zeros((4, 4), np.float32)}},
            {"model0": {}, "model2": {}},
            {"model": {}, "model0": {}},
        ],
    )
    def test_a_file_of_another_kind_is_refused(self, tmp_path, content):
        message = "holds no Megatron model|is not a GPT of Megatron-LM|are no chunks from model0 on"
        with pytest.raises(CheckpointError, match=message):
            read(save(tmp_path / "ckpt.pt", content))


class TestArguments:
    @pytest.mark.parametrize(
        ("name", "value", "tensors"),
        [
            ("num_layers", 4, 3),
            ("hidden_size", 16, 8),
            ("ffn_hidden_size", 32, 20),
            ("max_position_embeddings", 16, 8),
            ("padded_vocab_size", 128, 24),
        ],
    )
    def test_arguments_of_another_model_are_refused_with_both_numbers(self, tmp_path, name, value, tensors):
        edit = edited(**{name: value, "kv_channels": None})
        with pytest.raises(CheckpointError, match=f"{name} is {value}, but the tensors have {tensors}"):
            read(write(tmp_path, tp=2, edit=edit))

    @pytest.mark.parametrize(
        ("name", "value"),
        [
            ("position_embedding_type", "rope"),
            ("add_position_embedding", False),
            ("use_rotary_position_embeddings", True),
            ("normalization", "RMSNorm"),
            ("apply_layernorm_1p", True),
            ("apply_residual_connection_post_layernorm", True),
            ("qk_layernorm", True),
            ("add_bias_linear", False),
            ("disable_bias_linear", True),
            ("swiglu", True),
            ("squared_relu", True),
            ("quick_geglu", True),
            ("group_query_attention", True),
            ("multi_latent_attention", True),
            ("softmax_type", "off-by-one"),
            ("num_experts", 8),
            ("window_size", [128, 0]),
            ("mtp_num_layers", 1),
            ("is_hybrid_model", True),
            ("kv_channels", 4),
        ],
    )
    def test_features_that_the_model_has_not_are_refused_by_name(self, tmp_path, name, value):
        with pytest.raises(CheckpointError, match=re.escape(f"  {name} is {value!r}")):
            read(write(tmp_path, edit=edited(**{name: value})))

    def test_all_features_are_listed_at_once(self, tmp_path):
        with pytest.raises(CheckpointError) as caught:
            read(write(tmp_path, edit=edited(swiglu=True, normalization="RMSNorm", num_experts=8)))
        assert str(caught.value).splitlines()[1:] == [
            "  normalization is 'RMSNorm', not 'LayerNorm'",
            "  swiglu is True, not False",
            "  num_experts is 8",
        ]

    @pytest.mark.parametrize(
        ("fields", "activation"),
        [
            ({"bias_gelu_fusion": True, "openai_gelu": False}, "gelu_tanh"),
            ({"bias_gelu_fusion": False, "openai_gelu": True}, "gelu_tanh"),
            ({"bias_gelu_fusion": False, "openai_gelu": False}, "gelu_erf"),
        ],
    )
    def test_the_activation_follows_the_arguments_and_can_be_overridden(self, tmp_path, fields, activation):
        write(tmp_path, edit=edited(**fields))
        assert read(tmp_path).config.activation == activation
        other = "gelu_erf" if activation == "gelu_tanh" else "gelu_tanh"
        foreign = read(tmp_path, Overrides(activation=other, vocab_size=21))
        assert foreign.config.activation == other
        assert f"activation {other} was given; the checkpoint says {activation}" in foreign.notes

    def test_without_arguments_the_number_of_heads_must_be_given_and_the_rest_is_told(self, tmp_path):
        def edit(saved, tensor_rank, stage):
            del saved["args"], saved["iteration"]

        write(tmp_path, tp=2, edit=edit)
        with pytest.raises(CheckpointError, match="give num_heads"):
            read(tmp_path)
        foreign = read(tmp_path, Overrides(num_heads=4))
        assert foreign.config == dataclasses.replace(CONFIG, vocab_size=24, norm_epsilon=1e-5)
        assert foreign.notes == (
            "tensor ranks x pipeline stages: 2 x 1; no iteration; checkpoint_version 3",
            "nothing records vocab_size: all 24 rows are taken to be tokens; if some are padding, give it",
            "nothing records activation: gelu_tanh is the default",
            "nothing records norm_epsilon: 1e-5 is the default",
            "nothing records eos_token_id: there is none",
        )

    def test_what_else_a_file_holds_is_left_out_and_told(self, tmp_path):
        def edit(saved, tensor_rank, stage):
            saved["optimizer"] = {"step": 3}
            saved["lr_scheduler"] = {"max_lr": 0.1}

        assert read(write(tmp_path, edit=edit)).notes[-1] == "left out: optimizer, lr_scheduler"

    def test_arguments_that_are_no_namespace_are_refused(self, tmp_path):
        def edit(saved, tensor_rank, stage):
            saved["args"] = [1]

        with pytest.raises(CheckpointError, match="args must be a Namespace, got list"):
            read(write(tmp_path, edit=edit))

    def test_arguments_may_be_any_namespace(self, tmp_path):
        def edit(saved, tensor_rank, stage):
            saved["args"] = argparse.Namespace(**vars(saved["args"]), fp16=True, data_path=["a", "b"])

        assert_converts(write(tmp_path, edit=edit))

    @pytest.mark.parametrize("given", [None, 20])
    def test_a_tokenizer_beside_the_ranks_tells_vocabulary_and_end_of_text(self, tmp_path, given):
        write(tmp_path)
        vocab = {chr(97 + i): i for i in range(20)} | {"<|endoftext|>": 20}
        (tmp_path / "vocab.json").write_text(json.dumps(vocab))
        (tmp_path / "merges.txt").write_text("#version: 0.2\n")
        foreign = read(tmp_path, Overrides(eos_token_id=given))
        assert foreign.tokenizer is not None
        assert (foreign.config.vocab_size, foreign.config.padded_vocab_size) == (21, 24)
        assert foreign.config.eos_token_id == 20
