"""One of the two processes of `stack.py`: solves what it is told to, on Vernal or on Equinox.

Reads lines from its input, `compile NAME` or `call NAME NUMBER`, and answers each with the seconds of the processor
that it took: of tracing and compiling afresh, or of one call out of so many.
"""

import sys
import time

if sys.argv[1] == "vernal":
    import vernal.compat

    vernal.compat.install()

import diffrax as dfx
import equinox as eqx
import jax
import jax.numpy as jnp
import lineax as lx
import optimistix as optx
import quax
from flowjax.distributions import StandardNormal
from flowjax.flows import coupling_flow
from quax.examples.lora import loraify


def field(t, y, args):
    return -args * y + jnp.sin(t)


def ode(y0, rate):
    return dfx.diffeqsolve(
        dfx.ODETerm(field),
        dfx.Tsit5(),
        t0=0.0,
        t1=1.0,
        dt0=0.1,
        y0=y0,
        args=rate,
        stepsize_controller=dfx.PIDController(rtol=1e-4, atol=1e-6),
        max_steps=256,
    ).ys


def network_ode(network, y0):
    term = dfx.ODETerm(lambda t, y, args: network(y))
    return dfx.diffeqsolve(term, dfx.Tsit5(), 0.0, 1.0, 0.02, y0, max_steps=64).ys


def least_squares(y0, scale):
    xs = jnp.linspace(0.0, 1.0, 16)
    solver = optx.LevenbergMarquardt(rtol=1e-5, atol=1e-5)

    def misfit(y, scale):
        return y[0] * jnp.exp(-y[1] * xs) - scale * jnp.exp(-0.7 * xs)

    return optx.least_squares(misfit, solver, y0, scale).value


def linear(matrix, vector):
    return lx.linear_solve(lx.MatrixLinearOperator(matrix), vector).value


def log_density(flow, points):
    return jnp.mean(flow.log_prob(points))


def adapted(network, xs):
    """A network to whose weights matrices of a low rank are added."""
    return jnp.sum(jax.vmap(network)(xs) ** 2)


def of_sum(fn):
    return lambda *args: jnp.sum(fn(*args) ** 2)


Y0, RATE = jnp.array([1.0, 2.0]), jnp.array(1.5)
NETWORK = eqx.nn.MLP(4, 4, 32, 2, jnp.tanh, key=jax.random.key(0))
MATRIX = jax.random.normal(jax.random.key(1), (8, 8)) + 8 * jnp.eye(8)
FLOW = coupling_flow(jax.random.key(2), base_dist=StandardNormal((4,)), flow_layers=4, nn_width=16)
POINTS = jax.random.normal(jax.random.key(3), (32, 4))
LORA = loraify(NETWORK, rank=2, key=jax.random.key(4))

# What is differentiated, and the arguments.
CASES = {
    "Diffrax": (lambda: ode, (Y0, RATE)),
    "Diffrax, gradient": (lambda: eqx.filter_grad(of_sum(ode)), (Y0, RATE)),
    "Diffrax, network, gradient": (
        lambda: eqx.filter_grad(of_sum(network_ode)),
        (NETWORK, jnp.ones(4)),
    ),
    "Optimistix": (lambda: least_squares, (jnp.ones(2), RATE)),
    "Optimistix, gradient": (
        lambda: eqx.filter_grad(lambda scale: of_sum(least_squares)(jnp.ones(2), scale)),
        (RATE,),
    ),
    "Lineax": (lambda: linear, (MATRIX, jnp.ones(8))),
    "Lineax, gradient": (lambda: eqx.filter_grad(of_sum(linear)), (MATRIX, jnp.ones(8))),
    "flowjax": (lambda: log_density, (FLOW, POINTS)),
    "flowjax, gradient": (lambda: eqx.filter_grad(log_density), (FLOW, POINTS)),
    "quax, LoRA, gradient": (lambda: eqx.filter_grad(quax.quaxify(adapted)), (LORA, POINTS)),
}
COMPILED = {}


def compiled(name):
    """Traces and compiles afresh, and calls once."""
    make, args = CASES[name]
    jax.clear_caches()
    eqx.clear_caches()
    start = time.process_time()
    COMPILED[name] = eqx.filter_jit(make())
    jax.block_until_ready(COMPILED[name](*args))
    return time.process_time() - start


def called(name, number):
    fn, args = COMPILED[name], CASES[name][1]
    start, out = time.process_time(), None
    for _ in range(number):
        out = fn(*args)
    jax.block_until_ready(out)
    return (time.process_time() - start) / number


def main():
    for line in sys.stdin:
        command, name, number = line.rstrip("\n").split("\t")
        taken = compiled(name) if command == "compile" else called(name, int(number))
        print(repr(taken), flush=True)


if __name__ == "__main__":
    main()
