"""What goes wrong with a training run."""

from jorca.request import JorcaError


class TrainingError(JorcaError):
    """A text, a tokenizer or a run's folder does not do; the message says what to do about it."""
