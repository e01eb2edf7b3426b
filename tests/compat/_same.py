"""One program, run with the real Equinox and with `vernal.compat`.

Results, dtypes, weak types, warnings and the classes of errors must be the same."""

import functools
import warnings

import equinox
import equinox.internal
import jax
import jax.numpy as jnp
import numpy as np

from vernal.compat import equinox as compat


def _described(x):
    """What a leaf is, and its numbers."""
    if isinstance(x, jax.Array):
        if jnp.issubdtype(x.dtype, jax.dtypes.prng_key):
            return ("key", x.shape), jax.random.key_data(x)
        return ("array", x.shape, str(x.dtype), x.weak_type), np.asarray(x, complex)
    if isinstance(x, np.ndarray | np.generic):
        return ("numpy", x.shape, str(x.dtype)), np.asarray(x, complex)
    if isinstance(x, jax.ShapeDtypeStruct):
        return ("struct", x.shape, str(x.dtype), x.weak_type), ()
    if isinstance(x, bool | int | float | complex | str | None):
        return x, ()
    return type(x).__name__, ()


class _Error(str):
    """The class of an error, and its text, which does not count."""

    def __eq__(self, other):
        return type(other) is _Error and self.split(":")[0] == other.split(":")[0]

    __hash__ = None


def outcome(program, eqx):
    """What a program gives, or raises; and the classes of its warnings."""
    with warnings.catch_warnings(record=True) as noted:
        warnings.simplefilter("always")
        try:
            leaves = jax.tree.leaves(program(eqx), is_leaf=lambda x: x is None)
            kinds, numbers = zip(*map(_described, leaves), strict=True) if leaves else ((), ())
        except Exception as error:
            # The text is for people: those of the two differ.
            kinds, numbers = _Error(type(error).__name__ + ": " + str(error)), ()
    return kinds, numbers, [w.category for w in noted if issubclass(w.category, UserWarning)]


def same_as_equinox(program):
    """Makes a test of a program, which is given `equinox`."""

    @functools.wraps(program)
    def test():
        theirs, ours = (outcome(program, eqx) for eqx in (equinox, compat))
        assert ours[::2] == theirs[::2], f"Vernal: {ours}\nEquinox: {theirs}"
        for a, b in zip(ours[1], theirs[1], strict=True):
            np.testing.assert_allclose(a, b, rtol=1e-4, atol=1e-5)

    # Pytest would take `eqx` for a fixture.
    del test.__wrapped__
    return test
