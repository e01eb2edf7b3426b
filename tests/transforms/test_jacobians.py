import re
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

JACOBIANS = [vernal.filter_jacfwd, vernal.filter_jacrev]
ALL = [*JACOBIANS, vernal.filter_hessian]


def close(a: Any, b: Any) -> None:
    assert jtu.tree_structure(a) == jtu.tree_structure(b)
    for x, y in zip(jtu.tree_leaves(a), jtu.tree_leaves(b), strict=True):
        assert x.shape == y.shape
        np.testing.assert_allclose(x, y, rtol=2e-5, atol=2e-5)


def spring(params: dict[str, jax.Array], x: jax.Array) -> dict[str, jax.Array]:
    return {
        "force": jnp.sin(params["k"] @ x) + params["b"],
        "energy": jnp.sum(params["b"] ** 3) * jnp.sum(x**2),
    }


def spring_arguments(getkey) -> tuple[dict[str, jax.Array], jax.Array]:
    params = {
        "k": jax.random.normal(getkey(), (2, 3)),
        "b": jax.random.normal(getkey(), (2,)),
    }
    return params, jax.random.normal(getkey(), (3,))


@pytest.mark.parametrize(
    ("ours", "theirs"), [*zip(ALL, [jax.jacfwd, jax.jacrev, jax.hessian], strict=True)]
)
@pytest.mark.sample(3)
def test_derivatives_of_trees_of_arrays_agree_with_jax(getkey, ours, theirs):
    params, x = spring_arguments(getkey)
    close(ours(spring)(params, x), theirs(spring)(params, x))
    close(ours(spring, wrt=1)(params, x), theirs(spring, argnums=1)(params, x))
    close(ours(spring, wrt=("params", "x"))(params, x), theirs(spring, argnums=(0, 1))(params, x))


@pytest.mark.parametrize("jacobian", JACOBIANS)
def test_the_jacobian_agrees_with_finite_differences(getkey, jacobian):
    def f(x: jax.Array) -> jax.Array:
        return jnp.stack([x[0] * x[1], jnp.sin(x[2]), jnp.sum(x**2)])

    x, eps = jax.random.normal(getkey(), (3,)), 1e-2
    moves = eps * jnp.eye(3)
    columns = [(f(x + move) - f(x - move)) / (2 * eps) for move in moves]
    np.testing.assert_allclose(jacobian(f)(x), jnp.stack(columns, axis=1), rtol=1e-2, atol=1e-2)


def test_the_hessian_is_the_jacobian_of_the_gradient_and_symmetric(getkey):
    def f(x: jax.Array) -> jax.Array:
        return jnp.sum(jnp.sin(x)) * jnp.prod(x)

    x = jax.random.normal(getkey(), (3,))
    hessian = vernal.filter_hessian(f)(x)
    close(hessian, hessian.T)
    close(hessian, vernal.filter_jacfwd(vernal.filter_grad(f))(x))


class Model(vernal.Module):
    weight: jax.Array
    count: jax.Array
    name: str

    def __call__(self, x: jax.Array) -> jax.Array:
        return self.weight * x


@pytest.mark.parametrize("jacobian", JACOBIANS)
def test_inputs_that_are_not_differentiated_have_no_derivative(jacobian):
    model = Model(jnp.array([1.0, 2.0]), jnp.array(3), "model")
    rows = jacobian(lambda m, x: {"y": m(x)})(model, jnp.array([3.0, 4.0]))
    assert type(rows["y"]) is Model
    np.testing.assert_array_equal(rows["y"].weight, jnp.diag(jnp.array([3.0, 4.0])))
    assert rows["y"].count == NoGradient()
    assert rows["y"].name == "model"


def test_the_hessian_holds_the_structure_twice():
    model = Model(jnp.array(2.0), jnp.array(3), "model")
    hessian = vernal.filter_hessian(lambda m, x: m(x) ** 2)(model, jnp.array(3.0))
    assert hessian.weight.weight == 18.0
    assert hessian.weight.count == NoGradient()
    assert hessian.count == NoGradient()
    assert hessian.name == "model"


@pytest.mark.parametrize(
    ("ours", "theirs"),
    [
        (compat.filter_jacfwd, eqx.filter_jacfwd),
        (compat.filter_jacrev, eqx.filter_jacrev),
        (compat.filter_hessian, eqx.filter_hessian),
    ],
)
def test_jacobians_of_arbitrary_trees_agree_with_equinox(getkey, ours, theirs):
    tree = {"w": jax.random.normal(getkey(), (2,)), "f": jnp.sin, "n": 2, "i": jnp.arange(2)}

    def f(tree: dict[str, Any], x: jax.Array) -> list[jax.Array]:
        return [tree["f"](tree["w"]) ** tree["n"] * x, jnp.sum(tree["w"] ** 3)]

    x = jnp.array([1.0, 2.0])
    close(ours(f)(tree, x), theirs(f)(tree, x))


@pytest.mark.parametrize("transform", ALL)
def test_aux_may_be_any_python_object(transform):
    marker = object()

    @transform(has_aux=True)
    def f(x: jax.Array) -> Any:
        return x**2, {"object": marker, "x": x}

    derivative, aux = f(jnp.array(3.0))
    assert derivative == (2.0 if transform is vernal.filter_hessian else 6.0)
    assert aux["object"] is marker
    assert aux["x"] == 3.0


@pytest.mark.parametrize("transform", ALL)
def test_jacobians_work_under_jit_and_vmap_and_with_closures(transform):
    def derivative(x: jax.Array) -> Any:
        return transform(lambda y: jnp.sin(y * x) * x)(x)

    x = jnp.array([0.3, -1.2])
    expected = jnp.stack([derivative(x[0]), derivative(x[1])])
    np.testing.assert_allclose(jax.vmap(derivative)(x), expected, rtol=1e-5)
    np.testing.assert_allclose(jax.jit(jax.vmap(derivative))(x), expected, rtol=1e-5)


@pytest.mark.parametrize("transform", ALL)
@pytest.mark.parametrize("out", [None, {"a": ()}])
def test_a_function_without_outputs_is_refused(transform, out):
    with pytest.raises(TypeError, match="an output of `<lambda>` has no derivative"):
        transform(lambda x: out)(jnp.array(1.0))


def test_complex_inputs_and_outputs_where_jax_allows_them():
    z = jnp.array([1.0 + 2.0j, 3.0j])

    def to_real(z: jax.Array) -> jax.Array:
        return jnp.abs(z) ** 2

    close(vernal.filter_jacrev(to_real)(z), jax.jacrev(to_real)(z))

    def to_complex(x: jax.Array) -> jax.Array:
        return jnp.exp(1j * x.astype(jnp.complex64))

    x = jnp.array([0.5, 1.0])
    close(vernal.filter_jacfwd(to_complex)(x), jax.jacfwd(to_complex)(x))


@pytest.mark.parametrize("transform", [vernal.filter_jacfwd, vernal.filter_hessian])
def test_complex_inputs_are_refused_by_path(transform):
    with pytest.raises(TypeError, match="a differentiated argument is complex") as info:
        transform(lambda p: p["x"])({"x": jnp.array(1j)})
    assert "argument `p['x']`" in str(info.value)


@pytest.mark.parametrize("transform", [vernal.filter_jacrev, vernal.filter_hessian])
def test_complex_outputs_are_refused_by_path(transform):
    with pytest.raises(TypeError, match="an output of `f` is complex") as info:

        def f(x: jax.Array) -> Any:
            return [x, x.astype(complex)]

        transform(f)(jnp.array(1.0))
    assert "output[1]" in str(info.value)


@pytest.mark.parametrize("transform", ALL)
@pytest.mark.parametrize(
    ("bad", "shown"), [("text", "'text'"), (jnp.arange(2), "i32[2]"), (3, "3")]
)
def test_outputs_without_a_derivative_are_refused_by_path(transform, bad, shown):
    def f(x: jax.Array) -> Any:
        return {"good": x, "bad": bad}

    with pytest.raises(TypeError, match="an output of `f` has no derivative") as info:
        transform(f)(jnp.array(1.0))
    assert "where: output['bad']" in str(info.value)
    assert f"got: {shown}" in str(info.value)
    assert transform.__name__ in str(info.value)


@pytest.mark.parametrize("transform", ALL)
def test_the_refusals_of_filter_grad_hold_for_its_siblings(transform):
    name = transform.__name__
    with pytest.raises(TypeError, match=f"{name} of `<lambda>`: nothing to differentiate"):
        transform(lambda x: x)(1.0)
    with pytest.raises(TypeError, match=f"{name} has no option `argnums`"):
        transform(lambda x: x, argnums=0)
    with pytest.raises(TypeError, match="`wrt` must name or pick what to differentiate"):
        transform(lambda x: x, wrt=())
    with pytest.raises(ValueError, match="there is no argument `y`"):
        transform(lambda x: x, wrt="y")(jnp.array(1.0))
    with pytest.raises(TypeError, match="must return a pair, because has_aux=True"):
        transform(lambda x: x, has_aux=True)(jnp.array(1.0))
    with pytest.raises(TypeError, match=re.escape(f"{name} needs a function")):
        transform(jnp.array(1.0))
