"""When requests run: Algorithm 1, page accounting and the messages of an iteration."""
