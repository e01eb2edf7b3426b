"""What kind of thing a leaf is."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest

import vernal
from vernal.trees import has_shape


class Convertible:
    def __init__(self, value):
        self.value = value

    def __jax_array__(self):
        return jnp.asarray(self.value)


KEY = jax.random.key(0)
FLOAT0 = np.zeros(2, jax.dtypes.float0)

# value: is_array, is_array_like, is_inexact_array, is_inexact_array_like
TABLE = {
    "jax float": (jnp.ones(2), 1, 1, 1, 1),
    "jax bfloat16": (jnp.ones(2, jnp.bfloat16), 1, 1, 1, 1),
    "jax float8": (jnp.ones(2, jnp.float8_e4m3fn), 1, 1, 1, 1),
    "jax complex": (jnp.ones(2, jnp.complex64), 1, 1, 1, 1),
    "jax int": (jnp.arange(2), 1, 1, 0, 0),
    "jax bool": (jnp.ones(2, bool), 1, 1, 0, 0),
    "key": (KEY, 1, 1, 0, 0),
    "keys": (jax.random.split(KEY), 1, 1, 0, 0),
    "raw key": (jax.random.PRNGKey(0), 1, 1, 0, 0),
    "numpy float": (np.ones(2), 1, 1, 1, 1),
    "numpy half": (np.ones(2, np.float16), 1, 1, 1, 1),
    "numpy bfloat16": (np.ones(2, jnp.bfloat16), 1, 1, 1, 1),
    "numpy complex": (np.ones(2, complex), 1, 1, 1, 1),
    "numpy int": (np.arange(2), 1, 1, 0, 0),
    "numpy bool": (np.ones(2, bool), 1, 1, 0, 0),
    "numpy empty": (np.ones((0, 2)), 1, 1, 1, 1),
    "numpy scalar": (np.float32(1), 1, 1, 1, 1),
    "numpy float64 scalar, also a float": (np.float64(1), 1, 1, 1, 1),
    "numpy complex scalar": (np.complex64(1), 1, 1, 1, 1),
    "numpy int scalar": (np.int8(1), 1, 1, 0, 0),
    "numpy bool scalar": (np.bool_(True), 1, 1, 0, 0),
    "numpy text": (np.array(["text"]), 0, 0, 0, 0),
    "numpy bytes": (np.array([b"text"]), 0, 0, 0, 0),
    "numpy objects": (np.array([1.0, None], dtype=object), 0, 0, 0, 0),
    "numpy dates": (np.array(["2020-01-01"], dtype="datetime64[D]"), 0, 0, 0, 0),
    "numpy date": (np.datetime64("2020-01-01"), 0, 0, 0, 0),
    "numpy duration": (np.timedelta64(1, "s"), 0, 0, 0, 0),
    "numpy structure": (np.zeros(2, dtype=[("a", float)]), 0, 0, 0, 0),
    "numpy str scalar": (np.str_("text"), 0, 0, 0, 0),
    "float0": (FLOAT0, 0, 0, 0, 0),
    "float": (1.0, 0, 1, 0, 1),
    "complex": (1j, 0, 1, 0, 1),
    "int": (1, 0, 1, 0, 0),
    "bool": (True, 0, 1, 0, 0),
    "convertible float": (Convertible(1.0), 0, 1, 0, 1),
    "convertible int": (Convertible(1), 0, 1, 0, 0),
    "shape": (jax.ShapeDtypeStruct((2,), jnp.float32), 0, 0, 0, 0),
    "class with __jax_array__": (Convertible, 0, 0, 0, 0),
    "dtype": (jnp.float32, 0, 0, 0, 0),
    "text": ("text", 0, 0, 0, 0),
    "none": (None, 0, 0, 0, 0),
    "list": ([1.0], 0, 0, 0, 0),
    "function": (jnp.sin, 0, 0, 0, 0),
}


@pytest.mark.parametrize(
    ("value", "array", "like", "inexact", "inexact_like"), TABLE.values(), ids=TABLE
)
def test_the_table(value, array, like, inexact, inexact_like):
    assert vernal.is_array(value) is bool(array)
    assert vernal.is_array_like(value) is bool(like)
    assert vernal.is_inexact_array(value) is bool(inexact)
    assert vernal.is_inexact_array_like(value) is bool(inexact_like)
    assert has_shape(value) is (bool(array) or value is TABLE["shape"][0])


@pytest.mark.parametrize(
    "value", [v[0] for v in TABLE.values() if v[1]], ids=[k for k, v in TABLE.items() if v[1]]
)
def test_every_array_can_be_traced(value):
    jax.eval_shape(lambda x: x, value)


def test_tracers_are_arrays():
    def f(x, i, k):
        assert vernal.is_array(x) and vernal.is_inexact_array(x) and vernal.is_inexact_array_like(x)
        assert vernal.is_array(i) and not vernal.is_inexact_array(i)
        assert vernal.is_array(k) and not vernal.is_inexact_array(k)
        return x

    jax.jit(f)(1.0, 1, KEY)
    jax.vmap(f)(jnp.ones(2), jnp.arange(2), jax.random.split(KEY))
    jax.grad(f)(1.0, jnp.arange(1), KEY)
