"""The folder of a training run: what is being trained, how far it is, and the best model so far.

    run.json         the config, and a digest of the text
    tokenizer.json   the run's tokenizer
    state/           Orbax: weights, optimizer, losses and the place in the data, after the latest checkpoint
    model/           jorca's checkpoint of the weights that were best on the validation part
    loss.png         the loss curve, drawn at the end

Each of state/ and model/ is written under another name and renamed when it is whole.
"""

from __future__ import annotations

import dataclasses
import json
import shutil
from collections.abc import Mapping
from pathlib import Path
from typing import Any, Final, Self

import jax
import numpy as np
import orbax.checkpoint as ocp
import tokenizers

from jorca.checkpoint.store import TOKENIZER_FILE, save_checkpoint
from jorca.config import ConfigError
from jorca.training.config import TrainConfig
from jorca.training.errors import TrainingError
from jorca.training.step import TrainState

_RECORD: Final = "run.json"
_FORMAT: Final = "jorca training run"
_VERSION: Final = 1
_FREE: Final = frozenset({"checkpoint_every", "data_parallel", "tensor", "save_dtype"})
"""Fields that may change when a run is resumed: losses do not depend on them but for rounding."""


@dataclasses.dataclass(slots=True)
class Progress:
    """How far a run is, on the host's side.

    Attributes:
      losses: Mean loss of each update's batch so far, in nats per token.
      validation: (updates done, nats per byte of the validation part), in order.
    """

    losses: list[float] = dataclasses.field(default_factory=list)
    validation: list[tuple[int, float]] = dataclasses.field(default_factory=list)

    @property
    def steps(self) -> int:
        """Updates done."""
        return len(self.losses)

    @property
    def best(self) -> tuple[int, float] | None:
        """The first of the lowest entries of `validation`; None if there is none."""
        return min(self.validation, key=lambda entry: entry[1], default=None)


class Run:
    """A training run's folder, by `create` or `resume`; a context manager that ends Orbax's threads.

    Attributes:
      folder: Where it is.
      config: What is being trained.
    """

    def __init__(self, folder: Path, config: TrainConfig) -> None:
        self.folder = folder.absolute()
        self.config = config
        for leftover in self.folder.glob(".model.*"):  # of a model that was being written
            shutil.rmtree(leftover)
        self._manager = ocp.CheckpointManager(
            self.folder / "state",
            options=ocp.CheckpointManagerOptions(
                preservation_policy=ocp.checkpoint_managers.LatestN(1),
                cleanup_tmp_directories=True,
                enable_async_checkpointing=False,
            ),
        )

    @classmethod
    def create(
        cls, folder: str | Path, config: TrainConfig, digest: str, tokenizer: tokenizers.Tokenizer
    ) -> Self:
        """Makes the folder of a new run.

        Args:
          folder: Missing or empty.
          config: What will be trained.
          digest: Of the text.
          tokenizer: Kept for the run and for the model that comes out.

        Raises:
          TrainingError: The folder is not empty.
        """
        check_free(folder)
        folder = Path(folder)
        folder.mkdir(parents=True, exist_ok=True)
        tokenizer.save(str(folder / TOKENIZER_FILE))
        record = {"format": _FORMAT, "version": _VERSION, "text_sha256": digest}
        partial = folder / f"{_RECORD}.partial"
        partial.write_text(
            json.dumps(record | {"config": dataclasses.asdict(config)}, indent=2) + "\n", encoding="utf-8"
        )
        partial.rename(folder / _RECORD)  # last, since a folder without it is no run
        return cls(folder, config)

    @classmethod
    def resume(cls, folder: str | Path, digest: str, changes: Mapping[str, Any]) -> Self:
        """Opens the folder of a run that was interrupted.

        Args:
          folder: As `create` made it.
          digest: Of the text, which must be the same.
          changes: Fields of the config that differ now; those that the losses depend on may not.

        Raises:
          TrainingError: There is no run, or its text is another.
          ConfigError: A change breaks a rule.
        """
        stored = read_config(folder)
        config = dataclasses.replace(stored, **changes)
        fields = [field.name for field in dataclasses.fields(config) if field.name not in _FREE]
        for name in fields:
            if (new := getattr(config, name)) != (old := getattr(stored, name)):
                raise ConfigError(
                    f"{name} must stay {old!r} when a run is resumed, got {new!r}; leave it out or start anew"
                )
        if _read_record(folder)["text_sha256"] != digest:
            raise TrainingError(f"{folder}: this run learns from another text; resume it with that one")
        return cls(Path(folder), config)

    @property
    def curve_file(self) -> Path:
        """Where the loss curve is drawn."""
        return self.folder / "loss.png"

    @property
    def model_folder(self) -> Path:
        """Where the best model lies."""
        return self.folder / "model"

    def save(self, state: TrainState, progress: Progress, position: Mapping[str, Any]) -> None:
        """Writes a checkpoint from which the run can go on, and then removes the one before it.

        Args:
          state: The device's side.
          progress: The host's side.
          position: The data iterator's state.
        """
        host = {"losses": progress.losses, "validation": progress.validation, "position": dict(position)}
        self._manager.save(
            progress.steps,
            args=ocp.args.Composite(state=ocp.args.StandardSave(state), host=ocp.args.JsonSave(host)),
        )

    def restore(self, shapes: TrainState) -> tuple[TrainState, Progress, dict[str, Any]] | None:
        """Reads the latest checkpoint, straight onto a mesh; None if the run was cut short before its first.

        Args:
          shapes: What to read, a `jax.ShapeDtypeStruct` with a sharding for each array.

        Returns:
          State, progress and the data iterator's state.

        Raises:
          TrainingError: The checkpoint is damaged.
        """
        step = self._manager.latest_step()
        if step is None:
            return None
        args = ocp.args.Composite(state=ocp.args.StandardRestore(shapes), host=ocp.args.JsonRestore())
        try:
            restored = self._manager.restore(step, args=args)
        except Exception as error:  # Orbax raises what it likes for damaged files
            raise TrainingError(f"{self._manager.directory}/{step}: cannot be read ({error})") from error
        host = restored["host"]
        validation = [(done, nats) for done, nats in host["validation"]]
        return restored["state"], Progress(host["losses"], validation), host["position"]

    def save_model(self, params: Mapping[str, jax.Array]) -> None:
        """Writes the weights as the run's model, in `save_dtype`, over the one before it."""
        model = self.config.model_config()
        model = dataclasses.replace(model, dtype=self.config.save_dtype or model.dtype)
        rounded = {name: np.asarray(weight.astype(model.dtype)) for name, weight in params.items()}
        tokenizer = (self.folder / TOKENIZER_FILE).read_text(encoding="utf-8")
        save_checkpoint(self.model_folder, model, rounded, tokenizer=tokenizer, overwrite=True)

    def __enter__(self) -> Self:
        """Returns itself."""
        return self

    def __exit__(self, *_: object) -> None:
        """Ends Orbax's threads."""
        self._manager.close()


def check_free(folder: str | Path) -> None:
    """Raises TrainingError unless a new run can begin in `folder`: it is missing, or empty."""
    folder = Path(folder)
    if (folder / _RECORD).exists():
        raise TrainingError(f"{folder}: holds a run already; resume it, or choose another folder")
    if folder.exists() and (not folder.is_dir() or any(folder.iterdir())):
        raise TrainingError(f"{folder}: is in the way; choose a new folder for the run")


def read_config(folder: str | Path) -> TrainConfig:
    """Returns the config of the run in a folder; raises TrainingError if there is none."""
    try:
        return TrainConfig(**_read_record(folder)["config"])
    except (ConfigError, TypeError, KeyError) as error:
        raise TrainingError(f"{folder}/{_RECORD}: {error}") from error


def _read_record(folder: str | Path) -> dict[str, Any]:
    try:
        record = json.loads((Path(folder) / _RECORD).read_text(encoding="utf-8"))
    except OSError as error:
        raise TrainingError(f"{folder}: holds no run that could be resumed ({error.strerror})") from error
    except ValueError as error:
        raise TrainingError(f"{folder}/{_RECORD}: is not JSON ({error})") from error
    if not isinstance(record, dict) or (record.get("format"), record.get("version")) != (_FORMAT, _VERSION):
        raise TrainingError(f"{folder}/{_RECORD}: is not the record of a run of this version")
    return record
