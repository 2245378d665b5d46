"""jorca."""
