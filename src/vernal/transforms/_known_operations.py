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
    rules = _hidden_rules(eqn)
    if rules is None:
        return None
    return jax.make_jaxpr(lambda *args: list(rules.compute(*args)))(
        *[v.aval for v in eqn.invars]
    ).jaxpr


def _hidden_rules(eqn: Any) -> Any:
    if eqn.primitive is vprim_p:
        rules = eqn.params["rules"]
        is_hidden = eqn.params["program"] is None and not rules.traits.transposed
        return rules if is_hidden else None
    rules = defined.get(eqn.primitive)
    return None if rules is None else rules.given(eqn.params)


def rules_of(eqn: Any) -> Any:
    """The rules of an operation of ours that has a derivative of its own.

    Args:
        eqn: an operation in a program.

    Returns:
        Rules for `vprim_p`; or None if it is another operation, or only makes again what one has computed.
    """
    if eqn.primitive is vprim_p:
        return eqn.params["rules"]
    rules = defined.get(eqn.primitive)
    return None if rules is None or rules.traits.replays else rules.given(eqn.params)


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
