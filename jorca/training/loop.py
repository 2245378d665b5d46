"""The training loop: batch, update, now and then a look at the validation part and a checkpoint."""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

import jax
import rich.console
import tokenizers

from jorca._plot import check_can_draw
from jorca.checkpoint.store import TOKENIZER_FILE
from jorca.config import ConfigError
from jorca.training.bar import TrainingBar
from jorca.training.config import TrainConfig
from jorca.training.data import Corpus, batches, read_parts
from jorca.training.errors import TrainingError
from jorca.training.evaluate import nats_per_byte
from jorca.training.plot import draw_losses
from jorca.training.run import Progress, Run, check_free, read_config
from jorca.training.step import TrainState, batch_sharding, init_state, make_mesh, make_step, state_shapes
from jorca.training.tokenizer import train_tokenizer

OnStep = Callable[[int, float], None]
"""Called after each update with the number of updates done and the loss in nats per token."""


def train(
    config: TrainConfig,
    data: str | Path,
    out: str | Path,
    *,
    tokenizer: tokenizers.Tokenizer | None = None,
    console: rich.console.Console | None = None,
    on_step: OnStep | None = None,
) -> Progress:
    """Trains a model on a text, from the beginning.

    Args:
      config: Model, recipe, parts of the text, devices.
      data: The text, in UTF-8.
      out: The run's folder, missing or empty (see `jorca.training.run`).
      tokenizer: Of `config.vocab_size` tokens; None trains one on the training part.
      console: Where progress is shown; None shows nothing.
      on_step: Watches the losses. What it raises ends the run, which can be resumed.

    Returns:
      All losses.

    Raises:
      ConfigError: The devices are too few, or a size does not do.
      TrainingError: The text or the folder does not do, or a loss is not finite.
    """
    check_free(out)
    parts = read_parts(data, config.validation_share, config.test_share)
    if tokenizer is None:
        tokenizer = train_tokenizer(parts.train.decode("utf-8"), config.vocab_size)
    elif (size := tokenizer.get_vocab_size()) != config.vocab_size:
        raise ConfigError(f"vocab_size must be that of the tokenizer, {size}, got {config.vocab_size}")
    loop = _Loop(config, Corpus.encode(parts, tokenizer), console, on_step)
    return loop.run(Run.create(out, config, parts.digest, tokenizer))


def resume(
    data: str | Path,
    out: str | Path,
    changes: Mapping[str, Any] | None = None,
    *,
    console: rich.console.Console | None = None,
    on_step: OnStep | None = None,
) -> Progress:
    """Goes on with a run that was interrupted; its losses are those of a run that was not.

    Args:
      data: The same text.
      out: The run's folder.
      changes: Fields of the config that differ now: devices, and how often the run is saved.
      console: As for `train`.
      on_step: As for `train`.

    Returns:
      All losses, those before the interruption included.

    Raises:
      ConfigError: A change would change the losses, or as for `train`.
      TrainingError: There is no run in the folder, the text is another, or as for `train`.
    """
    stored = read_config(out)
    parts = read_parts(data, stored.validation_share, stored.test_share)
    run = Run.resume(out, parts.digest, changes or {})
    tokenizer = tokenizers.Tokenizer.from_file(str(run.folder / TOKENIZER_FILE))
    return _Loop(run.config, Corpus.encode(parts, tokenizer), console, on_step).run(run)


class _Loop:
    """Everything that a run needs but its folder: what can be wrong with it shows before that is made."""

    def __init__(
        self,
        config: TrainConfig,
        corpus: Corpus,
        console: rich.console.Console | None,
        on_step: OnStep | None,
    ) -> None:
        self._config = config
        self._corpus = corpus
        self._console = console or rich.console.Console(quiet=True)
        self._on_step = on_step
        self._batches = batches(corpus.train_ids, config.context, config.batch_size, config.seed)
        self._mesh = make_mesh(config)
        self._shapes = state_shapes(config, self._mesh)
        self._step = make_step(config, self._mesh)

    def run(self, run: Run) -> Progress:
        """Trains to the end, and draws the curve."""
        with run:
            state, progress = self._begin(run)
            with TrainingBar(
                self._console, self._config.steps, progress, self._corpus.bytes_per_token
            ) as bar:
                self._train(run, state, progress, bar)
        self._report(run, progress)
        return progress

    def _begin(self, run: Run) -> tuple[TrainState, Progress]:
        """Returns the state after the latest checkpoint, or a fresh one."""
        restored = run.restore(self._shapes)
        if restored is None:
            return init_state(self._config, self._mesh), Progress()
        state, progress, position = restored
        self._batches.set_state(position)
        return state, progress

    def _train(self, run: Run, state: TrainState, progress: Progress, bar: TrainingBar) -> None:
        steps, eval_every = self._config.steps, self._config.eval_every
        while progress.steps < steps:
            windows = jax.device_put(next(self._batches), batch_sharding(self._mesh))
            state, device_loss = self._step(state, windows)
            loss = float(device_loss)
            progress.losses.append(loss)
            done = progress.steps
            if not math.isfinite(loss):
                raise TrainingError(f"the loss of update {done} is {loss}; try a smaller learning_rate")
            bar.update()
            if done % eval_every == 0 or done == steps:
                self._validate(run, state, progress, bar)
            if done % self._config.checkpoint_every == 0 or done == steps:
                run.save(state, progress, self._batches.get_state())
            if self._on_step is not None:
                self._on_step(done, loss)

    def _validate(self, run: Run, state: TrainState, progress: Progress, bar: TrainingBar) -> None:
        """Reads the validation part; the best weights so far become the run's model."""
        best, corpus = progress.best, self._corpus
        with bar.validation(len(corpus.validation_ids)) as advance:
            nats = nats_per_byte(
                self._config.model_config(),
                state.params,
                corpus.validation_ids,
                corpus.validation_bytes,
                batch_size=self._config.batch_size,
                sharding=batch_sharding(self._mesh),
                advance=advance,
            )
            progress.validation.append((progress.steps, nats))
        if best is None or nats < best[1]:
            run.save_model(state.params)

    def _report(self, run: Run, progress: Progress) -> None:
        assert progress.best is not None, "the last update is followed by a look at the validation part"
        done, nats = progress.best
        self._console.print(
            f"{run.model_folder}: {nats:.4f} nats per byte of the validation part, {done} updates"
        )
        try:
            check_can_draw()
        except ConfigError as error:
            self._console.print(f"no loss curve: {error}")
            return
        train = [loss / self._corpus.bytes_per_token for loss in progress.losses]
        draw_losses(train, progress.validation, run.curve_file, run.folder.name)
