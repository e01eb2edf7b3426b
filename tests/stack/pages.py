"""What the pages of Diffrax and Optimistix show their readers, as small problems in our own words."""

import diffrax as dfx
import equinox as eqx
import jax
import jax.numpy as jnp
import jax.random as jr
import lineax as lx
import optimistix as optx

from .registry import problem

TIGHT = dfx.PIDController(rtol=1e-7, atol=1e-9)


def filled(module):
    """The module with weights that do not depend on random numbers."""
    return jax.tree.map(
        lambda x: jnp.sin(jnp.arange(1.0, x.size + 1)).reshape(x.shape) if eqx.is_array(x) else x,
        module,
    )


def weights(module):
    return jax.tree.leaves(eqx.filter(module, eqx.is_array))


@problem
def page_first_steps():
    """What is saved, and how."""
    some = dfx.SubSaveAt(ts=jnp.linspace(0.5, 1.5, 3), fn=lambda t, y, args: y["x"] ** 2)
    saveat = dfx.SaveAt(subs=[some, dfx.SubSaveAt(t0=True, t1=True, steps=True)])

    @jax.jit
    def solved(y0):
        term = dfx.ODETerm(lambda t, y, args: jax.tree.map(jnp.negative, y))
        controller = dfx.ClipStepSizeController(TIGHT, step_ts=jnp.array([0.7]))
        solution = dfx.diffeqsolve(
            term, dfx.Dopri8(), 0.0, 2.0, 0.1, y0, saveat=saveat, stepsize_controller=controller
        )
        # What was not reached is infinite.
        steps = jax.tree.map(lambda x: jnp.where(jnp.isfinite(x), x, 0.0), solution.ys[1])
        return solution.ys[0], steps, solution.stats["num_accepted_steps"]

    return solved({"x": jnp.array(1.0)})


@problem
def page_stiff():
    """Robertson's reactions."""

    class Reactions(eqx.Module):
        rates: jax.Array

        def __call__(self, t, y, args):
            slow, fast, middle = self.rates * jnp.array([y[0], y[1] ** 2, y[1] * y[2]])
            return jnp.stack([middle - slow, slow - fast - middle, fast])

    @jax.jit
    def solved(rates):
        return dfx.diffeqsolve(
            dfx.ODETerm(Reactions(rates)),
            dfx.Kvaerno3(),
            0.0,
            10.0,
            1e-4,
            jnp.array([1.0, 0.0, 0.0]),
            stepsize_controller=dfx.PIDController(rtol=1e-6, atol=1e-8),
        ).ys

    return solved(jnp.array([0.04, 3e7, 1e4]))


@problem
def page_steady_state():
    """Where a solve ends, differentiated by the implicit function theorem."""

    @jax.jit
    @jax.value_and_grad
    def distance(rate):
        solution = dfx.diffeqsolve(
            dfx.ODETerm(lambda t, y, rate: rate * (1.0 - y)),
            dfx.Tsit5(),
            0.0,
            jnp.inf,
            0.1,
            jnp.array(0.2),
            args=rate,
            stepsize_controller=TIGHT,
            adjoint=dfx.ImplicitAdjoint(),
            event=dfx.Event(dfx.steady_state_event(rtol=1e-4, atol=1e-5)),
        )
        return jnp.sum((solution.ys - rate) ** 2)

    return distance(jnp.array(2.0))


@problem
def page_forcing():
    """A force that is interpolated, and the gradient with respect to it."""
    ts = jnp.linspace(0.0, 1.0, 5)

    @jax.jit
    @jax.grad
    def end(forces):
        force = dfx.LinearInterpolation(ts, forces)
        term = dfx.ODETerm(lambda t, y, force: -y + force.evaluate(t))
        return dfx.diffeqsolve(term, dfx.Heun(), 0.0, 1.0, 0.1, 0.5, args=force).ys[-1]

    return end(jnp.cos(ts))


@problem
def page_neural_cde():
    """A network that is driven by a path."""
    ts = jnp.linspace(0.0, 1.0, 4)
    field = filled(eqx.nn.MLP(2, 4, 4, 1, jnp.tanh, final_activation=jnp.tanh, key=jr.key(0)))

    @eqx.filter_jit
    @eqx.filter_grad
    def loss(field):
        path = jnp.stack([ts, jnp.sin(3 * ts)], axis=-1)
        control = dfx.CubicInterpolation(ts, dfx.backward_hermite_coefficients(ts, path))
        term = dfx.ControlTerm(lambda t, y, args: field(y).reshape(2, 2), control).to_ode()
        out = dfx.diffeqsolve(term, dfx.Tsit5(), 0.0, 1.0, 0.1, jnp.ones(2), max_steps=16)
        return jax.nn.sigmoid(out.ys[-1].sum())

    return weights(loss(field))


@problem
def page_latent_ode():
    """A sequence is read backwards by a cell, and drawn again by an equation."""
    ts = jnp.linspace(0.0, 1.0, 4)
    cell = filled(eqx.nn.GRUCell(1, 3, key=jr.key(0)))
    law = filled(eqx.nn.Linear(3, 3, key=jr.key(0)))

    @eqx.filter_jit
    @eqx.filter_value_and_grad
    def loss(model, xs, key):
        cell, law = model
        seen, _ = jax.lax.scan(lambda h, x: (cell(x, h), None), jnp.zeros(3), xs[::-1])
        start = seen + 0.1 * jr.normal(key, (3,))
        term = dfx.ODETerm(lambda t, y, args: jnp.tanh(law(y)))
        save = dfx.SaveAt(ts=ts)
        drawn = dfx.diffeqsolve(term, dfx.Heun(), 0.0, 1.0, 0.2, start, saveat=save).ys
        return jnp.mean((drawn[:, :1] - xs) ** 2) + jnp.mean(start**2)

    value, gradient = loss((cell, law), jnp.cos(ts)[:, None], jr.key(2))
    return value, weights(gradient)


@problem
def page_neural_sde():
    """The gradient of the mean over a few paths."""
    drift = filled(eqx.nn.Linear(2, 2, key=jr.key(0)))

    @eqx.filter_jit
    @eqx.filter_grad
    def loss(drift, keys):
        def path(key):
            noise = dfx.VirtualBrownianTree(0.0, 1.0, tol=0.1, shape=(2,), key=key)
            terms = dfx.MultiTerm(
                dfx.ODETerm(lambda t, y, args: jnp.tanh(drift(y))),
                dfx.ControlTerm(lambda t, y, args: lx.DiagonalLinearOperator(0.1 * y), noise),
            )
            return dfx.diffeqsolve(terms, dfx.ReversibleHeun(), 0.0, 1.0, 0.2, jnp.ones(2)).ys

        return jnp.mean(jax.vmap(path)(keys) ** 2)

    return weights(loss(drift, jr.split(jr.key(1), 2)))


@problem
def page_continuous_flow():
    """A density that is carried along: the divergence of a field by reverse mode, inside of the solve."""
    law = filled(eqx.nn.MLP(2, 2, 3, 1, jnp.tanh, key=jr.key(0)))

    @eqx.filter_jit
    def log_density(law, y):
        def field(t, state, args):
            velocity, pull = jax.vjp(law, state[0])
            (rows,) = jax.vmap(pull)(jnp.eye(2))
            return velocity, jnp.trace(rows)

        term = dfx.ODETerm(field)
        ys = dfx.diffeqsolve(term, dfx.Ralston(), 1.0, 0.0, -0.25, (y, 0.0)).ys
        return ys[1][-1] - 0.5 * jnp.sum(ys[0][-1] ** 2)

    return log_density(law, jnp.array([0.3, -0.2]))


class ImplicitMidpoint(dfx.AbstractSolver):
    """A solver of one's own: `y1 = y0 + dt f((y0 + y1) / 2)`."""

    root_finder: optx.AbstractRootFinder = optx.Newton(rtol=1e-10, atol=1e-10)
    term_structure = dfx.ODETerm
    interpolation_cls = dfx.LocalLinearInterpolation

    def order(self, terms):
        return 2

    def init(self, terms, t0, t1, y0, args):
        return None

    def func(self, terms, t0, y0, args):
        return terms.vf(t0, y0, args)

    def step(self, terms, t0, t1, y0, args, solver_state, made_jump):
        def misfit(y1, _):
            return y1 - y0 - terms.vf_prod(t0, (y0 + y1) / 2, args, terms.contr(t0, t1))

        y1 = optx.root_find(misfit, self.root_finder, y0).value
        return y1, None, {"y0": y0, "y1": y1}, None, dfx.RESULTS.successful


@problem
def page_own_solver_for_heat():
    """Heat in a rod, by a solver of one's own."""

    @jax.jit
    @jax.value_and_grad
    def warmth(start):
        def laplace(t, y, args):
            return 4.0 * jnp.diff(y, prepend=0.0, append=0.0, n=2)

        term = dfx.ODETerm(laplace)
        return dfx.diffeqsolve(term, ImplicitMidpoint(), 0.0, 0.5, 0.1, start).ys[-1, 2]

    return warmth(jnp.array([0.0, 1.0, 2.0, 1.0]))


# Optimistix


@problem
def page_roots_and_minima():
    """Trees of unknowns, further results, and every remaining minimiser."""

    def implicit_step(y, start):
        return jax.tree.map(lambda y, y0: y - y0 - 0.1 * jnp.tanh(1 - y), y, start), y["a"] + 1

    def bowl(y, scale):
        return jnp.sum((y["a"] - scale) ** 2) + jnp.sum(jnp.cosh(y["b"])), y["b"].sum()

    @jax.jit
    def found(start, scale):
        tight = {"rtol": 1e-8, "atol": 1e-8}
        root = optx.root_find(implicit_step, optx.Newton(**tight), start, start, has_aux=True)
        minima = [
            optx.minimise(bowl, solver, start, scale, has_aux=True).value
            for solver in (
                optx.DFP(**tight),
                optx.LBFGS(**tight),
                optx.BestSoFarMinimiser(optx.BFGS(**tight)),
            )
        ]
        golden = optx.minimise(
            lambda y, args: (y - 0.3) ** 2,
            optx.GoldenSearch(rtol=1e-7, atol=1e-7),
            jnp.array(0.5),
            options={"lower": 0.0, "upper": 1.0},
        )
        return root.value, root.aux, minima, golden.value

    return found({"a": jnp.array(0.4), "b": jnp.array([0.3, -0.2])}, jnp.array(1.5))


class Mixed(optx.AbstractGaussNewton):
    """A solver that is put together: damped Newton steps, and a search along them."""

    rtol: float
    atol: float
    norm = staticmethod(optx.max_norm)
    descent = optx.DampedNewtonDescent()
    search = optx.BacktrackingArmijo()
    verbose = lambda self, **kwargs: None  # noqa: E731 (a method that prints nothing)


@problem
def page_mixed_least_squares():
    """A solver that is put together, and its gradient."""
    xs = jnp.linspace(0.0, 1.0, 5)

    @jax.jit
    @jax.value_and_grad
    def fitted(scale):
        def misfit(y, scale):
            return y["height"] * jnp.exp(-y["rate"] * xs) - scale * jnp.exp(-0.7 * xs)

        start = {"height": jnp.array(1.0), "rate": jnp.array(1.0)}
        solver = Mixed(rtol=1e-9, atol=1e-9)
        return optx.least_squares(misfit, solver, start, scale).value["height"]

    return fitted(jnp.array(1.5))


@problem
def page_step_by_step():
    """A minimiser that is stepped by hand."""
    solver = optx.BFGS(rtol=1e-6, atol=1e-6)

    def valley(y, args):
        return jnp.sum((y - jnp.array([1.0, 2.0])) ** 4 + y**2), None

    y, tags = jnp.zeros(2), frozenset()
    shapes = jax.ShapeDtypeStruct((), y.dtype), None
    state = eqx.filter_jit(solver.init)(valley, y, None, {}, *shapes, tags)
    step = eqx.filter_jit(lambda y, state: solver.step(valley, y, None, {}, state, tags))
    done = eqx.filter_jit(lambda y, state: solver.terminate(valley, y, None, {}, state, tags))
    for _ in range(20):
        if done(y, state)[0]:
            break
        y, state, _ = step(y, state)
    return y
