"""How iterations run: buckets, packing, executor, output stage, the loop and `LLM`."""
