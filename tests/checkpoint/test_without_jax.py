"""Config and tokenizer of every format come without JAX; weights bring it in when they are read."""

import shutil
import subprocess
import sys

import numpy as np
import pytest

from jorca.checkpoint import load_config, load_params, open_checkpoint
from jorca.checkpoint.formats import FORMAT_NAMES, detect
from tests.checkpoint.foreign_files import (
    ADDER,
    GOLDEN,
    adder_tensors,
    conv1d,
    write_hf,
    write_mingpt,
    write_nanogpt,
)
from tests.checkpoint.megatron_writer import write_checkpoint

OPEN = """
import sys
from jorca.checkpoint import load_config, open_checkpoint

opened = open_checkpoint(sys.argv[1])
print(opened.config)
print(None if opened.tokenizer is None else opened.tokenizer.to_str())
print(sorted({name.partition(".")[0] for name in sys.modules} & {"jax", "jaxlib", "flax", "orbax"}))
"""
READ = """
import jax
jax.config.update("jax_platforms", "cpu")
params = opened.read(opened.config, None)
print(sum(x.size for x in params.values()), *{str(x.dtype) for x in params.values()})
"""


def printed(program, path):
    """The lines that a fresh process prints."""
    command = [sys.executable, "-c", program, str(path)]
    result = subprocess.run(command, capture_output=True, text=True, check=False)
    assert result.returncode == 0, result.stderr
    return result.stdout.splitlines()


def write(format, folder):
    match format:
        case "jorca":
            return ADDER
        case "hf":
            write_hf(folder, conv1d(adder_tensors()))
        case "nanogpt":
            write_nanogpt(folder, adder_tensors())
        case "mingpt":
            write_mingpt(folder, adder_tensors())
        case "megatron":
            config = load_config(ADDER)
            params = {name: np.asarray(x) for name, x in load_params(ADDER, config).items()}
            write_checkpoint(folder, config, params, pp=3)
    assert detect(folder).name == format
    shutil.copyfile(ADDER / "tokenizer.json", folder / "tokenizer.json")
    return folder


@pytest.mark.parametrize("format", ["jorca", *FORMAT_NAMES])
def test_config_and_tokenizer_come_without_jax(tmp_path, format):
    path = write(format, tmp_path / format)
    here = open_checkpoint(path)
    assert here.tokenizer is not None
    config, tokenizer, loaded = printed(OPEN, path)
    assert (config, tokenizer) == (str(here.config), here.tokenizer.to_str())
    assert loaded == "[]"


def test_weights_bring_jax_in_when_they_are_read():
    *_, loaded, read = printed(OPEN + READ, GOLDEN / "hf_bfloat16")  # whose dtype NumPy itself does not know
    assert (loaded, read) == ("[]", "4812 bfloat16")
