"""Custom derivatives with Equinox's convention: the tangent of what is not differentiated is None."""

import warnings
from collections.abc import Callable
from typing import Any, NoReturn

import jax.tree_util as jtu
from jax.custom_derivatives import SymbolicZero

from ... import transforms
from ..._ground import callable_name
from ...modules import BoundMethod
from ...show import message
from ...transforms import is_zero
from ...trees import is_inexact_array
from ._module import Module


def _is_zero(x: Any) -> bool:
    return is_zero(x) or isinstance(x, SymbolicZero)


def _without_zeros(tree: Any) -> Any:
    return jtu.tree_map(lambda x: None if _is_zero(x) else x, tree, is_leaf=_is_zero)


class _Rule(Module):
    """A rule of Equinox, which takes None for zero and may return JAX's `SymbolicZero`, converted to one of ours.

    Args:
        rule: Equinox's.
        zeros: which of its positional arguments has zeros that it expects as None.
    """

    rule: Callable[..., Any]
    zeros: int

    def __call__(self, /, *args: Any, **kwargs: Any) -> Any:
        changed = [_without_zeros(x) if i == self.zeros else x for i, x in enumerate(args)]
        return _without_zeros(self.rule(*changed, **kwargs))


class _OldRule(Module):
    """A rule of Equinox before 0.10.7, which takes None only for arguments that could not be differentiated.

    Args:
        rule: the rule.
        zeros: which of its positional arguments has zeros.
        dropped: which of today's positional arguments it does not take, or None.
    """

    rule: Callable[..., Any]
    zeros: int | None
    dropped: int | None

    def __call__(self, /, *args: Any, **kwargs: Any) -> Any:
        taken = [
            jtu.tree_map(lambda x: x if is_inexact_array(x) else None, x) if i == self.zeros else x
            for i, x in enumerate(args)
            if i != self.dropped
        ]
        return _without_zeros(self.rule(*taken, **kwargs))


def _without(drop: Callable[[Any], bool], tangent: Any, of: Any) -> Any:
    """A tangent with None for the leaves of `of` of which `drop` is true. One that does not fit stays, for Vernal to
    refuse."""

    def kept(given: Any, node: Any) -> Any:
        return None if jtu.treedef_is_leaf(jtu.tree_structure(node)) and drop(node) else given

    try:
        return jtu.tree_map(kept, tangent, of, is_leaf=lambda x: x is None)
    except ValueError:
        return tangent


class _Forgiving(Module):
    """A rule that drops what it returns for leaves without a derivative, named as the user's rule."""

    rule: _Rule | _OldRule

    @property
    def __name__(self) -> str:  # pyright: ignore[reportIncompatibleVariableOverride] (read-only)
        return callable_name(self.rule.rule)


class _ForwardRule(_Forgiving):
    """Drops the tangents of Python numbers, which are constants. Equinox does where it takes gradients."""

    def __call__(self, primals: Any, tangents: Any, /, **kwargs: Any) -> Any:
        returned = self.rule(primals, tangents, **kwargs)
        if not isinstance(returned, tuple) or len(returned) != 2:
            return returned
        out, tangent_out = returned
        return out, _without(lambda x: isinstance(x, (float, complex)), tangent_out, out)


class _BackwardRule(_Forgiving):
    """Drops the gradients of what has none, as Equinox does."""

    def __call__(
        self,
        residuals: Any,
        grad_out: Any,
        perturbed: Any,
        vjp_arg: Any,
        /,
        *args: Any,
        **kwargs: Any,
    ) -> Any:
        gradient = self.rule(residuals, grad_out, perturbed, vjp_arg, *args, **kwargs)
        return _without(lambda x: not is_inexact_array(x), gradient, vjp_arg)


def _warn_old(old: str, new: str) -> None:
    warnings.warn(f"`{old}` is deprecated: write {new}", stacklevel=3)


class _CustomRule(Module):
    """The base of the two classes below, each a wrapper of one of ours."""

    fn: Any

    @property
    def __wrapped__(self) -> Any:
        return self.fn.__wrapped__

    def __call__(self, /, *args: Any, **kwargs: Any) -> Any:
        return self.fn(*args, **kwargs)

    def __get__(self, instance: Any, owner: Any = None) -> Any:
        return self if instance is None else BoundMethod(self, instance)


class filter_custom_jvp(_CustomRule):
    """`vernal.filter_custom_jvp` with None for the tangents of arguments that are not differentiated.

    Args:
        fn: the function.
    """

    def __init__(self, fn: Callable[..., Any]):
        self.fn = transforms.filter_custom_jvp(fn)

    def def_jvp(self, fn_jvp: Callable[..., Any]) -> None:
        """Gives the function its rule.

        Args:
            fn_jvp: called as `fn_jvp(primals, tangents, **kwargs)`; returns `(out, tangent_out)`.
        """
        self.fn.def_jvp(_ForwardRule(_Rule(fn_jvp, 1)), symbolic_zeros=True)

    def defjvp(self, fn_jvp: Callable[..., Any]) -> None:
        """Equinox's old spelling of `def_jvp`, with arrays of zeros for tangents that are zero.

        Args:
            fn_jvp: as in `def_jvp`.
        """
        _warn_old("filter_custom_jvp.defjvp", "`.def_jvp`")
        self.fn.def_jvp(_ForwardRule(_OldRule(fn_jvp, 1, None)))

    def defjvps(self, *rules: Any) -> NoReturn:
        """Not implemented, as in Equinox.

        Args:
            *rules: one for each argument.

        Raises:
            NotImplementedError: always.
        """
        raise NotImplementedError(
            message(
                "rules cannot be given one by one",
                where="filter_custom_jvp.defjvps",
                expected="one rule for all arguments",
                got=f"{len(rules)} rules",
                instead="`.def_jvp`",
            )
        )


class filter_custom_vjp(_CustomRule):
    """`vernal.filter_custom_vjp` with None for the gradients of results that are not used.

    Args:
        fn: the function.
    """

    def __init__(self, fn: Callable[..., Any]):
        self.fn = transforms.filter_custom_vjp(fn)

    def def_fwd(self, fn_fwd: Callable[..., Any]) -> None:
        """Gives the function its forward rule.

        Args:
            fn_fwd: called as `fn_fwd(perturbed, vjp_arg, *args, **kwargs)`; returns `(out, residuals)`.
        """
        self.fn.def_fwd(fn_fwd)

    def def_bwd(self, fn_bwd: Callable[..., Any]) -> None:
        """Gives the function its backward rule.

        Args:
            fn_bwd: called as `fn_bwd(residuals, grad_out, perturbed, vjp_arg, *args, **kwargs)`.
        """
        self.fn.def_bwd(_BackwardRule(_Rule(fn_bwd, 1)), symbolic_zeros=True)

    def defvjp(self, fn_fwd: Callable[..., Any], fn_bwd: Callable[..., Any]) -> None:
        """Equinox's old spelling of both, with arrays of zeros for gradients that are zero.

        Args:
            fn_fwd: called as `fn_fwd(vjp_arg, *args, **kwargs)`.
            fn_bwd: called as `fn_bwd(residuals, grad_out, vjp_arg, *args, **kwargs)`.
        """
        _warn_old("filter_custom_vjp.defvjp", "`.def_fwd` and `.def_bwd`")
        self.fn.def_fwd(_OldRule(fn_fwd, None, 0))
        self.fn.def_bwd(_BackwardRule(_OldRule(fn_bwd, 1, 2)))
