"""Small problems for Diffrax, Optimistix and traceax, each with its answer as a tree of arrays."""

import functools

import diffrax as dfx
import equinox as eqx
import jax
import jax.numpy as jnp
import lineax as lx
import optimistix as optx
import traceax as tx

from .registry import problem, problems

# Ordinary differential equations


def decay(t, y, args):
    return -args * y + 0.1 * jnp.sin(t)


def solved(y0, rate, solver, adjoint, **settings):
    return dfx.diffeqsolve(
        dfx.ODETerm(decay),
        solver,
        t0=0.0,
        t1=1.0,
        dt0=0.1,
        y0=y0,
        args=rate,
        stepsize_controller=dfx.PIDController(rtol=1e-6, atol=1e-8),
        adjoint=adjoint,
        max_steps=512,
        **settings,
    )


Y0 = jnp.array([1.0, 2.0])
RATE = jnp.array(1.5)


@problems(tsit5=dfx.Tsit5(), dopri5=dfx.Dopri5(), kvaerno5=dfx.Kvaerno5())
def ode(solver):
    solution = eqx.filter_jit(solved)(Y0, RATE, solver, dfx.RecursiveCheckpointAdjoint())
    return solution.ys, solution.stats["num_steps"]


@problems(
    checkpointed=dfx.RecursiveCheckpointAdjoint(),
    backsolve=dfx.BacksolveAdjoint(),
    direct=dfx.DirectAdjoint(),
)
def ode_gradient(adjoint):
    @eqx.filter_jit
    @eqx.filter_grad
    def loss(inputs):
        return jnp.sum(solved(*inputs, dfx.Tsit5(), adjoint).ys ** 2)

    return loss((Y0, RATE))


@problem
def ode_forward_mode():
    @jax.jit
    def along(y0, rate):
        return jax.jvp(
            lambda rate: solved(y0, rate, dfx.Tsit5(), dfx.ForwardMode()).ys, (rate,), (1.0,)
        )

    return along(Y0, RATE)


@problem
def ode_vmapped_gradient():
    def loss(y0, rate):
        return jnp.sum(solved(y0, rate, dfx.Tsit5(), dfx.RecursiveCheckpointAdjoint()).ys)

    rates = jnp.array([0.5, 1.0, 4.0])
    return eqx.filter_jit(jax.vmap(jax.grad(loss, 1), (None, 0)))(Y0, rates)


@problem
def ode_dense():
    settings = {"saveat": dfx.SaveAt(dense=True, ts=jnp.linspace(0, 1, 4))}
    solution = eqx.filter_jit(solved)(
        Y0, RATE, dfx.Tsit5(), dfx.RecursiveCheckpointAdjoint(), **settings
    )
    return solution.ys, jax.vmap(solution.evaluate)(jnp.linspace(0.0, 1.0, 5))


@problem
def ode_event():
    event = dfx.Event(lambda t, y, args, **kwargs: y[0] - 0.5, optx.Newton(rtol=1e-8, atol=1e-8))

    @eqx.filter_jit
    @eqx.filter_value_and_grad
    def stop(rate):
        return solved(Y0, rate, dfx.Tsit5(), dfx.RecursiveCheckpointAdjoint(), event=event).ts[0]

    return stop(RATE)


@problem
def ode_of_a_network():
    network = eqx.nn.MLP(2, 2, 8, 2, jnp.tanh, key=jax.random.key(0))
    network = jax.tree.map(
        lambda x: jnp.linspace(-0.5, 0.5, x.size).reshape(x.shape) if eqx.is_array(x) else x,
        network,
    )

    @eqx.filter_jit
    @eqx.filter_grad
    def loss(network):
        term = dfx.ODETerm(lambda t, y, args: network(y))
        return jnp.sum(dfx.diffeqsolve(term, dfx.Tsit5(), 0.0, 1.0, 0.1, Y0).ys)

    return jax.tree.leaves(eqx.filter(loss(network), eqx.is_array))


@problem
def sde():
    @eqx.filter_jit
    def path(key):
        brownian = dfx.VirtualBrownianTree(0.0, 1.0, tol=1e-3, shape=(2,), key=key)
        noise = dfx.ControlTerm(lambda t, y, args: 0.2 * jnp.diag(y), brownian)
        terms = dfx.MultiTerm(dfx.ODETerm(decay), noise)
        return dfx.diffeqsolve(terms, dfx.Heun(), 0.0, 1.0, 0.05, Y0, args=RATE).ys

    return jax.vmap(path)(jax.random.split(jax.random.key(1), 2))


@problem
def closure_in_while_loop():
    @jax.jit
    def run(scale):
        step = eqx.filter_closure_convert(lambda x: x * scale, jnp.ones(()))
        _, x = jax.lax.while_loop(
            lambda carry: carry[0] < 3,
            lambda carry: (carry[0] + 1, step(carry[1])),
            (0, jnp.ones(())),
        )
        return x

    return run(jnp.array(2.0))


# Nonlinear problems


def residual(y, args):
    return jnp.stack([jnp.tanh(y[0]) + 0.2 * y[1] - args, y[1] ** 3 + y[1] - y[0] - 0.5])


@problems(newton=optx.Newton, chord=optx.Chord, dogleg=optx.Dogleg, lm=optx.LevenbergMarquardt)
def root(solver):
    @jax.jit
    @functools.partial(jax.value_and_grad, has_aux=True)
    def found(args):
        solution = optx.root_find(residual, solver(rtol=1e-9, atol=1e-9), jnp.zeros(2), args)
        return solution.value.sum(), solution.value

    return found(jnp.array(0.3))


@problems(bisection=optx.Bisection, newton=optx.Newton)
def scalar_root(solver):
    @jax.jit
    @jax.value_and_grad
    def found(args):
        solver_ = solver(rtol=1e-9, atol=1e-9)
        options = {"lower": -1.0, "upper": 3.0}
        return optx.root_find(
            lambda y, a: jnp.tanh(y) - a, solver_, jnp.array(0.1), args, options=options
        ).value

    return found(jnp.array(0.3))


@problems(implicit=optx.ImplicitAdjoint(), checkpointed=optx.RecursiveCheckpointAdjoint())
def fixed_point(adjoint):
    @jax.jit
    @jax.value_and_grad
    def found(args):
        solver = optx.FixedPointIteration(rtol=1e-10, atol=1e-10)
        return optx.fixed_point(
            lambda y, a: jnp.cos(a * y), solver, jnp.array(0.5), args, adjoint=adjoint
        ).value

    return found(jnp.array(0.9))


def rosenbrock(y, args):
    return (args - y[0]) ** 2 + 10 * (y[1] - y[0] ** 2) ** 2


@problems(
    bfgs=optx.BFGS(rtol=1e-9, atol=1e-9),
    nonlinear_cg=optx.NonlinearCG(rtol=1e-7, atol=1e-7),
    nelder_mead=optx.NelderMead(rtol=1e-8, atol=1e-8),
    gradient_descent=optx.GradientDescent(learning_rate=2e-2, rtol=1e-4, atol=1e-4),
)
def minimum(solver):
    @jax.jit
    def found(args):
        return optx.minimise(rosenbrock, solver, jnp.array([0.5, 0.5]), args, max_steps=4096).value

    return found(jnp.array(1.0))


@problem
def minimum_by_optax():
    import optax

    solver = optx.OptaxMinimiser(optax.adam(1e-1), rtol=1e-4, atol=1e-4)
    return jax.jit(
        lambda a: optx.minimise(rosenbrock, solver, jnp.zeros(2), a, max_steps=4096).value
    )(jnp.array(1.0))


@problems(implicit=optx.ImplicitAdjoint(), checkpointed=optx.RecursiveCheckpointAdjoint())
def minimum_gradient(adjoint):
    @jax.jit
    @jax.grad
    def found(args):
        return optx.minimise(
            rosenbrock,
            optx.BFGS(rtol=1e-9, atol=1e-9),
            jnp.array([0.5, 0.5]),
            args,
            adjoint=adjoint,
        ).value.sum()

    return found(jnp.array(1.0))


@problems(gauss_newton=optx.GaussNewton, lm=optx.LevenbergMarquardt, dogleg=optx.Dogleg)
def least_squares(solver):
    xs = jnp.linspace(0.0, 1.0, 6)

    @jax.jit
    @jax.value_and_grad
    def found(args):
        def misfit(y, args):
            return y[0] * jnp.exp(-y[1] * xs) - args * jnp.exp(-0.7 * xs)

        solution = optx.least_squares(misfit, solver(rtol=1e-9, atol=1e-9), jnp.ones(2), args)
        return (solution.value * jnp.array([1.0, 2.0])).sum()

    return found(jnp.array(1.5))


@problem
def failure_is_reported():
    solution = optx.root_find(
        lambda y, args: y**2 + 1.0,
        optx.Newton(rtol=1e-9, atol=1e-9),
        jnp.array(1.0),
        throw=False,
        max_steps=8,
    )
    return solution.result == optx.RESULTS.successful, solution.stats["num_steps"]


# Traces


@problems(
    hutchinson=tx.HutchinsonEstimator(),
    hutch_pp=tx.HutchPlusPlusEstimator(),
    xtrace=tx.XTraceEstimator(),
    xnystrace=tx.XNysTraceEstimator(),
)
def trace(estimator):
    basis = jnp.sin(jnp.arange(64.0).reshape(8, 8) ** 1.5)
    operator = lx.MatrixLinearOperator(basis @ basis.T, lx.positive_semidefinite_tag)
    key = jax.random.key(0)
    plain = estimator.estimate(key, operator, 4)
    compiled = eqx.filter_jit(estimator.estimate)(key, operator, 4)
    shapes = eqx.filter_eval_shape(estimator.estimate, key, operator, 4)
    assert jax.tree.map(jnp.shape, plain) == jax.tree.map(lambda s: s.shape, shapes)
    return plain, compiled
