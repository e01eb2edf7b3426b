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


class Dense(vernal.Module):
    weight: jax.Array
    bias: jax.Array | None
    activation: Callable[..., Any]
    name: str
    steps: jax.Array

    def __call__(self, x: jax.Array) -> jax.Array:
        y = self.weight @ x
        return self.activation(y if self.bias is None else y + self.bias)


class Net(vernal.Module):
    layers: list[Any]
    scale: jax.Array

    def __call__(self, x: jax.Array) -> jax.Array:
        for layer in self.layers:
            x = layer(x)
        return self.scale * x


def net(getkey) -> Net:
    first = Dense(
        jax.random.normal(getkey(), (4, 3)),
        jax.random.normal(getkey(), (4,)),
        jnp.tanh,
        "one",
        jnp.array(7),
    )
    last = Dense(jax.random.normal(getkey(), (2, 4)), None, lambda x: x, "two", jnp.array(8))
    return Net([first, jnp.sin, last], jnp.array(1.5))


def loss(model: Net, x: jax.Array) -> jax.Array:
    return jnp.sum(model(x) ** 2)


def directional(f: Callable[[Any], Any], tree: Any, gradient: Any, getkey) -> tuple[Any, Any]:
    """The derivative along a random direction, by the gradient and by central differences."""
    eps = 1e-2

    def random(x: Any) -> Any:
        return jax.random.normal(getkey(), x.shape) if vernal.is_inexact_array(x) else None

    along = jtu.tree_map(random, tree)
    # Of length 1: the error of the differences grows with the third power of the step.
    length = sum(jnp.sum(v**2) for v in jtu.tree_leaves(along)) ** 0.5
    along = jtu.tree_map(lambda v: v / length, along)
    pairs = zip(jtu.tree_leaves(gradient), jtu.tree_leaves(along), strict=True)
    exact = sum(jnp.sum(g * v) for g, v in pairs)

    def at(step: float) -> Any:
        moved = jtu.tree_map(
            lambda x, v: x if v is None else x + step * v,
            tree,
            along,
            is_leaf=lambda x: x is None,
        )
        return f(moved)

    return exact, (at(eps) - at(-eps)) / (2 * eps)


def test_the_gradient_of_a_model_agrees_with_finite_differences(getkey):
    model, x = net(getkey), jax.random.normal(getkey(), (3,))
    gradient = vernal.filter_grad(loss)(model, x)
    exact, approximate = directional(lambda m: loss(m, x), model, gradient, getkey)
    np.testing.assert_allclose(exact, approximate, rtol=2e-2, atol=2e-2)


def test_the_gradient_of_a_model_agrees_with_jax_on_its_flat_arrays(getkey):
    model, x = net(getkey), jax.random.normal(getkey(), (3,))
    leaves, treedef = jtu.tree_flatten(model)
    inexact = [i for i, leaf in enumerate(leaves) if vernal.is_inexact_array(leaf)]

    def flat(chosen: list[Any]) -> jax.Array:
        filled = list(leaves)
        for i, leaf in zip(inexact, chosen, strict=True):
            filled[i] = leaf
        return loss(treedef.unflatten(filled), x)

    value, expected = jax.value_and_grad(flat)([leaves[i] for i in inexact])
    found_value, found = vernal.filter_value_and_grad(loss)(model, x)
    np.testing.assert_array_equal(found_value, value)
    for a, b in zip(jtu.tree_leaves(found), expected, strict=True):
        np.testing.assert_array_equal(a, b)


def test_the_gradient_has_the_structure_of_the_model_with_no_gradient_where_nothing_is_differentiated(
    getkey,
):
    gradient = vernal.filter_grad(loss)(net(getkey), jnp.ones(3))
    assert type(gradient) is Net
    first, function, last = gradient.layers
    assert first.weight.shape == (4, 3)
    assert first.bias.shape == (4,)
    assert first.steps == NoGradient()
    assert first.name == "one"
    assert first.activation is jnp.tanh
    assert function is jnp.sin
    assert last.bias is None and last.steps == NoGradient()
    assert gradient.scale.shape == ()


def test_gradients_of_trees_of_arbitrary_objects_agree_with_equinox(getkey):
    tree = {
        "w": jax.random.normal(getkey(), (3,)),
        "f": jnp.cos,
        "text": "text",
        "count": 3,
        "index": jnp.arange(3),
        "numpy": np.float32(2.0),
        "none": None,
        "key": jax.random.key(0),
        "rate": 0.5,
    }

    def f(tree: Any, power: int) -> Any:
        return jnp.sum(tree["f"](tree["w"]) ** power * tree["numpy"] * tree["rate"])

    ours = compat.filter_value_and_grad(f)(tree, 2)
    theirs = eqx.filter_value_and_grad(f)(tree, 2)
    assert jtu.tree_structure(ours) == jtu.tree_structure(theirs)
    for a, b in zip(jtu.tree_leaves(ours), jtu.tree_leaves(theirs), strict=True):
        np.testing.assert_array_equal(a, b)


def test_aux_may_be_any_python_object(getkey):
    marker = object()

    def f(x: jax.Array) -> Any:
        return jnp.sum(x**2), {"object": marker, "array": 2 * x, "f": f}

    gradient, aux = vernal.filter_grad(f, has_aux=True)(jnp.ones(2))
    np.testing.assert_array_equal(gradient, [2.0, 2.0])
    assert aux["object"] is marker
    assert aux["f"] is f
    np.testing.assert_array_equal(aux["array"], [2.0, 2.0])
    (value, aux), gradient = vernal.filter_value_and_grad(f, has_aux=True)(jnp.ones(2))
    assert value == 2.0
    assert aux["object"] is marker
    np.testing.assert_array_equal(gradient, [2.0, 2.0])


def test_aux_does_not_leak_tracers():
    _, aux = vernal.filter_grad(lambda x: (x**2, [x, x + 1.0]), has_aux=True)(jnp.array(1.0))
    assert all(isinstance(a, jax.Array) and not isinstance(a, jax.core.Tracer) for a in aux)


def test_a_loss_may_be_a_python_float_as_in_jax():
    assert vernal.filter_value_and_grad(lambda x: 1.0)(jnp.array(2.0)) == (1.0, 0.0)


def test_complex_arrays_are_differentiated_as_jax_does(getkey):
    z = jax.random.normal(getkey(), (3,), jnp.complex64)

    def f(z: jax.Array) -> jax.Array:
        return jnp.sum(jnp.abs(z) ** 2 + jnp.real(z**2))

    np.testing.assert_array_equal(vernal.filter_grad(f)(z), jax.grad(f)(z))


# Composition.


def test_gradients_work_under_jit_vmap_and_further_gradients():
    def f(x: jax.Array, text: str) -> jax.Array:
        return jnp.sin(x) * x

    grad = vernal.filter_grad(f)

    def first(x: jax.Array) -> jax.Array:
        return grad(x, "text")

    x = jnp.array([0.1, 0.7, -2.0])
    expected = jnp.sin(x) + x * jnp.cos(x)
    np.testing.assert_allclose(jax.vmap(first)(x), expected, rtol=1e-6)
    np.testing.assert_allclose(jax.jit(jax.vmap(first))(x), expected, rtol=1e-6)
    np.testing.assert_allclose(vernal.filter_jit(grad)(x[1], "text"), expected[1], rtol=1e-6)
    second = vernal.filter_grad(vernal.filter_grad(first))
    np.testing.assert_allclose(
        jax.vmap(second)(x), -3 * jnp.sin(x) - x * jnp.cos(x), rtol=1e-5, atol=1e-6
    )


def test_a_gradient_of_a_gradient_through_a_model(getkey):
    model, x = net(getkey), jax.random.normal(getkey(), (3,))

    def penalty(model: Net, x: jax.Array) -> jax.Array:
        inner = vernal.filter_grad(lambda x, m: loss(m, x), wrt=0)(x, model)
        return jnp.sum(inner**2)

    gradient = vernal.filter_grad(penalty)(model, x)
    exact, approximate = directional(lambda m: penalty(m, x), model, gradient, getkey)
    np.testing.assert_allclose(exact, approximate, rtol=3e-2, atol=3e-2)


def test_the_function_may_close_over_arrays_and_tracers():
    def outer(y: jax.Array) -> jax.Array:
        return vernal.filter_grad(lambda x: x**2 * y)(jnp.array(3.0))

    assert outer(jnp.array(2.0)) == 12.0
    assert jax.jit(outer)(jnp.array(2.0)) == 12.0
    assert vernal.filter_grad(outer)(jnp.array(2.0)) == 6.0


def test_arguments_that_are_not_differentiated_are_not_traced():
    def f(x: jax.Array, n: jax.Array) -> jax.Array:
        return x ** int(n)

    assert vernal.filter_grad(f)(jnp.array(3.0), jnp.array(2)) == 6.0


def test_the_first_argument_may_be_given_by_keyword():
    def f(x: jax.Array, y: jax.Array) -> jax.Array:
        return x**2 * y

    assert vernal.filter_grad(f)(y=jnp.array(2.0), x=jnp.array(3.0)) == 12.0


def test_plain_jax_transformations_take_the_transformed_function(getkey):
    model = net(getkey)
    grad = vernal.filter_grad(loss)
    gradient = jax.jit(grad)(model, jnp.ones(3))
    assert vernal.tree_allclose(gradient, grad(model, jnp.ones(3)), rtol=1e-5, atol=1e-5)


# `wrt`.


def three(x: jax.Array, y: Any = 2.0, *more: Any, z: Any = None, **rest: Any) -> jax.Array:
    total = x**2 * y
    for value in (*more, z, *rest.values()):
        total = total if value is None else total + value**3
    return total


A, B, C, D = (jnp.array(v) for v in (3.0, 4.0, 5.0, 6.0))

WRT = [
    (None, (A, B), {}, 24.0),
    (0, (A, B), {}, 24.0),
    (1, (A, B), {}, 9.0),
    ("y", (A, B), {}, 9.0),
    ("y", (A,), {"y": B}, 9.0),
    (1, (), {"y": B, "x": A}, 9.0),
    ((0, 1), (A, B), {}, (24.0, 9.0)),
    ((1, 0), (A, B), {}, (9.0, 24.0)),
    (("y", "x"), (A, B), {}, (9.0, 24.0)),
    ((0, "y"), (A,), {"y": B}, (24.0, 9.0)),
    ((0,), (A, B), {}, (24.0,)),
    (3, (A, B, C, D), {}, 108.0),
    ("z", (A, B), {"z": C}, 75.0),
    ("extra", (A, B), {"z": C, "extra": D}, 108.0),
    (("extra", 0), (A, B), {"z": C, "extra": D}, (108.0, 24.0)),
    (lambda x: x, (A, B), {}, 24.0),
]


@pytest.mark.parametrize(("wrt", "args", "kwargs", "expected"), WRT)
def test_wrt_chooses_arguments(wrt, args, kwargs, expected):
    assert vernal.filter_grad(three, wrt=wrt)(*args, **kwargs) == expected
    value, gradient = vernal.filter_value_and_grad(three, wrt=wrt)(*args, **kwargs)
    assert gradient == expected
    assert value == three(*args, **kwargs)


def test_the_gradient_of_several_arguments_is_a_tuple_of_trees(getkey):
    model, x = net(getkey), jax.random.normal(getkey(), (3,))
    of_model, of_x = vernal.filter_grad(loss, wrt=("model", "x"))(model, x)
    assert vernal.tree_equal(of_model, vernal.filter_grad(loss)(model, x))
    np.testing.assert_array_equal(of_x, jax.grad(loss, argnums=1)(model, x))


def test_a_function_picks_parts_of_the_first_argument(getkey):
    model, x = net(getkey), jax.random.normal(getkey(), (3,))
    everything = vernal.filter_grad(loss)(model, x)
    picked = vernal.filter_grad(loss, wrt=lambda m: (m.layers[0].weight, m.scale))(model, x)
    assert jtu.tree_structure(picked) != jtu.tree_structure(everything)
    np.testing.assert_array_equal(picked.layers[0].weight, everything.layers[0].weight)
    np.testing.assert_array_equal(picked.scale, everything.scale)
    assert picked.layers[0].bias == NoGradient()
    assert picked.layers[2].weight == NoGradient()
    assert picked.layers[1] is jnp.sin


def test_a_function_picks_a_whole_layer(getkey):
    model, x = net(getkey), jax.random.normal(getkey(), (3,))
    everything = vernal.filter_grad(loss)(model, x)
    picked = vernal.filter_grad(loss, wrt=lambda m: m.layers[0])(model, x)
    assert vernal.tree_equal(picked.layers[0], everything.layers[0])
    assert jtu.tree_leaves((picked.layers[2], picked.scale)) == []


def test_what_is_not_picked_is_not_traced():
    def f(params: dict[str, Any]) -> jax.Array:
        return params["x"] ** int(params["n"])

    params = {"x": jnp.array(3.0), "n": jnp.array(2.0)}
    gradient = vernal.filter_grad(f, wrt=lambda p: p["x"])(params)
    assert gradient["x"] == 6.0
    assert gradient["n"] == NoGradient()


def test_picking_works_inside_jit(getkey):
    model, x = net(getkey), jax.random.normal(getkey(), (3,))
    grad = vernal.filter_grad(loss, wrt=lambda m: m.scale)
    jitted = vernal.filter_jit(grad)(model, x)
    np.testing.assert_allclose(jitted.scale, grad(model, x).scale, rtol=1e-5)
    assert jitted.layers[0].weight == NoGradient()


# Refusals.


class Rates(vernal.Module):
    rate: float
    nested: dict[str, Any]
    fixed: float = vernal.field(static=True, default=9.25)

    def __call__(self) -> Any:
        return jnp.sum(jnp.asarray(self.rate))


def test_something_without_floating_point_arrays_is_refused_with_the_numbers_it_holds():
    model = Rates(0.25, {"a": [1.5, jnp.arange(2)], "b": "text"})

    def f(model: Rates) -> Any:
        return model()

    with pytest.raises(
        TypeError, match="nothing to differentiate, there is no floating-point array"
    ) as info:
        vernal.filter_grad(f)(model)
    text = str(info.value)
    assert "filter_grad of `f`" in text
    assert "argument `model`" in text
    assert "model.rate = 0.25 (a Python number)" in text
    assert "model.nested['a'][0] = 1.5 (a Python number)" in text
    assert "model.nested['a'][1]: i32[2]" in text
    assert "9.25" not in text
    assert "jax.Array" in text
    assert "jnp.asarray" in text


def test_a_python_number_as_the_argument_is_refused():
    with pytest.raises(TypeError, match=re.escape("got: x = 2.0 (a Python number)")):
        vernal.filter_value_and_grad(lambda x: x**2)(2.0)


@pytest.mark.parametrize(
    ("wrt", "where"),
    [
        ((0, 1), "argument `y`"),
        ("y", "argument `y`"),
        (lambda x: (x["a"], x["b"]), "argument `x['b']`"),
        (lambda x: x["c"], "argument `x['c']`"),
    ],
)
def test_every_part_that_is_asked_for_must_have_a_floating_point_array(wrt, where):
    x = {"a": jnp.array(1.0), "b": jnp.array(1), "c": 0.5}
    with pytest.raises(TypeError, match=re.escape(where)):
        vernal.filter_grad(lambda x, y: x["a"] * y, wrt=wrt)(x, 2.0)


def test_a_long_list_of_numbers_is_cut():
    with pytest.raises(TypeError, match=re.escape("x[9] = 9 (a Python number) and 5 more")):
        vernal.filter_grad(lambda x: 1.0)(list(range(15)))


def test_a_number_in_a_picked_field_of_a_module_is_named():
    with pytest.raises(TypeError, match=re.escape("model.rate = 0.25 (a Python number)")):
        vernal.filter_grad(lambda model: 1.0, wrt=lambda m: m.rate)(Rates(0.25, {}))


def test_a_number_for_a_field_annotated_as_an_array_is_differentiated():
    class Rate(vernal.Module):
        rate: jax.Array

    assert vernal.filter_grad(lambda m: m.rate**2)(Rate(3.0)).rate == 6.0  # pyright: ignore


BAD_LOSSES = [
    (lambda x: x, r"the loss `named` has shape \(2,\)", "jnp.mean"),
    (lambda x: jnp.argmax(x), "the loss `named` has dtype int32", "floating-point"),
    (lambda x: 3, "the loss `named` has dtype int32", "floating-point"),
    (lambda x: jnp.sum(x) > 0, "the loss `named` has dtype bool", "floating-point"),
    (lambda x: jnp.sum(x).astype(complex), "the loss `named` is complex", "jnp.real"),
    (lambda x: "text", "the loss `named` is not an array, so it has no gradient", "one number"),
    (lambda x: None, "the loss `named` is not an array", "one number"),
    (lambda x: (jnp.sum(x), x), "the loss `named` is not an array", "has_aux=True"),
    (lambda x: jax.random.key(0), "the loss `named` has dtype key<fry>", "floating-point"),
]


@pytest.mark.parametrize("transform", [vernal.filter_grad, vernal.filter_value_and_grad])
@pytest.mark.parametrize(("f", "match", "instead"), BAD_LOSSES)
def test_a_loss_that_is_not_a_real_scalar_is_refused(transform, f, match, instead):
    def named(x: jax.Array) -> Any:
        return f(x)

    with pytest.raises(TypeError, match=match) as info:
        transform(named)(jnp.ones(2))
    assert instead in str(info.value)
    assert f"{transform.__name__}(named)" in str(info.value)


@pytest.mark.parametrize("out", [lambda x: x, lambda x: (x, 1, 2), lambda x: {"loss": x}])
def test_aux_without_a_pair_is_refused(out):
    with pytest.raises(TypeError, match="must return a pair, because has_aux=True"):
        vernal.filter_grad(out, has_aux=True)(jnp.array(1.0))


@pytest.mark.parametrize(
    ("wrt", "args", "kwargs", "match"),
    [
        (2, (A, B), {}, "no positional argument number 2 to differentiate in this call of `f`"),
        (-1, (A, B), {}, "no positional argument number -1"),
        (
            None,
            (),
            {},
            "there is no positional argument number 0 .*\n.*\n.*\n.*a call with no arguments",
        ),
        ("q", (A, B), {}, "there is no argument `q`.*\n.*\n.*\n.*a call with `x`, `y`"),
        ("z", (A, B), {}, "there is no argument `z` to differentiate"),
        ("more", (A, B, C), {}, r"there is no argument `more`.*\n.*\n.*\n.*`x`, `y`, `more\[0\]`"),
        ((0, 0), (A, B), {}, "`wrt` names the same argument twice"),
        ((0, "x"), (A, B), {}, "`wrt` names the same argument twice"),
    ],
)
def test_a_wrt_that_names_what_is_not_there_is_refused(wrt, args, kwargs, match):
    def f(x: Any, y: Any, *more: Any, z: Any = A) -> Any:
        return x * y * z

    with pytest.raises(ValueError, match=match):
        vernal.filter_grad(f, wrt=wrt)(*args, **kwargs)


@pytest.mark.parametrize("wrt", [1.5, True, (), (0, None), [0, 1], (0, lambda x: x)])
def test_a_wrt_that_says_nothing_is_refused(wrt):
    with pytest.raises(TypeError, match="`wrt` must name or pick what to differentiate"):
        vernal.filter_grad(three, wrt=wrt)


@pytest.mark.parametrize(
    ("wrt", "got"), [(lambda m: m.scale * 2.0, "TypeError"), (lambda m: jnp.ones(3), "f32")]
)
def test_a_wrt_that_looks_at_values_is_refused(getkey, wrt, got):
    with pytest.raises(ValueError, match="`wrt` must use only the structure") as info:
        vernal.filter_grad(loss, wrt=wrt)(net(getkey), jnp.ones(3))
    assert got in str(info.value)


@pytest.mark.parametrize(
    ("option", "instead"),
    [
        ({"argnums": 1}, "wrt=1"),
        ({"argnames": "x"}, "wrt='x'"),
        ({"holomorphic": True}, "jnp.real"),
        ({"allow_int": True}, "integers are not differentiated"),
        ({"nonsense": True}, "leave `nonsense` out"),
    ],
)
@pytest.mark.parametrize("transform", [vernal.filter_grad, vernal.filter_value_and_grad])
def test_options_of_jax_that_make_no_sense_are_refused(transform, option, instead):
    with pytest.raises(TypeError, match=f"{transform.__name__} has no option `") as info:
        transform(three, **option)
    assert instead in str(info.value)
