"""`python -m vernal.compat`: prints the table of names."""

from ._differences import table

print(table(), end="")
