"""Properties of the operations in a program."""

from typing import Any

import jax

from .._ground import custom_vjp_call_p, equations_in
from ._operations import defined, vprim_p
from ._traits import Traits


def program_of(eqn: Any) -> Any:
    """The program of what one of Vernal's operations computes.

    Args:
        eqn: an operation in a program.

    Returns:
        A jaxpr; None if the parameters of the operation hold it, for an operation that is only ever
        transposed, or for an operation of JAX.
    """
    rules = rules_of(eqn)
    if rules is None or rules.traits.transposed:
        return None
    if eqn.primitive is vprim_p and eqn.params["program"] is not None:
        return None
    types = [v.aval for v in eqn.invars]
    return jax.make_jaxpr(lambda *args: list(rules.compute(*args)))(*types).jaxpr


def rules_of(eqn: Any) -> Any:
    """The rules of one of Vernal's operations.

    Args:
        eqn: an operation in a program.

    Returns:
        Rules as `vprim_p` takes them; None for an operation of JAX.
    """
    if eqn.primitive is vprim_p:
        return eqn.params["rules"]
    rules = defined.get(eqn.primitive)
    return None if rules is None else rules.given(eqn.params)


def traits_of(eqn: Any) -> Traits:
    """The traits of an operation in a program.

    Args:
        eqn: the operation.
    """
    if eqn.primitive is vprim_p:
        return eqn.params["rules"].traits
    of_jax = eqn.primitive is custom_vjp_call_p
    return Traits(one_way=of_jax, may_check=of_jax)


def one_way(jaxpr: Any) -> bool:
    """Whether a program contains, at any depth, a function with a derivative for reverse mode only.

    Args:
        jaxpr: the program.
    """
    return any(traits_of(eqn).one_way for eqn in equations_in(jaxpr))
