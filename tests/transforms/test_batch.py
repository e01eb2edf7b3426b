"""`filter_vmap`, and the rules of axes."""

import functools
import inspect
import itertools
import pickle
from typing import Any

import equinox as eqx
import jax
import jax.numpy as jnp
import numpy as np
import pytest

import vernal
from vernal import filter_vmap, if_array


class Dense(vernal.Module):
    weight: jax.Array
    activation: Any
    name: str

    def __call__(self, x: jax.Array) -> jax.Array:
        return self.activation(self.weight @ x)

    def scaled(self, x: jax.Array, by: jax.Array) -> jax.Array:
        """Scales."""
        return by * self(x)

    @filter_vmap
    def all_mapped(self, x: jax.Array) -> jax.Array:
        """Maps the module as well."""
        return self(x)

    @filter_vmap(in_axes={"self": None})
    def mapped(self, x: jax.Array) -> jax.Array:
        return self(x)


def dense(getkey) -> Dense:
    return Dense(jax.random.normal(getkey(), (3, 4)), jnp.tanh, "dense")


def product(x, y=2.0):
    """A product."""
    return x * y


def close(a, b):
    assert jax.tree.structure(a) == jax.tree.structure(b)
    for x, y in zip(jax.tree.leaves(a), jax.tree.leaves(b), strict=True):
        assert x.shape == y.shape and x.dtype == y.dtype
        np.testing.assert_allclose(x, y, rtol=2e-6, atol=1e-6)


IN_AXES = [p for p in itertools.product((0, 1, -1, None), (0, 1, None)) if p != (None, None)]


@pytest.mark.parametrize("in_axes", IN_AXES)
def test_every_pair_of_axes_agrees_with_jax(in_axes, getkey):
    x = jax.random.normal(getkey(), (3, 3, 3))
    y = jax.random.normal(getkey(), (3, 3))

    def contract(x, y):
        return jnp.sum(jnp.tensordot(x, y, 1), axis=tuple(range(x.ndim + y.ndim - 4, 0)))

    for out in (0, -1, 1, None):
        ndim = jax.eval_shape(jax.vmap(contract, in_axes, 0), x, y).ndim
        if out is None or out >= ndim:
            continue
        got = filter_vmap(contract, in_axes=in_axes, out_axes=out)(x, y)
        close(got, jax.vmap(contract, in_axes, out)(x, y))


def test_it_agrees_with_equinox_on_models(getkey):
    keys = jax.random.split(getkey(), 5)
    x = jax.random.normal(getkey(), (7, 4))
    ours, theirs = dense(getkey), eqx.nn.MLP(4, 3, 8, 2, key=getkey())
    close(filter_vmap(ours)(x), jnp.tanh(x @ ours.weight.T))
    close(filter_vmap(theirs)(x), eqx.filter_vmap(theirs)(x))

    def make(key):
        return eqx.nn.MLP(4, 3, 8, 2, key=key)

    a, b = filter_vmap(make)(keys), eqx.filter_vmap(make)(keys)
    close(eqx.filter(a, eqx.is_array), eqx.filter(b, eqx.is_array))
    run = {"fun": lambda m, x: m(x), "in_axes": (eqx.if_array(0), None)}
    close(filter_vmap(**run)(a, x[0]), eqx.filter_vmap(**run)(b, x[0]))


def test_an_ensemble_is_a_mapped_constructor_and_a_mapped_call(getkey):
    def make(key):
        return Dense(jax.random.normal(key, (3, 4)), jnp.tanh, "member")

    keys = jax.random.split(getkey(), 5)
    ensemble = filter_vmap(make)(keys)
    assert ensemble.weight.shape == (5, 3, 4)
    assert ensemble.activation is jnp.tanh and ensemble.name == "member"
    x = jax.random.normal(getkey(), (4,))
    got = filter_vmap(lambda m, x: m(x), in_axes=(0, None))(ensemble, x)
    close(got, jnp.stack([make(key)(x) for key in keys]))


@pytest.mark.parametrize(
    "fn, args",
    [
        (lambda f, x: f(x), (jnp.sin, jnp.ones((3, 2)))),
        (lambda x, y: {"a": x["a"] + y}, ({"a": jnp.ones((3, 2))}, jnp.ones((3, 2)))),
        (lambda x: (x.sum(), None, [x]), (np.ones((3, 2), np.float32),)),
        (lambda key: jax.random.normal(key, (2,)), (jax.random.split(jax.random.key(0), 3),)),
    ],
)
def test_in_axes_zero_passes_over_what_is_not_an_array(fn, args):
    expected = [
        jax.tree.map(lambda a, i=i: a[i] if vernal.is_array(a) else a, args) for i in range(3)
    ]
    expected = jax.tree.map(lambda *x: jnp.stack(x), *[fn(*call) for call in expected])
    for in_axes in (0, if_array(0), tuple(0 for _ in args)):
        close(filter_vmap(fn, in_axes=in_axes)(*args), expected)


def test_axes_by_name_leave_the_others_at_their_default():
    x, y = jnp.ones((3, 2)), jnp.arange(2.0)
    fn = filter_vmap(product, in_axes={"y": None})
    expected = jax.vmap(product, (0, None))(x, y)
    for got in (fn(x, y), fn(x, y=y), fn(y=y, x=x)):
        close(got, expected)


def test_variadic_and_keyword_only_arguments_have_axes_by_name():
    def fn(*xs, scale, **more):
        return sum(xs) * scale + more["extra"]

    x, extra = jnp.ones((3, 2)), jnp.ones((3, 2))
    scale = jnp.arange(2.0)
    mapped = filter_vmap(fn, in_axes={"scale": None, "xs": (0, None), "more": 0})
    close(mapped(x, scale, scale=scale, extra=extra), jnp.tile((1 + scale) * scale + 1, (3, 1)))


def test_keyword_arguments_without_a_position_are_mapped_by_default():
    fn = filter_vmap(lambda x, *, y: x + y, in_axes=(None,))
    close(fn(jnp.ones(2), y=jnp.zeros((3, 2))), jnp.ones((3, 2)))


def test_functions_of_a_leaf_choose_axes():
    def last_of_matrices(leaf):
        return -1 if vernal.is_array(leaf) and leaf.ndim == 2 else None

    x, y = jnp.arange(6.0).reshape(2, 3), jnp.ones(2)
    close(filter_vmap(product, in_axes=last_of_matrices)(x, y), x.T)
    got = filter_vmap(lambda x: (x, x.sum()), in_axes=1, out_axes=lambda leaf: leaf.ndim)(x)
    close(got, (x, x.sum(0)))


def test_prefix_trees_of_axes_reach_into_arguments_and_results(getkey):
    model = dense(getkey)
    axes = jax.tree.map(lambda w: 1 if w.ndim == 2 else None, model)
    got = filter_vmap(lambda m, x: m.weight @ x, in_axes=(axes, None))(model, jnp.ones(3))
    close(got, model.weight.T @ jnp.ones(3))

    def out(x):
        return {"m": (x, x * 2), "s": ("text", jnp.ones(2))}

    x = jnp.ones((3, 2))
    got = filter_vmap(out, out_axes={"m": (1, 0), "s": None})(x)
    assert got["s"][0] == "text"
    close((*got["m"], got["s"][1]), (x.T, x * 2, jnp.ones(2)))


def test_a_result_that_is_not_an_array_is_returned_once():
    marker = object()
    x = jnp.ones((3, 2))
    a, b, c = filter_vmap(lambda x: (x, marker, None))(x)
    close(a, x)
    assert b is marker and c is None


def test_if_nothing_is_mapped_the_function_is_simply_called():
    assert filter_vmap(lambda x: x + 1)(1) == 2
    close(filter_vmap(product, in_axes=None, out_axes=None)(jnp.ones(2)), 2 * jnp.ones(2))
    assert filter_vmap(lambda: "text")() == "text"


def test_axis_size_stands_in_for_a_mapped_argument():
    close(filter_vmap(lambda: jnp.arange(2), axis_size=3)(), jnp.tile(jnp.arange(2), (3, 1)))
    got = filter_vmap(lambda x: x, in_axes=None, axis_size=3, out_axes=1)(jnp.ones(2))
    close(got, jnp.ones((2, 3)))


def test_collectives_know_the_axis_name():
    x = jnp.arange(3.0)
    fn = filter_vmap(lambda x: jax.lax.psum(x, "i"), axis_name="i", out_axes=None)
    close(fn(x), x.sum())
    assert filter_vmap(lambda x: jax.lax.axis_index("i"), axis_name="i")(x).tolist() == [0, 1, 2]


def test_spmd_axis_name_reaches_jax():
    mesh = jax.make_mesh((8,), ("d",), axis_types=(jax.sharding.AxisType.Auto,))
    inner = jax.NamedSharding(mesh, jax.P(None))

    def fn(x):
        return jax.lax.with_sharding_constraint(x, inner)

    got = jax.jit(filter_vmap(fn, spmd_axis_name="d"))(jnp.ones((8, 2)))
    assert got.sharding.spec[0] == "d"


def test_it_nests_and_goes_with_the_other_transformations(getkey):
    x, y = jax.random.normal(getkey(), (3,)), jax.random.normal(getkey(), (4,))
    outer = filter_vmap(filter_vmap(product, in_axes=(None, 0)), in_axes=(0, None))
    close(outer(x, y), jnp.outer(x, y))
    close(vernal.filter_jit(outer)(x, y), jnp.outer(x, y))
    model = dense(getkey)
    batch = jax.random.normal(getkey(), (5, 4))

    def loss(model):
        return jnp.sum(filter_vmap(model)(batch) ** 2)

    def by_hand(weight):
        return jnp.sum(jnp.tanh(batch @ weight.T) ** 2)

    close(vernal.filter_grad(loss)(model).weight, jax.grad(by_hand)(model.weight))
    per_example = filter_vmap(
        vernal.filter_grad(lambda m, x: jnp.sum(m(x) ** 2)), in_axes=(None, 0)
    )
    close(per_example(model, batch).weight.sum(0), jax.grad(by_hand)(model.weight))


def test_methods_and_modules_are_functions_too(getkey):
    model = dense(getkey)
    x, by = jax.random.normal(getkey(), (5, 4)), jnp.arange(5.0)
    expected = jnp.tanh(x @ model.weight.T)
    close(filter_vmap(model)(x), expected)
    close(filter_vmap(model.scaled)(x, by), by[:, None] * expected)
    close(filter_vmap(model.scaled, in_axes={"by": None})(x, by=by[1]), expected)
    close(model.mapped(x), expected)
    stacked = filter_vmap(lambda _: model, axis_size=5)(0)
    close(stacked.all_mapped(x), expected)
    close(filter_vmap(functools.partial(product, jnp.ones(2)))(jnp.ones((3, 2))), jnp.ones((3, 2)))


def test_all_decorator_forms_agree_and_keep_name_documentation_and_signature():
    x = jnp.ones((3, 2))
    for fn in (filter_vmap(product), filter_vmap()(product), filter_vmap(in_axes=0)(product)):
        close(fn(x), 2 * x)
        assert fn.__name__ == "product" and fn.__doc__ == "A product."
        assert fn.__wrapped__ is product
        assert inspect.signature(fn) == inspect.signature(product)
    assert Dense.all_mapped.__doc__ == "Maps the module as well."


def test_it_pickles_and_is_a_pytree_of_the_functions_arrays(getkey):
    fn = filter_vmap(product, in_axes={"y": None}, out_axes=-1)
    again = pickle.loads(pickle.dumps(fn))
    x, y = jnp.ones((3, 2)), jnp.ones(2)
    close(again(x, y), fn(x, y))
    mapped = filter_vmap(dense(getkey))
    assert [leaf.shape for leaf in jax.tree.leaves(mapped)] == [(3, 4)]
    close(jax.jit(lambda f, x: f(x))(mapped, jnp.ones((5, 4))), mapped(jnp.ones((5, 4))))


@pytest.mark.parametrize("make", [jnp.zeros, jnp.arange, lambda n: jnp.ones((2, n))])
def test_a_traced_size_names_the_argument(make):
    def fn(x, sizes):
        return make(sizes["n"])

    call = filter_vmap(fn), jnp.ones(3), {"n": jnp.arange(3)}
    with pytest.raises(vernal.transforms.TracedShapeError, match=r"argument `sizes\['n'\]`"):
        call[0](*call[1:])
    with pytest.raises(TypeError, match="`fn`: a traced value was used as a shape"):
        jax.jit(call[0])(*call[1:])


X = jnp.ones((3, 2))
WRONG = {
    "not callable": (lambda: filter_vmap(X), TypeError, "filter_vmap needs a function"),
    "option": (
        lambda: filter_vmap(product, in_axis=0),
        TypeError,
        "filter_vmap has no option `in_axis`",
    ),
    "leaf": (lambda: filter_vmap(product, in_axes=(0, "x")), TypeError, r"where: in_axes\[1\]"),
    "bool": (lambda: filter_vmap(product, out_axes=True), TypeError, "not an axis"),
    "tree": (
        lambda: filter_vmap(product, in_axes=vernal.Static({"x": 0})),
        TypeError,
        "must be a prefix tree of the arguments|not an axis",
    ),
    "module": (
        lambda: filter_vmap(product, in_axes=Dense(jnp.ones(()), 0, "a")),
        TypeError,
        "not an axis|must be a prefix tree of the arguments",
    ),
    "name": (
        lambda: filter_vmap(product, in_axes={"z": 0}),
        ValueError,
        r"names an argument that `product` does not have\n.*in_axes\['z'\]\n.*'x', 'y'",
    ),
    "function": (
        lambda: filter_vmap(product, in_axes=lambda leaf: "0")(X),
        TypeError,
        "where: in_axes, for the argument x",
    ),
    "function of the result": (
        lambda: filter_vmap(product, out_axes=(lambda leaf: 0.5))(X),
        TypeError,
        "where: out_axes, for result\n",
    ),
    "sizes": (
        lambda: filter_vmap(lambda a, b: 0)(X, {"k": X.T}),
        ValueError,
        r"different sizes(.|\n)*a: size 3 \(axis 0 of shape \(3, 2\)\)\n *b\['k'\]: size 2",
    ),
    "axis_size": (
        lambda: filter_vmap(product, axis_size=4)(X),
        ValueError,
        r"axis_size: size 4\n *x: size 3",
    ),
    "many sizes": (
        lambda: filter_vmap(lambda *xs: 0)(*[X] * 20, X.T),
        ValueError,
        r"xs\[0\]: size 3(.|\n)*and 11 more",
    ),
    "no axis": (
        lambda: filter_vmap(product)(X, jnp.ones(())),
        ValueError,
        r"y has no axis 0 to map(.|\n)*in_axes=\{'y': None\}",
    ),
    "out of range": (
        lambda: filter_vmap(lambda a: a, in_axes=2)({"k": X}),
        ValueError,
        r"a\['k'\] has no axis 2 to map(.|\n)*2 axes(.|\n)*shape \(3, 2\), axis 2(.|\n)*from -2 to 1",
    ),
    "out of range in the result": (
        lambda: filter_vmap(lambda x: (x,), out_axes=2)(X),
        ValueError,
        r"result\[0\] cannot have its mapped axis at position 2(.|\n)*from -2 to 1",
    ),
    "count": (
        lambda: filter_vmap(product, in_axes=(0, None))(X),
        ValueError,
        "(?s)must have one entry for each positional argument.*1 entries: x.*2 entries",
    ),
    "prefix": (
        lambda: filter_vmap(lambda a: 0, in_axes=((0, 0),))((X, X, X)),
        ValueError,
        r"(?s)`in_axes` of `<lambda>` is not a prefix.*where: a\n.*f32\[3,2\]",
    ),
    "prefix of the result": (
        lambda: filter_vmap(lambda a: (a, a), out_axes=(0, 0, 0))(X),
        ValueError,
        "`out_axes` is not a prefix",
    ),
    "unmapped but mapped": (
        lambda: filter_vmap(lambda x: (X, {"k": x}), out_axes=(None, None))(X),
        ValueError,
        r"result\[1\]\['k'\] is the same for all calls of `<lambda>`, but it is not",
    ),
    "mapped but nothing is": (
        lambda: filter_vmap(lambda x: {"k": (1, X)})(1.0),
        ValueError,
        r"(?s)nothing is mapped in this call.*where: result\['k'\]\[1\]",
    ),
}


@pytest.mark.parametrize("case", WRONG)
def test_what_is_wrong_is_told_by_path(case):
    call, kind, text = WRONG[case]
    with pytest.raises(kind, match=text):
        call()


def test_errors_of_the_users_function_pass_through():
    def fails(x):
        raise ValueError("at vmap out_axes[1][0], got axis spec None, says the user")

    with pytest.raises(ValueError, match="says the user"):
        filter_vmap(fails)(X)


@pytest.mark.parametrize("x", [np.arange(3), np.ones(3), np.array([True, False, True])])
def test_a_numpy_array_that_is_mapped_comes_back_as_a_jax_array(x):
    same, twice = vernal.filter_vmap(lambda x: (x, x + x))(x)
    assert isinstance(same, jax.Array) and same.dtype == twice.dtype
    np.testing.assert_array_equal(same, x)
    mapped, still = vernal.filter_vmap(lambda x, y: (x, y), in_axes=(0, None), out_axes=(0, None))(
        x, x
    )
    assert isinstance(mapped, jax.Array) and still is x
