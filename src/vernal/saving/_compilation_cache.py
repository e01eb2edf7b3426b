"""`compilation_cache`: caches compiled programs on the disk, for the next process."""

import os

import jax
from jax.experimental.compilation_cache.compilation_cache import reset_cache


def compilation_cache(folder: str | os.PathLike[str]) -> None:
    """Caches everything that is compiled from now on in a folder, for the next process.

    Call it once, at the top of a script. It sets the options of JAX's persistent cache so that
    every program is cached, however small. A program is traced as always, but compiled only if the
    cache does not have it for the same versions, options and kind of device. Several processes may
    share the folder. Nothing is ever removed from it: delete it when it grows too large.

    Programs with run-time checks (`vernal.runtime.error_if`) or other calls to Python are cached from
    JAX 0.12 on. JAX 0.10.2 compiles them in every process.

    Compiled programs are machine code: use a folder that no other user can write to.

    Args:
        folder: the folder. It is created if it does not exist.

    Raises:
        OSError: if it is not a folder, or cannot be created.

    Example:
        >>> import tempfile
        >>> import jax
        >>> from vernal.saving import compilation_cache
        >>> compilation_cache(tempfile.mkdtemp())
        >>> jax.config.update("jax_compilation_cache_dir", None)  # and no longer
    """
    os.makedirs(folder, exist_ok=True)
    jax.config.update("jax_compilation_cache_dir", os.path.abspath(folder))
    jax.config.update("jax_persistent_cache_min_compile_time_secs", 0.0)
    jax.config.update("jax_persistent_cache_min_entry_size_bytes", -1)
    # Otherwise a process that has already compiled something keeps its old cache, or none.
    reset_cache()
