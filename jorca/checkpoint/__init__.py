"""Getting weights in: PyTorch and safetensors files, format tables, the Orbax store."""

from jorca.checkpoint.errors import CheckpointError
from jorca.checkpoint.load import (
    Checkpoint,
    OpenCheckpoint,
    convert_checkpoint,
    load_checkpoint,
    open_checkpoint,
)
from jorca.checkpoint.pytorch import read_pytorch
from jorca.checkpoint.safetensors import read_safetensors
from jorca.checkpoint.store import load_config, load_params, save_checkpoint

__all__ = [
    "Checkpoint",
    "CheckpointError",
    "OpenCheckpoint",
    "convert_checkpoint",
    "load_checkpoint",
    "load_config",
    "load_params",
    "open_checkpoint",
    "read_pytorch",
    "read_safetensors",
    "save_checkpoint",
]
