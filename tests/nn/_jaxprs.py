"""The equations of a traced function, also those inside of loops and compiled calls."""

import jax


def equations(jaxpr):
    for equation in getattr(jaxpr, "jaxpr", jaxpr).eqns:
        yield equation
        for parameter in jax.tree.leaves(equation.params, is_leaf=lambda p: hasattr(p, "eqns")):
            if hasattr(parameter, "eqns"):
                yield from equations(parameter)
