"""`announce_transform` tells every way that a value takes through the transformations."""

from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest

import vernal
from vernal.debug import announce_transform

ONE = jnp.array(1.0)


def told(run: Any, *args: Any, **options: Any) -> list[str]:
    """What is announced of the argument of `x -> 2 * x` under `run`."""
    lines: list[str] = []

    def f(x: Any) -> Any:
        return 2 * announce_transform(x, announce=lines.append, **options)

    run(f)(*args)
    return lines


WAYS = {
    "eager": (lambda f: f, ["evaluated"]),
    "jit": (jax.jit, ["abstract evaluation", "lowering"]),
    "vmap": (lambda f: lambda x: jax.vmap(f)(x[None]), ["vmap > evaluated"]),
    "twice_vmap": (
        lambda f: lambda x: jax.vmap(jax.vmap(f))(x[None, None]),
        ["vmap > vmap > evaluated"],
    ),
    "jvp": (
        lambda f: lambda x: jax.jvp(f, (x,), (x,)),
        ["jvp (primal) > evaluated", "jvp (tangent) > evaluated"],
    ),
    "make_jaxpr": (jax.make_jaxpr, ["abstract evaluation"]),
}


@pytest.mark.parametrize("way", WAYS)
def test_it_tells_the_way_of_a_value(way):
    run, expected = WAYS[way]
    assert told(run, ONE) == expected


def test_it_tells_the_way_of_a_gradient():
    lines = told(lambda f: jax.jit(jax.vmap(jax.grad(f))), ONE[None])
    # The result is linear, so that the primal value is not needed, and only the cotangent is compiled.
    assert "jvp (primal) > vmap > abstract evaluation" in lines
    assert "jvp (tangent) > transpose > lowering" in lines
    assert not any(line.endswith("evaluated") for line in lines)


def test_it_tells_of_the_way_where_asked():
    lines = told(lambda f: jax.jit(jax.vmap(jax.grad(f))), ONE[None], intermediates=True)
    for event in ("jvp", "jvp (primal) > vmap", "jvp (tangent) > transpose"):
        assert event in lines
    assert "jvp" not in told(jax.grad, ONE)


def test_its_lines_have_a_name():
    assert told(lambda f: f, ONE, name="x") == ["x: evaluated"]


def test_it_prints_unless_told_otherwise(capsys):
    announce_transform(ONE, "x")
    assert capsys.readouterr().out == "x: evaluated\n"


def test_a_tree_is_one_value_and_what_is_no_array_is_left_alone(capsys):
    tree = {"a": ONE, "b": np.arange(2), "c": jax.nn.relu, "d": 3}
    out = announce_transform(tree)
    assert out["c"] is jax.nn.relu and out["d"] == 3
    np.testing.assert_array_equal(out["b"], [0, 1])
    assert capsys.readouterr().out == "evaluated\n"
    assert announce_transform("text") == "text" and announce_transform(2.0) == 2.0
    assert capsys.readouterr().out == ""


def test_values_and_derivatives_are_as_without_it():
    def with_it(x, n):
        x, n = announce_transform((x, n), announce=lambda line: None)
        return jnp.sin(x) ** n

    def without(x, n):
        return jnp.sin(x) ** n

    x = jnp.array([0.3, 0.4])
    for run in (
        lambda f: jax.vmap(f, in_axes=(0, None))(x, 2),
        lambda f: jax.vmap(jax.grad(f), in_axes=(0, None))(x, 2),
        lambda f: jax.jit(jax.hessian(f), static_argnums=1)(x[0], 2),
        lambda f: jax.lax.scan(lambda c, _: (f(c, 2), c), x[0], length=3),
        lambda f: jax.grad(jax.checkpoint(f))(x[0], 2),
        lambda f: vernal.filter_grad(f)(x[0], 2),
    ):
        jax.tree.map(np.testing.assert_array_equal, run(with_it), run(without))


def test_only_what_is_used_is_transposed():
    def f(x, y):
        x, y = announce_transform((x, y), announce=lambda line: None)
        return 2 * x

    gradients = jax.grad(f, argnums=(0, 1))(ONE, ONE)
    assert gradients == (2, 0)


def test_a_sharded_array_stays_sharded():
    mesh = jax.make_mesh((8,), ("data",))
    with jax.set_mesh(mesh):
        x = jax.device_put(jnp.arange(8.0), jax.P("data"))
        f = jax.jit(jax.grad(lambda x: announce_transform(x**2, announce=lambda line: None).sum()))
        assert f(x).sharding.spec == jax.P("data")
        assert "all-gather" not in f.lower(x).compile().as_text()
