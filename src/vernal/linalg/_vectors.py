"""Vectors of an operator: any tree of arrays outside, one flat array inside.

Every algorithm here works with flat vectors, as columns of a matrix. The user's operator multiplies trees like
`in_structure()`. A structure is a tree of `jax.ShapeDtypeStruct`.
"""

import math
from typing import Any, TypeVar

import jax
import jax.numpy as jnp
import jax.tree_util as jtu
from jax import Array, lax

from ..show import diff_text, short, type_error
from ..transforms import gathered
from ..trees import is_array_like, is_inexact_array

_COMPLEX = "`MatrixOperator(matrix.astype(complex))` for complex vectors"

_T = TypeVar("_T")
# A tree of arrays, or of `jax.ShapeDtypeStruct`.
Structure = Any


def structure_of(example: Any, where: str) -> Structure:
    """Shapes and dtypes of a tree of arrays, numbers or `jax.ShapeDtypeStruct`; `TypeError` if it holds anything
    else."""
    if not all(_has_shape(leaf) for leaf in jtu.tree_leaves(example)):
        raise type_error(
            "the example of a vector contains a leaf that is not an array",
            where=where,
            expected="a tree of arrays",
            got=short(example),
            instead="`vernal.filter(example, vernal.is_inexact_array)`, and a function of such trees",
        )
    return jtu.tree_map(_spec, example)


def size_of(structure: Structure) -> int:
    """The number of elements of a vector."""
    return sum(math.prod(leaf.shape) for leaf in jtu.tree_leaves(structure))


def dtype_of(structure: Structure, where: str) -> Any:
    """The dtype of flat vectors: the widest of all leaves, and at least single precision. `TypeError` unless all leaves
    are floating-point, and all real or all complex."""
    dtypes = [leaf.dtype for leaf in jtu.tree_leaves(structure)]
    kinds = {jnp.issubdtype(dtype, jnp.complexfloating) for dtype in dtypes}
    if len(kinds) > 1 or not all(jnp.issubdtype(dtype, jnp.inexact) for dtype in dtypes):
        raise type_error(
            "the vectors of an operator must be trees of floating-point arrays",
            where=where,
            expected="floating-point arrays, either all real or all complex",
            got=short(structure),
            instead="convert the matrix or the example first, e.g. with `x.astype(float)`",
        )
    with jax.numpy_dtype_promotion("standard"):
        return jnp.result_type(jnp.float32, *dtypes)


def to_tree(structure: Structure, flat: Array) -> Any:
    """A flat vector as a tree.

    Args:
        structure: what the tree is like.
        flat: of shape `(n,)`.
    """
    leaves, treedef = jtu.tree_flatten(structure)
    out, start = [], 0
    for leaf in leaves:
        size = math.prod(leaf.shape)
        out.append(flat[start : start + size].reshape(leaf.shape).astype(leaf.dtype))
        start += size
    return jtu.tree_unflatten(treedef, out)


def to_flat(structure: Structure, tree: Any, where: str) -> Array:
    """Converts a tree that an operator returned to a flat vector. `TypeError` if its structure or shapes differ from
    those of the operator's vectors, or it is complex where they are real."""
    check_product(structure, tree, where)
    return _joined(tree, dtype_of(structure, where))


def _joined(tree: Any, dtype: Any) -> Array:
    leaves = jtu.tree_leaves(tree)
    if not leaves:
        return jnp.zeros(0, dtype)
    # On a mesh, flat vectors are replicated on every device.
    return jnp.concatenate([jnp.ravel(gathered(jnp.asarray(x))).astype(dtype) for x in leaves])


def flat_vector(structure: Structure, vector: Any, where: str) -> Array:
    """A vector that the user gave, flat; `TypeError` if it is not like the operator's vectors. It may be of integers,
    as a right-hand side often is."""
    check_vector(structure, vector, where)
    return _joined(vector, dtype_of(structure, where))


def check_product(structure: Structure, tree: Any, where: str) -> None:
    """Refuses, as `to_flat` does, a product (or its shapes) that is not like the operator's vectors."""
    kind = jnp.complexfloating if _is_complex(structure) else jnp.floating
    same = jtu.tree_structure(tree) == jtu.tree_structure(structure)
    pairs = zip(jtu.tree_leaves(tree), jtu.tree_leaves(structure), strict=False)
    if same and all(_fits(got, expected, kind) for got, expected in pairs):
        return
    got = jtu.tree_map(lambda x: _spec(x) if _has_shape(x) else x, tree)
    raise type_error(
        "the operator is not square: its product does not have the form of the vector",
        where=where,
        expected="a product with the structure, shapes and kind of numbers of the vector",
        got=diff_text(structure, got, root="product"),
        instead="return one array for every array in the vector",
    )


def check_vector(structure: Structure, vector: Any, where: str) -> None:
    """Refuses a vector of another structure or shape than the operator's, or a complex one where they are real."""
    got = jtu.tree_map(lambda x: _spec(x) if _has_shape(x) else x, vector)
    leaves, treedef = jtu.tree_flatten(got)
    wanted, expected = jtu.tree_flatten(structure)
    if (
        treedef == expected
        and all(_has_shape(x) and not is_random_key(x) for x in leaves)
        and [jnp.shape(x) for x in leaves] == [x.shape for x in wanted]
        and (_is_complex(structure) or not _is_complex(got))
    ):
        return
    raise type_error(
        "a vector is not one of those that the operator multiplies",
        where=where,
        expected="a tree of arrays like `operator.in_structure()`",
        got=diff_text(structure, got, root="vector"),
        instead=_COMPLEX if _is_complex(got) else None,
    )


def check_block(structure: jax.ShapeDtypeStruct, block: Array, where: str) -> None:
    """Refuses columns that are not flat vectors of the operator: of another length, or complex where they are real."""
    columns = block.shape[1] if jnp.ndim(block) == 2 else 1
    wanted = jax.ShapeDtypeStruct((*structure.shape, columns), structure.dtype)
    if jnp.shape(block) != wanted.shape or (jnp.iscomplexobj(block) and not _is_complex(structure)):
        raise type_error(
            "a vector is not one of those that the operator multiplies",
            where=where,
            expected=f"{short(wanted)}: the length and the kind of numbers of the matrix",
            got=short(block),
            instead=_COMPLEX if jnp.iscomplexobj(block) else None,
        )


def _fits(got: Any, expected: Any, kind: Any) -> bool:
    if not _has_shape(got):
        return False
    spec = _spec(got)
    # A real product of complex vectors is valid too.
    kinds = (kind, jnp.floating)
    return spec.shape == expected.shape and any(jnp.issubdtype(spec.dtype, k) for k in kinds)


def _is_complex(structure: Structure) -> bool:
    leaves = jtu.tree_leaves(structure)
    return any(_has_shape(x) and jnp.issubdtype(x.dtype, jnp.complexfloating) for x in leaves)


def _has_shape(x: Any) -> bool:
    return isinstance(x, jax.ShapeDtypeStruct) or is_array_like(x)


def is_random_key(x: Any) -> bool:
    """Whether it is a typed random key, or several: an array of JAX's, but not of numbers."""
    return isinstance(x, jax.Array | jax.ShapeDtypeStruct) and jnp.issubdtype(
        x.dtype, jax.dtypes.prng_key
    )


def _spec(x: Any) -> jax.ShapeDtypeStruct:
    if isinstance(x, jax.Array | jax.ShapeDtypeStruct):
        return jax.ShapeDtypeStruct(x.shape, x.dtype)
    return jax.ShapeDtypeStruct(jnp.shape(x), jnp.result_type(x))


def times(a: Array, b: Array) -> Array:
    """A matrix product in full precision, on every device."""
    return jnp.matmul(a, b, precision=lax.Precision.HIGHEST)


def stop_gradient(tree: _T) -> _T:
    """A tree, such as an operator, without derivatives."""
    return jtu.tree_map(lambda x: lax.stop_gradient(x) if is_inexact_array(x) else x, tree)


def lost_in_product(largest: Array, size: int) -> Array:
    """How much of the product with a unit vector may be lost, because its terms are too small for the dtype; zero for a
    zero operator.

    Args:
        largest: of the elements, or the length, of products.
        size: of the operator.
    """
    return jnp.where(largest > 0, size * float(jnp.finfo(largest.dtype).tiny), 0)


def power_of_two(block: Array) -> Array:
    """A real power of two of the size of the largest element; 1 for a block of zeros."""
    return power_below(jnp.max(jnp.abs(block), initial=0))


def power_below(x: Array) -> Array:
    """The largest power of two not above a positive number, element by element; 1 for zero. Has no derivative."""
    # Not `jnp.frexp`: on JAX 0.12 it cannot be inside of a compiled `linear_call`. Not `jnp.log2`: inexact.
    power = lax.reduce_precision(
        lax.stop_gradient(x), exponent_bits=jnp.finfo(x.dtype).nexp, mantissa_bits=0
    )
    return jnp.where((power > 0) & jnp.isfinite(power), power, 1)
