"""`tree_equal` and `tree_allclose`: agreement with the peer, and where we mean to differ."""

import collections

import equinox as eqx
import hypothesis.extra.numpy as hnp
import hypothesis.strategies as st
import jax
import jax.numpy as jnp
import numpy as np
import pytest
from hypothesis import given

from vernal.show import short
from vernal.trees import tree_allclose, tree_equal


def _outcome(answer):
    """What was said, and whether in Python or on the device."""
    return isinstance(answer, jax.Array), bool(answer)


class _Odd:
    """A leaf whose `==` gives something else than a bool."""

    def __init__(self, answer):
        self.answer = answer

    def __eq__(self, other):
        return self.answer

    __hash__ = None


def _pairs():
    f32 = np.float32
    ones, sds = np.ones(2, f32), jax.ShapeDtypeStruct
    key = jax.random.key
    return {
        "numpy": (ones, ones.copy()),
        "numpy and jax": (ones, jnp.ones(2)),
        "jax": (jnp.ones(2), jnp.ones(2)),
        "other elements": (jnp.ones(2), jnp.zeros(2)),
        "other numpy elements": (ones, 0 * ones),
        "jax array and number": (jnp.array(1), 1),
        "numpy array and number": (np.array(1), 1),
        "numpy scalar and number": (np.float64(1), 1.0),
        "numpy scalars": (f32(1), f32(1)),
        "numpy scalar and array": (f32(1), np.array(1, f32)),
        "numpy scalar and jax": (f32(1), jnp.array(1.0)),
        "int and float": (1, 1.0),
        "bool and int": (True, 1),
        "nan": (float("nan"), float("nan")),
        "numpy nan": (np.array(np.nan), np.array(np.nan)),
        "jax nan": (jnp.array(jnp.nan), jnp.array(jnp.nan)),
        "nearly equal numbers": (1.0, 1.0 + 1e-9),
        "nearly equal": (jnp.array(1.0), jnp.array(1.001)),
        "nearly equal numpy": (f32(1.0), f32(1.001)),
        "nearly equal ints": (jnp.array(300), jnp.array(301)),
        "nearly equal numpy ints": (np.array(300), np.array(301)),
        "bfloat16": (jnp.ones(2, jnp.bfloat16), jnp.full(2, 1.01, jnp.bfloat16)),
        "complex": (jnp.array(1j), jnp.array(1.0001j)),
        "infinite": (jnp.array(jnp.inf), jnp.array(jnp.inf)),
        "infinite and not": (jnp.array(jnp.inf), jnp.array(1.0)),
        "zeros": (jnp.array(0.0), jnp.array(-0.0)),
        "dtypes": (jnp.ones(2), jnp.ones(2, int)),
        "numpy dtypes": (np.int32(1), np.int64(1)),
        "double and single": (np.ones(2), jnp.ones(2)),
        "shapes": (jnp.ones(2), jnp.ones(3)),
        "shapes that broadcast": (jnp.ones((1, 2)), jnp.ones(2)),
        "weak type": (jnp.array(1.0), jnp.asarray(1.0)),
        "empty arrays": (jnp.zeros((0,)), jnp.zeros((0,))),
        "equal keys": (key(0), key(0)),
        "keys": (key(0), key(1)),
        "kinds of keys": (key(0), key(0, impl="rbg")),
        "equal structs": (sds((2,), f32), sds((2,), f32)),
        "struct shapes": (sds((2,), f32), sds((3,), f32)),
        "struct dtypes": (sds((2,), f32), sds((2,), np.int32)),
        "struct and array": (sds((2,), f32), jnp.ones(2)),
        "float0": (np.zeros(2, jax.dtypes.float0), np.zeros(2, jax.dtypes.float0)),
        "objects": (np.array(["a"], object), np.array(["a"], object)),
        "texts": (np.array(["a"]), np.array(["b"])),
        "functions": (jnp.sin, jnp.sin),
        "other functions": (jnp.sin, jnp.cos),
        "list and tuple": ([1], (1,)),
        "none": (None, None),
        "none and number": (None, 1),
        "empty": ([], []),
        "order of keys": ({"a": 1, "b": 2}, {"b": 2, "a": 1}),
        "kinds of dict": ({"a": 1}, collections.OrderedDict(a=1)),
        "first leaf decides nothing": ([jnp.ones(2), 1], [jnp.ones(2), 2]),
        "mixed": ([jnp.ones(2), ones], [jnp.ones(2), ones.copy()]),
        "== gives a jax bool": (_Odd(jnp.array(True)), _Odd(jnp.array(True))),
        "== gives None": (_Odd(None), _Odd(None)),
        "modules": (eqx.nn.Identity(), eqx.nn.Identity()),
    }


@pytest.mark.parametrize(
    "options", [{}, {"typematch": True}, {"rtol": 0.1}, {"atol": 0.01}], ids=short
)
@pytest.mark.parametrize("name", _pairs())
def test_pairs_of_leaves_compare_as_in_the_peer(name, options):
    x, y = _pairs()[name]
    assert _outcome(tree_equal(x, y, **options)) == _outcome(eqx.tree_equal(x, y, **options))


def test_three_trees_are_equal_only_if_all_are():
    one, two = {"a": jnp.ones(2)}, {"a": jnp.zeros(2)}
    assert tree_equal(one, one, dict(one))
    assert not tree_equal(one, one, two)
    assert tree_equal(one) is True


def test_without_jax_arrays_the_answer_is_a_python_bool_even_under_jit():
    seen = []

    @jax.jit
    def f(x):
        seen.append(tree_equal([np.ones(2), x.shape], [np.ones(2), (3,)]))
        seen.append(tree_equal(x, jnp.ones(4)))
        return x

    f(jnp.ones(3))
    assert seen == [True, False] and all(type(answer) is bool for answer in seen)


def test_under_jit_the_answer_is_traced():
    equal = jax.jit(tree_equal)
    assert equal({"a": jnp.ones(2)}, {"a": jnp.ones(2)})
    assert not equal({"a": jnp.ones(2)}, {"a": jnp.zeros(2)})


def test_a_tracer_has_the_type_of_the_array_it_stands_for():
    x = jnp.ones(2)
    assert jax.jit(lambda y: tree_equal(y, x, typematch=True))(x)


def test_one_nan_does_not_equal_itself():
    x = jnp.array(jnp.nan)
    assert not tree_equal(x, x)
    assert not tree_equal([np.nan], [np.nan])


_FLOATS = hnp.arrays(
    np.float32,
    hnp.array_shapes(min_dims=0, max_dims=2, max_side=3),
    elements=st.floats(-3, 3, width=16),
)


@given(x=_FLOATS, y=_FLOATS, rtol=st.floats(0, 1), atol=st.floats(0, 1))
def test_tolerances_mean_what_numpy_means(x, y, rtol, atol):
    expected = x.shape == y.shape and np.allclose(x, y, rtol=rtol, atol=atol)
    assert tree_equal([x], [y], rtol=rtol, atol=atol) is bool(expected)


@given(
    tree=st.recursive(st.integers() | st.text() | _FLOATS, lambda x: st.lists(x) | st.tuples(x, x))
)
def test_a_tree_equals_its_copy(tree):
    copy = jax.tree.map(lambda x: x.copy() if isinstance(x, np.ndarray) else x, tree)
    assert tree_equal(tree, copy, typematch=True) is True


def test_tolerances_hold_for_bfloat16_in_numpy_too():
    # The peer compares these exactly, because NumPy does not know bfloat16 for a floating-point type.
    x, y = np.ones(2, jnp.bfloat16), np.full(2, 1.01, jnp.bfloat16)
    assert tree_equal(x, y, rtol=0.1) is True
    assert tree_equal(x, y) is False


def test_keys_are_compared_exactly_whatever_the_tolerance(getkey):
    a, b = getkey(), getkey()
    assert not tree_equal(a, b, rtol=10, atol=10)
    assert tree_equal(a, a, rtol=10, atol=10)


def test_allclose_forgives_rounding_and_nothing_else(getkey):
    x = {"w": jax.random.normal(getkey(), (3, 2)), "n": 3, "f": jnp.tanh, "k": getkey()}
    near = x | {"w": x["w"] * (1 + 1e-6)}
    assert tree_allclose(x, near) and not tree_equal(x, near)
    assert not tree_allclose(x, near, rtol=1e-8, atol=0)
    assert not tree_allclose(x, x | {"w": x["w"] + 0.1})
    assert tree_allclose(x, x | {"w": x["w"] + 0.1}, atol=1)
    assert tree_allclose(x, x | {"n": 3.0}) is False
    assert tree_allclose(x, x | {"f": jnp.sin}) is False
    assert tree_allclose(np.ones(2, np.float32), jnp.ones(2)) is False


def test_allclose_of_python_and_numpy_values_is_a_python_bool():
    assert tree_allclose([np.ones(2), "text"], [np.ones(2) + 1e-7, "text"]) is True


def test_nothing_to_compare_is_an_error():
    with pytest.raises(TypeError, match=r"nothing to compare\n  where: tree_equal"):
        tree_equal()
    with pytest.raises(TypeError, match=r"nothing to compare\n  where: tree_allclose"):
        tree_allclose()
