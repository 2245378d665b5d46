"""The small trainer behind the shipped text model: grain, optax, Orbax, and the modules that serve."""

from jorca.training.config import TrainConfig
from jorca.training.errors import TrainingError

__all__ = ["TrainConfig", "TrainingError"]
