"""`python -m jorca.cli`."""

from jorca.cli import main

main()
