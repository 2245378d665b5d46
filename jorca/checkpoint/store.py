"""jorca's own checkpoint: a folder with a config, weights written by Orbax, and perhaps a tokenizer.

    config.json      format, version, and the fields of `ModelConfig`
    params/          one array per entry of the parameter table, by its name
    tokenizer.json   optional, for the `tokenizers` library

A folder is written under another name and renamed when it is whole. JAX and Orbax are imported where weights
are read or written, since some processes want config and tokenizer alone.
"""

from __future__ import annotations

import contextlib
import dataclasses
import json
import shutil
import uuid
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import TYPE_CHECKING, Any, Final

import numpy as np

from jorca.checkpoint.errors import CheckpointError
from jorca.config import ConfigError, Dtype, ModelConfig
from jorca.model.params import mismatches, param_table

if TYPE_CHECKING:
    import jax
    from jax.sharding import Sharding

CONFIG_FILE: Final = "config.json"
TOKENIZER_FILE: Final = "tokenizer.json"
_PARAMS: Final = "params"
_FORMAT: Final = "jorca"
_VERSION: Final = 1
_COMMIT_NOTE: Final = "commit_success.txt"
"""Orbax's note of the absolute path it wrote to; reading does not need it."""


def save_checkpoint(
    path: str | Path,
    config: ModelConfig,
    params: Mapping[str, jax.Array | np.ndarray],
    *,
    tokenizer: str | None = None,
    overwrite: bool = False,
) -> None:
    """Writes a model to a folder, wholly or not at all.

    Args:
      path: The folder to make; its parent must exist.
      config: The model.
      params: Every weight of the parameter table by name, with its shape and of dtype `config.dtype`.
      tokenizer: The text of a `tokenizer.json`.
      overwrite: Whether a checkpoint at `path` is replaced; until the new one is whole, the old one stays.

    Raises:
      CheckpointError: The weights do not fit the config, or something is in the way at `path`.
    """
    path = check_destination(path, overwrite=overwrite)
    if problems := mismatches(config, params):
        raise CheckpointError(f"params do not fit the config ({config.dtype}):\n  " + "\n  ".join(problems))
    with new_folder(path) as partial:
        _write(partial, config, params, tokenizer)


@contextlib.contextmanager
def new_folder(path: Path) -> Iterator[Path]:
    """Gives a folder to fill, which takes the place of `path` when all has gone well, or else vanishes."""
    partial = path.with_name(f".{path.name}.{uuid.uuid4().hex}.partial")
    try:
        partial.mkdir()
        yield partial
        _replace(path, partial)
    finally:
        shutil.rmtree(partial, ignore_errors=True)


def check_destination(path: str | Path, *, overwrite: bool) -> Path:
    """Returns the absolute path of a folder that a checkpoint can be written to.

    Raises:
      CheckpointError: Something is in the way, or its parent is no folder.
    """
    path = Path(path).absolute()  # Orbax takes no relative paths
    if path.exists():
        if not overwrite:
            raise CheckpointError(f"{path}: exists already; choose another path, or overwrite=True")
        _check_replaceable(path)
    if not path.parent.is_dir():
        raise CheckpointError(f"{path.parent}: is not a folder; make it first")
    return path


def _write(folder: Path, config: ModelConfig, params: Mapping[str, Any], tokenizer: str | None) -> None:
    import jax
    import orbax.checkpoint as ocp

    # Orbax copies host arrays and compresses all at once, twice the model in memory. Weights hardly compress.
    types = ocp.type_handlers.create_type_handler_registry(
        (np.ndarray, ocp.type_handlers.NumpyHandler(deepcopy_host_arrays=False)),
        (jax.Array, ocp.type_handlers.ArrayHandler()),
    )
    handler = ocp.PyTreeCheckpointHandler(type_handler_registry=types, use_compression=False)
    with ocp.Checkpointer(handler) as checkpointer:
        checkpointer.save(folder / _PARAMS, args=ocp.args.PyTreeSave(dict(params)))
    (folder / _PARAMS / _COMMIT_NOTE).unlink(missing_ok=True)
    if tokenizer is not None:
        (folder / TOKENIZER_FILE).write_text(tokenizer, encoding="utf-8")
    # Last, since a folder without it is no checkpoint.
    fields = {"format": _FORMAT, "version": _VERSION, "model": dataclasses.asdict(config)}
    (folder / CONFIG_FILE).write_text(json.dumps(fields, indent=2) + "\n", encoding="utf-8")


def _check_replaceable(path: Path) -> None:
    """Raises unless `path` holds a checkpoint and nothing else that would be lost with it."""
    names = {file.name for file in path.iterdir()} if path.is_dir() else set()
    others = sorted(names - {CONFIG_FILE, TOKENIZER_FILE, _PARAMS})
    if CONFIG_FILE not in names or others:
        what = f"holds other files too ({', '.join(others)})" if others else "is no checkpoint"
        raise CheckpointError(f"{path}: {what}, so it is not overwritten; choose another path")


def _replace(path: Path, partial: Path) -> None:
    """Renames `partial` to `path`, and removes what was there."""
    if not path.exists():
        partial.rename(path)
        return
    old = partial.with_suffix(".old")
    path.rename(old)
    try:
        partial.rename(path)
    except BaseException:
        old.rename(path)
        raise
    shutil.rmtree(old)


def is_checkpoint(path: str | Path) -> bool:
    """Returns whether a folder looks like a jorca checkpoint, which may be damaged or incomplete."""
    path = Path(path)
    if (path / _PARAMS).is_dir():
        return True
    try:
        return json.loads((path / CONFIG_FILE).read_text(encoding="utf-8"))["format"] == _FORMAT
    except (OSError, ValueError, TypeError, KeyError):
        return False


def load_config(path: str | Path) -> ModelConfig:
    """Returns the config of the checkpoint in a folder.

    Raises:
      CheckpointError: There is none, it is of another format or version, or a field is unknown or wrong.
    """
    file = Path(path) / CONFIG_FILE
    try:
        data = json.loads(file.read_text(encoding="utf-8"))
    except OSError as error:
        raise CheckpointError(
            f"{path}: is not a jorca checkpoint, its {CONFIG_FILE} cannot be read ({error.strerror}); "
            "`jorca convert` makes one"
        ) from error
    except ValueError as error:
        raise CheckpointError(f"{file}: is not JSON ({error})") from error
    if not isinstance(data, dict) or data.get("format") != _FORMAT:
        raise CheckpointError(f"{file}: is not a jorca checkpoint's; `jorca convert` makes one from others")
    if data.get("version") != _VERSION:
        raise CheckpointError(f"{file}: version must be {_VERSION}, got {data.get('version')!r}")
    if unknown := sorted(data.keys() - {"format", "version", "model"}):
        raise CheckpointError(f"{file}: unknown fields: {', '.join(unknown)}")
    try:
        return ModelConfig(**data.get("model", {}))
    except (ConfigError, TypeError) as error:
        raise CheckpointError(f"{file}: {error}") from error


def load_params(
    path: str | Path,
    config: ModelConfig,
    *,
    shardings: Mapping[str, Sharding] | None = None,
    dtype: Dtype | None = None,
) -> dict[str, jax.Array]:
    """Reads the weights straight onto devices; each device reads its own part.

    Args:
      path: The checkpoint's folder.
      config: The model, as `load_config` gives it, or with more rows of padding in its vocabulary: these are
        filled with zeros.
      shardings: Where each weight goes, by name; how they were saved does not matter. Only weights named here
        are read. None puts all on the first local device.
      dtype: What to round the weights to while reading; None is what the parameter table says.

    Returns:
      The weights by name, in the order of the parameter table.

    Raises:
      CheckpointError: The stored names or shapes are not those of the config (all are listed), or the
        weights cannot be read.
    """
    import jax
    import orbax.checkpoint as ocp

    folder = Path(path).absolute() / _PARAMS
    if not (folder / "_METADATA").is_file():
        raise CheckpointError(f"{path}: holds no weights; it is not a jorca checkpoint, or incomplete")
    table = param_table(config)
    if shardings is None:
        shardings = dict.fromkeys(table, jax.sharding.SingleDeviceSharding(jax.local_devices()[0]))
    target = {
        name: ocp.ArrayRestoreArgs(
            sharding=shardings[name],
            global_shape=info.shape,
            dtype=np.dtype(dtype or info.dtype),
            strict=False,  # rows of padding may be added; all else is checked here
        )
        for name, info in table.items()
        if name in shardings
    }
    # Each process reads what it needs when it needs it; Orbax would have all of them wait for each other.
    process = jax.process_index()
    alone = ocp.options.MultiprocessingOptions(
        primary_host=process, active_processes={process}, barrier_sync_key_prefix=f"process-{process}"
    )
    handler = ocp.PyTreeCheckpointHandler(multiprocessing_options=alone)
    with ocp.Checkpointer(handler, multiprocessing_options=alone) as checkpointer:
        stored = checkpointer.metadata(folder).item_metadata
        if stored is None:  # Orbax only logs why
            raise CheckpointError(f"{path}: the weights' index is damaged; convert or fetch them again")
        if problems := mismatches(config, stored.tree, any_dtype=True, may_lack_padding=True):
            raise CheckpointError(f"{path}: the weights do not fit the config:\n  " + "\n  ".join(problems))
        wanted = ocp.args.PyTreeRestore(
            item=dict.fromkeys(target, 0), restore_args=target, partial_restore=True
        )
        try:
            params = checkpointer.restore(folder, args=wanted)
        except Exception as error:  # TensorStore raises what it likes for damaged files
            raise CheckpointError(f"{path}: the weights cannot be read ({error})") from error
    return {name: params[name] for name in target}
