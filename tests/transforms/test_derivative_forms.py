"""Every transformation of this table, in every form in which a function may come."""

import copy
import inspect
import pickle
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest

import vernal


def cube(x: jax.Array, scale: float = 2.0) -> jax.Array:
    """A scaled cube."""
    return scale * x**3


# Each with what it makes of `cube` at 2 with scale 5, and of the same function as a method of a module.
TABLE = {
    "filter_grad": (vernal.filter_grad, 60.0),
    "filter_value_and_grad": (vernal.filter_value_and_grad, (40.0, 60.0)),
    "filter_jacfwd": (vernal.filter_jacfwd, 60.0),
    "filter_jacrev": (vernal.filter_jacrev, 60.0),
    "filter_hessian": (vernal.filter_hessian, 60.0),
    "filter_checkpoint": (vernal.filter_checkpoint, 40.0),
}
OPTIONS: dict[str, dict[str, Any]] = {
    name: {"prevent_cse": False} if name == "filter_checkpoint" else {"wrt": "x"} for name in TABLE
}
X = jnp.array(2.0)

by_table = pytest.mark.parametrize("name", TABLE)


class Cube(vernal.Module):
    scale: jax.Array

    def __call__(self, x: jax.Array) -> jax.Array:
        return self.scale * x**3

    def method(self, x: jax.Array) -> jax.Array:
        """A method."""
        return self(x)

    grad = vernal.filter_grad(wrt="x")(lambda self, x: self(x))
    value_and_grad = vernal.filter_value_and_grad(wrt="x")(lambda self, x: self(x))
    jacfwd = vernal.filter_jacfwd(wrt="x")(lambda self, x: self(x))
    jacrev = vernal.filter_jacrev(wrt=1)(lambda self, x: self(x))
    hessian = vernal.filter_hessian(wrt="x")(lambda self, x: self(x))
    checkpoint = vernal.filter_checkpoint(lambda self, x: self(x))


@by_table
def test_a_function_is_transformed_directly_and_by_all_decorator_forms(name):
    transform, expected = TABLE[name]
    direct = transform(cube)
    with_brackets = transform()(cube)
    with_options = transform(**OPTIONS[name])(cube)
    for fn in (direct, with_brackets, with_options, transform(cube, **OPTIONS[name])):
        assert fn(X, 5.0) == expected
        assert fn(X, scale=5.0) == expected
        assert fn(scale=5.0, x=X) == expected


@by_table
def test_name_documentation_and_signature_are_kept(name):
    fn = TABLE[name][0](cube)
    assert fn.__name__ == "cube"
    assert fn.__qualname__ == "cube"
    assert fn.__doc__ == "A scaled cube."
    assert fn.__module__ == cube.__module__
    assert fn.__wrapped__ is cube
    assert inspect.signature(fn) == inspect.signature(cube)


@by_table
def test_a_module_and_its_methods_are_functions_too(name):
    transform, expected = TABLE[name]
    model = Cube(jnp.array(5.0))
    assert transform(model)(X) == expected
    assert transform(model.method)(X) == expected
    assert transform(model.method)(x=X) == expected
    assert transform(model.method).__name__ == "method"
    assert transform(model.method).__doc__ == "A method."


@by_table
def test_a_decorated_method_binds_self(name):
    _, expected = TABLE[name]
    model = Cube(jnp.array(5.0))
    method = getattr(model, name.removeprefix("filter_"))
    assert method(X) == expected
    assert method(x=X) == expected
    assert jax.jit(lambda m, x: m(x))(method, X) == expected


@by_table
def test_by_default_a_decorated_method_is_differentiated_with_respect_to_self(name):
    transform, _ = TABLE[name]

    class Model(vernal.Module):
        weight: jax.Array

        @transform
        def method(self, x: jax.Array) -> jax.Array:
            """A method."""
            return self.weight**2 * x

    assert Model.method.__name__ == "method"
    assert Model.method.__doc__ == "A method."
    out = Model(jnp.array(3.0)).method(X)
    expected: dict[str, Any] = {
        "filter_grad": Model(jnp.array(12.0)),
        "filter_value_and_grad": (18.0, Model(jnp.array(12.0))),
        "filter_jacfwd": Model(jnp.array(12.0)),
        "filter_jacrev": Model(jnp.array(12.0)),
        "filter_checkpoint": 18.0,
    }
    if name == "filter_hessian":
        assert out.weight.weight == 4.0
    else:
        assert out == expected[name]


@by_table
def test_it_works_on_methods_of_plain_classes(name):
    transform, expected = TABLE[name]

    class Plain:
        scale = 5.0

        @transform(**OPTIONS[name])
        def method(self, x: jax.Array) -> jax.Array:
            return self.scale * x**3

    assert Plain().method(X) == expected


@by_table
def test_it_pickles_and_copies_where_its_function_does(name):
    transform, expected = TABLE[name]
    model = Cube(jnp.array(5.0))
    for fn, args in ((transform(cube, **OPTIONS[name]), (X, 5.0)), (transform(model), (X,))):
        for again in (pickle.loads(pickle.dumps(fn)), copy.deepcopy(fn), copy.copy(fn)):
            assert again(*args) == expected
            assert getattr(again, "__name__", None) == getattr(fn, "__name__", None)
    fn = transform(cube)
    assert pickle.loads(pickle.dumps(fn)) == fn


@vernal.filter_grad(wrt="x")
def decorated(x: jax.Array, scale: float) -> jax.Array:
    return scale * x**3


def test_a_decorated_function_pickles_by_its_name():
    assert pickle.loads(pickle.dumps(decorated)) is decorated
    assert copy.deepcopy(decorated) is decorated
    assert decorated(X, 5.0) == 60.0


@by_table
def test_equal_transformations_of_one_function_are_one_program(name):
    transform, expected = TABLE[name]
    traces = []

    @vernal.filter_jit
    def apply(fn: Any, x: jax.Array) -> Any:
        traces.append(1)
        return fn(x, 5.0)

    assert apply(transform(cube), X) == expected
    assert apply(transform(cube), X) == expected
    assert len(traces) == 1


@by_table
def test_it_is_a_pytree_with_the_arrays_of_its_function(name):
    transform, _ = TABLE[name]
    assert jax.tree.leaves(transform(cube)) == []
    (leaf,) = jax.tree.leaves(transform(Cube(jnp.array(5.0))))
    np.testing.assert_array_equal(leaf, 5.0)


@by_table
def test_what_cannot_be_called_is_refused(name):
    transform, _ = TABLE[name]
    with pytest.raises(TypeError, match=f"{name} needs a function"):
        transform(3.0)
    with pytest.raises(TypeError, match=f"{name} needs a function"):
        transform(**OPTIONS[name])("text")
