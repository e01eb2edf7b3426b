"""Reads names of problems, and answers each with a line of JSON, computed with whatever `import equinox` is.

With the real one, this is what the tests compare with: `python -m tests.stack`.
"""

import json
import sys

import jax

# As in `tests/conftest.py`, and for the same reason.
jax.config.update("jax_disable_most_optimizations", True)

from . import libraries, linear, models, pages, solves  # noqa: E402, F401 (they fill the registry)
from .registry import answers  # noqa: E402

if __name__ == "__main__":
    import equinox

    for line in sys.stdin:
        name = line.strip()
        found = {"equinox": equinox.__file__, "name": name, "answers": answers(name)}
        print(json.dumps(found), flush=True)
