"""Everything with a derivative of its own, under every three transformations: the numbers of plain JAX code.

The functions that have a rule are wrong without it: what they compute goes through `stop_gradient`, so that a rule that
is forgotten anywhere on the way leaves a zero where a number belongs.
"""

import functools
import itertools
import math
import os

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax import lax

import vernal
from vernal import estimators, linalg, loops
from vernal.primitives import create_vprim
from vernal.runtime import error_if


def opaque(x):
    return lax.stop_gradient(jnp.sin(x))


@vernal.filter_custom_jvp
def with_jvp(x):
    return opaque(x)


@with_jvp.def_jvp
def _(primals, tangents):
    (x,), (x_dot,) = primals, tangents
    return with_jvp(x), jnp.cos(x) * x_dot


@vernal.filter_custom_vjp
def with_vjp(x):
    return opaque(x)


@with_vjp.def_fwd
def _(perturbed, x):
    # Not by `with_vjp`: what is computed here is differentiated in forward mode, too.
    return jnp.sin(x), x


@with_vjp.def_bwd
def _(x, grad_out, perturbed, _):
    return jnp.cos(x) * grad_out


def _vprim_jvp(primals, tangents):
    (x,), (x_dot,) = primals, tangents
    return vprim_p.bind(x), [jnp.cos(x) * x_dot]


vprim_p = create_vprim(
    "opaque", lambda x: [opaque(x)], lambda x: [x], _vprim_jvp, lambda cts, x: [None]
)


@jax.custom_jvp
def of_jax(x):
    return opaque(x)


@of_jax.defjvp
def _(primals, tangents):
    return of_jax(*primals), jnp.cos(*primals) * tangents[0]


def looped(kind, core, max_steps=4):
    def run(x):
        def body(carry):
            i, y = carry
            return i + 1, core(y) * x

        return loops.while_loop(lambda c: c[0] < 2, body, (0, x), kind=kind, max_steps=max_steps)[1]

    return run


def scanned(kind, core):
    def run(x):
        return loops.scan(lambda y, _: (core(y) * x, None), x, None, length=2, kind=kind)[0]

    return run


def twice(core):
    return lambda x: core(core(x) * x) * x


def mapped(x):
    return jnp.sum(loops.map(with_jvp, jnp.stack([x, x * x])))


def checked(x):
    return jnp.sin(error_if(x, x > 1e3, "too large"))


SPREAD = np.array([[2.0, 0.3], [0.3, 1.0]])


def matrix_of(x):
    return jnp.asarray(SPREAD, x.dtype) * jnp.sin(x) + 3 * jnp.eye(2, dtype=x.dtype)


def trace(x):
    operator = linalg.MatrixOperator(matrix_of(x))
    return estimators.trace(operator, jax.random.key(0), matvecs=2).value


def logdet(x):
    operator = linalg.MatrixOperator(matrix_of(x), positive_semidefinite=True)
    return estimators.logdet(operator, jax.random.key(0), matvecs=2).value


def log_of_determinant(x):
    a = matrix_of(x)
    return jnp.log(a[0, 0] * a[1, 1] - a[0, 1] * a[1, 0])


# With a rule, and the same without one.
SUBJECTS = {
    "custom_jvp": (with_jvp, jnp.sin),
    "custom_vjp": (with_vjp, jnp.sin),
    "vprim": (lambda x: vprim_p.bind(x)[0], jnp.sin),
    "bounded": (looped("bounded", with_jvp), twice(jnp.sin)),
    "checkpointed": (looped("checkpointed", with_jvp), twice(jnp.sin)),
    "checkpointed without bound": (looped("checkpointed", with_jvp, None), twice(jnp.sin)),
    "loop in a loop": (looped("checkpointed", scanned("lax", with_jvp)), twice(twice(jnp.sin))),
    "scan": (scanned("checkpointed", with_jvp), twice(jnp.sin)),
    "custom_vjp in a loop": (looped("checkpointed", with_vjp), twice(jnp.sin)),
    "a rule of JAX in a scan": (scanned("lax", of_jax), twice(jnp.sin)),
    "map": (mapped, lambda x: jnp.sin(x) + jnp.sin(x * x)),
    "error_if": (checked, jnp.sin),
    "trace": (trace, lambda x: jnp.trace(matrix_of(x))),
    "logdet": (logdet, log_of_determinant),
}


def steps(f):
    def run(x):
        return lax.while_loop(lambda c: c[0] < 2, lambda c: (c[0] + 1, f(c[1]) * x), (0, x))[1]

    return run


AROUND = {
    "jvp": lambda f: lambda x: jax.jvp(f, (x,), (jnp.cos(x),))[1],
    "vjp": lambda f: lambda x: jax.vjp(f, x)[1](jnp.cos(x))[0],
    "vmap": lambda f: lambda x: jnp.sum(jax.vmap(f)(jnp.stack([x, x * x]))),
    "scan": lambda f: lambda x: lax.scan(lambda c, _: (f(c) * x, None), x, None, length=2)[0],
    "while": steps,
    "cond": lambda f: lambda x: lax.cond(x > 0, f, jnp.cos, x),
    "jit": jax.jit,
    "checkpoint": jax.checkpoint,
}
X = jnp.float32(0.8)
# Three transformations may make a rounding error ten thousand times as large: of log det(x), (x^2)^2 of a step is the
# argument of a sine in the next one. So they are compared in double precision, where that leaves eleven digits.
DOUBLE = np.float64(0.8)

# Without `VERNAL_ALL_COMPOSITIONS=1`, a Latin square of the cells is taken, in which each two transformations meet at
# each two of the three places; and of these subjects, which take long to trace, only what changes the program.
LONG = {
    "bounded",
    "checkpointed",
    "checkpointed without bound",
    "loop in a loop",
    "scan",
    "custom_vjp in a loop",
    "a rule of JAX in a scan",
    "trace",
    "logdet",
}
CHANGING = ("jvp", "vjp", "vmap", "scan")
ALL = "VERNAL_ALL_COMPOSITIONS" in os.environ


def transformations(subject):
    return tuple(AROUND) if ALL or subject not in LONG else CHANGING


def cells_of(subject):
    """Three transformations each, outermost first."""
    around = transformations(subject)
    for i, j, k in itertools.product(range(len(around)), repeat=3):
        if ALL or (i + j + k) % len(around) == 0:
            yield around[i], around[j], around[k]


def composed(f, names):
    for name in reversed(names):
        f = AROUND[name](f)
    return f


def refusal(subject, names):
    """The error that a cell has to be, or None."""
    derivatives = [name for name in names if name in ("jvp", "vjp")]
    if subject.startswith("custom_vjp") and derivatives[-1:] == ["jvp"]:
        return TypeError, "has no derivative in forward mode"
    if has_no_reverse_mode(names):
        return ValueError, "Reverse-mode differentiation does not work"
    return None


def has_no_reverse_mode(names):
    """JAX's own loop, differentiated backwards."""
    return "vjp" in names and "while" in names[names.index("vjp") :]


def all_at_once(f, cells):
    """One program is compiled faster than many."""
    return jax.jit(lambda x: [composed(f, names)(x) for names in cells])


@functools.cache
def expected(reference, cells):
    return [float(x) for x in all_at_once(reference, cells)(DOUBLE)]


@pytest.mark.slow
@pytest.mark.parametrize(
    ("subject", "outermost"),
    [(subject, outermost) for subject in SUBJECTS for outermost in transformations(subject)],
)
@pytest.mark.sample(2)
def test_three_transformations_give_the_numbers_of_plain_code(subject, outermost):
    with jax.enable_x64(True):
        for middle in transformations(subject):
            check_cells(subject, [n for n in cells_of(subject) if n[:2] == (outermost, middle)])


def check_cells(subject, cells):
    fn, reference = SUBJECTS[subject]
    refused = {names: refusal(subject, names) for names in cells}
    cells = tuple(names for names in cells if refused[names] is None)
    for names, error in refused.items():
        if error is not None:
            with pytest.raises(error[0], match=error[1]):
                jax.jit(composed(fn, names))(DOUBLE)
    if cells:
        got = all_at_once(fn, cells)(DOUBLE)
        wrong = [
            (names, float(g), want)
            for names, g, want in zip(cells, got, expected(reference, cells), strict=True)
            if not math.isclose(g, want, rel_tol=1e-9, abs_tol=1e-9)
        ]
        assert not wrong


@pytest.mark.slow
@pytest.mark.timeout(3600 if ALL else 300)
@pytest.mark.parametrize("subject", SUBJECTS)
@pytest.mark.sample(2)
def test_no_transformation_leaks_a_tracer(subject):
    fn, _ = SUBJECTS[subject]
    # JAX remembers no trace while it looks for leaks.
    with jax.enable_x64(True), jax.checking_leaks():
        for names in cells_of(subject):
            if refusal(subject, names) is None:
                jax.jit(composed(fn, names)).trace(DOUBLE)


@pytest.mark.parametrize("subject", SUBJECTS)
@pytest.mark.sample(6)
def test_derivatives_of_every_order_inside_a_scan(subject):
    fn, reference = (composed(f, ("vjp", "vjp", "scan")) for f in SUBJECTS[subject])
    np.testing.assert_allclose(jax.jit(fn)(X), jax.jit(reference)(X), rtol=1e-4)


@pytest.mark.parametrize(
    ("core", "kind"), [*itertools.product([with_jvp, with_vjp], ["checkpointed", "bounded"])]
)
@pytest.mark.sample(3)
def test_the_third_derivative_through_scan_and_loop(core, kind):
    def around(loop):
        return lambda x: lax.scan(lambda c, _: (loop(c) * x, None), x, None, length=2)[0]

    fn, reference = around(looped(kind, core)), around(twice(jnp.sin))
    third = [jax.jit(jax.grad(jax.grad(jax.grad(f))))(X) for f in (fn, reference)]
    np.testing.assert_allclose(*third, rtol=1e-4)


DIAGONAL = jnp.linspace(1.0, 2.0, 30)


def estimated_trace(values):
    # Exact for a diagonal matrix, though there are far fewer products than dimensions.
    operator = linalg.MatrixOperator(jnp.diag(values))
    return estimators.trace(operator, jax.random.key(0), matvecs=8).value / 30


def estimated_logdet(values):
    operator = linalg.MatrixOperator(jnp.diag(values), positive_semidefinite=True)
    return estimators.logdet(operator, jax.random.key(0), matvecs=200).value / 30


@pytest.mark.parametrize(
    ("estimate", "truth"),
    [(estimated_trace, jnp.mean), (estimated_logdet, lambda values: jnp.mean(jnp.log(values)))],
    ids=["trace", "logdet"],
)
def test_second_derivatives_of_estimates_inside_a_scan(estimate, truth):
    def around(f):
        def step(c, x):
            return f(jnp.sin(c * DIAGONAL) + DIAGONAL) * x, None

        return lambda x: lax.scan(step, x, jnp.stack([x, x]))[0]

    for derivative in (jax.grad, lambda f: jax.grad(jax.grad(f)), jax.hessian):
        got, want = (jax.jit(derivative(around(f)))(X) for f in (estimate, truth))
        np.testing.assert_allclose(got, want, rtol=1e-4)
