"""Where a model runs: meshes, pipeline stages, and which axis of a mesh each weight is split over."""

from jorca.sharding.attention import AttentionByHeads
from jorca.sharding.rules import RULES, pad_vocab, param_shardings, param_specs
from jorca.sharding.stages import Stage, make_stages, spread_layers

__all__ = [
    "RULES",
    "AttentionByHeads",
    "Stage",
    "make_stages",
    "pad_vocab",
    "param_shardings",
    "param_specs",
    "spread_layers",
]
