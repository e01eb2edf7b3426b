"""Vectors of an operator: trees outside, flat arrays inside."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest

import vernal
from vernal import linalg
from vernal.linalg import FunctionOperator, MatrixOperator
from vernal.linalg._vectors import dtype_of, size_of, structure_of, to_flat, to_tree


class Pair(vernal.Module):
    first: jax.Array
    rest: dict


TREES = {
    "array": lambda: jnp.arange(6.0).reshape(2, 3),
    "scalar": lambda: jnp.asarray(2.0),
    "number": lambda: 2.0,
    "dict": lambda: {"b": jnp.arange(2.0), "a": jnp.arange(3.0), "none": None},
    "module": lambda: Pair(jnp.ones((2, 2)), {"x": (jnp.zeros(0), jnp.arange(3.0))}),
    "numpy": lambda: [np.arange(3, dtype=np.float32), np.float32(1)],
    "complex": lambda: jax.lax.complex(jnp.arange(2.0), jnp.ones(2)),
    "empty": dict,
}


@pytest.mark.parametrize("name", TREES)
def test_a_tree_survives_being_made_flat(name):
    tree = TREES[name]()
    structure = structure_of(tree, "here")
    flat = to_flat(structure, tree, "here")
    assert flat.shape == (size_of(structure),) and flat.dtype == dtype_of(structure, "here")
    again = to_tree(structure, flat)
    assert jax.tree.structure(again) == jax.tree.structure(tree)
    for a, b in zip(jax.tree.leaves(again), jax.tree.leaves(tree), strict=True):
        np.testing.assert_array_equal(a, b)


def test_mixed_precisions_are_flat_in_the_widest_and_come_back_in_their_own():
    tree = {"half": jnp.ones(2, jnp.bfloat16), "single": jnp.ones(1, jnp.float32)}
    structure = structure_of(tree, "here")
    flat = to_flat(structure, tree, "here")
    assert flat.dtype == jnp.float32
    dtypes = jax.tree.map(lambda x: x.dtype, to_tree(structure, flat))
    assert dtypes == {"half": jnp.bfloat16, "single": jnp.float32}


def test_half_precision_alone_is_flat_in_single_precision():
    assert FunctionOperator(lambda v: v, jnp.ones(2, jnp.bfloat16)).dtype == jnp.float32
    assert MatrixOperator(jnp.eye(2, dtype=jnp.float16)).dtype == jnp.float32


def test_double_precision_stays():
    with jax.enable_x64(True):
        assert MatrixOperator(np.eye(2)).dtype == jnp.float64
        assert MatrixOperator(np.eye(2, dtype=np.complex128)).dtype == jnp.complex128


def test_an_example_may_be_shapes_alone():
    example = {"a": jax.ShapeDtypeStruct((2, 3), jnp.float32), "b": jnp.zeros(())}
    operator = FunctionOperator(lambda v: v, example)
    assert operator.size == 7
    assert operator.in_structure()["a"] == example["a"]


@pytest.mark.parametrize(
    "example",
    [
        jnp.arange(3),
        {"real": jnp.ones(2), "complex": jnp.ones(2, jnp.complex64)},
        (jnp.ones(2), jnp.ones(2, bool)),
        jax.random.key(0),
    ],
    ids=["integers", "mixed", "bools", "key"],
)
def test_what_is_not_floating_point_is_refused(example):
    with pytest.raises(
        TypeError, match="the vectors of an operator must be trees of floating-point"
    ):
        FunctionOperator(lambda v: v, example)


def test_an_example_with_functions_in_it_is_refused():
    model = vernal.nn.MLP(2, 2, 3, 1, key=jax.random.key(0))
    example = [model, jnp.tanh]
    with pytest.raises(TypeError, match="contains a leaf that is not an array"):
        FunctionOperator(lambda v: v, example)
    filtered = vernal.filter(example, vernal.is_inexact_array)
    assert FunctionOperator(lambda v: v, filtered).size == 17


WRONG = {
    "another shape": (jnp.ones(2), lambda v: v[:1]),
    "another rank": (jnp.ones(2), lambda v: v[:, None]),
    "a tuple": (jnp.ones(2), lambda v: (v, v)),
    "a key less": ({"a": jnp.ones(2), "b": jnp.ones(2)}, lambda v: {"a": v["b"]}),
    "complex": (jnp.ones(2), lambda v: jax.lax.complex(v, v)),
    "integers": (jnp.ones(2), lambda v: jnp.arange(2)),
    "nothing": (jnp.ones(2), lambda v: None),
    "text": (jnp.ones(2), lambda v: "product"),
}


@pytest.mark.parametrize("name", WRONG)
@pytest.mark.parametrize("batch_size", [None, 1])
def test_a_product_that_does_not_look_like_the_vector_is_refused(name, batch_size):
    example, fn = WRONG[name]
    operator = FunctionOperator(fn, example, batch_size=batch_size)
    with pytest.raises(
        TypeError, match="the operator is not square: its product does not have the form"
    ):
        operator.matmul(jnp.ones((operator.size, 3)))
    with pytest.raises(TypeError, match="the operator is not square"):
        operator.adjoint_mv(example)


@pytest.mark.parametrize(
    "vector",
    [jnp.ones(3), jnp.ones((2, 1)), (jnp.ones(2),), jnp.ones(2, jnp.complex64)],
)
def test_a_vector_that_the_operator_does_not_multiply_is_refused_as_such(vector):
    operator = FunctionOperator(lambda v: 2 * v, jnp.ones(2), symmetric=True)
    symmetric = MatrixOperator(jnp.eye(2), symmetric=True)
    ways = [
        operator.mv,
        FunctionOperator(lambda v: 2 * v, jnp.ones(2)).adjoint_mv,
        (2.0 * operator).mv,
        lambda v: linalg.funm(jnp.exp, symmetric, v),
        lambda v: linalg.solve(operator, v),
        lambda v: linalg.lanczos(operator, v, 1),
    ]
    for way in ways:
        with pytest.raises(TypeError, match="not one of those that the operator multiplies"):
            way(vector)


def test_the_message_says_how_the_product_differs():
    operator = FunctionOperator(lambda v: {"a": v["a"][:1]}, {"a": jnp.ones(2)})
    with pytest.raises(TypeError, match=r"where: FunctionOperator(.|\n)*product\S*a"):
        operator.matmul(jnp.ones((2, 3)))


def test_a_real_product_of_complex_vectors_is_taken_as_complex():
    operator = FunctionOperator(
        lambda v: jnp.zeros(2, jnp.float32), jnp.ones(2, jnp.complex64), symmetric=True
    )
    product = operator.matmul(jnp.ones((2, 3), jnp.complex64))
    assert product.dtype == jnp.complex64 and not product.any()


def test_vectors_without_elements_have_products():
    operator = FunctionOperator(lambda v: v, {})
    assert operator.size == 0 and operator.matmul(jnp.ones((0, 3))).shape == (0, 3)
    operator = FunctionOperator(lambda v: v, jnp.ones(2))
    assert operator.matmul(jnp.ones((2, 0))).shape == (2, 0)


def test_random_keys_are_no_vectors():
    """Their shape fits, and products failed inside of JAX."""
    operator = MatrixOperator(jnp.eye(3), symmetric=True)
    keys = jax.random.split(jax.random.key(0), 3)
    with pytest.raises(
        TypeError, match="a vector is not one of those that the operator multiplies"
    ):
        linalg.funm(jnp.exp, operator, keys)
    function = FunctionOperator(lambda v: v, jnp.ones(3))
    for vector in (keys, ["text"], "text"):
        with pytest.raises(TypeError, match="a vector is not one of those that the operator"):
            function.mv(vector)
    with pytest.raises(TypeError, match="its product does not have the form of the vector"):
        FunctionOperator(lambda v: keys, jnp.ones(3)).matmul(jnp.ones((3, 1)))
