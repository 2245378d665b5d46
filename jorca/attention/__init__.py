"""Selective batching's split half: one op, its implementations, the KV array."""

from jorca.attention.abilities import Abilities
from jorca.attention.api import Attention, abilities_of, get_attention, selective_attention
from jorca.attention.cache import KVCache
from jorca.attention.choice import choose_attention
from jorca.attention.metadata import AttentionMetadata
from jorca.attention.selfcheck import BOUNDS, AttentionCheckError, check_attention, prove_attention

__all__ = [
    "BOUNDS",
    "Abilities",
    "Attention",
    "AttentionCheckError",
    "AttentionMetadata",
    "KVCache",
    "abilities_of",
    "check_attention",
    "choose_attention",
    "get_attention",
    "prove_attention",
    "selective_attention",
]
