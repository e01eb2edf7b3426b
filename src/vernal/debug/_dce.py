"""`store_dce` and `inspect_dce`: which arrays of a compiled program the compiler has removed.

The difficulty: to see whether a value is computed, something must happen at run time exactly if the
value is needed, without making it needed and without changing it.

The solution: `where(token, x, 0)`, where `token` is the result of a call to Python: always true, but
the compiler does not know that. The call has no declared effect, so it is removed exactly if `x` is.
"""

import functools
from collections.abc import Hashable
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from .._ground import by_data, register_cache
from ..show import is_traced, message, tree_pformat
from ..transforms import call_with_jvp
from ..trees import Rest, split

_TOKEN = jax.ShapeDtypeStruct((), np.bool_)


class _Removed:
    def __repr__(self) -> str:
        return "<DCE'd>"


class _Entry:
    """One traced call: its tree with the arrays as shapes, and which of them were computed."""

    def __init__(self, shapes: list[Any], rest: Rest):
        self.shapes = shapes
        self.rest = rest
        self.computed: set[int] = set()

    def token(self, index: int) -> Any:
        self.computed.add(index)
        return np.bool_(True)

    def __str__(self) -> str:
        shown = [x if i in self.computed else _Removed() for i, x in enumerate(self.shapes)]
        return tree_pformat(self.rest.fill(shown), struct_as_array=True)


_entries: dict[Hashable, list[_Entry]] = {}
register_cache(_entries.clear)


def _mark(entry: _Entry, index: int, x: Any) -> Any:
    def mark(x: Any) -> Any:
        token = jax.pure_callback(functools.partial(entry.token, index), _TOKEN)
        return by_data(lambda x: jnp.where(token, x, jnp.zeros_like(x)), x)

    def rule(primals: Any, tangents: Any) -> Any:
        # Not the tangent: it may be needed where the value is not.
        return _mark(entry, index, *primals), *tangents

    return call_with_jvp(mark, rule, x)


def store_dce(x: Any, name: Hashable = None) -> Any:
    """Returns `x`, and records which of its arrays a compiled program really computes.

    Compilers remove values that are not needed (dead code elimination, DCE). Call the compiled
    function, then `inspect_dce`.

    Args:
        x: any tree. Leaves that are not arrays are ignored.
        name: tells calls apart.

    Returns:
        `x`.

    Raises:
        RuntimeError: if it is called outside of a compiled function, where nothing is removed.

    Example:
        >>> import jax, jax.numpy as jnp
        >>> import vernal
        >>> @jax.jit
        ... def f(x):
        ...     sine, cosine = vernal.debug.store_dce((jnp.sin(x), jnp.cos(x)), "waves")
        ...     return sine
        >>> _ = f(jnp.array(1.0))
        >>> vernal.debug.inspect_dce("waves")
        Found 1 call to `vernal.debug.store_dce`.
        Entry 0:
        (f32[], <DCE'd>)
    """
    if not is_traced(jnp.zeros(())):
        raise RuntimeError(
            message(
                "`store_dce` must be called in compiled code",
                where="store_dce",
                expected="a call inside of a compiled function",
                got="a call outside of one",
                instead="@jax.jit (or @vernal.filter_jit) on the function that calls it",
            )
        )
    arrays, rest = split(x)
    avals = [jax.typeof(a) for a in arrays]
    entry = _Entry([jax.ShapeDtypeStruct(a.shape, a.dtype) for a in avals], rest)
    _entries.setdefault(name, []).append(entry)
    return rest.fill([_mark(entry, i, jnp.asarray(a)) for i, a in enumerate(arrays)])


def inspect_dce(name: Hashable = None) -> None:
    """Prints the records of `store_dce`: every traced call, with `<DCE'd>` for the arrays that were
    never computed.

    Call it outside of compiled functions, after calling them. (Under `vmap` the shapes are those of one
    element.) `vernal.clear_caches` deletes the records.

    Args:
        name: the name given to `store_dce` in the calls to print.

    Example:
        >>> import vernal
        >>> vernal.debug.inspect_dce("never used")
        Found 0 calls to `vernal.debug.store_dce`.
    """
    # A running computation has not recorded everything yet.
    jax.effects_barrier()
    jax.block_until_ready(jax.live_arrays())
    entries = _entries.get(name, [])
    print(
        f"Found {len(entries)} call{'' if len(entries) == 1 else 's'} to `vernal.debug.store_dce`."
    )
    for i, entry in enumerate(entries):
        print(f"Entry {i}:\n{entry}")
