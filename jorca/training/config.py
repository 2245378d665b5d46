"""What a training run is: the model's shape, the recipe, the parts of the text, the devices."""

from __future__ import annotations

import dataclasses
import math
from typing import Literal

from jorca._fields import check_choice, check_float, check_int
from jorca.config import ConfigError, Dtype, ModelConfig

TrainDtype = Literal["float32", "bfloat16"]

_INCLUDING_ZERO = math.nextafter(0, -1)


@dataclasses.dataclass(frozen=True, kw_only=True, slots=True)
class TrainConfig:
    """Everything about a training run but the text and where its results go.

    Attributes:
      vocab_size: Tokens of the vocabulary, V.
      layers: Transformer blocks, L.
      heads: Attention heads, N; divides `width`.
      width: Model width, D. The feed-forward part is four times as wide.
      context: Tokens of a training window, S, and positions of the model; at least 2.
      batch_size: Windows in a step, B; a multiple of `data_parallel`.
      steps: Updates in all.
      learning_rate: The highest, reached after the warm-up; from there a cosine takes it to 0.
      warmup_steps: Updates over which the learning rate rises from 0; below `steps`.
      weight_decay: AdamW's, on matrices alone: not on biases and norms.
      clip_norm: Longest gradient, over all weights together.
      dropout: Share of the numbers, at least 0 and below 1, that are dropped behind the embedding and behind
        what each layer adds to the residual stream.
      seed: Of weights, batches and dropout, below 2**32.
      dtype: In which the model computes. Weights and optimizer are float32 whatever it is.
      save_dtype: Of the model that comes out; None is `dtype`.
      validation_share: Share of the text's bytes, before the test part, on which the best weights are chosen.
      test_share: Share of the text's bytes, at its end, that training never reads; may be 0.
      eval_every: Updates between two looks at the validation part.
      checkpoint_every: Updates between two resumable checkpoints.
      data_parallel: Devices over which a batch is split.
      tensor: Devices over which the weights are split.
    """

    vocab_size: int = 1000
    layers: int = 4
    heads: int = 4
    width: int = 256
    context: int = 256
    batch_size: int = 8
    steps: int = 3200
    learning_rate: float = 1e-3
    warmup_steps: int = 100
    weight_decay: float = 0.1
    clip_norm: float = 1.0
    dropout: float = 0.15
    seed: int = 0
    dtype: TrainDtype = "float32"
    save_dtype: Dtype | None = None
    validation_share: float = 0.1
    test_share: float = 0.1
    eval_every: int = 200
    checkpoint_every: int = 200
    data_parallel: int = 1
    tensor: int = 1

    def __post_init__(self) -> None:
        for name in ("vocab_size", "layers", "heads", "width", "batch_size", "steps"):
            check_int(self, name, 1)
        for name in ("warmup_steps", "eval_every", "checkpoint_every", "data_parallel", "tensor"):
            check_int(self, name, 1)
        check_int(self, "context", 2)
        check_int(self, "seed", 0)
        for name in ("learning_rate", "clip_norm"):
            check_float(self, name, "above 0", 0, math.inf)
        check_float(self, "weight_decay", "of at least 0", _INCLUDING_ZERO, math.inf)
        for name in ("dropout", "test_share"):
            check_float(self, name, "of at least 0 and below 1", _INCLUDING_ZERO, 1)
        check_float(self, "validation_share", "above 0 and below 1", 0, 1)
        check_choice(self, "dtype", TrainDtype)
        if self.save_dtype is not None:
            check_choice(self, "save_dtype", Dtype)
        self._check_pairs()

    def _check_pairs(self) -> None:
        if self.seed >= 2**32:
            raise ConfigError(f"seed must be below 2**32, got {self.seed}")
        if self.width % self.heads:
            raise ConfigError(f"heads must divide width, got heads {self.heads} and width {self.width}")
        if self.batch_size % self.data_parallel:
            raise ConfigError(
                f"data_parallel must divide batch_size, got data_parallel {self.data_parallel} "
                f"and batch_size {self.batch_size}"
            )
        if self.warmup_steps >= self.steps:
            raise ConfigError(
                f"warmup_steps must be below steps, got warmup_steps {self.warmup_steps} "
                f"and steps {self.steps}"
            )
        if self.validation_share + self.test_share >= 1:
            raise ConfigError(
                "validation_share and test_share together must be below 1, "
                f"got {self.validation_share} and {self.test_share}"
            )

    def model_config(self) -> ModelConfig:
        """Returns the model that is trained, in the dtype in which it computes."""
        return ModelConfig(
            vocab_size=self.vocab_size,
            max_positions=self.context,
            num_layers=self.layers,
            num_heads=self.heads,
            d_model=self.width,
            dtype=self.dtype,
        )
