"""What every figure needs."""

from __future__ import annotations

from jorca.config import ConfigError


def check_can_draw() -> None:
    """Raises ConfigError, saying what to install, unless matplotlib is there."""
    try:
        import matplotlib  # noqa: F401
    except ImportError:
        raise ConfigError(
            "a plot needs matplotlib, which is not installed: pip install 'jorca[plot]'"
        ) from None
