"""`jax.linear_transpose` of loops whose steps are linear, against the transpose of the matrix; and refusals."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest

import vernal
from vernal.loops import fori_loop, map, scan, while_loop
from vernal.runtime import RuntimeCheckError, error_if

W = jnp.array([[0.9, -0.3], [0.2, 1.1]])
X = jnp.array([1.0, -2.0])
KINDS = {
    "checkpointed": {"kind": "checkpointed"},
    "checkpointed, bound": {"kind": "checkpointed", "max_steps": 5},
    "checkpointed, few": {"kind": "checkpointed", "max_steps": 5, "checkpoints": 1},
    "bounded": {"kind": "bounded", "max_steps": 5, "base": 2},
}


def repeated(w, x, **options):
    """Three steps, and what is counted beside."""

    def body(carry):
        i, x, bias = carry
        return i + 1, w @ x - x * bias, bias

    return while_loop(lambda c: c[0] < 3, body, (0, x, jnp.float32(0.5)), **options)[1]


def written(w, x, **options):
    def body(carry):
        i, x, out = carry
        return i + 1, w @ x, out.at[i].set(x)

    init = 0, x, jnp.zeros((3, 2))
    select = {"buffers": lambda c: c[2]}
    return while_loop(lambda c: c[0] < 3, body, init, **select, **options)[2]


def nested(w, x, **options):
    return while_loop(
        lambda c: c[0] < 2,
        lambda c: (
            c[0] + 1,
            fori_loop(0, c[0], lambda j, x: w @ x, repeated(w, c[1], **options), **options),
        ),
        (0, x),
        **options,
    )[1]


def beside(w, x, **options):
    """What is not linear does not depend on x."""

    def body(carry):
        x, angle = carry
        return jnp.tanh(w[0, 1]) * w @ x * jnp.cos(angle), jnp.exp(angle)

    return while_loop(lambda c: c[1] < 3, body, (x, w[1, 0]), **options)[0]


FUNCTIONS = {"repeated": repeated, "written": written, "nested": nested}
SCANS = {
    "scan": lambda w, x: scan(
        lambda c, k: (w @ c * k, c), x, jnp.arange(1.0, 4.0), kind="checkpointed"
    ),
    "scan of what is transposed": lambda w, x: scan(
        lambda c, x: (c + x, w[0, 0] * x), 0.0, x, kind="checkpointed"
    ),
    "reverse": lambda w, x: scan(
        lambda c, k: (w @ c * k, c), x, jnp.arange(1.0, 4.0), kind="checkpointed", reverse=True
    ),
    "fori_loop": lambda w, x: fori_loop(0, 3, lambda i, x: w @ x, x, kind="checkpointed"),
    "map": lambda w, x: map(lambda x: w * x, x, kind="checkpointed"),
    "lax scan": lambda w, x: scan(lambda c, k: (w @ c * k, c), x, jnp.arange(1.0, 4.0)),
}
ALL = {
    f"{name}, {kind}": lambda w, x, fn=fn, options=options: fn(w, x, **options)
    for name, fn in FUNCTIONS.items()
    for kind, options in KINDS.items()
} | SCANS
# Loops of loops take long to compile.
TWICE = {name: fn for name, fn in ALL.items() if "nested" not in name and "few" not in name}
TWICE |= {
    f"beside, {kind}": lambda w, x, options=options: beside(w, x, **options)
    for kind, options in KINDS.items()
}


def transposed(fn, w, x, cts):
    return jax.linear_transpose(lambda x: fn(w, x), x)(cts)[0]


def flat(fn, w):
    """The function as a matrix."""
    columns = [fn(w, e) for e in jnp.eye(2)]
    return jnp.stack([jnp.concatenate([y.ravel() for y in jax.tree.leaves(c)]) for c in columns], 1)


SOME = [
    pytest.param(fn, id=name, marks=[pytest.mark.slow] if "nested" in name else [])
    for name, fn in ALL.items()
]


@pytest.mark.parametrize("fn", SOME)
@pytest.mark.sample(10)
def test_it_is_that_of_the_matrix(fn):
    leaves, tree = jax.tree.flatten(jax.eval_shape(fn, W, X))
    keys = jax.random.split(jax.random.key(0), len(leaves))
    cts = [jax.random.normal(key, x.shape) for key, x in zip(keys, leaves, strict=True)]
    given = tree.unflatten(cts)

    def back(w):
        return transposed(fn, w, X, given)

    def plain(w):
        return flat(fn, w).T @ jnp.concatenate([ct.ravel() for ct in cts])

    def answers(back):
        # Also the derivative with respect to what is not transposed, and a batch of that.
        many = jnp.stack([W, 2 * W])
        return jax.jit(lambda w: (back(w), jax.jacrev(back)(w), jax.vmap(back)(many)))(W)

    for got, expected in zip(answers(back), answers(plain), strict=True):
        np.testing.assert_allclose(got, expected, rtol=1e-4, atol=1e-5)


@pytest.mark.parametrize("fn", TWICE.values(), ids=TWICE)
@pytest.mark.sample(6)
def test_the_transpose_of_the_transpose_is_the_function(fn):
    zeros = jax.tree.map(lambda t: jnp.zeros(t.shape, t.dtype), jax.eval_shape(fn, W, X))

    def once(cts):
        return transposed(fn, W, X, cts)

    def answers(x):
        (again,) = jax.linear_transpose(once, zeros)(x)
        return again, fn(W, x), once(again)

    again, same, back = jax.jit(answers)(X)
    jax.tree.map(lambda a, b: np.testing.assert_allclose(a, b, rtol=1e-4), again, same)
    # And the first one is the transpose: <f(x), f(x)> = <x, f^T(f(x))>.
    squares = sum(jnp.vdot(y, y) for y in jax.tree.leaves(same))
    np.testing.assert_allclose(jnp.vdot(X, back), squares, rtol=1e-4)


@pytest.mark.parametrize("fn", [repeated, written])
def test_outside_of_compiled_code(fn):
    def back(fn):
        out = fn(W, X)
        return transposed(fn, W, X, jnp.ones_like(out))

    expected = jax.jit(lambda: flat(fn, W).T @ jnp.ones(flat(fn, W).shape[0]))()
    got = back(lambda w, x: fn(w, x, kind="checkpointed"))
    np.testing.assert_allclose(got, expected, rtol=1e-5)


@pytest.mark.parametrize("kind", KINDS.values(), ids=KINDS)
@pytest.mark.sample(3)
def test_of_a_mapped_loop(kind):
    steps = jnp.array([0, 1, 3])

    def of_one(x, n):
        return while_loop(lambda c: c[0] < n, lambda c: (c[0] + 1, W @ c[1]), (0, x), **kind)[1]

    xs = jnp.arange(6.0).reshape(3, 2)
    back = jax.linear_transpose(lambda xs: jax.vmap(of_one)(xs, steps), xs)(xs)[0]
    expected = [np.linalg.matrix_power(W.T, n) @ x for x, n in zip(xs, steps, strict=True)]
    np.testing.assert_allclose(back, np.stack(expected), rtol=1e-5)


@pytest.mark.parametrize("kind", KINDS.values(), ids=KINDS)
@pytest.mark.sample(3)
def test_of_a_mapped_loop_from_what_all_share(kind):
    scales = jnp.array([1.0, 0.0, 3.0])

    def of_one(a, x):
        return while_loop(lambda c: c[0] < 2, lambda c: (c[0] + 1, a * c[1]), (0, x), **kind)[1]

    back = jax.linear_transpose(lambda x: jax.vmap(of_one, (0, None))(scales, x), X)(
        jnp.ones((3, 2))
    )[0]
    np.testing.assert_allclose(back, jnp.full(2, (scales**2).sum()))


REFUSED = {
    "sin": (lambda c: c[0] < 3, lambda c: (c[0] + 1, jnp.sin(c[1]))),
    "a square": (lambda c: c[0] < 3, lambda c: (c[0] + 1, c[1] * c[1])),
    "a condition": (lambda c: c[1].sum() < 3, lambda c: (c[0] + 1, 2 * c[1])),
    "a counter": (
        lambda c: c[0] < 3,
        lambda c: (c[0] + 1 + (c[1].sum() > 0).astype(int), 2 * c[1]),
    ),
}


@pytest.mark.parametrize("kind", ["checkpointed", "bounded"])
@pytest.mark.parametrize("cond, body", REFUSED.values(), ids=REFUSED)
@pytest.mark.sample(3)
def test_what_is_not_linear_is_refused(cond, body, kind):
    def fn(x):
        return while_loop(cond, body, (0, x), kind=kind, max_steps=5)[1]

    with pytest.raises(ValueError, match="cannot be transposed\n"):
        jax.linear_transpose(fn, X)(X)
    jax.grad(lambda x: fn(x).sum())(X)


def test_the_error_says_why():
    def fn(kind, body):
        return lambda x: while_loop(lambda c: c[0] < 3, body, (0, x), kind=kind, max_steps=5)[1]

    with pytest.raises(
        ValueError,
        match="`checkpointed_loop` cannot be transposed\n(?s:.)*a function that is not linear",
    ):
        jax.linear_transpose(fn("checkpointed", lambda c: (c[0] + 1, c[1] ** 2)), X)(X)
    with pytest.raises(ValueError, match="`bounded_loop` cannot be transposed"):
        jax.linear_transpose(fn("bounded", lambda c: (c[0] + 1, jnp.sin(c[1]))), X)(X)


@pytest.mark.parametrize("options", KINDS.values(), ids=KINDS)
@pytest.mark.sample(3)
def test_a_check_in_the_body_stays_a_check(options):
    def back(scale, ct):
        def fn(x):
            def body(c):
                i, x = c
                return i + 1, error_if(scale * (W @ x), (scale < 0) & (i == 1), "negative")

            return while_loop(lambda c: c[0] < 3, body, (0, x), **options)[1]

        return jax.linear_transpose(fn, X)(ct)[0]

    want = 8 * np.linalg.matrix_power(np.asarray(W).T, 3) @ X
    np.testing.assert_allclose(vernal.filter_jit(back)(jnp.float32(2), X), want, rtol=1e-5)
    with pytest.raises(RuntimeCheckError, match="negative\n  at step 1"):
        vernal.filter_jit(back)(jnp.float32(-2), X)
    with pytest.raises(RuntimeCheckError, match=r"negative\n  at batch index \(1,\)"):
        vernal.filter_jit(jax.vmap(back, (0, None)))(jnp.float32([2, -2]), X)

    # Transposed twice, it is the function again.
    def twice(scale):
        return jax.linear_transpose(lambda x: back(scale, x), X)(X)[0]

    want = 8 * np.linalg.matrix_power(np.asarray(W), 3) @ X
    np.testing.assert_allclose(vernal.filter_jit(twice)(jnp.float32(2)), want, rtol=1e-5)
    with pytest.raises(RuntimeCheckError, match="negative\n  at step 1"):
        vernal.filter_jit(twice)(jnp.float32(-2))
