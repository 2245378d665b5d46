"""Selective batching's split half: one op, its implementations, the KV array."""
