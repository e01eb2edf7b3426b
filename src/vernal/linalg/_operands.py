"""What may stand beside an operator in `+`, `*` and `@`."""

import math
from typing import Any

import jax.numpy as jnp
import numpy as np
from jax import Array

from ..show import diff_text, short, type_error, value_error
from ..trees import is_array_like
from ._vectors import Structure


def is_not_negative(number: Any) -> bool:
    return isinstance(number, int | float) and 0 <= number < math.inf


def as_number(value: Any, dtype: Any, where: str) -> Array:
    """A scalar in the dtype of an operator; `TypeError` if not a scalar, or complex where the operator is real."""
    is_number = isinstance(value, int | float | complex | np.generic | np.ndarray | Array)
    real = jnp.issubdtype(dtype, jnp.floating)
    if not is_number or jnp.shape(value) != () or (real and jnp.iscomplexobj(value)):
        raise type_error(
            "an operator can only be multiplied by, or shifted by, a number",
            where=where,
            expected="a real number, or a complex one for a complex operator",
            got=short(value),
            instead="`operator.mv(vector)` for a product; `left @ right`, `left + right` of two operators",
        )
    return jnp.asarray(value).astype(dtype)


def check_alike(one: Structure, other: Structure, sign: str) -> None:
    """`ValueError` unless two operators, whose structures are given, multiply the same vectors."""
    if one != other:
        raise value_error(
            "the operators multiply different vectors",
            where=f"left {sign} right",
            expected="two operators with the same `in_structure()`",
            got=diff_text(one, other, root="vector"),
        )


def refuse_vector(operand: Any, where: str) -> None:
    """`TypeError` for an array beside `@`: an operator's vectors are trees, and `mv` says which side it is on."""
    if is_array_like(operand):
        raise type_error(
            "`@` is the product of two operators",
            where=where,
            expected="an operator",
            got=short(operand),
            instead="`operator.mv(vector)`; `operator.H.mv(vector)` for a vector from the left; "
            "`operator @ MatrixOperator(matrix)`",
        )
