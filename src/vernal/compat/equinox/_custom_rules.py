"""Custom derivatives with Equinox's convention: the tangent of what is not differentiated is None."""

from collections.abc import Callable
from typing import Any

import jax.tree_util as jtu
from jax.custom_derivatives import SymbolicZero

from ... import transforms
from ...modules import BoundMethod
from ...transforms import is_zero
from ._module import Module


def _is_zero(x: Any) -> bool:
    return is_zero(x) or isinstance(x, SymbolicZero)


def _without_zeros(tree: Any) -> Any:
    return jtu.tree_map(lambda x: None if _is_zero(x) else x, tree, is_leaf=_is_zero)


class _Rule(Module):
    """A rule of Equinox's, which takes None for zero and may return JAX's `SymbolicZero`, as one of ours.

    Args:
        rule: Equinox's.
        zeros: which of its positional arguments has zeros that it expects as None.
    """

    rule: Callable[..., Any]
    zeros: int

    def __call__(self, /, *args: Any, **kwargs: Any) -> Any:
        changed = [_without_zeros(x) if i == self.zeros else x for i, x in enumerate(args)]
        return _without_zeros(self.rule(*changed, **kwargs))


class _CustomRule(Module):
    """What the two below share: they stand for one of ours."""

    fn: Any

    @property
    def __wrapped__(self) -> Any:
        return self.fn.__wrapped__

    def __call__(self, /, *args: Any, **kwargs: Any) -> Any:
        return self.fn(*args, **kwargs)

    def __get__(self, instance: Any, owner: Any = None) -> Any:
        return self if instance is None else BoundMethod(self, instance)


class filter_custom_jvp(_CustomRule):
    """`vernal.filter_custom_jvp` with None for the tangent of what is not differentiated.

    Args:
        fn: the function.
    """

    def __init__(self, fn: Callable[..., Any]):
        self.fn = transforms.filter_custom_jvp(fn)

    def def_jvp(self, rule: Callable[..., Any]) -> None:
        """Gives the function its rule.

        Args:
            rule: called as `rule(primals, tangents, **kwargs)`; returns `(out, tangent_out)`.
        """
        self.fn.def_jvp(_Rule(rule, 1), symbolic_zeros=True)

    defjvp = def_jvp


class filter_custom_vjp(_CustomRule):
    """`vernal.filter_custom_vjp` with None for the gradient of what is not used.

    Args:
        fn: the function.
    """

    def __init__(self, fn: Callable[..., Any]):
        self.fn = transforms.filter_custom_vjp(fn)

    def def_fwd(self, fwd: Callable[..., Any]) -> None:
        """Gives the function the rule for the way forward.

        Args:
            fwd: called as `fwd(perturbed, vjp_arg, *args, **kwargs)`; returns `(out, residuals)`.
        """
        self.fn.def_fwd(fwd)

    def def_bwd(self, bwd: Callable[..., Any]) -> None:
        """Gives the function the rule for the way back.

        Args:
            bwd: called as `bwd(residuals, grad_out, perturbed, vjp_arg, *args, **kwargs)`.
        """
        self.fn.def_bwd(_Rule(bwd, 1), symbolic_zeros=True)

    def defvjp(self, fwd: Callable[..., Any], bwd: Callable[..., Any]) -> None:
        """Gives both.

        Args:
            fwd: as in `def_fwd`.
            bwd: as in `def_bwd`.
        """
        self.def_fwd(fwd)
        self.def_bwd(bwd)
