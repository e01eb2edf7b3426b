import copy
import functools
import gc
import inspect
import itertools
import pickle
import weakref
from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest

import vernal
from vernal import Module, filter_grad, filter_jit, filter_jvp, filter_vmap
from vernal.transforms import ZeroTangent, filter_custom_jvp, is_zero, materialise


def close(got, want, rtol=1e-6):
    assert jax.tree.structure(got) == jax.tree.structure(want)
    for a, b in zip(jax.tree.leaves(got), jax.tree.leaves(want), strict=True):
        np.testing.assert_allclose(a, b, rtol=rtol, atol=1e-6)


@filter_custom_jvp
def product(x, y):
    "Multiplies."
    return jnp.sin(x) * y


@product.def_jvp
def product_rule(primals, tangents):
    (x, y), (x_dot, y_dot) = primals, tangents
    return product(x, y), jnp.cos(x) * x_dot * y + jnp.sin(x) * y_dot


X, Y = jnp.float32(0.5), jnp.float32(2.0)


def test_the_rule_is_returned_and_used():
    assert product_rule.__name__ == "product_rule"
    close(product(X, Y), jnp.sin(X) * Y)
    close(jax.grad(product, (0, 1))(X, Y), (jnp.cos(X) * Y, jnp.sin(X)))
    # A wrong rule shows that it is the rule that is used.
    wrong = filter_custom_jvp(lambda x: x)
    wrong.def_jvp(lambda primals, tangents: (primals[0], 7.0 * tangents[0]))
    assert jax.grad(wrong)(X) == 7.0


def test_python_numbers_are_differentiated_as_arrays():
    assert jax.grad(product)(0.5, Y) == jax.grad(product)(X, Y)
    close(jax.jvp(product, (0.5, 2.0), (1.0, 1.0))[1], jnp.cos(X) * Y + jnp.sin(X))
    assert jax.grad(product)(np.float32(0.5), np.float32(2.0)) == jax.grad(product)(X, Y)


def test_it_looks_like_the_function_and_binds_copies_and_pickles_as_one():
    assert (product.__name__, product.__doc__, product.__wrapped__.__name__) == (
        "product",
        "Multiplies.",
        "product",
    )
    assert repr(product) == "_CustomJvp(fn=<function product>, rule=<function product_rule>)"
    assert "<no rule>" in repr(filter_custom_jvp(jnp.sin))
    assert pickle.loads(pickle.dumps(product)) is product
    local = filter_custom_jvp(product_rule)
    local.def_jvp(product_rule)
    again = pickle.loads(pickle.dumps(local))
    assert again.rule.given is product_rule
    assert copy.deepcopy(local) == local
    assert hash(copy.deepcopy(local)) == hash(local)
    assert again != local


def test_a_function_that_is_no_longer_used_is_freed():
    def define():
        @filter_custom_jvp
        def f(x):
            return x

        @f.def_jvp
        def rule(primals, tangents):
            return f(*primals), tangents[0]

        jax.grad(f)(X)
        return weakref.ref(f.fn)

    gone = define()
    gc.collect()
    assert gone() is None


# --- which tangents a rule is given ---


def tangents_given(symbolic_zeros: bool, wrt: Any, *args: Any) -> Any:
    """The tangents that a rule is given when the arguments in `wrt` are differentiated."""
    seen = []
    f = filter_custom_jvp(lambda *args: args[0])

    @f.def_jvp(symbolic_zeros=symbolic_zeros)
    def rule(primals, tangents):
        seen.append((primals, tangents))
        return primals[0], tangents[0]

    vernal.filter_value_and_grad(lambda *args: f(*args) * 1.0, wrt=wrt)(*args)
    (given,) = seen
    return given


ARGUMENTS = (
    X,
    {"y": jnp.ones(3, jnp.bfloat16), "n": jnp.arange(2), "b": jnp.array([True])},
    jax.random.key(0),
    "text",
    jnp.sin,
    2.0,
    None,
    np.ones(2, np.float32),
)


def test_what_is_not_differentiated_has_zeros():
    primals, tangents = tangents_given(False, 0, *ARGUMENTS)
    assert primals[3:7] == ARGUMENTS[3:7]
    x, tree, *nothing, numpy = tangents
    assert x.shape == ()
    assert nothing == [None] * 5
    assert (tree["y"].dtype, tree["y"].shape) == (jnp.bfloat16, (3,))
    for name in "nb":
        assert tree[name].shape == ARGUMENTS[1][name].shape
        assert tree[name].dtype == jnp.float32
        assert tree[name].weak_type
    assert numpy.shape == (2,)
    for zeros in jax.tree.leaves((tree, numpy)):
        np.testing.assert_array_equal(zeros, jnp.zeros_like(zeros))


def test_with_symbolic_zeros_they_are_zero_tangents():
    _, (x, tree, *nothing, numpy) = tangents_given(True, 0, *ARGUMENTS)
    assert not is_zero(x)
    assert nothing == [None] * 5
    assert tree == {
        "y": ZeroTangent((3,), jnp.bfloat16),
        "n": ZeroTangent((2,), jnp.float32, weak_type=True),
        "b": ZeroTangent((1,), jnp.float32, weak_type=True),
    }
    assert numpy == ZeroTangent((2,), jnp.float32)


# --- naive rules, for every subset of the arguments ---


def matrix_rule(primals, tangents):
    (a, x, n), (a_dot, x_dot, n_dot) = primals, tangents
    m = n.astype(x.dtype)
    return a @ x * m, (a_dot @ x + a @ x_dot) * m + a @ x * n_dot


def scan_rule(primals, tangents):
    (a, x, n), (a_dot, x_dot, n_dot) = primals, tangents

    def body(total, row):
        a, a_dot = row
        return total, jnp.sum(a_dot * x + a * x_dot)

    out_dot = jax.lax.scan(body, 0.0, (a, a_dot))[1]
    m = n.astype(x.dtype)
    return a @ x * m, jax.lax.add(out_dot * m, jnp.multiply(a @ x, n_dot))


def jvp_rule(primals, tangents):
    (a, x, n), (a_dot, x_dot, _) = primals, tangents
    return jax.jvp(lambda a, x: a @ x * n.astype(x.dtype), (a, x), (a_dot, x_dot))


@pytest.mark.parametrize("jit", [False, True])
@pytest.mark.parametrize("subset", [(0,), (1,), (0, 1)], ids=str)
@pytest.mark.parametrize("rule", [matrix_rule, scan_rule, jvp_rule])
@pytest.mark.sample(3)
def test_a_naive_rule_is_right_for_every_subset(getkey, rule, subset, jit):
    def free(a, x, n):
        return a @ x * n.astype(x.dtype)

    f = filter_custom_jvp(free)
    f.def_jvp(rule)
    args = jax.random.normal(getkey(), (2, 3)), jax.random.normal(getkey(), (3,)), jnp.arange(2) + 1
    maybe_jit = jax.jit if jit else lambda f: f
    got, want = (maybe_jit(jax.grad(lambda *a, g=g: g(*a).sum(), subset))(*args) for g in (f, free))
    close(got, want)


@pytest.mark.parametrize("symbolic_zeros", [False, True])
def test_every_subset_of_three_arguments_in_both_modes(symbolic_zeros):
    def free(x, y, z):
        return x * y + jnp.sin(z), y

    f = filter_custom_jvp(free)

    @f.def_jvp(symbolic_zeros=symbolic_zeros)
    def rule(primals, tangents):
        (x, y, z), (x_dot, y_dot, z_dot) = primals, tangents
        return free(x, y, z), (x_dot * y + x * y_dot + jnp.cos(z) * z_dot, y_dot)

    at = X, Y, jnp.float32(0.1)
    for count in (1, 2, 3):
        for wrt in itertools.combinations(range(3), count):
            tangents = tuple(jnp.float32(1.5) if i in wrt else None for i in range(3))
            got, want = (filter_jvp(g, at, tangents) for g in (f, free))
            close(got[0], want[0])
            close(materialise(got[1][0]), want[1][0])
            assert (got[1][1] is None) == (1 not in wrt and symbolic_zeros)


def equations(f, *args):
    """How often each primitive is used in a function's jaxpr, whatever contains it."""
    counts: dict[str, int] = {}

    def count(jaxpr):
        for eqn in jaxpr.eqns:
            counts[eqn.primitive.name] = counts.get(eqn.primitive.name, 0) + 1
            for sub in jax.tree.leaves([*eqn.params.values()]):
                if hasattr(sub, "eqns"):
                    count(sub)

    count(jax.make_jaxpr(f)(*args).jaxpr)
    return counts


def test_with_symbolic_zeros_the_work_for_zero_tangents_is_not_there():
    def count(symbolic_zeros, wrt):
        f = filter_custom_jvp(lambda a, b: a @ b)

        @f.def_jvp(symbolic_zeros=symbolic_zeros)
        def rule(primals, tangents):
            (a, b), (a_dot, b_dot) = primals, tangents
            return a @ b, a_dot @ b + a @ b_dot

        def run(a, b):
            along = [jnp.ones((3, 3))] * len(wrt)
            at = [(a, b)[i] for i in wrt]

            def chosen(*at):
                args = [a, b]
                for i, x in zip(wrt, at, strict=True):
                    args[i] = x
                return f(*args)

            return jax.jvp(chosen, at, along)

        return equations(run, jnp.ones((3, 3)), jnp.ones((3, 3)))["dot_general"]

    # The value, and one product for each tangent that is not zero.
    assert [count(True, wrt) for wrt in [(0,), (1,), (0, 1)]] == [2, 2, 3]
    assert [count(False, wrt) for wrt in [(0,), (1,), (0, 1)]] == [3, 3, 3]


def test_a_tangent_that_the_rule_says_is_zero_stays_unknown_to_jax():
    f = filter_custom_jvp(lambda x: (x, 2 * x, jnp.arange(2), "text"))

    @f.def_jvp
    def rule(primals, tangents):
        (x,), (t,) = primals, tangents
        return (x, 2 * x, jnp.arange(2), "text"), (None, 2 * t, jnp.zeros(2), None)

    out, tangent = filter_jvp(f, (X,), (Y,))
    assert out[3] == "text"
    assert tangent[0] is None
    assert tangent[2:] == (None, None)
    close(tangent[1], 2 * Y)

    g = filter_custom_jvp(lambda x: {"a": (x, x), "b": x})
    g.def_jvp(lambda p, t: ({"a": (p[0], p[0]), "b": p[0]}, {"a": None, "b": 1.0}))
    _, tangent = filter_jvp(g, (X,), (Y,))
    close(tangent["b"], jnp.float32(1.0))
    assert tangent["a"] == (None, None)


# --- any Python object, methods, modules, keywords ---


class Layer(Module):
    w: jax.Array
    b: jax.Array
    activation: Callable[..., Any]

    @filter_custom_jvp
    def __call__(self, x):
        return self.activation(self.w * x + self.b), self.activation

    @__call__.def_jvp
    def rule(primals, tangents):
        (self, x), (self_dot, x_dot) = primals, tangents
        assert isinstance(self_dot, Layer)
        inner, inner_dot = self.w * x + self.b, self_dot.w * x + self.w * x_dot + self_dot.b
        out, out_dot = jax.jvp(self.activation, (inner,), (inner_dot,))
        return (out, self.activation), (out_dot, None)


@pytest.mark.parametrize("jit", [False, True])
def test_methods_of_modules(jit):
    layer = Layer(jnp.float32(0.3), jnp.float32(0.2), jnp.tanh)
    maybe_jit = filter_jit if jit else lambda f: f

    def free(layer, x):
        return layer.activation(layer.w * x + layer.b)

    got = maybe_jit(filter_grad(lambda layer, x: layer(x)[0], wrt=(0, 1)))(layer, X)
    close(got, filter_grad(free, wrt=(0, 1))(layer, X))
    got = maybe_jit(filter_grad(lambda layer, x: layer(x)[0], wrt=lambda m: m.w))(layer, X)
    close(got, filter_grad(free, wrt=lambda m: m.w)(layer, X))
    assert layer(X)[1] is jnp.tanh
    assert callable(Layer.rule)


def test_a_module_can_be_the_function():
    class Model(Module):
        w: jax.Array

        def __call__(self, x):
            return jnp.sin(self.w * x)

    def loss(model, x):
        f = filter_custom_jvp(model)
        f.def_jvp(lambda p, t: (model(p[0]), jnp.cos(model.w * p[0]) * model.w * t[0]))
        return f(x)

    model = Model(jnp.float32(0.7))
    for transform in (lambda f: f, jax.jit):
        got = transform(jax.grad(loss, (0, 1)))(model, X)
        close(got, jax.grad(lambda m, x: m(x), (0, 1))(model, X))
        hessian = jax.jacfwd(jax.grad(loss, (0, 1)), (0, 1))
        close(transform(hessian)(model, X), jax.hessian(lambda m, x: m(x), (0, 1))(model, X))


@filter_custom_jvp
def scaled(x, *, by):
    return x * by["k"]


@scaled.def_jvp
def scaled_rule(primals, tangents, *, by):
    return scaled(*primals, by=by), tangents[0] * by["k"]


def test_keyword_arguments_are_values():
    by = {"k": jnp.float32(3.0), "text": "any"}
    assert jax.grad(lambda x: scaled(x, by=by))(X) == 3.0
    assert jax.jit(lambda k: jax.grad(lambda x: scaled(x, by={"k": k}))(X))(Y) == 2.0
    batched = jax.vmap(jax.grad(lambda x, k: scaled(x, by={"k": k})), (None, 0))
    np.testing.assert_array_equal(batched(X, jnp.arange(3.0)), jnp.arange(3.0))


def test_a_keyword_argument_that_is_differentiated_is_refused_by_name():
    for transform in (lambda f: f, jax.jit):
        with pytest.raises(
            ValueError,
            match=r"`scaled` is differentiated with respect to an argument that its rule does "
            r"not handle\n  where: argument `by\['k'\]`[\s\S]*pass it by position",
        ):
            transform(jax.grad(lambda k: scaled(X, by={"k": k})))(Y)


def test_axes_of_vmap():
    a, b = jnp.arange(6.0).reshape(2, 3), jnp.arange(3.0)
    grad = jax.grad(lambda x, y: product(x, y).sum())
    want = jax.grad(lambda x, y: (jnp.sin(x) * y).sum())
    for axes in [(0, None), (1, None)]:
        y = b if axes[0] == 0 else b[:2]
        close(jax.vmap(grad, axes)(a, y), jax.vmap(want, axes)(a, y))
    close(filter_vmap(product, in_axes=(None, 0))(X, b), jnp.sin(X) * b)
    close(jax.grad(lambda x: jax.vmap(product)(x, b).sum())(b), jnp.cos(b) * b)


# --- what the function and the rule close over ---


def sine(a, x):
    return jnp.sin(a * x)


def closing_over(a, x):
    """`sine(a, x)`, with `a` closed over by the function and by its rule."""

    @filter_custom_jvp
    def f(x):
        return jnp.sin(a * x)

    @f.def_jvp
    def rule(primals, tangents):
        (x,), (x_dot,) = primals, tangents
        return f(x), jnp.cos(a * x) * a * x_dot

    return f(x)


def closing_over_in_an_argument(a, x):
    """`sine(a, x)`, with `a` closed over by a function that is an argument."""

    @filter_custom_jvp
    def f(scale, x):
        return jnp.sin(scale(x))

    @f.def_jvp
    def rule(primals, tangents):
        (scale, x), (nothing, x_dot) = primals, tangents
        assert nothing is None
        inner, inner_dot = jax.jvp(scale, (x,), (x_dot,))
        return jnp.sin(inner), jnp.cos(inner) * inner_dot

    return f(lambda x: a * x, x)


def closing_over_partial(a, x):
    """`sine(a, x)`, with a partial as the function."""
    f = filter_custom_jvp(functools.partial(sine, a))
    f.def_jvp(functools.partial(lambda a, p, t: (sine(a, *p), jnp.cos(a * p[0]) * a * t[0]), a))
    return f(x)


def nested(a, x):
    """`sine(a, x)`, where the function calls another one with a rule, and `a` is closed over."""
    inner = filter_custom_jvp(lambda x: a * x)
    inner.def_jvp(lambda primals, tangents: (a * primals[0], a * tangents[0]))

    @filter_custom_jvp
    def outer(x):
        return jnp.sin(inner(x))

    @outer.def_jvp
    def rule(primals, tangents):
        y, y_dot = jax.jvp(inner, primals, tangents)
        return jnp.sin(y), jnp.cos(y) * y_dot

    return outer(x)


DERIVATIVES = {
    "grad": lambda f: jax.grad(f, (0, 1)),
    "grad_of_closed": lambda f: jax.grad(f, 0),
    "jit_of_grad": lambda f: jax.jit(jax.grad(f, (0, 1))),
    "grad_of_jit": lambda f: jax.grad(jax.jit(f), (0, 1)),
    "jvp": lambda f: lambda a, x: jax.jvp(f, (a, x), (x, a)),
    "grad_of_grad": lambda f: jax.jacrev(jax.grad(f, (0, 1)), (0, 1)),
    "jvp_of_grad": lambda f: jax.jacfwd(jax.grad(f, (0, 1)), (0, 1)),
    "grad_of_jvp": lambda f: jax.grad(lambda a, x: jax.jvp(f, (a, x), (x, a))[1], (0, 1)),
    "inner_grad": lambda f: jax.grad(lambda a, x: jax.grad(f, 1)(a, x) * a, (0, 1)),
    "vmap": lambda f: lambda a, x: jax.vmap(jax.grad(f, (0, 1)), (0, None))(a + jnp.arange(2.0), x),
    "grad_of_vmap": lambda f: jax.grad(
        lambda a, x: jax.vmap(lambda s: f(a * s, x))(jnp.arange(2.0)).sum(), (0, 1)
    ),
    "scan": lambda f: jax.grad(
        lambda a, x: jax.lax.scan(lambda c, s: (f(a * s, c), None), x, jnp.arange(1.0, 3.0))[0],
        (0, 1),
    ),
    "closed_in_scan": lambda f: jax.grad(
        lambda a, x: jax.lax.scan(lambda c, _: (f(c, x), None), a, length=2)[0], (0, 1)
    ),
    "checkpoint": lambda f: jax.grad(jax.checkpoint(f), (0, 1)),
    "cond": lambda f: jax.grad(lambda a, x: jax.lax.cond(x > 0, f, lambda a, x: a, a, x), (0, 1)),
    "while": lambda f: (
        lambda a, x: jax.jvp(
            lambda a, x: jax.lax.while_loop(
                lambda c: c[0] < 3, lambda c: (c[0] + 1, f(a, c[1])), (0, x)
            ),
            (a, x),
            (x, a),
        )[1][1]
    ),
}


FEW = ("grad", "jit_of_grad", "jvp_of_grad", "grad_of_vmap", "closed_in_scan")
CLOSURES = [
    *((f, name) for f in (closing_over, closing_over_in_an_argument) for name in DERIVATIVES),
    *((f, name) for f in (closing_over_partial, nested) for name in FEW),
]


@pytest.mark.parametrize(("f", "name"), CLOSURES)
@pytest.mark.sample(8)
def test_what_is_closed_over_is_differentiated_and_does_not_leak(f, name):
    derivative, (a, x) = DERIVATIVES[name], (jnp.float32(0.7), jnp.float32(0.4))
    with jax.checking_leaks():
        got = derivative(f)(a, x)
    close(got, derivative(sine)(a, x), rtol=2e-6)


def test_integers_and_keys_may_be_closed_over_too():
    @jax.jit
    def run(n, key, x):
        @filter_custom_jvp
        def f(x):
            return x * n.astype(x.dtype) + jax.random.normal(key)

        @f.def_jvp
        def rule(primals, tangents):
            return f(*primals), tangents[0] * n.astype(x.dtype)

        return jax.grad(f)(x)

    with jax.checking_leaks():
        assert run(jnp.array(3), jax.random.key(0), X) == 3.0


def test_the_rule_is_not_called_for_what_only_the_function_closes_over():
    calls = []

    def run(a):
        @filter_custom_jvp
        def f(x):
            return a * x

        @f.def_jvp
        def rule(primals, tangents):
            calls.append(1)
            return f(*primals), a * tangents[0]

        return f(X)

    assert jax.grad(run)(Y) == X
    assert not calls


def test_what_only_the_rule_closes_over_is_a_value():
    def run(a, x):
        f = filter_custom_jvp(lambda x: x)
        f.def_jvp(lambda primals, tangents: (primals[0], a * tangents[0]))
        return f(x)

    assert jax.grad(run, 0)(Y, X) == 0.0
    assert jax.grad(run, 1)(Y, X) == Y
    # The derivative depends on it.
    assert jax.grad(jax.grad(run, 1), 0)(Y, X) == 1.0


def test_a_function_compiles_once():
    step = filter_jit(lambda f, x: jax.grad(f)(x, Y))
    for _ in range(3):
        step(product, X)
    assert step.trace_count == 1


def test_a_sharded_array_stays_where_it_is():
    mesh = jax.make_mesh((8,), ("data",))
    with jax.set_mesh(mesh):
        x = jax.device_put(jnp.arange(16.0), jax.NamedSharding(mesh, jax.P("data")))
        y, n = x + 1.0, x.astype(int)

        @filter_custom_jvp
        def f(x, y, n):
            return jnp.sin(x) * y + n.astype(x.dtype)

        @f.def_jvp
        def rule(primals, tangents):
            (x, y, n), (x_dot, y_dot, n_dot) = primals, tangents
            return f(x, y, n), jnp.cos(x) * x_dot * y + jnp.sin(x) * y_dot + n_dot

        grad = jax.jit(jax.grad(lambda x: f(x, y, n).sum()))
        compiled = grad.lower(x).compile()
        got = grad(x)
        assert got.sharding.spec == jax.P("data")
        assert "all-gather" not in compiled.as_text()
        close(got, jnp.cos(x) * y)


def test_inside_shard_map():
    mesh = jax.make_mesh((8,), ("data",), axis_types=(jax.sharding.AxisType.Auto,))
    a, b, n = jnp.arange(8.0), jnp.arange(8.0) + 1.0, jnp.arange(8)

    @filter_custom_jvp
    def f(a, b, n):
        return a * b * n.astype(a.dtype)

    @f.def_jvp
    def rule(primals, tangents):
        (a, b, n), (a_dot, b_dot, n_dot) = primals, tangents
        return f(a, b, n), (a_dot * b + a * b_dot) * n.astype(a.dtype) + a * b * n_dot

    def loss(a, b):
        specs = (jax.P("data"),) * 3
        return jax.shard_map(f, mesh=mesh, in_specs=specs, out_specs=jax.P("data"))(a, b, n).sum()

    for wrt in (0, 1, (0, 1)):
        close(
            jax.jit(jax.grad(loss, wrt))(a, b),
            jax.grad(lambda a, b: (a * b * n.astype(a.dtype)).sum(), wrt)(a, b),
        )


def test_double_precision_and_complex_numbers():
    with jax.enable_x64(True):
        assert jax.grad(product)(0.5, jnp.float64(2.0)).dtype == jnp.float64
        close(jax.grad(product)(0.1, jnp.float64(2.0)), 2 * jnp.cos(jnp.float64(0.1)), rtol=1e-14)
    z = jnp.complex64(1 + 2j)
    got = jax.grad(lambda z: jnp.real(product(z, jnp.complex64(2.0))))(z)
    close(got, jax.grad(lambda z: jnp.real(jnp.sin(z) * 2.0))(z))


# --- refusals ---


def test_what_cannot_be_called_is_refused():
    with pytest.raises(TypeError, match="filter_custom_jvp needs a function"):
        inspect.unwrap(filter_custom_jvp)(3)
    with pytest.raises(TypeError, match="def_jvp needs a function"):
        filter_custom_jvp(jnp.sin).def_jvp(3)


def test_a_function_without_a_rule_is_refused():
    f = filter_custom_jvp(product_rule)
    for call in (f, jax.jit(f), jax.grad(f)):
        with pytest.raises(
            TypeError,
            match=r"`product_rule` has no rule yet[\s\S]*decorate the rule with `@product_rule.def_jvp`",
        ):
            call(X, Y)


def test_a_second_rule_is_refused():
    with pytest.raises(ValueError, match="`product` already has a rule"):
        product.def_jvp(lambda primals, tangents: (primals[0], tangents[0]))


def returning(result):
    f = filter_custom_jvp(lambda x: {"a": x, "b": (jnp.zeros((2, 3)), "text")})
    f.def_jvp(lambda primals, tangents: result(*primals, *tangents))
    return f


def whole(x):
    return {"a": x, "b": (jnp.zeros((2, 3)), "text")}


MISTAKES = {
    "no_pair": (lambda x, t: whole(x), "must return a pair"),
    "structure": (
        lambda x, t: (whole(x), {"a": t}),
        r"the `tangent_out` of the rule `<lambda>` does not have the structure of the result",
    ),
    "leaf_for_subtree": (
        lambda x, t: (whole(x), {"a": t, "b": t}),
        r"`tangent_out` of the rule `<lambda>` does not have the structure",
    ),
    "shape": (
        lambda x, t: (whole(x), {"a": t, "b": (jnp.zeros((3, 2)), None)}),
        r"does not fit the value it belongs to\n  where: tangent_out\['b'\]\[0\]\n  expected: f32\[2,3\]",
    ),
    "zero_shape": (
        lambda x, t: (whole(x), {"a": ZeroTangent((1,), jnp.float32), "b": None}),
        r"where: tangent_out\['a'\]\n[\s\S]*got: ZeroTangent",
    ),
    "dtype": (
        lambda x, t: (whole(x), {"a": t.astype(jnp.bfloat16), "b": None}),
        r"where: tangent_out\['a'\]\n  expected: f32\[\], or None for zero\n  got: bf16\[\]",
    ),
    "weak_complex": (
        lambda x, t: (whole(x), {"a": 1j, "b": None}),
        r"where: tangent_out\['a'\]",
    ),
    "no_array": (
        lambda x, t: (whole(x), {"a": "text", "b": None}),
        r"where: tangent_out\['a'\]",
    ),
    "not_differentiable": (
        lambda x, t: (whole(x), {"a": t, "b": (None, t)}),
        r"where: tangent_out\['b'\]\[1\]\n  expected: None",
    ),
}


@pytest.mark.parametrize(("result", "text"), MISTAKES.values(), ids=MISTAKES.keys())
def test_a_result_of_the_rule_that_does_not_fit_is_named(result, text):
    with pytest.raises(TypeError, match=text):
        jax.jvp(lambda x: returning(result)(x)["a"], (X,), (Y,))


def test_a_rule_may_return_what_jax_gives_for_integers():
    """Their tangents have the dtype float0 in JAX."""

    def value(x):
        return {"y": x**2, "steps": jnp.arange(2), "done": x > 0}

    f = vernal.filter_custom_jvp(value)
    f.def_jvp(lambda primals, tangents: jax.jvp(value, primals, tangents))
    for transform in (jax.grad, vernal.filter_grad):
        gradient = transform(lambda x: f(x)["y"])
        assert gradient(jnp.float32(3)) == jax.jit(gradient)(jnp.float32(3)) == 6
    g = vernal.filter_custom_jvp(value)
    nothing = np.zeros((), jax.dtypes.float0)
    g.def_jvp(
        lambda primals, tangents: (value(*primals), {"y": nothing, "steps": None, "done": None})
    )
    with pytest.raises(TypeError, match=r"tangent_out\['y'\](.|\n)*got: float0"):
        jax.grad(lambda x: g(x)["y"])(3.0)


def test_a_rule_with_another_value_than_the_function_is_refused():
    f = filter_custom_jvp(lambda x: (x, "text"))
    f.def_jvp(lambda primals, tangents: ((primals[0], "other"), (tangents[0], None)))
    with pytest.raises(
        TypeError,
        match=r"returns a result that does not match `<lambda>`[\s\S]*out\[1\]: expected 'text'",
    ):
        jax.grad(jax.jit(lambda x: f(x)[0]))(X)


def test_a_function_with_a_rule_is_transposed_if_it_is_linear():
    @filter_custom_jvp
    def doubled(x):
        return 2 * x

    @doubled.def_jvp
    def _(primals, tangents):
        return doubled(*primals), 3 * tangents[0]

    (ct,) = jax.linear_transpose(doubled, jnp.ones(2))(jnp.ones(2))
    np.testing.assert_allclose(ct, [2.0, 2.0])

    @filter_custom_jvp
    def squared(x):
        return x * x

    @squared.def_jvp
    def _(primals, tangents):
        return squared(*primals), 2 * primals[0] * tangents[0]

    with pytest.raises(ValueError, match="cannot be transposed"):
        jax.linear_transpose(squared, jnp.ones(2))(jnp.ones(2))


@pytest.mark.parametrize("shape", [(), (2,)])
def test_a_rule_with_a_random_key_in_a_scan_outside_of_jit(shape):
    @filter_custom_jvp
    def noisy(x, key, n):
        draws = (
            jax.vmap(lambda k: jax.random.normal(k, ()))(key)
            if shape
            else jax.random.normal(key, ())
        )
        return jnp.sin(x) + jnp.sum(draws), n + 1

    @noisy.def_jvp
    def _(primals, tangents):
        return noisy(*primals), (jnp.cos(primals[0]) * tangents[0], None)

    keys = jax.random.split(jax.random.key(1), (4, *shape))

    def total(y, fn):
        return jax.lax.scan(
            lambda c, k: (fn(c * y, k, jnp.asarray(3))[0], None), jnp.asarray(1.0), keys
        )[0]

    def plain(x, key, n):
        return jnp.sin(x) + jax.lax.stop_gradient(noisy(jnp.asarray(0.0), key, n)[0]), n

    found = jax.grad(total)(1.3, noisy)
    np.testing.assert_allclose(
        found, jax.jit(jax.grad(total), static_argnums=1)(1.3, plain), rtol=1e-5
    )
