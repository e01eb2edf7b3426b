"""A traced value that reaches a shape says which value, from which argument, and what to write instead."""

from typing import Any

import jax
import jax.numpy as jnp
import pytest

from vernal import Module, filter_jit, filter_vmap
from vernal.transforms import TracedShapeError


class M(Module):
    size: Any
    w: Any = None

    def build(self, n):
        return jnp.zeros(self.size + n)


def by_zeros(x, n):
    return jnp.zeros(n)


def by_minimum(x, n):
    return jnp.ones((jnp.minimum(n, 3), 2))


def by_reshape(x, n):
    return x.reshape(n, -1)


def by_range(x, n):
    return sum(range(n))


def by_normal(x, n):
    return jax.random.normal(jax.random.key(0), (n,))


def by_int(x, n):
    return int(n)


@pytest.mark.parametrize("fn", [by_zeros, by_minimum, by_reshape, by_range, by_normal, by_int])
def test_the_argument_and_the_remedy_are_named(fn):
    with pytest.raises(
        TracedShapeError, match=rf"`{fn.__name__}`: a traced value was used as a shape"
    ) as caught:
        filter_jit(fn)(jnp.ones(4), jnp.array(2))
    text = str(caught.value)
    assert "`n`" in text
    assert "`x`" not in text
    assert "Python's `min`, `max` and `int`" in text
    assert isinstance(caught.value, TypeError)
    assert caught.value.__cause__ is not None


def test_places_inside_arguments_are_named():
    @filter_jit
    def f(model, extra):
        return jnp.zeros(model.size * extra["k"][0])

    with pytest.raises(
        TracedShapeError, match=r"arguments [\s\S]*`model\.size`, `extra\['k'\]\[0\]`"
    ):
        f(M(jnp.array(2)), {"k": [jnp.array(3)]})


def test_methods_name_self():
    with pytest.raises(TracedShapeError, match=r"build[\s\S]*size"):
        filter_jit(M(jnp.array(2)).build)(jnp.array(1))


def test_the_line_of_the_user_is_shown():
    with pytest.raises(
        TracedShapeError,
        match=r"where: test_traced_shapes\.py:\d+ in by_zeros: `return jnp\.zeros\(n\)`",
    ):
        filter_jit(by_zeros)(jnp.ones(4), jnp.array(2))


def test_nested_functions_are_explained_once():
    @filter_jit
    def outer(x, count):
        return filter_jit(by_zeros)(x, count)

    with pytest.raises(TracedShapeError, match="a traced value was used as a shape") as caught:
        outer(jnp.ones(4), jnp.array(2))
    assert str(caught.value).count("was used as a shape") == 1


def test_static_sizes_work():
    assert filter_jit(by_zeros)(jnp.ones(4), 2).shape == (2,)


@pytest.mark.parametrize(
    ("fn", "error", "text"),
    [
        (lambda x: x + "text", TypeError, "text|str"),
        (lambda x: len(1), TypeError, "has no len"),
        (lambda x: jnp.zeros("a"), TypeError, "."),
        (lambda x: x[5].undefined, AttributeError, "undefined"),
        (lambda x: 1 if x[0] else 2, jax.errors.TracerBoolConversionError, "boolean"),
    ],
)
def test_other_errors_are_left_alone(fn, error, text):
    with pytest.raises(error, match=text) as caught:
        filter_jit(fn)(jnp.ones(3))
    assert not isinstance(caught.value, TracedShapeError)


def test_a_value_of_an_outer_function_is_named_through_closures():
    @filter_jit
    def outer(config, xs):
        return filter_vmap(lambda x: jnp.zeros(config["size"]) + x)(xs)

    with pytest.raises(
        TracedShapeError, match=r"`outer`: a traced[\s\S]*`config\['size'\]`"
    ) as caught:
        outer({"size": jnp.array(3)}, jnp.ones(2))
    assert caught.value.origins == ("config['size']",)
    assert "test_traced_shapes.py" in str(caught.value)


def test_the_inner_function_is_named_where_its_own_argument_is_meant():
    @filter_jit
    def outer(n):
        return filter_vmap(lambda size: jnp.zeros(size))(jnp.stack([n, n]))

    with pytest.raises(TracedShapeError, match=r"`<lambda>`: a traced[\s\S]*argument `size`"):
        outer(jnp.array(3))
