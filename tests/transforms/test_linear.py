import inspect
import re
from collections.abc import Callable
from typing import Any

import equinox as eqx
import jax
import jax.numpy as jnp
import jax.tree_util as jtu
import numpy as np
import pytest

import vernal
from vernal import NoGradient
from vernal.compat import equinox as compat


class Layer(vernal.Module):
    weight: jax.Array
    activation: Callable[..., Any]
    count: jax.Array

    def __call__(self, x: jax.Array) -> jax.Array:
        return self.activation(self.weight @ x)


def layer(getkey) -> Layer:
    return Layer(jax.random.normal(getkey(), (2, 3)), jnp.tanh, jnp.array(1))


def same(a: Any, b: Any) -> None:
    assert jtu.tree_structure(a) == jtu.tree_structure(b)
    for x, y in zip(jtu.tree_leaves(a), jtu.tree_leaves(b), strict=True):
        if isinstance(x, (jax.Array, np.ndarray)):
            assert x.dtype == y.dtype
            np.testing.assert_allclose(x, y, rtol=1e-5, atol=1e-6)
        else:
            assert x == y


def model_tangent(model: Layer, direction: jax.Array) -> Layer:
    empty = jtu.tree_map(lambda _: None, model)
    return vernal.tree_at(lambda m: m.weight, empty, direction, is_leaf=lambda x: x is None)


# filter_jvp


def test_the_derivative_along_a_direction_agrees_with_finite_differences(getkey):
    model, x = layer(getkey), jax.random.normal(getkey(), (3,))
    v = jax.random.normal(getkey(), (2, 3))

    def f(model: Layer, x: jax.Array) -> jax.Array:
        return model(x)

    out, tangent = vernal.filter_jvp(f, (model, x), (model_tangent(model, v), None))
    np.testing.assert_allclose(out, model(x), rtol=1e-6)
    eps = 1e-2

    def at(step: float) -> jax.Array:
        return vernal.tree_at(lambda m: m.weight, model, model.weight + step * v)(x)

    np.testing.assert_allclose(tangent, (at(eps) - at(-eps)) / (2 * eps), rtol=2e-2, atol=2e-3)


@pytest.mark.parametrize("t_x", [None, 2.0])
@pytest.mark.parametrize("t_y", [None, 3.0])
def test_none_tangents_in_and_out_agree_with_equinox(t_x, t_y):
    def f(x: jax.Array, y: dict[str, Any], *, z: jax.Array) -> Any:
        return {
            "x": jnp.sin(x),
            "y": y["a"] ** 2,
            "xy": x * y["a"],
            "z": z * 2.0,
            "constant": jnp.ones(2),
            "number": 3.0,
            "text": y["text"],
            "integer": jnp.arange(2),
            "none": None,
        }

    def tangent(t: float | None) -> Any:
        return None if t is None else jnp.array(t)

    primals = (jnp.array(0.5), {"a": jnp.array(1.5), "text": "text", "i": jnp.array(1)})
    tangents = (tangent(t_x), {"a": tangent(t_y), "text": None, "i": None})
    z = jnp.array(2.0)
    ours = vernal.filter_jvp(f, primals, tangents, z=z)
    theirs = eqx.filter_jvp(f, primals, tangents, z=z)
    same(ours, theirs)
    assert (ours[1]["x"] is None) == (t_x is None)
    assert (ours[1]["y"] is None) == (t_y is None)
    assert (ours[1]["xy"] is None) == (t_x is None and t_y is None)
    assert ours[1]["z"] is None
    assert ours[1]["constant"] is None


def test_an_output_that_depends_on_an_outer_differentiation_only_has_no_tangent():
    def outer(y: jax.Array) -> Any:
        (_, out), (t_x, t_y) = vernal.filter_jvp(
            lambda x: (x**2 * y, y**2), (jnp.array(3.0),), (jnp.array(1.0),)
        )
        assert t_y is None
        return t_x, out

    (t_x, out), (tt_x, t_out) = vernal.filter_jvp(outer, (jnp.array(2.0),), (jnp.array(1.0),))
    assert (t_x, out, tt_x, t_out) == (12.0, 4.0, 6.0, 4.0)
    t_x, out = jax.jacrev(outer)(jnp.array(2.0))
    assert (t_x, out) == (6.0, 4.0)
    _, out = jax.vmap(outer)(jnp.array([2.0, 3.0]))
    np.testing.assert_array_equal(out, [4.0, 9.0])


def test_zero_tangents_are_found_through_jit_and_scan():
    @jax.jit
    def f(x: jax.Array, y: jax.Array) -> Any:
        _, ys = jax.lax.scan(lambda c, _: (c, c * 2.0), y, None, length=3)
        return x * 2.0, ys

    out, (t_x, t_y) = vernal.filter_jvp(f, (jnp.array(1.0), jnp.array(2.0)), (jnp.array(1.0), None))
    assert t_x == 2.0
    assert t_y is None
    np.testing.assert_array_equal(out[1], [4.0, 4.0, 4.0])


def test_jvp_works_under_jit_vmap_and_grad():
    def along(x: jax.Array) -> jax.Array:
        return vernal.filter_jvp(jnp.sin, (x,), (jnp.ones_like(x),))[1]

    x = jnp.array([0.1, 0.9])
    np.testing.assert_allclose(jax.jit(along)(x), jnp.cos(x), rtol=1e-6)
    np.testing.assert_allclose(jax.vmap(along)(x), jnp.cos(x), rtol=1e-6)
    np.testing.assert_allclose(jax.vmap(jax.grad(along))(x), -jnp.sin(x), rtol=1e-6)
    np.testing.assert_allclose(
        jax.vmap(lambda x: vernal.filter_jvp(along, (x,), (jnp.ones_like(x),))[1])(x),
        -jnp.sin(x),
        rtol=1e-6,
    )


def test_a_module_and_its_methods_can_be_the_function(getkey):
    model, x, v = layer(getkey), jnp.ones(3), jnp.array([1.0, 0.0, -1.0])
    expected = jax.jvp(model, (x,), (v,))
    same(vernal.filter_jvp(model, (x,), (v,)), expected)
    same(vernal.filter_jvp(model, [x], [v]), expected)


def test_python_floats_may_have_tangents_as_in_jax():
    assert vernal.filter_jvp(lambda x: x**2, (3.0,), (1.0,)) == (9.0, 6.0)
    assert vernal.filter_jvp(lambda x: x**2, (jnp.array(3.0),), (1.0,)) == (9.0, 6.0)


def test_complex_directions_agree_with_jax():
    z, t = jnp.array(1.0 + 2.0j), jnp.array(0.5j)
    same(vernal.filter_jvp(jnp.exp, (z,), (t,)), jax.jvp(jnp.exp, (z,), (t,)))


def test_the_value_is_exact_when_nothing_changes():
    out, tangent = vernal.filter_jvp(lambda x, f: (f(x), f), (jnp.array(1), abs), (None, None))
    assert out == (1, abs)
    assert tangent == (None, None)


BAD_TANGENTS = [
    ((None,), ValueError, "the tangents must have the structure", "tangents[1]"),
    (({}, None), ValueError, "the tangents must have the structure", "tangents[0]"),
    (
        ({"a": jnp.ones(2, jnp.int32), "b": None}, None),
        TypeError,
        "a tangent must have the shape and dtype of the value",
        "where: tangents[0]['a']",
    ),
    (
        ({"a": jnp.ones(3), "b": None}, None),
        ValueError,
        "a tangent must have the shape and dtype of the value",
        "expected: shape (2,) and dtype float32, or None",
    ),
    (({"a": "t", "b": None}, None), TypeError, "a tangent must have the shape and dtype", "'t'"),
    (
        ({"a": None, "b": jnp.ones(())}, None),
        TypeError,
        "a tangent was given for a value that is not a floating-point array",
        "where: tangents[0]['b']",
    ),
    (({"a": None, "b": None}, jnp.ones(())), TypeError, "a tangent was given for", "tangents[1]"),
]


@pytest.mark.parametrize(("tangents", "error", "match", "where"), BAD_TANGENTS)
def test_tangents_that_do_not_fit_are_refused_by_path(tangents, error, match, where):
    primals = ({"a": jnp.ones(2), "b": jnp.array(1)}, "text")
    with pytest.raises(error, match=match) as info:
        vernal.filter_jvp(lambda x, y: x["a"], primals, tangents)
    assert where in str(info.value)


def test_tangents_of_another_module_structure_are_refused_by_path(getkey):
    model = layer(getkey)
    other = Layer(model.weight, jnp.sin, model.count)
    with pytest.raises(ValueError, match=re.escape("tangents[0].activation")):
        vernal.filter_jvp(lambda m: m.weight, (model,), (model_tangent(other, model.weight),))


@pytest.mark.parametrize(
    ("primals", "tangents", "name"), [(jnp.ones(2), (None,), "primals"), ((1.0,), 1.0, "tangents")]
)
def test_arguments_that_are_not_tuples_are_refused(primals, tangents, name):
    with pytest.raises(TypeError, match=f"the {name} of filter_jvp must be a tuple"):
        vernal.filter_jvp(lambda x: x, primals, tangents)


def test_jvp_and_vjp_refuse_what_cannot_be_called():
    # Around the type checks that this suite runs under, which would refuse it first.
    with pytest.raises(TypeError, match="filter_jvp needs a function"):
        inspect.unwrap(vernal.filter_jvp)(1.0, (), ())
    with pytest.raises(TypeError, match="filter_vjp needs a function"):
        inspect.unwrap(vernal.filter_vjp)(1.0)


# filter_vjp


def rich(model: Layer, x: jax.Array, text: str) -> dict[str, Any]:
    return {"y": model(x), "x": x**2, "text": text, "count": model.count, "f": model.activation}


def test_pulling_back_is_the_adjoint_of_pushing_forward(getkey):
    model, x = layer(getkey), jax.random.normal(getkey(), (3,))
    v, t = jax.random.normal(getkey(), (2, 3)), jax.random.normal(getkey(), (3,))
    y, z = jax.random.normal(getkey(), (2,)), jax.random.normal(getkey(), (3,))
    out, pull = vernal.filter_vjp(rich, model, x, "text")
    assert out["text"] == "text"
    assert out["f"] is jnp.tanh
    assert out["count"] == 1
    of_model, of_x, of_text = pull({"y": y, "x": z, "text": None, "count": None, "f": None})
    assert type(of_model) is Layer
    assert of_model.count == NoGradient()
    assert of_model.activation is jnp.tanh
    assert of_text == NoGradient()
    tangents = (model_tangent(model, v), t, None)
    _, pushed = vernal.filter_jvp(rich, (model, x, "text"), tangents)
    there = jnp.sum(pushed["y"] * y) + jnp.sum(pushed["x"] * z)
    back = jnp.sum(of_model.weight * v) + jnp.sum(of_x * t)
    np.testing.assert_allclose(there, back, rtol=1e-4, atol=1e-5)


def test_cotangents_agree_with_equinox(getkey):
    tree = {"w": jax.random.normal(getkey(), (2,)), "f": jnp.sin, "i": jnp.arange(2), "n": None}

    def f(tree: dict[str, Any], n: int) -> Any:
        return tree["f"](tree["w"]) ** n, tree["i"]

    y = jnp.array([1.0, -1.0])
    ours, our_pull = compat.filter_vjp(f, tree, 2)
    theirs, their_pull = eqx.filter_vjp(f, tree, 2)
    same(ours, theirs)
    same(our_pull((y, None)), their_pull((y, None)))


def test_a_cotangent_of_none_is_zero():
    _, pull = vernal.filter_vjp(lambda x: (x**2, x**3), jnp.array(2.0))
    assert pull((jnp.array(1.0), None)) == (4.0,)
    assert pull((None, jnp.array(1.0))) == (12.0,)
    assert pull((None, None)) == (0.0,)


def test_the_pullback_passes_in_and_out_of_compiled_functions():
    def f(x: jax.Array, text: str) -> Any:
        return {"y": jnp.sin(x), "text": text}

    x = jnp.array(0.5)
    cotangent = {"y": jnp.array(2.0), "text": None}
    _, pull = vernal.filter_vjp(f, x, "text")
    expected = 2 * jnp.cos(x)
    for jit in (jax.jit, vernal.filter_jit):
        result, nothing = jit(lambda pull, c: pull(c))(pull, cotangent)
        np.testing.assert_allclose(result, expected, rtol=1e-6)
        assert nothing == NoGradient()
        returned = jit(lambda x: vernal.filter_vjp(f, x, "text")[1])(x)
        np.testing.assert_allclose(returned(cotangent)[0], expected, rtol=1e-6)


def test_vjp_works_under_vmap_and_grad():
    def pulled(x: jax.Array) -> jax.Array:
        _, pull = vernal.filter_vjp(jnp.sin, x)
        return pull(jnp.ones_like(x))[0]

    x = jnp.array([0.2, 1.0])
    np.testing.assert_allclose(jax.vmap(pulled)(x), jnp.cos(x), rtol=1e-6)
    np.testing.assert_allclose(jax.vmap(jax.grad(pulled))(x), -jnp.sin(x), rtol=1e-6)


def test_vjp_returns_aux_of_any_kind():
    marker = object()
    out, pull, aux = vernal.filter_vjp(
        lambda x: (x**2, {"object": marker, "x": x}), jnp.array(3.0), has_aux=True
    )
    assert out == 9.0
    assert pull(jnp.array(1.0)) == (6.0,)
    assert aux["object"] is marker
    assert aux["x"] == 3.0
    with pytest.raises(TypeError, match="must return a pair, because has_aux=True"):
        vernal.filter_vjp(lambda x: x, jnp.array(1.0), has_aux=True)


def test_vjp_without_anything_to_differentiate_gives_no_gradient():
    out, pull = vernal.filter_vjp(lambda n, f: f(n), 3, lambda n: n + 1)
    assert out == 4
    assert pull(None) == (NoGradient(), NoGradient())


@pytest.mark.parametrize(
    ("cotangent", "error", "match", "where"),
    [
        (jnp.ones(()), ValueError, "the cotangents must have the structure", "`f(...)`"),
        ({"y": jnp.ones(3), "n": None}, ValueError, "a cotangent must have the shape", "['y']"),
        (
            {"y": 1, "n": None},
            TypeError,
            "a cotangent must have the shape and dtype",
            "shape () and dtype float32",
        ),
        ({"y": None, "n": 1.0}, TypeError, "a cotangent was given for a value", "cotangent['n']"),
    ],
)
def test_cotangents_that_do_not_fit_are_refused_by_path(cotangent, error, match, where):
    def f(x: jax.Array) -> Any:
        return {"y": x, "n": 3}

    _, pull = vernal.filter_vjp(f, jnp.array(1.0))
    with pytest.raises(error, match=match) as info:
        pull(cotangent)
    assert where in str(info.value)
