"""What stands before an engine and needs no device: from prompts to requests, from tokens to text; no JAX."""
