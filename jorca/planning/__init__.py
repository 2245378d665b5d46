"""What can be known of a GPU without having one: its figures, and what the compiler makes of a program."""

from jorca.planning.gpus import GPUS, Gpu, gpu
from jorca.planning.topology import compile_for, make_devices

__all__ = ["GPUS", "Gpu", "compile_for", "gpu", "make_devices"]
