"""`filter_pmap`, on eight CPU devices."""

import inspect
import pickle
import warnings
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest

import vernal
from vernal import filter_pmap
from vernal.transforms import _pmap

X = jnp.arange(24.0).reshape(8, 3)


class Dense(vernal.Module):
    weight: jax.Array
    activation: Any

    def __call__(self, x: jax.Array) -> jax.Array:
        return self.activation(self.weight @ x)

    @filter_pmap(in_axes={"self": None})
    def mapped(self, x: jax.Array) -> jax.Array:
        """Mapped."""
        return self(x)


MODEL = Dense(jnp.array([[1.0, 0.5, -1.0], [0.0, 1.0, 2.0]]) / 10, jnp.tanh)
EXPECTED = jnp.tanh(X @ MODEL.weight.T)


def product(x, y=2.0):
    """A product."""
    return x * y


def spread():
    """An array that lies on the devices already, as donation needs it."""
    return jax.pmap(lambda x: x + 0)(X)


@pytest.mark.parametrize("in_axes", [(0, None), (1, 0), (None, 0), (-1, -1), (0, 1)])
def test_axes_agree_with_vmap(in_axes, getkey):
    x, y = jax.random.normal(getkey(), (3, 3)), jax.random.normal(getkey(), (3, 3))

    def product(x, y):
        return jnp.tensordot(jnp.atleast_2d(x), jnp.atleast_2d(y), [1, 1])

    for out_axes in (0, 1, -1):
        got = filter_pmap(product, in_axes=in_axes, out_axes=out_axes)(x, y)

        want = vernal.filter_vmap(product, in_axes=in_axes, out_axes=out_axes)(x, y)
        np.testing.assert_allclose(got, want, rtol=1e-6)


def test_arguments_and_results_are_arbitrary_objects():
    marker = object()
    fn = filter_pmap(
        lambda f, x, m: (f(x), {"m": m}, x.sum(), None),
        in_axes={"f": None},
        out_axes=(-1, None, 0, None),
    )
    a, b, c, d = fn(MODEL, X, marker)
    np.testing.assert_allclose(a, EXPECTED.T, rtol=1e-6, atol=1e-6)
    np.testing.assert_allclose(c, X.sum(1), rtol=1e-6)
    assert b["m"] is marker and d is None


def test_collectives_axis_size_and_results_of_one_device():
    total = filter_pmap(lambda x: jax.lax.psum(x, "i"), axis_name="i", out_axes=None)
    np.testing.assert_allclose(total(X), X.sum(0))
    index = filter_pmap(lambda: jax.lax.axis_index("i"), axis_name="i", axis_size=3)
    assert index().tolist() == [0, 1, 2]
    same = filter_pmap(lambda x: x, in_axes=None, axis_size=4)
    np.testing.assert_array_equal(same(X[0]), jnp.tile(X[0], (4, 1)))


def test_if_nothing_is_mapped_the_function_is_simply_called():
    assert filter_pmap(lambda x: x + 1)(1) == 2
    with pytest.raises(ValueError, match="nothing is mapped in this call"):
        filter_pmap(lambda: X)()


def test_it_compiles_once_for_each_set_of_static_values():
    traces = []

    def fn(x, tag):
        traces.append(tag)
        return x

    mapped = filter_pmap(fn)
    for tag in ("a", "a", "b", "a"):
        mapped(X, tag)
    filter_pmap(fn)(X, "a")
    assert traces == ["a", "b"]
    vernal.clear_caches()
    mapped(X, "a")
    assert traces == ["a", "b", "a"]


def test_inside_a_trace_nothing_is_kept():
    def outer(x):
        return filter_pmap(lambda y: x.sum() * y)(x)

    kept = _pmap._program.cache_info().currsize
    np.testing.assert_allclose(jax.jit(outer)(X), X.sum() * X, rtol=1e-6)
    assert _pmap._program.cache_info().currsize == kept


def test_donation():
    a, b = spread(), spread()
    filter_pmap(lambda x, y: x + y)(a, b)
    assert not a.is_deleted() and not b.is_deleted()
    filter_pmap(lambda x, y: x + y, donate="all-except-first")(a, b)
    assert not a.is_deleted() and b.is_deleted()
    b = spread()
    filter_pmap(lambda x, y: (x + y, x * y), donate="all")(a, b)
    assert a.is_deleted() and b.is_deleted()


def test_donation_warns_only_on_request():
    with pytest.warns(UserWarning, match="donated buffers were not usable"):
        filter_pmap(lambda x: x.sum(), donate="warn")(spread())
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        filter_pmap(lambda x: x.sum(), donate="all")(spread())
        filter_pmap(lambda x: x.sum(), donate="warn-except-first")(spread())


def test_it_lowers_and_compiles_ahead_of_time():
    lowered = filter_pmap(lambda f, x: (f(x), "s")).lower(jnp.sin, X)
    assert "sine" in lowered.as_text()
    out, text = lowered.compile()(jnp.sin, x=2 * X)
    np.testing.assert_allclose(out, jnp.sin(2 * X), rtol=1e-5, atol=1e-6)
    assert text == "s"


def test_devices_and_backend_reach_jax():
    devices = jax.devices()[3:5]
    out = filter_pmap(product, devices=devices)(X[:2])
    assert out.devices() == set(devices)
    assert filter_pmap(product, backend="cpu")(X).shape == X.shape


def test_methods_and_modules_are_functions_too():
    np.testing.assert_allclose(filter_pmap(MODEL)(X), EXPECTED, rtol=1e-6, atol=1e-6)
    np.testing.assert_allclose(filter_pmap(MODEL.__call__)(X), EXPECTED, rtol=1e-6, atol=1e-6)
    np.testing.assert_allclose(MODEL.mapped(X), EXPECTED, rtol=1e-6, atol=1e-6)
    assert Dense.mapped.__doc__ == "Mapped."


def test_all_decorator_forms_agree_and_keep_name_documentation_and_signature():
    for fn in (filter_pmap(product), filter_pmap()(product), filter_pmap(in_axes=0)(product)):
        np.testing.assert_array_equal(fn(X), 2 * X)
        np.testing.assert_array_equal(fn(x=X, y=X), X * X)
        assert fn.__name__ == "product" and fn.__doc__ == "A product."
        assert fn.__wrapped__ is product
        assert inspect.signature(fn) == inspect.signature(product)


def test_it_pickles():
    fn = filter_pmap(product, in_axes={"y": None}, out_axes=-1, donate="warn")
    np.testing.assert_array_equal(pickle.loads(pickle.dumps(fn))(X), 2 * X.T)


def test_a_traced_size_names_the_argument():
    with pytest.raises(vernal.transforms.TracedShapeError, match="argument `n`"):
        filter_pmap(lambda n: jnp.zeros(n))(jnp.arange(3))


WRONG = {
    "too few devices": (
        lambda: filter_pmap(lambda x: x)(jnp.ones((jax.device_count() + 1, 2))),
        ValueError,
        "(?s)the mapped axis is larger than the number of devices.*size 8 at most.*got: 9",
    ),
    "not callable": (lambda: filter_pmap(X), TypeError, "filter_pmap needs a function"),
    "option": (
        lambda: filter_pmap(product, static_broadcasted_argnums=0),
        TypeError,
        "(?s)no option `static_broadcasted_argnums`.*static already",
    ),
    "donate": (
        lambda: filter_pmap(product, donate="arrays"),
        ValueError,
        "(?s)unknown value of `donate`.*'all-except-first'",
    ),
    "axis": (lambda: filter_pmap(product, in_axes="x"), TypeError, "not an axis"),
    "sizes": (
        lambda: filter_pmap(product)(X, X[:2]),
        ValueError,
        r"(?s)different sizes.*x: size 8.*y: size 2",
    ),
    "no axis": (lambda: filter_pmap(product, in_axes=2)(X), ValueError, "x has no axis 2 to map"),
}


@pytest.mark.parametrize("case", WRONG)
def test_what_is_wrong_is_told_by_path(case):
    call, kind, text = WRONG[case]
    with pytest.raises(kind, match=text):
        call()
