"""The one error of everything that reads, converts or stores weights."""

from __future__ import annotations

from jorca.request import JorcaError


class CheckpointError(JorcaError, ValueError):
    """A checkpoint cannot be read, converted or stored; the message says which file, what and why."""
