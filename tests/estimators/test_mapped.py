"""Estimates for a batch of operators under `jax.vmap` are those of one operator after the other."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax.sharding import AxisType
from jax.sharding import PartitionSpec as P

from vernal import estimators, linalg
from vernal.estimators import (
    Hutchinson,
    HutchPlusPlus,
    LanczosQuadrature,
    XDiag,
    XNysDiag,
    XNysTrace,
    XTrace,
)
from vernal.linalg import FunctionOperator, MatrixOperator

SIZE = 24
KEYS = jax.random.split(jax.random.key(0), 2)
FACTORS = jax.random.normal(jax.random.key(1), (2, SIZE, SIZE)) / SIZE**0.5
POINTS = jax.random.normal(jax.random.key(2), (2, SIZE))


def general(batch):
    return MatrixOperator(batch["factor"])


def symmetric(batch):
    return MatrixOperator(batch["factor"] + batch["factor"].T, symmetric=True)


def positive(batch):
    # A function with batched parameters.
    factor = batch["factor"]
    return FunctionOperator(
        lambda v: {"x": factor.T @ (factor @ v["x"]) + v["x"]},
        {"x": batch["point"]},
        positive_semidefinite=True,
    )


def energy(x, factor):
    return jnp.sum(jnp.cosh(factor @ x)) + jnp.prod(x[:3])


def hessian(batch):
    return linalg.hessian_operator(energy, batch["point"], batch["factor"])


def jacobian(batch):
    return linalg.jacobian_operator(
        lambda x, factor: jnp.tanh(factor @ x), batch["point"], batch["factor"]
    )


def gauss_newton(batch):
    return linalg.gauss_newton_operator(
        lambda x, factor: factor @ x,
        batch["point"],
        batch["factor"],
        loss=lambda y: jnp.sum(jnp.cosh(y)),
    )


def kernel(batch):
    scale = batch["factor"][0, 0] ** 2 + 1
    return linalg.kernel_operator(
        lambda a, b: jnp.exp(-scale * (a - b) ** 2), batch["point"], noise=0.1
    )


def trace(method=None, **kwargs):
    return lambda operator, key: estimators.trace(operator, key, method=method, **kwargs)


def logdet(operator, key):
    return estimators.logdet(operator, key, matvecs=20, method=LanczosQuadrature(steps=4))


def diagonal(method):
    return lambda operator, key: estimators.diagonal(operator, key, matvecs=10, method=method)


CASES = {
    "hutchinson": (hessian, trace(Hutchinson(), matvecs=8)),
    "hutch++": (gauss_newton, trace(HutchPlusPlus(), matvecs=9)),
    "xtrace": (jacobian, trace(XTrace(), matvecs=10)),
    "xnystrace": (positive, trace(XNysTrace(), matvecs=8)),
    "xdiag": (general, diagonal(XDiag())),
    "xnysdiag": (kernel, diagonal(XNysDiag())),
    "quadrature": (positive, logdet),
    "quadrature of a kernel": (kernel, logdet),
    "exact": (gauss_newton, trace(matvecs=SIZE)),
    "tolerance": (positive, trace(rtol=0.2, max_matvecs=20)),
    "tolerance, not semidefinite": (symmetric, trace(atol=8.0, max_matvecs=20)),
}


SLOW = {"tolerance, not semidefinite"}


@pytest.mark.parametrize(
    "name", [pytest.param(x, marks=[pytest.mark.slow] * (x in SLOW)) for x in CASES]
)
@pytest.mark.sample(6)
def test_estimates_of_a_batch_of_operators_are_those_of_each(name):
    make, estimate = CASES[name]
    batch = {"factor": FACTORS, "point": POINTS}

    def one(batch_and_key):
        batch, key = batch_and_key

        def value(scale):
            found = estimate(make({**batch, "factor": scale * batch["factor"]}), key)
            return jnp.sum(jax.tree.leaves(found.value)[0]), found

        # One kind of derivative each: pairs that are drawn again, pairs of a basis, of a quadrature, unit vectors.
        if name in ("hutchinson", "xtrace", "quadrature", "exact"):
            return jax.grad(value, has_aux=True)(jnp.asarray(1.1))
        return value(jnp.asarray(1.1))

    @jax.jit
    def both(batch, keys):
        return jax.vmap(one)((batch, keys)), jax.lax.map(one, (batch, keys))

    mapped, looped = both(batch, KEYS)
    for got, want in zip(jax.tree.leaves(mapped), jax.tree.leaves(looped), strict=True):
        np.testing.assert_allclose(got, want, rtol=2e-3, atol=2e-4)
    # Not by both being the same for every operator; all kernels have the same trace.
    assert not np.allclose(looped[0][0], looped[0][1]) or make is kernel


@pytest.mark.slow
def test_on_the_devices_of_shard_map():
    mesh = jax.make_mesh((2,), ("data",), axis_types=(AxisType.Auto,), devices=jax.devices()[:2])
    a = jax.scipy.linalg.toeplitz(jnp.array([3.0, 1.0, 0.5, 0.0, 0.0, 0.2]))
    matrices, key = jnp.stack([a, a @ a]), jax.random.key(0)

    def estimates(a):
        operator = linalg.MatrixOperator(a, positive_semidefinite=True)
        return jnp.stack(
            [
                estimators.trace(operator, key, matvecs=5).value,
                estimators.logdet(operator, key, matvecs=6).value,
                estimators.diagonal(operator, key, matvecs=6).value.sum(),
            ]
        )

    # What all share, and what each has for itself.
    for spec, cut in ((P(), lambda a: a), (P("data"), lambda a: a[0])):
        given = matrices[0] if spec == P() else matrices

        def on_devices(given, spec=spec, cut=cut):
            def one(a):
                out = estimates(cut(a))
                return out if spec == P() else out[None]

            return jax.shard_map(one, mesh=mesh, in_specs=spec, out_specs=spec)(given)

        def alone(given, spec=spec):
            return estimates(given) if spec == P() else jnp.stack([*map(estimates, given)])

        def answers(fn, given=given):
            return jax.jit(lambda a: (fn(a), jax.grad(lambda a: (fn(a) ** 2).sum())(a)))(given)

        for got, expected in zip(answers(on_devices), answers(alone), strict=True):
            np.testing.assert_allclose(got, expected, rtol=1e-4, atol=1e-4)
