"""Loops, operations, checks and estimators on meshes, as `_same.py` says."""

import functools

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax import lax

import vernal
from tests.sharding._same import AUTO, BATCH, EXPLICIT, Computation, check_same
from vernal import estimators, linalg, loops, nn, primitives, runtime
from vernal.transforms import varying_axes

KEY = jax.random.key(1)


def over_devices(reduce, x):
    """A sum or a mean that is one of all devices, inside `filter_shard_map`, too."""
    axes = tuple(varying_axes(x))
    return reduce(x, axes) if axes else x


def total(xs):
    return over_devices(lax.psum, jnp.sum(xs))


def mean(xs):
    return over_devices(lax.pmean, jnp.mean(xs))


def step(cell, xs):
    """What most rows compute in some way: one step of a cell."""
    return cell(xs, jnp.cos(xs))


def of_examples(run):
    """A row that is mapped over the batch."""
    return lambda cell, xs: jax.vmap(functools.partial(run, cell))(xs)


# --- loops


def of_while(kind):
    def run(cell, xs):
        def body(carry):
            return step(cell, carry[0]), carry[1] + 1

        return loops.while_loop(lambda c: c[1] < 3, body, (xs, 0), kind=kind, max_steps=4)[0]

    return run


def until_small(cell, x):
    """Every example stops by itself."""
    loop = functools.partial(loops.while_loop, kind="checkpointed", max_steps=8)
    return loop(lambda x: jnp.sum(x) > -3, lambda x: step(cell, x) - 0.5, x)


def with_buffer(cell, xs):
    def body(carry):
        states, x, n = carry
        x = step(cell, x) + states[n // 2]
        return states.at[n + 1].set(x), x, n + 1

    first = jnp.stack([jnp.zeros_like(xs)] * 5), xs, 0
    loop = functools.partial(loops.while_loop, kind="checkpointed", max_steps=3)
    return loop(lambda c: c[2] < 3, body, first, buffers=lambda c: c[0])[1]


def of_scan(kind):
    def run(cell, xs):
        def body(x, n):
            return step(cell, x) * n, x

        last, ys = loops.scan(body, xs, jnp.arange(3.0), kind=kind)
        return last, jnp.moveaxis(ys, 0, 1)

    return run


def of_fori(kind):
    return lambda cell, xs: loops.fori_loop(0, 3, lambda i, x: step(cell, x), xs, kind=kind)


def of_map(cell, xs):
    return jnp.moveaxis(loops.map(functools.partial(step, cell), jnp.stack([xs, -xs])), 0, 1)


def written(cell, xs):
    """A buffer that a loop writes to, with the check of `debug_buffers`."""

    def body(carry):
        buffer, x, n = carry
        x = step(cell, x)
        return loops.buffer_at_set(buffer, n, x), x, n + 1

    first = jnp.stack([jnp.zeros_like(xs)] * 3), xs, 0
    with loops.debug_buffers():
        loop = functools.partial(loops.while_loop, kind="checkpointed", max_steps=3)
        return loop(lambda c: c[2] < 3, body, first, buffers=lambda c: c[0])[0][2]


# --- checks and operations


def checked(cell, xs):
    return runtime.error_if(step(cell, xs), jnp.any(xs > 100), "too large")


def checked_by_index(cell, xs):
    return runtime.branched_error_if(step(cell, xs), jnp.any(xs > 100), 0, ["too large"])


def checked_unused(cell, xs):
    runtime.assert_dce(jnp.exp(xs), "is computed")
    return step(cell, xs)


def shown(cell, xs):
    """A loop that shows how far it has come, where that is the same everywhere."""
    meter = runtime.NoProgressMeter()

    def body(i, carry):
        x, state = carry
        return step(cell, x), meter.step(state, (i + 1) / 3)

    x, state = loops.fori_loop(0, 3, body, (xs, meter.init()))
    meter.close(state)
    return x


def not_inlined(cell, xs):
    return primitives.noinline(step)(cell, xs)


def chosen(cell, x):
    return primitives.select_if_vmap(jnp.sum(x) > 0, step(cell, x), x)


def scaled_by_all(cell, x):
    largest = primitives.unvmap_max(jnp.sum(lax.stop_gradient(x)))
    return step(cell, x) * over_devices(lax.pmax, largest)


def guarded(cell, xs):
    fixed = primitives.nondifferentiable(jax.lax.stop_gradient(xs))
    return step(cell, primitives.nonbatchable(xs)) + primitives.nondifferentiable_backward(fixed)


def linear(cell, xs):
    def forward(weight, xs):
        return xs * jnp.mean(weight)

    def transposed(weight, ct):
        return ct * jnp.mean(weight)

    return primitives.linear_call(forward, transposed, jax.lax.stop_gradient(cell.weight_hh), xs)


# --- transformations


@vernal.filter_custom_jvp
def with_jvp(cell, xs):
    return step(cell, xs)


@with_jvp.def_jvp
def _(primals, tangents):
    return jax.jvp(step, primals, tangents)


@vernal.filter_custom_vjp
def with_vjp(moving):
    return step(*moving)


@with_vjp.def_fwd
def _(perturbed, moving):
    return jax.vjp(step, *moving)


@with_vjp.def_bwd
def _(pull, ct, perturbed, moving):
    return pull(ct)


def closed(cell, xs):
    return vernal.filter_closure_convert(functools.partial(step, cell), xs)(xs)


def branching(cell, xs):
    return vernal.filter_cond(total(xs) > 0, step, lambda cell, xs: xs, cell, xs)


def switching(cell, xs):
    branches = [lambda cell, xs: xs, step, lambda cell, xs: -xs]
    return loops.filter_switch(jnp.int32(total(xs) > 0), branches, cell, xs)


def along(cell, xs):
    return vernal.filter_jvp(functools.partial(step, cell), (xs,), (xs,))


def slopes(cell, xs):
    """The gradient for every example."""
    slope = vernal.filter_grad(lambda x: jnp.sum(step(cell, x)))
    return vernal.filter_vmap(slope)(xs)


def called_back(cell, xs):
    sine = vernal.filter_pure_callback(np.sin, jax.lax.stop_gradient(xs), result_shape_dtypes=xs)
    return step(cell, xs) + sine


OPERATIONS = {
    "while_loop, checkpointed": of_while("checkpointed"),
    "while_loop, bounded": of_while("bounded"),
    "while_loop for each": of_examples(until_small),
    "while_loop with a buffer": with_buffer,
    "scan, lax": of_scan("lax"),
    "scan, checkpointed": of_scan("checkpointed"),
    "scan for each": of_examples(lambda cell, x: of_scan("checkpointed")(cell, x)[0]),
    "fori_loop, lax": of_fori("lax"),
    "fori_loop, checkpointed": of_fori("checkpointed"),
    "map": of_map,
    "buffer_at_set under debug_buffers": written,
    "assert_dce": checked_unused,
    "NoProgressMeter": shown,
    "error_if": checked,
    "error_if for each": of_examples(checked),
    "branched_error_if": checked_by_index,
    "noinline": not_inlined,
    "noinline for each": of_examples(not_inlined),
    "select_if_vmap": of_examples(chosen),
    "unvmap_max": of_examples(scaled_by_all),
    "guards": guarded,
    "linear_call": linear,
    "linear_call for each": of_examples(linear),
    "filter_custom_jvp": with_jvp,
    "filter_custom_vjp": lambda cell, xs: with_vjp((cell, xs)),
    "filter_closure_convert": closed,
    "filter_checkpoint": vernal.filter_checkpoint(step),
    "filter_cond": branching,
    "filter_switch": switching,
    "filter_jit": vernal.filter_jit(step),
    "filter_jvp": along,
    "filter_vmap of filter_grad": slopes,
    "filter_pure_callback": called_back,
}


# --- estimators


def curvature(layer, xs):
    return linalg.gauss_newton_operator(lambda layer: jnp.tanh(layer(xs)), layer)


def hessian(layer, xs):
    return linalg.hessian_operator(lambda layer: mean(jnp.tanh(layer(xs)) ** 2), layer)


def shifted(layer, xs):
    operator = curvature(layer, xs)

    def plus_identity(v):
        return jax.tree.map(jnp.add, operator.mv(v), v)

    return linalg.FunctionOperator(plus_identity, layer, positive_semidefinite=True)


def matrix(layer, xs):
    return linalg.MatrixOperator(layer.weight + mean(xs), symmetric=True)


def of(estimate, operator, *args, **options):
    def run(layer, xs):
        return estimate(operator(layer, xs), KEY, *args, **options).value

    return run


def with_probes(probes):
    """Of five products of eight: an estimate. Complex probes are for complex operators."""

    def run(layer, xs):
        dtype = jnp.complex64 if isinstance(probes, estimators.Steinhaus) else jnp.float32
        operator = linalg.MatrixOperator((layer.weight + mean(xs)).astype(dtype))
        operator = linalg.block_diagonal(operator, operator)
        method = estimators.Hutchinson(probes)
        return jnp.real(estimators.trace(operator, KEY, matvecs=5, method=method).value)

    return run


def of_function(layer, xs):
    return estimators.trace_of_function(jnp.sqrt, shifted(layer, xs), KEY, matvecs=15).value


def of_norm(layer, xs):
    return estimators.schatten_norm(shifted(layer, xs), KEY, 3, matvecs=16).value


def density(layer, xs):
    """Which has no derivative."""
    operator = shifted(*jax.lax.stop_gradient((layer, xs)))
    return estimators.spectral_density(operator, KEY, matvecs=15, points=5).density


ESTIMATES = {
    "Hutchinson": of(estimators.trace, hessian, matvecs=5, method=estimators.Hutchinson()),
    "HutchPlusPlus": of(estimators.trace, hessian, matvecs=9, method=estimators.HutchPlusPlus()),
    "XTrace": of(estimators.trace, hessian, matvecs=10, method=estimators.XTrace()),
    "XNysTrace": of(estimators.trace, curvature, matvecs=8, method=estimators.XNysTrace()),
    "trace to a tolerance": of(estimators.trace, hessian, rtol=0.5, max_matvecs=12),
    "trace of a matrix": of(estimators.trace, matrix, matvecs=4, method=estimators.XTrace()),
    "diagonal, HutchinsonDiagonal": of(
        estimators.diagonal, hessian, matvecs=5, method=estimators.HutchinsonDiagonal()
    ),
    "XDiag": of(estimators.diagonal, hessian, matvecs=10, method=estimators.XDiag()),
    "XNysDiag": of(estimators.diagonal, curvature, matvecs=6, method=estimators.XNysDiag()),
    "logdet, LanczosQuadrature, Sphere": of(
        estimators.logdet,
        shifted,
        matvecs=15,
        method=estimators.LanczosQuadrature(3, estimators.Sphere()),
    ),
    "HutchPlusPlus, Normal": of(
        estimators.trace, hessian, matvecs=9, method=estimators.HutchPlusPlus(estimators.Normal())
    ),
    "Hutchinson, Rademacher": with_probes(estimators.Rademacher()),
    "Hutchinson, Steinhaus": with_probes(estimators.Steinhaus()),
    "trace_of_function": of_function,
    "schatten_norm": of_norm,
    "spectral_density": density,
    "frobenius_norm": of(estimators.frobenius_norm, hessian, matvecs=6),
}


def computation(name):
    rng = np.random.default_rng(0)
    kind = (6, nn.GRUCell, OPERATIONS) if name in OPERATIONS else (4, nn.Linear, ESTIMATES)
    size, make, table = kind
    model = jax.tree.map(
        lambda a: jnp.asarray(rng.normal(size=a.shape) / 3, a.dtype),
        jax.eval_shape(lambda: make(size, size, key=KEY)),
    )
    xs = rng.normal(size=(BATCH, size)).astype(np.float32)
    # Split over the axis of the batch, which is the hardest case.
    return Computation(table[name], model, xs, axes=("data",))


@pytest.mark.parametrize("name", [*OPERATIONS, "Hutchinson"])
@pytest.mark.sample(8)
def test_an_operation_is_the_same_on_a_mesh_with_explicit_axes(name):
    check_same(computation(name), EXPLICIT)


@pytest.mark.slow
@pytest.mark.sample(3)
@pytest.mark.parametrize("name", ESTIMATES)
def test_an_estimate_is_the_same_on_a_mesh_with_explicit_axes(name):
    check_same(computation(name), EXPLICIT)


@pytest.mark.slow
@pytest.mark.sample(3)
@pytest.mark.parametrize("name", [*OPERATIONS, *ESTIMATES])
def test_an_operation_is_the_same_on_a_mesh_with_automatic_axes(name):
    check_same(computation(name), AUTO)
