"""Selective batching's split half: one op, its implementations, the KV array."""

from jorca.attention.api import Attention, Implementation, get_attention, selective_attention
from jorca.attention.cache import KVCache
from jorca.attention.choice import choose_attention
from jorca.attention.metadata import AttentionMetadata

__all__ = [
    "Attention",
    "AttentionMetadata",
    "Implementation",
    "KVCache",
    "choose_attention",
    "get_attention",
    "selective_attention",
]
