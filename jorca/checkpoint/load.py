"""From any checkpoint to jorca's own on disk, or straight to devices.

Config and tokenizer come without JAX; it is imported when weights are written or go to devices.
"""

from __future__ import annotations

import contextlib
import dataclasses
import logging
from collections.abc import Callable, Iterator, Mapping
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np
import tokenizers
from rich.console import Console
from rich.progress import track

from jorca.checkpoint.convert import apply_table, cast, common_dtype
from jorca.checkpoint.errors import CheckpointError
from jorca.checkpoint.foreign import Foreign, Overrides
from jorca.checkpoint.formats import read_foreign
from jorca.checkpoint.store import (
    TOKENIZER_FILE,
    check_destination,
    is_checkpoint,
    load_config,
    load_params,
    save_checkpoint,
)
from jorca.checkpoint.tokenizer_files import tokenizer_json
from jorca.config import Dtype, ModelConfig
from jorca.model.params import ParamInfo, num_params, pad_widths, param_table

if TYPE_CHECKING:
    import jax
    from jax.sharding import Sharding

_logger = logging.getLogger(__name__)


@dataclasses.dataclass(frozen=True, kw_only=True, slots=True)
class Checkpoint:
    """A model in memory.

    Attributes:
      config: Its shape and flags.
      params: Every weight of the parameter table by name, on the first local device.
      tokenizer: None if the checkpoint has none.
    """

    config: ModelConfig
    params: dict[str, jax.Array]
    tokenizer: tokenizers.Tokenizer | None


@dataclasses.dataclass(frozen=True, kw_only=True, slots=True)
class OpenCheckpoint:
    """A model whose weights are still where they were found.

    Attributes:
      config: Its shape and flags.
      tokenizer: None if the checkpoint has none.
      read: As `load_params`, the path left out: brings weights to devices.
    """

    config: ModelConfig
    tokenizer: tokenizers.Tokenizer | None
    read: Callable[[ModelConfig, Mapping[str, Sharding] | None], dict[str, jax.Array]]


def load_checkpoint(path: str | Path) -> Checkpoint:
    """Loads a model from a jorca checkpoint, or from any that `jorca convert` reads, as it is.

    Weights of another program are converted on the way, one at a time, and a line in the log says so.

    Args:
      path: A folder, or a file of weights. No file is written.

    Raises:
      CheckpointError: It is damaged, incomplete, or of no format that is known.
    """
    opened = open_checkpoint(path)
    params = opened.read(opened.config, None)
    return Checkpoint(config=opened.config, params=params, tokenizer=opened.tokenizer)


def open_checkpoint(path: str | Path) -> OpenCheckpoint:
    """Opens what `load_checkpoint` loads, for those who want the weights elsewhere, or in parts.

    Args:
      path: A folder, or a file of weights, which must stay as it is while weights are read.

    Raises:
      CheckpointError: It is damaged, incomplete, or of no format that is known.
    """
    path = Path(path)
    if is_checkpoint(path):
        text = tokenizer_json(path / TOKENIZER_FILE) if (path / TOKENIZER_FILE).exists() else None

        def read_own(config: ModelConfig, shardings: Mapping[str, Sharding] | None) -> dict[str, jax.Array]:
            return load_params(path, config, shardings=shardings)

        return OpenCheckpoint(config=load_config(path), tokenizer=_tokenizer(text), read=read_own)
    foreign = read_foreign(path)
    params = foreign_params(foreign)
    with _named(foreign):
        dtype = common_dtype(params)
    _logger.warning(
        "%s: %s, %s weights, converted while loading; `jorca convert %s NEW_FOLDER` saves doing so again%s",
        path, foreign.format, f"{num_params(foreign.config):,}", path,
        "".join(f"; {note}" for note in foreign.notes),
    )  # fmt: skip

    def read_foreign_params(
        config: ModelConfig, shardings: Mapping[str, Sharding] | None
    ) -> dict[str, jax.Array]:
        import jax

        table = param_table(config)
        if shardings is None:
            shardings = dict.fromkeys(table, jax.sharding.SingleDeviceSharding(jax.local_devices()[0]))
        arrays = _checked(foreign, {name: params[name] for name in shardings}, table)
        return {name: _placed(x, table[name].shape, shardings[name]) for name, x in arrays}

    return OpenCheckpoint(
        config=dataclasses.replace(foreign.config, dtype=dtype),
        tokenizer=_tokenizer(foreign.tokenizer),
        read=read_foreign_params,
    )


def _placed(x: np.ndarray, shape: tuple[int, ...], sharding: Sharding) -> jax.Array:
    """Returns an array on devices, with zeros in rows that `x` has not; each device gets its part alone."""
    import jax

    def part(index: tuple[slice, ...] | None) -> np.ndarray:
        rows = x[index or ...]
        wanted = len(range(*index[0].indices(shape[0]))) if index else len(rows)
        # A copy, since on CPU an array may be the memory that it was made from: here, the file.
        return np.array(rows) if len(rows) == wanted else np.pad(rows, pad_widths(rows.shape, wanted))

    return jax.make_array_from_callback(shape, sharding, part)


def convert_checkpoint(
    src: str | Path,
    dst: str | Path,
    *,
    format: str | None = None,
    dtype: Dtype | None = None,
    tokenizer: str | Path | None = None,
    overwrite: bool = False,
    show_progress: bool = False,
    **overrides: Any,
) -> ModelConfig:
    """Converts the checkpoint of another program into a jorca checkpoint.

    Tensors stay in their files, which are mapped, until they are written.

    Args:
      src: A file or folder (docs/checkpoints.md lists what is read).
      dst: The folder to make, wholly or not at all; its parent must exist.
      format: "hf", "nanogpt", "mingpt" or "megatron"; None detects it.
      dtype: What to store, rounded to nearest. None keeps the tensors' dtype, which must then be one and the
        same, and not float64.
      tokenizer: A `tokenizer.json`, or a folder with that or with vocabulary and merges, to use instead of
        what lies beside the weights.
      overwrite: Whether a checkpoint at `dst` is replaced; until the new one is whole, the old one stays.
      show_progress: Whether to draw a progress bar on standard error.
      **overrides: What is known better than the files say: num_heads, activation, norm_epsilon, vocab_size,
        eos_token_id, rename (see `jorca.checkpoint.foreign.Overrides`). An unknown one is a TypeError.

    Returns:
      The model's config.

    Raises:
      CheckpointError: The source is damaged or no whole model, or something is in the way at `dst`.
    """
    check_destination(dst, overwrite=overwrite)
    foreign = read_foreign(src, format=format, overrides=Overrides(**overrides))
    for note in foreign.notes:
        _logger.info("%s: %s", src, note)
    return save_foreign(
        foreign, dst, dtype=dtype, tokenizer=tokenizer, overwrite=overwrite, show_progress=show_progress
    )


def foreign_params(foreign: Foreign) -> dict[str, np.ndarray]:
    """Returns the weights by name, in the dtypes that they are stored in, as views wherever that is possible.

    Raises:
      CheckpointError: The tensors do not fit the model; it lists them all.
    """
    with _named(foreign):
        return apply_table(foreign.tensors, foreign.table, foreign.config, foreign.ignored)


def save_foreign(
    foreign: Foreign,
    dst: str | Path,
    *,
    dtype: Dtype | None = None,
    tokenizer: str | Path | None = None,
    overwrite: bool = False,
    show_progress: bool = False,
) -> ModelConfig:
    """Writes what `read_foreign` found as a jorca checkpoint; see `convert_checkpoint`."""
    text = foreign.tokenizer if tokenizer is None else tokenizer_json(tokenizer)
    if tokenizer is not None and text is None:
        raise CheckpointError(f"{tokenizer}: holds no tokenizer")
    stored = foreign_params(foreign)
    with _named(foreign):
        config = dataclasses.replace(foreign.config, dtype=common_dtype(stored) if dtype is None else dtype)
    params = dict(_checked(foreign, stored, param_table(config), show_progress=show_progress))
    with Console(stderr=True).status("writing") if show_progress else contextlib.nullcontext():
        save_checkpoint(dst, config, params, tokenizer=text, overwrite=overwrite)
    return config


def _checked(
    foreign: Foreign,
    params: dict[str, np.ndarray],
    table: Mapping[str, ParamInfo],
    *,
    show_progress: bool = False,
) -> Iterator[tuple[str, np.ndarray]]:
    """Takes the weights out of `params`, one by one, and yields each in the table's dtype.

    When the last is taken, those with NaN or infinity have been named in the log.
    """
    not_finite: list[str] = []
    console = Console(stderr=True)
    for name in track(list(params), "reading", console=console, transient=True, disable=not show_progress):
        x, key = params.pop(name), foreign.table[name].key
        if not np.isfinite(x).all():
            not_finite.append(key)
        with _named(foreign):
            x = cast(x, table[name].dtype, key)
        yield name, x
    if not_finite:
        _logger.warning("%s: NaN or infinity in %s", foreign.files[0], ", ".join(not_finite))


@contextlib.contextmanager
def _named(foreign: Foreign) -> Iterator[None]:
    """Puts the file's name before an error."""
    try:
        yield
    except CheckpointError as error:
        raise CheckpointError(f"{foreign.files[0]}: {error}") from error


def _tokenizer(text: str | None) -> tokenizers.Tokenizer | None:
    return None if text is None else tokenizers.Tokenizer.from_str(text)
