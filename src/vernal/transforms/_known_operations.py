"""What is known of the operations in a program."""

from typing import Any

import jax

from .._ground import custom_vjp_call_p, equations_in
from ._operations import defined, vprim_p
from ._traits import Traits


def program_of(eqn: Any) -> Any:
    """What an operation of ours computes.

    Args:
        eqn: an operation in a program.

    Returns:
        A jaxpr; or None if its parameters say it, or it is an operation of JAX.
    """
    rules = rules_of(eqn)
    if rules is None or rules.traits.transposed:
        return None
    if eqn.primitive is vprim_p and eqn.params["program"] is not None:
        return None
    types = [v.aval for v in eqn.invars]
    return jax.make_jaxpr(lambda *args: list(rules.compute(*args)))(*types).jaxpr


def rules_of(eqn: Any) -> Any:
    """The rules of an operation of ours.

    Args:
        eqn: an operation in a program.

    Returns:
        Rules as `vprim_p` takes them; or None if it is an operation of JAX.
    """
    if eqn.primitive is vprim_p:
        return eqn.params["rules"]
    rules = defined.get(eqn.primitive)
    return None if rules is None else rules.given(eqn.params)


def traits_of(eqn: Any) -> Traits:
    """What an operation in a program is.

    Args:
        eqn: the operation.
    """
    if eqn.primitive is vprim_p:
        return eqn.params["rules"].traits
    of_jax = eqn.primitive is custom_vjp_call_p
    return Traits(one_way=of_jax, may_check=of_jax)


def one_way(jaxpr: Any) -> bool:
    """Whether a function with a derivative for reverse mode alone is somewhere in a program.

    Args:
        jaxpr: the program.
    """
    return any(traits_of(eqn).one_way for eqn in equations_in(jaxpr))
