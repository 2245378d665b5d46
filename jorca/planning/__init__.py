"""What can be known of a GPU without having one: its figures, and what the compiler makes of a program."""

from jorca.planning.gpus import GPUS, Gpu, gpu
from jorca.planning.hlo import COLLECTIVES, Operation, count_launches, read_operations
from jorca.planning.steps import CompiledStep, compile_steps
from jorca.planning.topology import compile_for, make_devices

__all__ = [
    "COLLECTIVES",
    "GPUS",
    "CompiledStep",
    "Gpu",
    "Operation",
    "compile_for",
    "compile_steps",
    "count_launches",
    "gpu",
    "make_devices",
    "read_operations",
]
