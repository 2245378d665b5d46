"""Selective batching's split half: one op, its implementations, the KV array."""

from jorca.attention.api import Attention, get_attention, selective_attention
from jorca.attention.cache import KVCache
from jorca.attention.metadata import AttentionMetadata

__all__ = ["Attention", "AttentionMetadata", "KVCache", "get_attention", "selective_attention"]
