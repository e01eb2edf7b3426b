"""`compilation_cache`: compiled programs on the disk, for the next process."""

import os

import jax
from jax.experimental.compilation_cache.compilation_cache import reset_cache


def compilation_cache(folder: str | os.PathLike[str]) -> None:
    """Keeps what is compiled from here on in a folder, where the next process finds it.

    Call it once, at the top of a script. It sets the options of JAX's persistent cache so that
    every program is kept, however small; a program is traced as always, but not compiled if it was
    before, by the same versions, with the same options, for the same kind of device. Several
    processes may share the folder. Nothing is ever removed from it: delete it when it has become
    too large.

    Programs with run-time checks (`vernal.runtime.error_if`) or other calls of Python are kept from
    JAX 0.12 on. JAX 0.10.2 compiles them in every process.

    Compiled programs are machine code: use a folder that nobody else can write to.

    Args:
        folder: where to; made if it is not there.

    Raises:
        OSError: if it is not a folder, or cannot be made.

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
    # Otherwise a process that has compiled before stays without a cache, or with its old one.
    reset_cache()
