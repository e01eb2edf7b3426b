import copy
import gc
import inspect
import pickle
import weakref
from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from vernal import Module, NoGradient, filter_grad, filter_jit, filter_value_and_grad, filter_vjp
from vernal.transforms import ZeroTangent, filter_custom_vjp


def close(got, want, rtol=1e-6):
    assert jax.tree.structure(got) == jax.tree.structure(want)
    for a, b in zip(jax.tree.leaves(got), jax.tree.leaves(want), strict=True):
        np.testing.assert_allclose(a, b, rtol=rtol, atol=1e-6)


@filter_custom_vjp
def square(x, name="text", *, power=2):
    "Squares."
    return x**power


@square.def_fwd
def square_fwd(perturbed, x, name="text", *, power=2):
    return x**power, (x, jnp.sin, name)


@square.def_bwd
def square_bwd(residuals, grad_out, perturbed, x, name="text", *, power=2):
    x, function, kept = residuals
    assert function is jnp.sin
    assert kept == name
    assert perturbed is True
    return power * x * grad_out


X, Y = jnp.float32(0.5), jnp.float32(2.0)


def define(fn, fwd, bwd, **options):
    f = filter_custom_vjp(fn)
    f.def_fwd(fwd)
    f.def_bwd(bwd, **options)
    return f


def scale_gradient(by):
    """The identity, with a gradient that shows that the rule is used."""
    return define(
        lambda x: x,
        lambda perturbed, x: (x, None),
        lambda residuals, grad_out, perturbed, x: jax.tree.map(lambda g: by * g, grad_out),
    )


def test_the_rules_are_returned_and_used():
    assert square_fwd.__name__ == "square_fwd"
    assert square_bwd.__name__ == "square_bwd"
    assert square(X) == X**2
    close(jax.grad(square)(X), 2 * X)
    assert jax.grad(scale_gradient(7.0))(X) == 7.0
    assert filter_value_and_grad(square)(X, "any", power=2) == (X**2, 2 * X)


@pytest.mark.parametrize(
    "number", [3.0, np.float32(3.0), jnp.float32(3.0)], ids=["float", "numpy", "jax"]
)
def test_python_numbers_are_differentiated_as_arrays(number):
    # With Equinox the first of these is zero, and the rule is never called.
    assert jax.grad(square)(number) == 6.0
    assert jax.grad(jax.jit(square))(number) == 6.0
    assert jax.grad(jax.grad(square))(number) == 2.0
    assert jax.grad(scale_gradient(7.0))(number) == 7.0
    assert jax.vjp(square, number)[1](jnp.float32(1.0)) == (6.0,)


def test_it_looks_like_the_function_and_pickles_as_one():
    assert (square.__name__, square.__doc__) == ("square", "Squares.")
    assert "fwd=<function square_fwd>, bwd=<function square_bwd>" in repr(square)
    assert pickle.loads(pickle.dumps(square)) is square
    f = scale_gradient(2.0)
    assert copy.deepcopy(f) == f


def test_derivatives_of_higher_order():
    cube = define(
        lambda x: x**3,
        lambda perturbed, x: (x**3, x),
        lambda x, grad_out, perturbed, _: 3 * x**2 * grad_out,
    )
    close(jax.grad(jax.grad(cube))(Y), 6 * Y)
    close(jax.jvp(jax.grad(cube), (Y,), (X,))[1], 6 * Y * X)
    close(jax.jit(jax.grad(jax.grad(jax.grad(cube))))(Y), jnp.float32(6.0))


def test_forward_mode_is_refused():
    # The transpose of the way back would not do: JAX transposes rules that are not linear without a word.
    ways_back = {
        "linear": lambda g: 2 * g,
        "affine": lambda g: 2 * g + 1,
        "rounded": lambda g: jnp.floor(8 * g).astype(jnp.int32).astype(jnp.float32),
        "sign": lambda g: jnp.where(g > 0, jnp.float32(3), jnp.float32(-3)),
    }
    for back in ways_back.values():
        f = define(
            lambda x: x,
            lambda perturbed, x: (x, None),
            lambda residuals, grad_out, perturbed, _, back=back: back(grad_out),
        )
        for run in (
            f,
            jax.jit(f),
            lambda x, f=f: jax.lax.scan(lambda c, _: (f(c), None), x, length=2)[0],
        ):
            mapped = jax.vmap(jax.jacfwd(run))
            for forward in (
                jax.jacfwd(run),
                jax.jit(jax.jacfwd(run)),
                lambda x, mapped=mapped: mapped(x[None]),
                jax.jit(jax.grad(jax.jacfwd(run))),
            ):
                with pytest.raises(
                    TypeError, match=r"no derivative in forward mode(.|\n)*filter_custom_jvp"
                ):
                    forward(X)
        close(jax.grad(f)(X), back(jnp.float32(1)))


def test_a_value_that_hides_in_an_object_has_no_derivative():
    class Box:
        pass

    box = Box()
    scaled = define(
        lambda x: box.w * x,
        lambda perturbed, x: (box.w * x, None),
        lambda residuals, grad_out, perturbed, _: box.w * grad_out,
    )

    def run(w):
        box.w = w
        return jax.lax.cond(w > 0, scaled, jnp.sin, X)

    with pytest.raises(ValueError, match="which it reads from a global variable or from an object"):
        jax.jit(jax.grad(run))(Y)


class Layer(Module):
    w: jax.Array
    n: jax.Array
    activation: Callable[..., Any]

    @filter_custom_vjp
    def __call__(self, x):
        return self.activation(self.w * x), self.n, self.activation

    @__call__.def_fwd
    def fwd(perturbed, self, x):
        assert (perturbed.w, perturbed.n) == (True, False)
        out, pullback = jax.vjp(lambda w: self.activation(w * x), self.w)
        return (out, self.n, self.activation), pullback

    @__call__.def_bwd
    def bwd(pullback, grad_out, perturbed, self, x):
        out, *nothing = grad_out
        assert nothing == [None, None]
        return Layer(pullback(out)[0], None, self.activation)


@pytest.mark.parametrize("jit", [False, True])
def test_methods_of_modules_with_any_objects(jit):
    layer = Layer(Y, jnp.array(3), jnp.tanh)
    maybe_jit = filter_jit if jit else lambda f: f
    grad = maybe_jit(filter_grad(lambda layer, x: layer(x)[0]))(layer, X)
    close(grad.w, (1 - jnp.tanh(X * Y) ** 2) * X)
    assert grad.n == NoGradient()
    out, n, activation = maybe_jit(lambda layer, x: layer(x))(layer, X)
    assert (n, activation) == (3, jnp.tanh)
    batched = jax.vmap(jax.grad(lambda layer, x: layer(x)[0], allow_int=True), (None, 0))
    assert batched(layer, jnp.ones(4)).w.shape == (4,)


def test_residuals_may_hide_what_is_traced():
    f = define(
        lambda x: jnp.sin(x),
        lambda perturbed, x: (jnp.sin(x), {"f": lambda g, y=2 * x: jnp.cos(y / 2) * g, "n": 3}),
        lambda residuals, grad_out, perturbed, x: residuals["f"](grad_out) * (residuals["n"] - 2),
    )
    with jax.checking_leaks():
        for transform in (jax.grad(f), jax.jit(jax.grad(f)), jax.grad(jax.jit(f))):
            close(transform(X), jnp.cos(X))
        close(jax.grad(jax.grad(f))(X), -jnp.sin(X))
        close(jax.vmap(jax.grad(f))(X[None]), jnp.cos(X)[None])
        close(jax.grad(lambda x: jax.lax.map(f, x).sum())(X[None]), jnp.cos(X)[None])


def test_perturbed_tells_what_is_differentiated():
    seen = []

    def fwd(perturbed, args):
        seen.append(perturbed)
        return args[0] * args[1]["y"], None

    f = define(
        lambda args: args[0] * args[1]["y"],
        fwd,
        lambda residuals, g, perturbed, args: (
            g * args[1]["y"],
            {"y": g * args[0], "n": None},
            None,
        ),
    )
    rest = {"y": Y, "n": jnp.array(1)}, "text"
    for transform in (lambda f: f, jax.jit):
        close(transform(jax.grad(lambda x: f((x, *rest))))(X), Y)
        close(transform(jax.grad(lambda y: f((X, {**rest[0], "y": y}, "text"))))(Y), X)
    assert (
        seen
        == [
            (True, {"y": False, "n": False}, False),
            (False, {"y": True, "n": False}, False),
        ]
        * 2
    )


def frugal(count):
    """A product, of which the rule keeps only what is needed for what is perturbed."""
    return define(
        lambda args: args[0] * args[1],
        lambda p, args: (
            args[0] * args[1],
            # Also things that are not inputs, and many of them.
            [(1.0 * args[1] if p[0] else None, args[0] if p[1] else None)] * count,
        ),
        lambda kept, g, p, args: (
            g * kept[0][0] if p[0] else None,
            g * kept[0][1] if p[1] else None,
        ),
    )


@pytest.mark.parametrize("count", [1, 12])
@pytest.mark.parametrize(
    "around",
    [
        jax.jit,
        jax.checkpoint,
        lambda f: jax.jit(lambda w, x: jax.vmap(f, (None, 0))(w, x[None])[0]),
        lambda f: jax.jit(lambda w, x: jax.lax.scan(lambda c, _: (f(w, c), None), x, length=1)[0]),
    ],
    ids=["jit", "checkpoint", "vmap", "scan"],
)
@pytest.mark.sample(3)
def test_one_program_may_be_run_with_different_things_perturbed_before_it_is_run_back(
    around, count
):
    # JAX's own rules with symbolic zeros give wrong gradients here.
    f = frugal(count)

    def network(layer, w, x):
        # `x` is not perturbed in the first call, nor the first argument in the last.
        return layer(x, layer(w[1], layer(w[0], x))) * layer(w[1], x)

    w, x = (jnp.float32(2.0), jnp.float32(3.0)), jnp.float32(5.0)
    got, want = (
        jax.grad(lambda w, layer=layer: network(layer, w, x))(w)
        for layer in (around(lambda w, x: f((w, x))), lambda w, x: w * x)
    )
    close(got, want)

    layer = around(lambda w, x: f((w, x)))
    (_, by_w), (_, by_x) = (
        jax.vjp(lambda w: layer(w, x), w[0]),
        jax.vjp(lambda x: layer(w[0], x), x),
    )
    one = jnp.float32(1.0)
    assert (by_w(one), by_x(one), by_w(one)) == ((5.0,), (2.0,), (5.0,))


@pytest.mark.parametrize("symbolic_zeros", [False, True])
@pytest.mark.parametrize("jit", [False, True])
def test_the_gradient_of_what_is_not_used(symbolic_zeros, jit):
    seen = []

    def fn(x):
        return {"a": x, "b": 2.0 * x * jnp.ones(3), "n": jnp.arange(2), "t": "text"}

    def bwd(residuals, grad_out, perturbed, x):
        seen.append(jax.tree.map(lambda g: g if isinstance(g, ZeroTangent) else "array", grad_out))
        return grad_out["a"] + grad_out["b"].sum()

    f = define(fn, lambda perturbed, x: (fn(x), None), bwd, symbolic_zeros=symbolic_zeros)
    maybe_jit = jax.jit if jit else lambda f: f
    close(maybe_jit(jax.grad(lambda x: f(x)["a"]))(X), jnp.float32(1.0))
    zero = ZeroTangent((3,), jnp.float32) if symbolic_zeros else "array"
    assert seen == [{"a": "array", "b": zero, "n": None, "t": None}]


def test_none_is_a_gradient_of_zero():
    for nothing in (None, (None, None), (ZeroTangent((), jnp.float32), {"a": None})):
        f = define(
            lambda args: args[0] * args[1]["a"],
            lambda perturbed, args: (args[0] * args[1]["a"], None),
            lambda residuals, g, perturbed, args, nothing=nothing: nothing,
        )
        close(jax.grad(f)((X, {"a": Y})), (jnp.float32(0.0), {"a": jnp.float32(0.0)}))


def test_vmap_with_axes():
    f = define(
        lambda args: args[0] @ args[1],
        lambda perturbed, args: (args[0] @ args[1], None),
        lambda residuals, g, perturbed, args: (g[:, None] * args[1][None], args[0].T @ g),
    )
    a, b = jnp.arange(12.0).reshape(2, 2, 3), jnp.arange(3.0)
    grad, want = (
        jax.grad(lambda a, b, g=g: g((a, b)).sum(), (0, 1)) for g in (f, lambda t: t[0] @ t[1])
    )
    for axes in ((0, None), (1, None)):
        close(jax.vmap(grad, axes)(a, b), jax.vmap(want, axes)(a, b))


@pytest.mark.parametrize("transform", [jax.grad, lambda f: jax.jit(jax.grad(f)), filter_grad])
@pytest.mark.sample(3)
def test_what_the_rules_captured_is_freed(transform):
    def define():
        scale = jnp.ones(3)

        @filter_custom_vjp
        def f(x):
            return (scale * x).sum()

        @f.def_fwd
        def _(perturbed, x):
            return (scale * x).sum(), None

        @f.def_bwd
        def _(residuals, grad_out, perturbed, x):
            return grad_out * scale

        transform(f)(jnp.ones(3))
        return weakref.ref(scale)

    gone = define()
    gc.collect()
    assert gone() is None


# --- what the function and the rules close over ---


def sine(a, x):
    return jnp.sin(a * x)


def closing_over(a, x):
    """`sine(a, x)`, with `a` closed over by the function and by its rules."""
    f = define(
        lambda x: jnp.sin(a * x),
        lambda perturbed, x: (jnp.sin(a * x), None),
        lambda residuals, g, perturbed, x: jnp.cos(a * x) * a * g,
    )
    return f(x)


def closing_over_in_an_argument(a, x):
    """`sine(a, x)`, with `a` closed over by a function that is an argument."""

    def fwd(perturbed, x, scale):
        inner, pullback = jax.vjp(scale, x)
        return jnp.sin(inner), (inner, pullback)

    f = define(
        lambda x, scale: jnp.sin(scale(x)),
        fwd,
        lambda residuals, g, perturbed, x, scale: residuals[1](jnp.cos(residuals[0]) * g)[0],
    )
    return f(x, lambda x: a * x)


DERIVATIVES = {
    "grad": lambda f: jax.grad(f, (0, 1)),
    "grad_of_closed": lambda f: jax.grad(f, 0),
    "jit_of_grad": lambda f: jax.jit(jax.grad(f, (0, 1))),
    "grad_of_jit": lambda f: jax.grad(jax.jit(f), (0, 1)),
    "grad_of_grad": lambda f: jax.jacrev(jax.grad(f, (0, 1)), (0, 1)),
    "jvp_of_grad": lambda f: jax.jacfwd(jax.grad(f, (0, 1)), (0, 1)),
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
}


@pytest.mark.parametrize("derivative", DERIVATIVES.values(), ids=DERIVATIVES.keys())
@pytest.mark.parametrize("f", [closing_over, closing_over_in_an_argument])
@pytest.mark.sample(10)
def test_what_is_closed_over_is_differentiated_and_does_not_leak(f, derivative):
    a, x = jnp.float32(0.7), jnp.float32(0.4)
    with jax.checking_leaks():
        got = derivative(f)(a, x)
    close(got, derivative(sine)(a, x), rtol=2e-6)


def test_the_gradient_of_what_is_closed_over_beside_integers_and_unused_outputs():
    def run(a, x):
        f = define(
            lambda x: (a * x, jnp.arange(2), a),
            lambda perturbed, x: ((a * x, jnp.arange(2), a), None),
            lambda residuals, g, perturbed, x: a * g[0],
        )
        return f(x)[0]

    with jax.checking_leaks():
        close(jax.grad(run, (0, 1))(Y, X), (X, Y))
        close(jax.jit(jax.grad(run, (0, 1)))(Y, X), (X, Y))


def test_what_only_a_rule_closes_over_is_a_value():
    def run(a, x):
        return define(
            lambda x: x,
            lambda perturbed, x: (x, None),
            lambda residuals, g, perturbed, x: a * g,
        )(x)

    assert jax.grad(run, 0)(Y, X) == 0.0
    assert jax.grad(run, 1)(Y, X) == Y
    assert jax.grad(jax.grad(run, 1), 0)(Y, X) == 1.0


def test_with_symbolic_zeros_the_work_for_unused_outputs_is_not_there():
    def count(symbolic_zeros):
        f = define(
            lambda x: (x @ x, x.T),
            lambda perturbed, x: ((x @ x, x.T), None),
            lambda residuals, g, perturbed, x: x.T @ g[0] + g[0] @ x.T + g[1].T,
            symbolic_zeros=symbolic_zeros,
        )
        _, pullback = jax.vjp(lambda x: f(x)[1], jnp.ones((3, 3)))
        return str(jax.make_jaxpr(pullback)(jnp.ones((3, 3)))).count("matmul") + str(
            jax.make_jaxpr(pullback)(jnp.ones((3, 3)))
        ).count("dot_general")

    assert count(True) == 0
    assert count(False) > 0


def test_a_sharded_array_stays_where_it_is():
    mesh = jax.make_mesh((8,), ("data",))
    with jax.set_mesh(mesh):
        x = jax.device_put(jnp.arange(16.0), jax.NamedSharding(mesh, jax.P("data")))
        f = define(
            lambda x: (x**2, x),
            lambda perturbed, x: ((x**2, x), None),
            lambda residuals, g, perturbed, x: 2 * x * g[0] + g[1],
        )
        grad = jax.jit(jax.grad(lambda x: f(x)[0].sum()))
        got = grad(x)
        assert got.sharding.spec == jax.P("data")
        assert "all-gather" not in grad.lower(x).compile().as_text()
        close(got, 2 * x)


def test_inside_shard_map():
    mesh = jax.make_mesh((8,), ("data",), axis_types=(jax.sharding.AxisType.Auto,))
    f = frugal(1)
    a, b = jnp.arange(8.0), jnp.arange(8.0) + 1.0

    def loss(a, b, g):
        spec = jax.P("data")
        mapped = jax.shard_map(g, mesh=mesh, in_specs=(spec, spec), out_specs=spec)
        return mapped(a, b).sum()

    for wrt in (0, 1, (0, 1)):
        got = jax.jit(jax.grad(lambda a, b: loss(a, b, lambda *args: f(args)), wrt))(a, b)
        close(got, jax.grad(lambda a, b: (a * b).sum(), wrt)(a, b))


def test_double_precision_and_complex_numbers():
    with jax.enable_x64(True):
        assert jax.grad(square)(0.5).dtype == jnp.float64
        close(jax.grad(square)(0.1), jnp.float64(0.2), rtol=1e-14)
    z = jnp.complex64(1 + 2j)
    got = jax.grad(lambda z: jnp.real(square(z)))(z)
    close(got, jax.grad(lambda z: jnp.real(z**2))(z))


# --- refusals ---


def test_what_cannot_be_called_is_refused():
    with pytest.raises(TypeError, match="filter_custom_vjp needs a function"):
        inspect.unwrap(filter_custom_vjp)(3)
    with pytest.raises(TypeError, match="def_fwd needs a function"):
        filter_custom_vjp(jnp.sin).def_fwd(3)
    with pytest.raises(TypeError, match="def_bwd needs a function"):
        filter_custom_vjp(jnp.sin).def_bwd(3)


def test_a_function_without_a_rule_is_refused():
    f = filter_custom_vjp(square_fwd)
    with pytest.raises(TypeError, match="given by `square_fwd.def_fwd`"):
        f(X)
    f.def_fwd()(square_fwd)
    with pytest.raises(TypeError, match="given by `square_fwd.def_bwd`"):
        f(X)


def test_a_second_rule_is_refused():
    with pytest.raises(ValueError, match="`square` already has a rule"):
        square.def_fwd(square_fwd)
    with pytest.raises(ValueError, match="`square` already has a rule"):
        square.def_bwd(square_bwd)


def test_a_call_without_a_positional_argument_is_refused():
    with pytest.raises(TypeError, match="`square` was called without a positional argument"):
        square()
    with pytest.raises(TypeError, match=r"by position\n  got: keyword arguments only"):
        square(x=X)


def test_another_argument_that_is_differentiated_is_refused_by_name():
    f = define(
        lambda x, y, *, z: x * y * z["k"],
        lambda perturbed, x, y, *, z: (x * y * z["k"], None),
        lambda residuals, g, perturbed, x, y, *, z: g * y * z["k"],
    )
    text = r"differentiated with respect to an argument that its rule does not handle"
    for transform in (lambda f: f, jax.jit):
        with pytest.raises(ValueError, match=text + r"\n  where: argument `y`[\s\S]*as a tuple"):
            transform(jax.grad(lambda y: f(X, y, z={"k": X})))(Y)
        with pytest.raises(ValueError, match=text + r"\n  where: argument `z\['k'\]`"):
            transform(jax.grad(lambda z: f(X, Y, z={"k": z})))(Y)
    close(jax.grad(lambda x: f(x, Y, z={"k": Y}))(X), Y * Y)


def test_a_fwd_that_returns_no_pair_or_something_else_is_refused():
    f = define(lambda x: x, lambda perturbed, x: x, square_bwd)
    with pytest.raises(TypeError, match=r"the rule `<lambda>` must return a pair[\s\S]*residuals"):
        jax.grad(f)(X)
    f = define(lambda x: x, lambda perturbed, x: (x[None], None), square_bwd)
    with pytest.raises(TypeError, match=r"returns a result that does not match `<lambda>`"):
        jax.grad(jax.jit(f))(X)


MISTAKES = {
    "structure": (
        lambda g: (g, g),
        "does not have the structure of the first argument[\\s\\S]*not in a tuple with one for each argument",
    ),
    "shape": (
        lambda g: {"a": g[None], "n": None},
        r"the `gradient` of the rule `<lambda>` does not fit the value it belongs to\n"
        r"  where: gradient\['a'\]\n  expected: f32\[\], or None for zero\n  got: f32\[1\]",
    ),
    "dtype": (
        lambda g: {"a": g.astype(jnp.bfloat16), "n": None},
        r"where: gradient\['a'\]\n[\s\S]*got: bf16\[\]",
    ),
    "integers": (
        lambda g: {"a": g, "n": jnp.zeros(2)},
        r"where: gradient\['n'\]\n  expected: None\n  got: f32\[2\]",
    ),
}


@pytest.mark.parametrize(("gradient", "text"), MISTAKES.values(), ids=MISTAKES.keys())
def test_a_gradient_that_does_not_fit_is_named(gradient, text):
    f = define(
        lambda tree: tree["a"],
        lambda perturbed, tree: (tree["a"], None),
        lambda residuals, g, perturbed, tree: gradient(g),
    )
    with pytest.raises(TypeError, match=text):
        filter_vjp(f, {"a": X, "n": jnp.arange(2)})[1](Y)
