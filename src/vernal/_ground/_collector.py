"""Importing without a collection of garbage in between.

Halfway through the import of Vernal Python's collector tends to look through all of JAX, whose
100,000 objects have just been made. That takes half as long as the import itself, and finds nothing.
"""

import gc


class WithoutCollecting:
    """While the block runs, no garbage is collected."""

    def __enter__(self) -> None:
        self._was_enabled = gc.isenabled()
        gc.disable()

    def __exit__(self, *error: object) -> None:
        if self._was_enabled:
            gc.enable()
