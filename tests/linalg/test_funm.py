"""`funm`: against dense functions of matrices, with derivatives, and with honest errors."""

import fractions
import functools
import itertools
import math

import jax
import jax.numpy as jnp
import numpy as np
import pytest
import scipy.linalg
from jax.scipy.linalg import expm, sqrtm

from vernal.estimators import trace_of_function
from vernal.linalg import FunctionOperator, MatrixOperator, funm
from vernal.linalg._divided import divided_differences

SIZE = 12
slowly = functools.partial(pytest.param, marks=pytest.mark.slow)
either = pytest.mark.parametrize("symmetric", [True, slowly(False)])


def matrix(seed, dtype, symmetric, size=SIZE):
    rng = np.random.default_rng(seed)
    x = rng.standard_normal((size, size))
    if np.issubdtype(dtype, np.complexfloating):
        x = x + 1j * rng.standard_normal((size, size))
    x = (x + x.conj().T) / 2 if symmetric else x
    return jnp.asarray(x / size**0.5, dtype)


def vector(seed, dtype, size=SIZE):
    return matrix(seed, dtype, False, size)[0] * size**0.5


def of(symmetric):
    return jnp.exp if symmetric else expm


def value(x, v, symmetric, steps=SIZE, f=None):
    operator = MatrixOperator(x, symmetric=symmetric)
    return funm(f or of(symmetric), operator, v, steps=steps).value


def paired(cotangents, tangents):
    """JAX's pairing: the real part of the sum of products."""
    leaves = zip(jax.tree.leaves(cotangents), jax.tree.leaves(tangents), strict=True)
    return sum(float(np.real(np.sum(np.asarray(a) * np.asarray(b)))) for a, b in leaves)


@pytest.mark.parametrize(
    ("symmetric", "dtype"),
    [
        (True, "complex128"),
        (False, "float64"),
        slowly(True, "float64"),
        slowly(False, "complex128"),
    ],
)
def test_values_and_derivatives_are_those_of_the_dense_function(symmetric, dtype):
    with jax.enable_x64(True):
        x, e = (matrix(seed, dtype, symmetric) for seed in (0, 1))
        v, dv, c = (vector(seed, dtype) for seed in (2, 3, 4))
        fn = functools.partial(value, symmetric=symmetric)
        exact, change = scipy.linalg.expm_frechet(np.asarray(x), np.asarray(e))
        out, dot = jax.jvp(fn, (x, v), (e, dv))
        np.testing.assert_allclose(out, exact @ v, atol=1e-13)
        np.testing.assert_allclose(dot, change @ v + exact @ dv, atol=1e-12)
        pulled = jax.vjp(fn, x, v)[1](c)
        np.testing.assert_allclose(paired(pulled, (e, dv)), paired(c, dot), rtol=1e-11)
        h = 1e-6
        ahead, behind = (fn(x + t * e, v + t * dv) for t in (h, -h))
        np.testing.assert_allclose(dot, (ahead - behind) / (2 * h), atol=1e-8)


@either
def test_few_steps_find_the_derivatives_too(symmetric):
    with jax.enable_x64(True):
        size = 60
        x, e = (matrix(seed, "float64", symmetric, size) for seed in (0, 1))
        v, c = (vector(seed, "float64", size) for seed in (2, 4))
        fn = functools.partial(value, symmetric=symmetric, steps=18)
        exact, change = scipy.linalg.expm_frechet(np.asarray(x), np.asarray(e))
        found, dot = jax.jvp(lambda x: fn(x, v), (x,), (e,))
        np.testing.assert_allclose(found, exact @ v, atol=1e-8)
        np.testing.assert_allclose(dot, change @ v, atol=1e-8)
        pulled = jax.vjp(fn, x, v)[1](c)
        np.testing.assert_allclose(pulled[1], exact.T @ c, atol=1e-8)
        np.testing.assert_allclose(np.sum(pulled[0] * e), c @ change @ v, atol=1e-8)


@either
@pytest.mark.parametrize(
    "kind",
    ["identity", "repeated", "eigenvector", "zero vector", "zero", "low rank", "small", "rounded"],
)
@pytest.mark.sample(2)
def test_derivatives_leave_an_exhausted_space(symmetric, kind):
    with jax.enable_x64(True):
        x = jnp.diag(jnp.asarray([1.0, 2.0, 2.0, 3.0, 3.0, 3.0]))
        v = jnp.arange(1.0, 7.0)
        if kind == "identity":
            x = 2 * jnp.eye(6)
        elif kind == "zero":
            x = 0 * x
        elif kind == "eigenvector":
            v = jnp.zeros(6).at[1].set(2.0)
        elif kind == "zero vector":
            v = 0 * v
        elif kind in ("low rank", "small"):
            factor = matrix(5, "float64", False, 6)[:, :2]
            x = factor @ factor.T * (1 if kind == "low rank" else 1e-3)
        elif kind == "rounded":
            x = jnp.diag(jnp.asarray([1.0, 0.0, 1e-16, -1e-16, 2e-16, 3e-13]))
        e, dv, c = (
            matrix(1, "float64", symmetric, 6),
            vector(3, "float64", 6),
            vector(4, "float64", 6),
        )
        fn = functools.partial(value, symmetric=symmetric, steps=5)
        exact, change = scipy.linalg.expm_frechet(np.asarray(x), np.asarray(e))
        found, dot = jax.jvp(fn, (x, v), (e, dv))
        np.testing.assert_allclose(found, exact @ v, atol=1e-12)
        np.testing.assert_allclose(dot, change @ v + exact @ dv, atol=1e-10)
        pulled = jax.vjp(fn, x, v)[1](c)
        np.testing.assert_allclose(paired(pulled, (e, dv)), c @ dot, rtol=1e-10)
        result = funm(of(symmetric), MatrixOperator(x, symmetric=symmetric), v, steps=5)
        assert result.is_finite and result.error < 1e-11 and result.tags_hold


SPECTRA = {
    "even": np.linspace(0.1, 3, 200),
    "low end": np.geomspace(1e-2, 10, 200),
    "algebraic": 0.1 + 1 / np.arange(1, 201.0) ** 2,
    "clusters": np.repeat([0.5, 1.0, 5.0, 20.0], 50) * (1 + 1e-3 * np.sin(np.arange(200))),
    "repeated": np.repeat([0.5, 1.0, 5.0, 20.0], 50),
}
FUNCTIONS = {
    "exp": (lambda x: jnp.exp(-x), lambda m: expm(-m), lambda x: np.exp(-x)),
    "sqrt": (jnp.sqrt, sqrtm, np.sqrt),
    "inverse": (lambda x: 1 / x, jnp.linalg.inv, lambda x: 1 / x),
}


@pytest.mark.parametrize("name", FUNCTIONS)
@pytest.mark.parametrize(
    ("dtype", "symmetric"),
    [
        ("float64", True),
        slowly("float32", True),
        slowly("float32", False),
        slowly("float64", False),
    ],
)
@pytest.mark.sample(3)
def test_the_error_covers_the_distance_from_the_truth(dtype, symmetric, name):
    elementwise, of_matrix, exact = FUNCTIONS[name]
    v = np.random.default_rng(0).standard_normal(200)
    with jax.enable_x64(dtype == "float64"):
        start, f = jnp.asarray(v, dtype), elementwise if symmetric else of_matrix
        for spectrum, nodes in SPECTRA.items():
            operator = MatrixOperator(jnp.diag(jnp.asarray(nodes, dtype)), symmetric=symmetric)
            for steps in (10, 24):
                found = funm(f, operator, start, steps=steps)
                away = np.linalg.norm(np.asarray(found.value, float) - exact(nodes) * v)
                assert found.is_finite and found.tags_hold
                assert away <= found.error, (spectrum, steps)


@either
@pytest.mark.parametrize("backwards", [False, slowly(True)])
def test_second_derivatives_in_a_scan_under_jit(symmetric, backwards):
    with jax.enable_x64(True):
        size = 6
        x, e = (matrix(seed, "float64", symmetric, size) for seed in (0, 1))
        v = vector(2, "float64", size)

        def total(of):
            def loss(x, v, t):
                def step(carry, c):
                    scaled = t * c * x
                    return jnp.sin(of(scaled, carry)), None

                return jnp.sum(jax.lax.scan(step, v, jnp.array([0.5, 1.0]))[0] ** 2)

            def along(x, v, t):
                slope = jax.grad(loss, (0, 1, 2))
                return jax.jvp(slope, (x, v, t), (e, v[::-1], jnp.ones_like(t)))

            def back(x, v, t):
                first = jax.grad(loss, (0, 1, 2))
                return jax.grad(
                    lambda x, v, t: paired_arrays((e, v[::-1], t), first(x, v, t)), (0, 1, 2)
                )(x, v, t)

            return jax.jit(back if backwards else along)(x, v, jnp.asarray(0.7))

        def paired_arrays(a, b):
            return sum(jnp.sum(x * y) for x, y in zip(a, b, strict=True))

        got = total(lambda x, v: value(x, v, symmetric, size))
        want = total(lambda x, v: expm(x) @ v)
        if symmetric:
            # A symmetric operator only knows the symmetric part of a derivative.
            got, want = (jax.tree.map(symmetrised, given) for given in (got, want))
        jax.tree.map(lambda a, b: np.testing.assert_allclose(a, b, rtol=1e-7, atol=1e-8), got, want)


@pytest.mark.slow
@pytest.mark.parametrize("symmetric", [True, False])
def test_second_derivatives_in_forward_mode(symmetric):
    with jax.enable_x64(True):
        x, e = (matrix(seed, "float64", symmetric, 5) for seed in (0, 1))
        v, dv = vector(2, "float64", 5), vector(3, "float64", 5)

        def twice(of):
            def once(x, v):
                return jax.jvp(of, (x, v), (e, dv))[1]

            back = jax.grad(lambda x, v: jnp.sum(once(x, v) ** 2), (0, 1))
            return jax.jvp(once, (x, v), (e, dv))[1], back(x, v)

        got, want = twice(lambda x, v: value(x, v, symmetric, 5)), twice(lambda x, v: expm(x) @ v)
        if symmetric:
            got, want = (jax.tree.map(symmetrised, given) for given in (got, want))
        jax.tree.map(lambda a, b: np.testing.assert_allclose(a, b, rtol=1e-7, atol=1e-8), got, want)


def symmetrised(x):
    return (x + x.T) / 2 if x.ndim == 2 else x


@pytest.mark.slow
@pytest.mark.parametrize("symmetric", [True, False])
def test_arrays_that_f_closes_over_have_mixed_derivatives(symmetric):
    with jax.enable_x64(True):
        x, e = (matrix(seed, "float64", symmetric, 5) for seed in (0, 1))
        v = vector(2, "float64", 5)

        def ours(t, x):
            f = (lambda n: jnp.exp(t * n)) if symmetric else (lambda m: expm(t * m))
            return jnp.sum(jnp.cos(value(x, v, symmetric, 5, f)))

        def dense(t, x):
            return jnp.sum(jnp.cos(expm(t * x) @ v))

        at = jnp.asarray(0.6), x
        for order in (jax.grad, lambda g: jax.grad(jax.grad(g))):
            np.testing.assert_allclose(order(ours)(*at), order(dense)(*at), rtol=1e-8)
        mixed = [
            jax.jvp(lambda x, g=g: jax.grad(g)(at[0], x), (x,), (e,))[1] for g in (ours, dense)
        ]
        np.testing.assert_allclose(*mixed, rtol=1e-8)
        other = [jax.grad(lambda x, g=g: jax.grad(g)(at[0], x))(x) for g in (ours, dense)]
        np.testing.assert_allclose(*map(symmetrised if symmetric else np.asarray, other), atol=1e-8)


@either
def test_batches_are_the_single_ones(symmetric):
    xs = jnp.stack([matrix(seed, "float32", symmetric) for seed in range(3)])
    vs = jnp.stack([vector(9, "float32"), jnp.zeros(SIZE), vector(8, "float32")])

    def both(x, v):
        return jax.value_and_grad(lambda x, v: jnp.sum(value(x, v, symmetric, 6) ** 2), (0, 1))(
            x, v
        )

    batch = jax.jit(jax.vmap(both))(xs, vs)
    for i in range(3):
        jax.tree.map(
            lambda a, b, i=i: np.testing.assert_allclose(a[i], b, rtol=2e-4, atol=2e-4),
            batch,
            both(xs[i], vs[i]),
        )


def test_a_propagator_keeps_the_length_and_has_derivatives():
    with jax.enable_x64(True):
        x, e = (matrix(seed, "complex128", True) for seed in (0, 1))
        v, c = vector(2, "complex128"), vector(3, "complex128")

        def fn(x):
            return value(x, v, True, SIZE, lambda n: jnp.exp(-1j * n.astype(complex)))

        exact, change = scipy.linalg.expm_frechet(-1j * np.asarray(x), -1j * np.asarray(e))
        found, dot = jax.jvp(fn, (x,), (e,))
        np.testing.assert_allclose(found, exact @ v, atol=1e-13)
        np.testing.assert_allclose(dot, change @ v, atol=1e-12)
        np.testing.assert_allclose(np.linalg.norm(found), np.linalg.norm(v), rtol=1e-13)
        np.testing.assert_allclose(paired(jax.vjp(fn, x)[1](c), (e,)), paired(c, dot), rtol=1e-11)


@pytest.mark.parametrize(
    ("f", "exact"), [slowly(sqrtm, scipy.linalg.sqrtm), (jnp.linalg.inv, np.linalg.inv)]
)
def test_other_functions_of_general_operators_have_derivatives(f, exact):
    with jax.enable_x64(True):
        x, e = matrix(0, "float64", False) + 3 * jnp.eye(SIZE), matrix(1, "float64", False)
        v, c = vector(2, "float64"), vector(3, "float64")
        fn = functools.partial(value, v=v, symmetric=False, f=f)
        np.testing.assert_allclose(fn(x), np.real(exact(x)) @ v, atol=1e-11)
        slope, h = jax.vjp(fn, x)[1](c)[0], 1e-5
        numeric = np.real(exact(x + h * e) - exact(x - h * e)) / (2 * h)
        np.testing.assert_allclose(np.sum(slope * e), c @ numeric @ v, rtol=1e-7)
        np.testing.assert_allclose(jax.jvp(fn, (x,), (e,))[1], numeric @ v, atol=1e-7)


def test_vectors_are_trees_of_any_precision():
    weights = {"a": jnp.asarray([1.0, 0.5]), "b": jnp.asarray(-1.0)}

    def found(weights, dtype=jnp.float32, symmetric=True):
        example = jax.tree.map(lambda w: jnp.ones(w.shape, dtype), weights)

        def fn(v):
            return jax.tree.map(lambda w, x: w.astype(dtype) * x, weights, v)

        operator = FunctionOperator(fn, example, symmetric=symmetric)
        return funm(of(symmetric), operator, example)

    for symmetric in (True, False):
        full = found(weights, symmetric=symmetric)
        jax.tree.map(
            lambda w, y: np.testing.assert_allclose(y, jnp.exp(w), rtol=1e-5), weights, full.value
        )
        slope = jax.grad(lambda w, s=symmetric: jnp.sum(found(w, symmetric=s).value["a"]))(weights)
        np.testing.assert_allclose(slope["a"], jnp.exp(weights["a"]), rtol=1e-4)
        np.testing.assert_allclose(slope["b"], 0, atol=1e-5)
        half = found(weights, jnp.bfloat16, symmetric)
        assert half.value["a"].dtype == jnp.bfloat16 and half.tags_hold and half.is_finite
        away = [half.value[k].astype(float) - jnp.exp(weights[k]) for k in weights]
        assert np.linalg.norm(np.hstack(away)) <= half.error < 0.5


@pytest.mark.parametrize("symmetric", [True, False])
def test_one_row_one_step_and_more_steps_than_rows(symmetric):
    one = funm(
        of(symmetric), MatrixOperator(jnp.full((1, 1), 2.0), symmetric=symmetric), jnp.ones(1)
    )
    np.testing.assert_allclose(one.value, np.exp([2.0]), rtol=1e-6)
    assert one.error < 1e-4 and one.matvecs == 1
    x, v = matrix(0, "float32", symmetric), vector(1, "float32")
    many = funm(of(symmetric), MatrixOperator(x, symmetric=symmetric), v, steps=1000)
    assert many.matvecs == SIZE
    few = funm(of(symmetric), MatrixOperator(x, symmetric=symmetric), v, steps=1)
    assert np.linalg.norm(few.value - many.value) < few.error


def test_what_is_not_known_says_so():
    x = jnp.diag(jnp.asarray([-1.0, 0.0, 1.0]))
    assert not funm(jnp.log, MatrixOperator(x, symmetric=True), jnp.ones(3)).is_finite
    assert not funm(jnp.linalg.inv, MatrixOperator(x), jnp.ones(3)).is_finite
    assert not funm(sqrtm, MatrixOperator(x), jnp.ones(3)).is_finite
    spoilt = jnp.full((3, 3), jnp.nan)
    for symmetric in (True, False):
        found = funm(of(symmetric), MatrixOperator(spoilt, symmetric=symmetric), jnp.ones(3))
        assert not found.is_finite
    false = MatrixOperator(matrix(0, "float32", False), symmetric=True)
    assert not funm(jnp.exp, false, vector(1, "float32")).tags_hold
    assert not funm(jnp.exp, MatrixOperator(x, positive_semidefinite=True), jnp.ones(3)).tags_hold
    singular = MatrixOperator(jnp.diag(jnp.asarray([0.0, 1.0, 4.0])), positive_semidefinite=True)
    found = funm(jnp.sqrt, singular, jnp.ones(3))
    np.testing.assert_allclose(found.value, [0, 1, 2], atol=1e-3)
    assert found.is_finite and np.linalg.norm(found.value - jnp.arange(3.0)) <= found.error

    # What f is not a function of a matrix cannot be refused here: it depends on a traced array.
    def traced(t):
        return funm(lambda m: jnp.exp(t * m), matrix(0, "float32", False), jnp.ones(SIZE)).value

    assert np.isnan(jax.jit(traced)(1.0)).all()


@either
def test_second_derivatives_of_an_exhausted_space_are_not_a_number(symmetric):
    def loss(x):
        return jnp.sum(value(x, jnp.ones(4), symmetric, 3) ** 2)

    x, e = jnp.eye(4), matrix(0, "float32", True, 4)
    assert np.isfinite(jax.grad(loss)(x)).all()
    assert np.isnan(jax.jvp(jax.grad(loss), (x,), (e,))[1]).any()


def test_it_refuses_what_f_and_the_operator_do_not_fit():
    symmetric, general = MatrixOperator(jnp.eye(3), symmetric=True), MatrixOperator(jnp.eye(3))
    v = jnp.ones(3)
    with pytest.raises(TypeError, match="`f` cannot be applied"):
        funm(expm, symmetric, v)
    with pytest.raises(TypeError, match="`f` cannot be applied"):
        funm(lambda x: (x, x), symmetric, v)
    for f in (jnp.sum, lambda x: jax.lax.complex(jnp.cos(x), jnp.sin(x))):
        with pytest.raises(TypeError, match="not a function of the eigenvalues of a symmetric"):
            funm(f, symmetric, v)
    with pytest.raises(TypeError, match="`f` is not a function of a square matrix"):
        funm(jnp.trace, general, v)
    for f in (jnp.exp, jnp.sin, jnp.square):
        with pytest.raises(ValueError, match="`f` acts element by element"):
            funm(f, general, v)
    with pytest.raises(ValueError, match="the operator is empty"):
        funm(expm, jnp.zeros((0, 0)), jnp.zeros(0))
    with pytest.raises(ValueError, match="`steps` is too small"):
        funm(jnp.exp, symmetric, v, steps=0)
    with pytest.raises(TypeError, match="not one of those that the operator multiplies"):
        funm(jnp.exp, symmetric, jnp.ones(2))


DIVIDED = {
    "exp": (jnp.exp, lambda x, y: np.exp(y) * quotient(np.expm1, x - y)),
    "log": (jnp.log, lambda x, y: quotient(np.log1p, (x - y) / y) / y),
    "rounding log1p": (
        lambda x: jnp.log(1 + x),
        lambda x, y: quotient(np.log1p, (x - y) / (1 + y)) / (1 + y),
    ),
    "sqrt": (jnp.sqrt, lambda x, y: 1 / (np.sqrt(x) + np.sqrt(y))),
    "reciprocal": (lambda x: 1 / x, lambda x, y: -1 / (x * y)),
    "square": (jnp.square, lambda x, y: x + y),
}


def quotient(f, x):
    return f(x) / x if x else 1.0


@pytest.mark.parametrize("name", DIVIDED)
@pytest.mark.parametrize("dtype", ["float64", "float32"])
def test_divided_differences_lose_little_at_any_distance(name, dtype):
    """At most what the root of the rounding of the nodes, next to the largest, can be blamed for."""
    g, exact = DIVIDED[name]
    eps = np.finfo(dtype).eps
    with jax.enable_x64(True):
        nodes = np.unique(
            [
                (base * (1 + distance)).astype(dtype)
                for base in np.asarray([1e-4, 1e-2, 0.3, 1.0], dtype)
                for distance in np.asarray([0, *10.0 ** np.arange(-16, 1)], dtype)
            ]
        )
        given = jnp.asarray(nodes, dtype)
        found = np.asarray(divided_differences(g, [given, given]), np.float64)
        wide = nodes.astype(np.float64)
        wanted = np.array([[exact(x, y) for y in wide] for x in wide])
    # Relative to the smaller node, rounding moves nodes by this.
    moved = eps * wide.max() / np.minimum(wide[:, None], wide[None, :])
    assert np.all(np.abs(found / wanted - 1) <= 16 * moved ** (2 / 3))


NODES = {
    "spread": [-0.8, -0.3, 0.3, 0.5, 0.7],
    "two pairs": [1.0, 1 + 3e-7, -1.0, -1 + 1e-7, 0.3],
    "equal": [1.0, 1.0, 1.0, 0.5, 0.5],
    "small": [1e-9, 2e-9, 1e-3, 1.0, 1 + 1e-3],
    "tiny": [1e-20, 2e-20, 3e-20, -1e-20, 0.0],
}


@pytest.mark.parametrize("name", NODES)
@pytest.mark.parametrize("order", [1, 2, 3])
@pytest.mark.parametrize(("dtype", "rtol"), [("float64", 1e-6), ("float32", 1e-2)])
def test_differences_of_many_nodes(name, order, dtype, rtol):
    """Of `x**6` they are sums of products of nodes, of `1 / (3 - x)` products."""
    with jax.enable_x64(True):
        given = jnp.asarray(NODES[name], dtype)
        nodes = [fractions.Fraction(float(x)) for x in given]

        def sums(chosen):
            products = itertools.combinations_with_replacement(chosen, 6 - order)
            return float(sum(math.prod(product) for product in products))

        def products(chosen):
            return float(math.prod(1 / (3 - x) for x in chosen))

        for f, exact in ((lambda x: x**6, sums), (lambda x: 1 / (3 - x), products)):
            found = np.asarray(divided_differences(f, [given] * (order + 1)), np.float64)
            places = itertools.product(range(5), repeat=order + 1)
            want = np.array([exact([nodes[i] for i in at]) for at in places]).reshape(found.shape)
            np.testing.assert_allclose(
                found, want, rtol=0, atol=rtol * np.max(np.abs(want)) + 1e-37
            )


PAIRS = {
    "two pairs": lambda e: [1, -1 + e, 1 + 2 * e, -1 - 3 * e, 0.3],
    "three pairs": lambda e: [1, 1 + e, 0.4, 0.4 + e, 2, 2 + 2 * e],
    "nothing else": lambda e: [1, -1 + e, 1 + 2 * e, -1 - 3 * e],
}


@pytest.mark.slow
@pytest.mark.parametrize("name", PAIRS)
@pytest.mark.parametrize(
    ("dtype", "gaps", "rtol"),
    [("float64", (1e-4, 1e-6, 3e-8, 1e-9), 1e-5), ("float32", (1e-2, 1e-3, 3e-4), 1e-2)],
)
@pytest.mark.sample(3)
def test_several_close_pairs_of_eigenvalues(name, dtype, gaps, rtol):
    """Second derivatives were off by 4%, third ones by a factor of 1,000: these are NaN now."""
    with jax.enable_x64(True):

        @functools.partial(jax.jit, static_argnums=(2, 3, 4))
        def derivative(a, given, mode, order, dense):
            e, v, w = given

            def value(t):
                moved = a + t * e
                if dense:
                    return w @ expm(moved) @ v
                return w @ funm(jnp.exp, MatrixOperator(moved, symmetric=True), v).value

            return functools.reduce(lambda g, _: mode(g), range(order), value)(
                jnp.zeros((), a.dtype)
            )

        known = 0
        for gap, seed in itertools.product(gaps, (1, 2)):
            eigenvalues = np.array(PAIRS[name](gap))
            n = len(eigenvalues)
            q = np.linalg.qr(np.asarray(matrix(seed, "float64", False, n)))[0]
            a = jnp.asarray((q * eigenvalues) @ q.T, dtype)
            a = (a + a.T) / 2
            given = matrix(3, dtype, True, n), vector(4, dtype, n), vector(5, dtype, n)
            wide = jax.tree.map(lambda x: x.astype("float64"), (a, given))
            want = float(derivative(*wide, jax.jacfwd, 2, True))
            for mode in (jax.grad, jax.jacfwd):
                found = float(derivative(a, given, mode, 2, False))
                known += not np.isnan(found)
                assert np.isnan(found) or abs(found - want) <= rtol * (1 + abs(want))
        assert known >= 6
        assert np.isnan(derivative(a, given, jax.grad, 3, False))
        assert np.isnan(derivative(a, given, jax.jacfwd, 3, False))


def test_a_node_with_an_infinite_slope_has_differences_to_others():
    nodes = jnp.asarray([0.0, 1.0, 4.0], jnp.float32)
    found = divided_differences(jnp.sqrt, [nodes, nodes])
    np.testing.assert_allclose(
        found, [[np.inf, 1, 0.5], [1, 0.5, 1 / 3], [0.5, 1 / 3, 0.25]], rtol=1e-6
    )


@either
@pytest.mark.parametrize("closes_over", [False, True])
def test_mixed_derivatives_at_a_zero_vector_are_right_or_nan(symmetric, closes_over):
    """Reverse mode over reverse mode gave 0 in one order."""
    with jax.enable_x64(True):
        x, ones = matrix(0, "float64", symmetric, 4), jnp.ones(4)
        f = jnp.exp if symmetric else expm

        def ours(t, s):
            given = (lambda y: f((1 + t) * y), x) if closes_over else (f, (1 + t) * x)
            operator = MatrixOperator(given[1], symmetric=symmetric)
            return jnp.sum(funm(given[0], operator, s * ones, steps=4).value)

        def dense(t, s):
            return jnp.sum(expm((1 + t) * x) @ (s * ones))

        modes = jax.grad, jax.jacfwd
        for outer, inner, (a, b) in itertools.product(modes, modes, [(0, 1), (1, 0), (1, 1)]):
            got, want = (float(outer(inner(g, a), b)(0.0, 0.0)) for g in (ours, dense))
            assert np.isnan(got) or abs(got - want) < 1e-9 * max(1, abs(want))


@pytest.mark.slow
@pytest.mark.parametrize("dtype", ["float32", "float64"])
@pytest.mark.parametrize("f", ["exp", "tanh", "square", "linear"])
@pytest.mark.parametrize("mode", [jax.grad, jax.jacfwd])
@pytest.mark.sample(3)
def test_derivatives_at_small_matrices_are_right_or_nan(f, mode, dtype):
    """The second derivative of exp at a matrix of size 1e-20 was 3e5 for 26."""
    f = {
        "exp": jnp.exp,
        "tanh": lambda x: jnp.tanh(x + 0.3),
        "square": lambda x: x**2,
        "linear": lambda x: 2 * x + 1,
    }[f]
    with jax.enable_x64(True):
        eigenvalues, e, v = (
            np.diag([1.0, 0.5, -1.0]),
            matrix(1, "float64", True, 3),
            vector(2, "float64", 3),
        )

        @jax.jit
        def derivatives(scale):
            def of_tangent(t):
                return scale * jnp.asarray(eigenvalues, dtype) + t * jnp.asarray(e, dtype)

            def along(t):
                operator = MatrixOperator(of_tangent(t), symmetric=True)
                return jnp.sum(funm(f, operator, v.astype(dtype), steps=3).value)

            def trace(t):
                operator = MatrixOperator(of_tangent(t), symmetric=True)
                return trace_of_function(f, operator, jax.random.key(0), matvecs=3).value

            zero = jnp.zeros((), dtype)
            return [
                mode(mode(along))(zero),
                mode(mode(trace))(zero),
                mode(mode(mode(trace)))(zero),
            ]

        powers = [np.asarray(x) for x in (e, e @ e, e @ e @ e)]
        slopes = [f]
        for _ in range(3):
            slopes.append(jax.grad(slopes[-1]))
        second, third = float(slopes[2](0.0)), float(slopes[3](0.0))
        limit = [
            second * np.sum(powers[1] @ v),
            second * np.trace(powers[1]),
            third * np.trace(powers[2]),
        ]
        known = 0
        for scale in (1e-4, 1e-5, 1e-6, 1e-8, 1e-12, 1e-15, 1e-20, 1e-30):
            got = np.asarray(derivatives(jnp.asarray(scale, dtype)), np.float64)
            atol = np.full(3, 1e-2 * np.max(np.abs(limit)))
            # A power of the matrix has no scale of its own: rounding counts next to the matrix.
            atol += (
                np.array([second == 0, second == 0, third == 0])
                * 100
                * float(jnp.finfo(dtype).eps)
                / scale
            )
            atol[2] += (second == 0) * 100 * float(jnp.finfo(dtype).eps) / scale**2
            known += np.sum(~np.isnan(got))
            off = np.abs(got - limit)
            assert np.all(np.isnan(got) | (off <= atol + 1e-2 * np.abs(limit))), (scale, got, limit)
        assert known >= 7


EVEN = {
    "power": (lambda x: x**6, lambda a: jnp.linalg.matrix_power(a, 6)),
    "cosine": (lambda x: jnp.cos(3 * x), lambda a: expm(3j * a.astype(complex)).real),
    "gauss": (lambda x: jnp.exp(-(x**2)), lambda a: expm(-a @ a)),
    "lorentz": (
        lambda x: 1 / (1 + 25 * x**2),
        lambda a: jnp.linalg.inv(jnp.eye(len(a)) + 25 * a @ a),
    ),
    "cosh": (jnp.cosh, lambda a: (expm(a) + expm(-a)) / 2),
    "shifted": (
        lambda x: jnp.cosh(3 * (x - 0.1)),
        lambda a: (expm(3 * a - 0.3 * jnp.eye(len(a))) + expm(0.3 * jnp.eye(len(a)) - 3 * a)) / 2,
    ),
    "logarithm": (lambda x: jnp.log(1 + x), None),
}


@pytest.mark.slow
@pytest.mark.parametrize("name", EVEN)
@pytest.mark.parametrize("pair", [0.3, 1.7e-3, 1.5e-4, 1e-6])
@pytest.mark.sample(4)
def test_functions_that_are_symmetric_between_two_eigenvalues(name, pair):
    """The mean slope of an even function between -a and a is zero, as is what its values differ by, however large a is:
    second derivatives were wrong."""
    f, dense = EVEN[name]
    centre = 0.1 if name == "shifted" else 0.0
    with jax.enable_x64(True):
        q = np.linalg.qr(np.asarray(matrix(0, "float64", False, 5)))[0]
        eigenvalues = np.array([-0.8, centre - pair, centre + pair, 0.5, 0.7])
        a = jnp.asarray((q * eigenvalues) @ q.T)
        e, v, w = matrix(1, "float64", True, 5), vector(2, "float64", 5), vector(3, "float64", 5)

        def ours(t):
            return w @ funm(f, MatrixOperator(a + t * e, symmetric=True), v, steps=5).value

        zero = jnp.zeros(())
        if dense is None:
            # The derivative in the direction of a pair, by the divided differences.
            def divided(x, y):
                return 1 / (1 + x) if x == y else np.log1p((x - y) / (1 + y)) / (x - y)

            differences = np.array([[divided(x, y) for y in eigenvalues] for x in eigenvalues])
            slope = q @ (differences * (q.T @ np.asarray(e) @ q)) @ q.T
            for mode in (jax.grad, jax.jacfwd):
                np.testing.assert_allclose(jax.jit(mode(ours))(zero), w @ slope @ v, rtol=1e-6)
            return

        def wanted(t):
            return w @ dense(a + t * e) @ v

        for order, rtol in enumerate([1e-9, 1e-7], 1):
            want = functools.reduce(lambda g, _: jax.jacfwd(g), range(order), wanted)(zero)
            for mode in (jax.grad, jax.jacfwd):
                got = jax.jit(functools.reduce(lambda g, _: mode(g), range(order), ours))(zero)
                np.testing.assert_allclose(got, want, rtol=rtol, atol=rtol)


def test_values_with_errors_that_the_slope_does_not_tell():
    """Those of log(1 + x) near zero: eigenvalues that were equal up to rounding had the slope 0."""
    with jax.enable_x64(True):
        w, v = jnp.array([1.0, 2.0, -1.5]), jnp.ones(3)

        @jax.jit
        @jax.grad
        def slope(a):
            return w @ funm(lambda x: jnp.log(1 + x), MatrixOperator(a, symmetric=True), v).value

        for a in (1e-8, *np.geomspace(1e-4, 0.3, 60)):
            found = slope(jnp.diag(jnp.array([-a, a, 0.5])))[1, 1] / w[1]
            np.testing.assert_allclose(found, 1 / (1 + a), rtol=1e-9)


def test_a_rule_for_derivatives_closes_over_its_tangent():
    """The function is linear in the tangent, and what guards derivatives by the operator is not."""
    with jax.enable_x64(True):
        x, v = matrix(0, "float64", True, 4), vector(1, "float64", 4)
        operator = MatrixOperator(x, symmetric=True)

        @jax.custom_jvp
        def ours(t):
            return funm(lambda y: jnp.exp(t * y), operator, v, steps=4).value

        @ours.defjvp
        def _(primals, tangents):
            (t,), (dot,) = primals, tangents
            return ours(t), funm(lambda y: dot * y * jnp.exp(t * y), operator, v, steps=4).value

        for mode, order in itertools.product((jax.grad, jax.jacfwd), (1, 2, 3)):
            found = functools.reduce(lambda g, _: mode(g), range(order), lambda t: ours(t).sum())
            want = jnp.sum(jnp.linalg.matrix_power(x, order) @ jax.scipy.linalg.expm(0.7 * x) @ v)
            np.testing.assert_allclose(found(0.7), want, rtol=1e-9)


def test_where_a_function_of_a_tangent_has_no_transpose_multiply_by_the_tangent():
    with jax.enable_x64(True):
        x, v = matrix(0, "float64", False, 4), vector(1, "float64", 4)

        def make(inside):
            @jax.custom_jvp
            def ours(t):
                return jnp.exp(t) * v

            @ours.defjvp
            def _(primals, tangents):
                (t,), (dot,) = primals, tangents
                factor = dot if inside else 1.0
                found = funm(lambda y: factor * y @ expm(t * y), t * x, v, steps=4).value
                return ours(t), found if inside else dot * found

            return lambda t: ours(t).sum()

        with pytest.raises(
            ValueError, match="cannot be transposed(.|\n)*multiplied by the tangent"
        ):
            jax.grad(make(True))(0.7)

        def slope(t):
            return jnp.sum(t * x @ expm(t * t * x) @ v)

        for order in (1, 2):
            found = functools.reduce(lambda g, _: jax.grad(g), range(order), make(False))(0.7)
            want = functools.reduce(lambda g, _: jax.grad(g), range(order - 1), slope)(0.7)
            np.testing.assert_allclose(found, want, rtol=1e-9)


@pytest.mark.parametrize("mode", [jax.grad, jax.jacfwd])
@pytest.mark.parametrize("f", [jnp.tanh, jax.nn.sigmoid])
def test_a_curvature_that_rounding_hides_is_not_zero(f, mode):
    """Second derivatives were -1.2 for -1e-8."""
    d = jnp.array([[2.0, 1.0, -0.5], [1.0, 1.5, 0.7], [-0.5, 0.7, -1.0]])
    v = jnp.array([1.0, -0.6, 0.8])

    @jax.jit
    def second(scale):
        def value(t):
            operator = MatrixOperator(
                scale * jnp.diag(jnp.array([1.0, 2.0, 3.5])) + t * d, symmetric=True
            )
            return v @ funm(f, operator, v, steps=3).value

        return mode(mode(value))(0.0)

    for scale in (1e-6, 1e-8, 1e-10, 1e-20):
        assert np.isnan(second(scale))
