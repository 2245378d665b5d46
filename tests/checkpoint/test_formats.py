"""Which format a path is: exactly one fits, or one error says what was looked for."""

import json
import shutil

import pytest

from jorca.checkpoint import CheckpointError
from jorca.checkpoint.formats import FORMAT_NAMES, detect, read_foreign
from tests.checkpoint import torch_files as tf
from tests.checkpoint.foreign_files import (
    ADDER,
    DATA,
    GOLDEN,
    adder_tensors,
    conv1d,
    write_hf,
    write_mingpt,
    write_nanogpt,
)


@pytest.mark.parametrize(
    ("path", "name"),
    [
        (GOLDEN / "hf", "hf"),
        (GOLDEN / "hf/model.safetensors", "hf"),
        (GOLDEN / "hf_sharded", "hf"),
        (GOLDEN / "hf_sharded/model.safetensors.index.json", "hf"),
        (GOLDEN / "hf_bin/pytorch_model.bin", "hf"),
        (GOLDEN / "hf_bin_sharded", "hf"),
        (GOLDEN / "nanogpt", "nanogpt"),
        (GOLDEN / "nanogpt_without_bias/ckpt.pt", "nanogpt"),
        (GOLDEN / "mingpt", "mingpt"),
        (GOLDEN / "mingpt/model.pt", "mingpt"),
        (ADDER / "source", "mingpt"),
        (DATA / "nanogpt_byhand", "nanogpt"),
        (DATA / "hf_tiny_gpt2", "hf"),
    ],
    ids=lambda value: str(value)[-20:],
)
def test_every_layout_is_known(path, name):
    assert detect(path).name == name


def test_a_folder_that_fits_several_formats_asks_which(tmp_path):
    write_nanogpt(tmp_path, adder_tensors())
    write_mingpt(tmp_path, adder_tensors())
    with pytest.raises(CheckpointError, match="may be nanogpt and mingpt; say which with format"):
        detect(tmp_path)
    assert read_foreign(tmp_path, format="mingpt").format == "mingpt"
    assert read_foreign(tmp_path, format="nanogpt").format == "nanogpt"


def test_a_path_that_fits_none_lists_what_was_looked_for(tmp_path):
    (tmp_path / "weights.pt").write_text("")
    with pytest.raises(CheckpointError) as caught:
        detect(tmp_path)
    assert "is not a jorca checkpoint, nor anything that `jorca convert` knows" in str(caught.value)
    for name in ("jorca", *FORMAT_NAMES):
        assert f"\n  {name}: " in str(caught.value)
    with pytest.raises(
        CheckpointError, match="format must be one of hf, nanogpt, mingpt, megatron, got 'gguf'"
    ):
        read_foreign(tmp_path, format="gguf")
    with pytest.raises(CheckpointError, match="does not exist"):
        detect(tmp_path / "nothing")


def test_a_jorca_checkpoint_needs_no_converting(tmp_path):
    with pytest.raises(CheckpointError, match="is a jorca checkpoint, which needs no converting"):
        detect(ADDER)


@pytest.mark.parametrize("write", [write_nanogpt, write_mingpt])
def test_a_file_that_is_cut_is_called_damaged_wherever_it_is_cut(tmp_path, write):
    path = next(write(tmp_path / "x", adder_tensors()).glob("*.pt"))
    whole = path.read_bytes()
    other = tmp_path / "other.pt"
    for size in [0, 1, 3, 4, 100, *range(1000, len(whole), len(whole) // 20), len(whole) - 1]:
        path.write_bytes(whole[:size])
        for source in (path.parent, path, shutil.copyfile(path, other)):
            with pytest.raises(
                CheckpointError, match=r"\.pt: (is damaged|is not a file that torch\.save wrote)"
            ):
                read_foreign(source)


def test_other_values_that_torch_saved_are_no_checkpoint(tmp_path):
    for value in ([1, 2], {"a": 1.5}, {"state": {"wte.weight": 1.0}}):
        with pytest.raises(CheckpointError, match="nor anything"):
            read_foreign(tf.save(tmp_path / "x.pt", value))


def test_a_format_can_be_said_for_files_with_other_names(tmp_path):
    folder = write_hf(tmp_path / "x", conv1d(adder_tensors()), kind="bin")
    (folder / "pytorch_model.bin").rename(folder / "weights.bin")
    assert read_foreign(folder / "weights.bin").format == "hf"
    with pytest.raises(CheckpointError, match=r"holds none of model\.safetensors, .*pytorch_model\.bin"):
        read_foreign(folder, format="hf")


def test_a_tokenizer_of_another_size_is_noted_either_way(tmp_path):
    folder = write_hf(tmp_path / "x", conv1d(adder_tensors()))
    tokenizer = json.loads((ADDER / "tokenizer.json").read_text())
    for num_ids, said in (
        (10, []),
        (8, ["vocab_size 8 keeps them from being sampled"]),
        (12, ["are refused"]),
    ):
        tokenizer["model"]["vocab"] = {str(i): i for i in range(num_ids)}
        (folder / "tokenizer.json").write_text(json.dumps(tokenizer))
        notes = read_foreign(folder).notes
        assert len(notes) == len(said)
        assert all(note.endswith(end) for note, end in zip(notes, said, strict=True))
