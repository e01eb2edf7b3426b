"""`backward_nan` prints and checks cotangents, and changes nothing else."""

from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest

import vernal
from vernal.debug import backward_nan
from vernal.runtime import RuntimeCheckError


def root(x: Any, **options: Any) -> Any:
    """Its derivative at zero is NaN: 0 * inf."""
    return jnp.sqrt(backward_nan(x, "x", **options)) * 0.0


RUNS = {
    "eager": lambda f: f,
    "jit": jax.jit,
    "filter_jit": vernal.filter_jit,
    "checkpoint": lambda f: jax.jit(f),
}


@pytest.mark.parametrize("run", RUNS)
def test_a_nan_is_printed_and_ends_the_program(run, capsys):
    with pytest.raises(Exception, match="the cotangent of `x` is NaN on the backward pass"):
        RUNS[run](jax.grad(root))(jnp.array(0.0)).block_until_ready()
    out = capsys.readouterr().out
    assert out == "x, primal: array(0., dtype=float32)\nx, cotangent: array(nan, dtype=float32)\n"


def test_it_is_our_error_where_possible(capsys):
    for f in (jax.grad(root), vernal.filter_jit(jax.grad(root))):
        with pytest.raises(RuntimeCheckError, match="NaN on the backward pass"):
            f(jnp.array(0.0))


def test_a_python_float_is_watched_as_well(capsys):
    with pytest.raises(RuntimeCheckError, match="NaN on the backward pass"):
        jax.grad(root)(0.0)
    assert jax.grad(lambda x: 3 * backward_nan(x))(1.0) == 3
    assert "backward_nan, cotangent: array(3." in capsys.readouterr().out


def test_it_need_not_end_the_program(capsys):
    assert jnp.isnan(jax.jit(jax.grad(lambda x: root(x, terminate=False)))(0.0))
    assert "x, cotangent: array(nan" in capsys.readouterr().out


def test_every_element_of_a_batch_is_printed(capsys):
    jax.vmap(jax.grad(root))(jnp.array([1.0, 4.0]))
    out = capsys.readouterr().out.splitlines()
    assert sorted(out) == [
        "x, cotangent: array(0., dtype=float32)",
        "x, cotangent: array(0., dtype=float32)",
        "x, primal: array(1., dtype=float32)",
        "x, primal: array(4., dtype=float32)",
    ]
    with pytest.raises(RuntimeCheckError, match=r"NaN on the backward pass\n.*index \(1,\)"):
        jax.vmap(jax.grad(root))(jnp.array([1.0, 0.0]))


def test_the_part_of_a_tree_is_named(capsys):
    def f(x, y):
        tree = backward_nan({"a": x, "b": [y, "text"], "c": y + 1, "n": jnp.arange(2)}, "tree")
        return tree["a"] * 2 + jnp.sqrt(tree["b"][0]) * 0

    with pytest.raises(RuntimeCheckError, match=r"the cotangent of `tree\['b'\]\[0\]` is NaN"):
        jax.grad(f, argnums=1)(jnp.array(1.0), jnp.array(0.0))
    assert "'c': <zero>" in capsys.readouterr().out.replace("\n", " ")


def test_values_and_other_derivatives_are_as_without_it(capsys):
    def with_it(x):
        return jnp.sin(backward_nan(x))

    x = jnp.array(0.5)
    assert with_it(x) == jnp.sin(x)
    assert jax.jvp(with_it, (x,), (x,)) == jax.jvp(jnp.sin, (x,), (x,))
    assert capsys.readouterr().out == ""
    assert jax.grad(with_it)(x) == jnp.cos(x)
    assert jax.hessian(with_it)(x) == jax.hessian(jnp.sin)(x)
    assert jax.grad(jax.grad(with_it))(x) == -jnp.sin(x)
    assert jax.jacfwd(jax.grad(with_it))(x) == -jnp.sin(x)


def test_it_works_in_loops_and_checkpoints(capsys):
    def with_it(x):
        body = jax.checkpoint(lambda c, _: (jnp.sin(backward_nan(c, "c")), None))
        return jax.lax.scan(body, x, length=3)[0]

    def without(x):
        return jnp.sin(jnp.sin(jnp.sin(x)))

    np.testing.assert_allclose(jax.jit(jax.grad(with_it))(0.5), jax.grad(without)(0.5), rtol=1e-6)
    assert capsys.readouterr().out.count("c, cotangent") == 3


def test_what_has_no_derivative_is_left_alone(capsys):
    tree = (3, "text", jax.nn.relu)
    assert backward_nan(tree) is tree
    assert backward_nan(2.0) == 2.0
    n = jnp.arange(2)
    assert backward_nan(n) is n


def test_a_sharded_gradient_stays_sharded(capsys):
    mesh = jax.make_mesh((8,), ("data",))
    with jax.set_mesh(mesh):
        x = jax.device_put(jnp.arange(1.0, 9.0), jax.P("data"))
        out = jax.jit(jax.grad(lambda x: (backward_nan(x) ** 2).sum()))(x)
        assert out.sharding.spec == jax.P("data")
    np.testing.assert_array_equal(out, 2 * np.arange(1.0, 9.0))
    assert capsys.readouterr().out.count("cotangent") == 1
