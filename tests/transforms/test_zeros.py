import copy
import operator
import pickle

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from vernal.show import short
from vernal.transforms import ZeroTangent, is_zero, materialise

Z = ZeroTangent((2, 3), jnp.float32)
X = jnp.arange(6.0).reshape(2, 3)

STAY_ZERO = {
    "times_array": lambda z: z * X,
    "array_times": lambda z: X * z,
    "times_number": lambda z: z * 2.0,
    "number_times": lambda z: 2 * z,
    "numpy_times": lambda z: np.ones((2, 3), np.float32) * z,
    "numpy_scalar_times": lambda z: np.float32(2) * z,
    "broadcast": lambda z: jnp.ones((4, 1, 1)) * z[None],
    "times_itself": lambda z: z * z,
    "divided": lambda z: z / (X + 1.0),
    "matmul": lambda z: z @ jnp.ones((3, 4)),
    "rmatmul": lambda z: jnp.ones((4, 2)) @ z,
    "rmatmul_numpy": lambda z: np.ones((4, 2), np.float32) @ z,
    "minus": lambda z: -z,
    "plus": lambda z: +z,
    "twice": lambda z: z + z,
    "less_itself": lambda z: z - z,
    "index": lambda z: z[0],
    "slice": lambda z: z[:, 1:],
    "gather": lambda z: z[jnp.array([0, 1, 0])],
    "new_axis": lambda z: z[..., None],
    "reshape": lambda z: z.reshape(3, 2),
    "reshape_tuple": lambda z: z.reshape((-1,)),
    "ravel": lambda z: z.ravel(),
    "astype": lambda z: z.astype(jnp.bfloat16),
    "sum": lambda z: z.sum(),
    "sum_axis": lambda z: z.sum(axis=0, keepdims=True),
    "mean": lambda z: z.mean(axis=1),
    "transpose": lambda z: z.T,
    "matrix_transpose": lambda z: z.mT,
}


@pytest.mark.parametrize("operation", STAY_ZERO.values(), ids=STAY_ZERO.keys())
def test_what_is_linear_in_a_zero_stays_a_zero_of_the_right_shape_and_dtype(operation):
    zero, array = operation(Z), operation(materialise(Z))
    assert is_zero(zero)
    assert (zero.shape, zero.dtype, zero.ndim) == (array.shape, array.dtype, array.ndim)
    np.testing.assert_array_equal(materialise(zero), array)


@pytest.mark.parametrize(
    "operation",
    [lambda a, b: a + b, lambda a, b: b + a, lambda a, b: b - a, lambda a, b: a - b],
    ids=["z_plus_x", "x_plus_z", "x_minus_z", "z_minus_x"],
)
@pytest.mark.parametrize(
    "other",
    [X, 2.0, np.ones((2, 3), np.float32), jnp.ones((4, 2, 3)), jnp.float32(1.0)],
    ids=["array", "number", "numpy", "larger", "scalar"],
)
def test_a_sum_with_a_zero_is_the_other_operand(operation, other):
    z = ZeroTangent((1, 2, 3), jnp.float32) if jnp.ndim(other) == 3 else Z
    got, want = operation(z, other), operation(materialise(z), other)
    assert (got.shape, got.dtype) == (want.shape, want.dtype)
    np.testing.assert_array_equal(got, want)


def test_nothing_is_computed_for_a_sum_or_a_product():
    assert (X + Z) is X
    assert (Z + X) is X
    assert (X - Z) is X
    jaxpr = jax.make_jaxpr(lambda x: x + (Z * x).sum() * x - x @ Z.T @ x)(X)
    assert not jaxpr.eqns


def test_dtypes_follow_the_rules_of_promotion_that_are_in_force():
    weak = ZeroTangent((3,), jnp.float32, weak_type=True)
    assert (weak * jnp.ones(3, jnp.bfloat16)).dtype == jnp.bfloat16
    assert (weak * 2.0).weak_type
    assert materialise(weak).weak_type
    assert not materialise(ZeroTangent((3,), jnp.float32)).weak_type
    with pytest.raises(jax.dtypes.TypePromotionError, match="implicit dtype promotion"):
        ZeroTangent((3,), jnp.float32) * jnp.ones(3, jnp.bfloat16)
    with pytest.raises(TypeError, match="incompatible shapes for broadcasting"):
        Z * jnp.ones((2, 4))


def test_it_works_on_traced_values():
    got = jax.jit(lambda x: (x + Z, materialise(x * Z)))(X)
    np.testing.assert_array_equal(got[0], X)
    np.testing.assert_array_equal(got[1], jnp.zeros((2, 3)))


def test_materialise_replaces_the_zeros_of_a_tree():
    tree = {"z": Z, "x": X, "f": jnp.sin, "n": None, "t": "text"}
    got = materialise(tree)
    np.testing.assert_array_equal(got["z"], jnp.zeros((2, 3)))
    assert got["x"] is X
    assert got["f"] is jnp.sin
    assert (got["n"], got["t"]) == (None, "text")
    key = ZeroTangent((2,), jnp.complex64)
    assert materialise(key).dtype == jnp.complex64


NEEDS_AN_ARRAY = {
    "power": lambda z: z**2,
    "exponent": lambda z: 2.0**z,
    "divisor": lambda z: X / z,
    "zero_by_zero": lambda z: z / z,
    "greater": lambda z: z > 0,
    "less": lambda z: X < z,
    "bool": bool,
    "float": lambda z: float(z.sum()),
    "index": lambda z: operator.index(z.sum()),
    "iteration": list,
    "length": len,
    "abs": abs,
    "numpy": np.asarray,
    "asarray": jnp.asarray,
}


@pytest.mark.parametrize("operation", NEEDS_AN_ARRAY.values(), ids=NEEDS_AN_ARRAY.keys())
def test_what_needs_an_array_says_what_to_do(operation):
    with pytest.raises(
        TypeError, match=r"a ZeroTangent is not an array[\s\S]*materialise\(z\)[\s\S]*is_zero\(z\)"
    ):
        operation(Z)


def test_an_unknown_attribute_says_what_to_do():
    with pytest.raises(AttributeError, match=r"has no `at`: .* `materialise\(z\).at`"):
        _ = Z.at


@pytest.mark.parametrize(
    "operation",
    [jnp.sin, jax.nn.relu, lambda z: jax.lax.add(X, z), lambda z: jax.jit(jnp.sin)(z), np.sin],
    ids=["jnp", "nn", "lax", "jit", "numpy"],
)
def test_functions_of_arrays_refuse_it_by_name(operation):
    with pytest.raises(TypeError, match="ZeroTangent"):
        operation(Z)


def test_what_is_no_array_on_the_other_side_is_refused():
    with pytest.raises(TypeError, match="unsupported operand"):
        Z * object()
    with pytest.raises(TypeError, match="unsupported operand"):
        Z + None
    with pytest.raises(TypeError, match="unsupported operand"):
        Z - "text"


def test_it_is_an_immutable_value_and_a_leaf():
    again = ZeroTangent((2, 3), "float32")
    assert again == Z
    assert hash(again) == hash(Z)
    assert again != ZeroTangent((2, 3), jnp.bfloat16)
    assert ZeroTangent((), jnp.float32) != ZeroTangent((), jnp.float32, weak_type=True)
    assert jax.tree.leaves([Z]) == [Z]
    assert pickle.loads(pickle.dumps(Z)) == Z
    assert copy.deepcopy(Z) == Z
    with pytest.raises(AttributeError, match="cannot assign to field"):
        Z.shape = ()
    assert is_zero(Z)
    assert not is_zero(jnp.zeros(()))
    assert not is_zero(None)


def test_it_is_printed_with_shape_and_dtype():
    assert repr(Z) == "ZeroTangent((2, 3), float32)"
    assert repr(ZeroTangent((), jnp.float32, weak_type=True)).endswith("weak_type=True)")
    assert "ZeroTangent" in short(Z)
