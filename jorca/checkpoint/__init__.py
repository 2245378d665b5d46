"""Getting weights in: PyTorch files without PyTorch, format tables, the Orbax store."""

from jorca.checkpoint.errors import CheckpointError
from jorca.checkpoint.mingpt import convert_mingpt
from jorca.checkpoint.pytorch import read_pytorch
from jorca.checkpoint.store import load_config, load_params, save_checkpoint

__all__ = [
    "CheckpointError",
    "convert_mingpt",
    "load_config",
    "load_params",
    "read_pytorch",
    "save_checkpoint",
]
