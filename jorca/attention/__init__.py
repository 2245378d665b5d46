"""Selective batching's split half: one op, its implementations, the KV array."""

from jorca.attention.api import Attention, Implementation, get_attention, selective_attention
from jorca.attention.cache import KVCache
from jorca.attention.choice import choose_attention
from jorca.attention.metadata import AttentionMetadata
from jorca.attention.selfcheck import BOUNDS, AttentionCheckError, check_attention, prove_attention

__all__ = [
    "BOUNDS",
    "Attention",
    "AttentionCheckError",
    "AttentionMetadata",
    "Implementation",
    "KVCache",
    "check_attention",
    "choose_attention",
    "get_attention",
    "prove_attention",
    "selective_attention",
]
