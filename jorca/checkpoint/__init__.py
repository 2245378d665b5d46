"""Getting weights in: PyTorch files without PyTorch, format tables, the Orbax store."""
