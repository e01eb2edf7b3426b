"""`backward_nan`: finds the first cotangent that is NaN.

It is an identity whose derivative is a linear function with its own transpose (`linear_call`), which
prints and checks. So it affects only the backward pass; forward-mode and second derivatives are as
if it were not there.
"""

from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax.custom_derivatives import SymbolicZero

from ..primitives import linear_call
from ..runtime import branched_error_if
from ..show import path_text, tree_pformat
from ..transforms import call_with_jvp, is_zero
from ..trees import Rest, is_inexact_array, split

_SHOWN = jax.ShapeDtypeStruct((), np.bool_)


class _NotNeeded:
    def __repr__(self) -> str:
        return "<zero>"


def _identity(primals: Any, tangents: Any) -> Any:
    del primals
    return tangents


class _Watch:
    """One call of `backward_nan`."""

    def __init__(self, rest: Rest, name: str | None, terminate: bool):
        self.rest = rest
        self.name = "backward_nan" if name is None else name
        self.terminate = terminate

    def show(self, primals: Any, needed: Any, cotangents: Any) -> Any:
        """Prints the values, on the host."""
        values = iter(map(np.asarray, cotangents))
        filled = [next(values) if n else _NotNeeded() for n in needed]
        for label, leaves in (("primal", map(np.asarray, primals)), ("cotangent", filled)):
            text = tree_pformat(self.rest.fill(leaves), short_arrays=False)
            print(f"{self.name}, {label}: {text}", flush=True)
        return np.bool_(True)

    def transposed(self, primals: Any, cotangents: Any) -> Any:
        needed = tuple(not is_zero(ct) for ct in cotangents)
        live = [ct for ct in cotangents if not is_zero(ct)]
        shown = jax.pure_callback(
            lambda primals, live: self.show(primals, needed, live),
            _SHOWN,
            *jax.lax.stop_gradient((primals, live)),
            vmap_method="sequential",
        )
        # The compiler does not know that this is always true. So it prints before the cotangents are
        # used, and whenever they are.
        live = [jnp.where(shown, ct, jnp.zeros_like(ct)) for ct in live]
        if self.terminate:
            bad = jnp.stack([jnp.isnan(ct).any() for ct in live])
            paths = [path for path, n in zip(self.rest.paths(), needed, strict=True) if n]
            messages = [
                f"the cotangent of `{path_text(path, root=self.name)}` is NaN on the backward pass"
                for path in paths
            ]
            live = branched_error_if(live, bad.any(), jnp.argmax(bad), messages)
        values = iter(live)
        return [next(values) if n else ct for n, ct in zip(needed, cotangents, strict=True)]


def _watched(watch: _Watch, arrays: list[Any]) -> list[Any]:
    def rule(primals: Any, tangents: Any) -> Any:
        (arrays,), (dots,) = primals, tangents
        zeros = [isinstance(dot, SymbolicZero) for dot in dots]
        full = [
            jnp.zeros_like(x) if z else dot for x, dot, z in zip(arrays, dots, zeros, strict=True)
        ]
        return arrays, linear_call(_identity, watch.transposed, arrays, full)

    return call_with_jvp(lambda arrays: arrays, rule, arrays)


def backward_nan(x: Any, name: str | None = None, terminate: bool = True) -> Any:
    """Returns `x`. On the backward pass, prints `x` and its cotangent, and fails if the cotangent is NaN.

    To find the source of a NaN in a gradient, put several of these into a function: the last one (in
    the order of the forward pass) that sees a NaN is right before the operation that made it.

    Args:
        x: any tree. Leaves that are not floating-point arrays are ignored.
        name: the name in the output and in the error. Default: `backward_nan`.
        terminate: whether to fail, by `runtime.branched_error_if`, if there is a NaN.

    Returns:
        `x`.

    Raises:
        RuntimeCheckError: on the backward pass, if `terminate`. It names the part of `x`.

    Example:
        >>> import jax, jax.numpy as jnp
        >>> import vernal
        >>> def f(x):
        ...     y = vernal.debug.backward_nan(x**2, name="y")
        ...     return 3 * y
        >>> print(jax.grad(f)(1.0))
        y, primal: array(1., dtype=float32)
        y, cotangent: array(3., dtype=float32)
        6.0
    """
    arrays, rest = split(x, is_inexact_array)
    if not arrays:
        return x
    return rest.fill(_watched(_Watch(rest, name, terminate), list(map(jnp.asarray, arrays))))
