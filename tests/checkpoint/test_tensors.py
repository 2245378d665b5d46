"""State dicts whole and in shards: the same however they are cut, and every way an index can be wrong."""

import json

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from safetensors.numpy import save_file

from jorca.checkpoint.errors import CheckpointError
from jorca.checkpoint.tensors import read_tensors
from tests.checkpoint import torch_files as tf

NAMES = tuple("abcdefgh")
TENSORS = {name: np.full((2, 3), i, np.float32) for i, name in enumerate(NAMES)}


def write_shards(folder, parts, suffix=".safetensors", **weight_map):
    """Writes lists of names as shards; `weight_map` stands above what is true."""
    files = [f"shard-{i}{suffix}" for i in range(len(parts))]
    for file, names in zip(files, parts, strict=True):
        part = {name: TENSORS[name] for name in names}
        if suffix == ".bin":
            tf.save(folder / file, part)
        else:
            save_file(part, folder / file)
    places = {name: file for file, names in zip(files, parts, strict=True) for name in names}
    index = folder / f"model{suffix}.index.json"
    index.write_text(json.dumps({"metadata": {}, "weight_map": places | weight_map}))
    return index


@pytest.mark.parametrize("suffix", [".safetensors", ".bin"])
@settings(max_examples=30, deadline=None)
@given(places=st.lists(st.integers(0, 3), min_size=len(NAMES), max_size=len(NAMES)))
def test_tensors_are_the_same_however_they_are_cut_into_shards(tmp_path_factory, suffix, places):
    parts = [[n for n, place in zip(NAMES, places, strict=True) if place == i] for i in sorted(set(places))]
    folder = tmp_path_factory.mktemp("shards")
    tensors, files = read_tensors(write_shards(folder, parts, suffix))
    assert tensors.keys() == TENSORS.keys()
    assert all(np.array_equal(tensors[name], x) for name, x in TENSORS.items())
    assert len(files) == 1 + len(parts)


def test_missing_shards_are_all_listed(tmp_path):
    index = write_shards(tmp_path, [["a"], ["b"], ["c"]])
    for i in (0, 2):
        (tmp_path / f"shard-{i}.safetensors").unlink()
    with pytest.raises(CheckpointError) as caught:
        read_tensors(index)
    assert str(caught.value).splitlines()[1:] == [
        "  missing file: shard-0.safetensors",
        "  missing file: shard-2.safetensors",
    ]


def test_all_differences_between_index_and_shards_are_listed(tmp_path):
    parts = [["a", "b"], ["b", "c"], ["d"]]
    index = write_shards(
        tmp_path, parts, b="shard-0.safetensors", d="shard-0.safetensors", e="shard-1.safetensors"
    )
    data = json.loads(index.read_text())
    del data["weight_map"]["c"]
    data["weight_map"]["d2"] = "shard-2.safetensors"
    index.write_text(json.dumps(data))
    with pytest.raises(CheckpointError) as caught:
        read_tensors(index)
    assert sorted(str(caught.value).splitlines()[1:]) == [
        "  missing: d, in shard-0.safetensors",
        "  missing: d2, in shard-2.safetensors",
        "  missing: e, in shard-1.safetensors",
        "  not in the index: c, in shard-1.safetensors",
        "  twice: b, in shard-1.safetensors and in shard-0.safetensors",
    ]


@pytest.mark.parametrize(
    "file", ["../secret.safetensors", "/etc/passwd", "", ".", "..", "x/../shard-0.safetensors"]
)
def test_an_index_opens_nothing_but_files_beside_it(tmp_path, file):
    (tmp_path / "x").mkdir()
    save_file({"a": TENSORS["a"]}, tmp_path / "secret.safetensors")
    index = write_shards(tmp_path / "x", [["a"]], a=file)
    with pytest.raises(CheckpointError, match=r"not a file beside the index|missing file"):
        read_tensors(index)


@pytest.mark.parametrize(
    "text",
    ["{", "[]", "{}", '{"weight_map": {}}', '{"weight_map": {"a": 1}}', '{"weight_map": ["a"]}', "\xff"],
)
def test_an_index_that_is_none_is_one_error(tmp_path, text):
    index = tmp_path / "model.safetensors.index.json"
    index.write_bytes(text.encode("latin-1"))
    with pytest.raises(CheckpointError, match=r"index\.json: (is not JSON|must hold|has no weight_map)"):
        read_tensors(index)


def test_a_damaged_shard_is_named(tmp_path):
    index = write_shards(tmp_path, [["a"], ["b"]])
    shard = tmp_path / "shard-1.safetensors"
    shard.write_bytes(shard.read_bytes()[:-1])
    with pytest.raises(CheckpointError, match=r"shard-1\.safetensors: cannot be read"):
        read_tensors(index)


@pytest.mark.parametrize("value", [[1.0], {"a": {"b": 1}, 7: 1}, "text"], ids=str)
def test_a_file_that_holds_no_tensors_by_name_is_refused(tmp_path, value):
    with pytest.raises(CheckpointError, match="holds no state dict"):
        read_tensors(tf.save(tmp_path / "pytorch_model.bin", value))
