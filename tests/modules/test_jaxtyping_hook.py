"""A user's modules under jaxtyping's import hook, and under `@jaxtyped` alone."""

import importlib
import sys
import textwrap

import beartype
import jax
import jax.numpy as jnp
import pytest
from jaxtyping import Array, Float, install_import_hook, jaxtyped

import vernal

SOURCE = """
from typing import Any
import jax
import jax.numpy as jnp
from jaxtyping import Array, Float, Int
import vernal


class Scale(vernal.Module):
    factor: Float[Array, ""]
    offset: Float[Array, " n"]
    count: int = 1
    name: str = vernal.field(static=True, default="scale")

    def __call__(self, x: Float[Array, " n"]) -> Float[Array, " n"]:
        return self.factor * x + self.offset

    def wrong(self, x: Float[Array, " n"]) -> Float[Array, ""]:
        return x


class Converted(vernal.Module):
    x: Float[Array, " n"] = vernal.field(converter=jnp.asarray)
    text: str = vernal.field(converter=str, default=3)


class Sized(vernal.Module):
    w: Float[Array, " n"] = vernal.field(converter=lambda n: jnp.zeros(n))


class Custom(vernal.Module):
    w: Float[Array, "n n"]

    def __init__(self, n: int):
        self.w = jnp.eye(n)


class Optional(vernal.Module):
    b: Float[Array, ""] | None = None


class Child(Scale):
    extra: Float[Array, ""] = 2.0
"""


@pytest.fixture(scope="module")
def user(tmp_path_factory):
    folder = tmp_path_factory.mktemp("user")
    (folder / "a_users_package.py").write_text(textwrap.dedent(SOURCE))
    sys.path.insert(0, str(folder))
    try:
        with install_import_hook("a_users_package", "beartype.beartype"):
            yield importlib.import_module("a_users_package")
    finally:
        sys.path.remove(str(folder))
        del sys.modules["a_users_package"]


def test_numbers_for_array_annotations_become_arrays(user):
    m = user.Scale(2.0, jnp.ones(3))
    assert isinstance(m.factor, jax.Array)
    assert user.Scale(2, jnp.ones(3)).factor.dtype == jnp.float32
    assert (m(jnp.ones(3)) == 3).all()
    assert isinstance(user.Optional(1.0).b, jax.Array)
    assert user.Optional().b is None
    assert isinstance(user.Child(1.0, jnp.ones(1)).extra, jax.Array)


def test_converters_accept_what_they_accept(user):
    assert user.Converted([1.0, 2.0]).x.shape == (2,)
    assert user.Converted([1.0]).text == "3"
    assert user.Sized(3).w.shape == (3,)
    assert user.Custom(2).w.shape == (2, 2)


def test_wrong_types_and_shapes_are_refused(user):
    with pytest.raises(TypeError, match="factor"):
        user.Scale("text", jnp.ones(3))
    with pytest.raises(TypeError, match="offset"):
        user.Scale(1.0, jnp.ones((3, 3)))
    with pytest.raises(TypeError, match="count"):
        user.Scale(1.0, jnp.ones(3), "one")
    with pytest.raises(TypeError, match="return"):
        user.Scale(1.0, jnp.ones(3)).wrong(jnp.ones(3))
    with pytest.raises(TypeError, match="x"):
        user.Scale(1.0, jnp.ones(3))(jnp.ones((3, 1)))


def test_everything_works_under_transformations(user):
    m = user.Scale(2.0, jnp.ones(3))
    assert (jax.jit(lambda m, x: m(x))(m, jnp.ones(3)) == 3).all()
    assert jax.grad(lambda m: m(jnp.ones(3)).sum())(m).factor == 3
    assert jax.tree.map(lambda _: "anything", m).factor == "anything"
    assert jax.vmap(user.Scale)(jnp.ones(2), jnp.ones((2, 3))).factor.shape == (2,)


def test_jaxtyped_on_the_class_and_on_methods():
    @jaxtyped(typechecker=beartype.beartype)
    class M(vernal.Module):
        a: Float[Array, " n"]
        b: Float[Array, " n"]

    assert M(jnp.ones(2), jnp.ones(2)).a.shape == (2,)
    with pytest.raises(TypeError, match="[Tt]ype-check error"):
        M(jnp.ones(2), jnp.ones((2, 2)))

    class N(vernal.Module):
        w: Float[Array, " n"]

        @jaxtyped(typechecker=beartype.beartype)
        def f(self, x: Float[Array, " n"]) -> Float[Array, " n"]:
            return self.w + x

    assert N(jnp.ones(2)).f(jnp.ones(2)).shape == (2,)
    with pytest.raises(TypeError, match="[Tt]ype-check error"):
        N(jnp.ones(2)).f(jnp.ones((2, 2)))
