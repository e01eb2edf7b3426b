"""flowjax and quax: what their pages show their readers, as small problems in our own words."""

import equinox as eqx
import jax
import jax.numpy as jnp
import jax.random as jr
import quax
from flowjax.bijections import RationalQuadraticSpline
from flowjax.distributions import StandardNormal
from flowjax.flows import coupling_flow, masked_autoregressive_flow
from quax.examples.lora import loraify
from quax.examples.zero import Zero

from .pages import filled, weights
from .registry import problem

POINTS = jnp.sin(jnp.arange(9.0)).reshape(3, 3)


@problem
def flow_of_couplings():
    """The log density of a flow that is not yet fitted, and its gradient."""
    flow = coupling_flow(
        jr.key(0), base_dist=StandardNormal((3,)), flow_layers=2, nn_width=4, nn_depth=1
    )

    @eqx.filter_jit
    @eqx.filter_value_and_grad
    def loss(flow, points):
        return -jnp.mean(flow.log_prob(points))

    value, gradient = loss(flow, POINTS)
    return value, weights(gradient), flow.sample(jr.key(1), (2,))


@problem
def flow_of_splines():
    """A conditional flow, whose transformer is a spline."""
    flow = masked_autoregressive_flow(
        jr.key(0),
        base_dist=StandardNormal((3,)),
        transformer=RationalQuadraticSpline(knots=3, interval=2),
        cond_dim=1,
        flow_layers=1,
        nn_width=4,
    )
    condition = jnp.array([0.5])
    density = eqx.filter_jit(lambda flow: flow.log_prob(POINTS, condition))
    return density(flow), flow.sample(jr.key(1), (2,), condition)


@problem
def quax_low_rank():
    """A network to whose weights matrices of a low rank are added, and what is learnt of them."""
    network = filled(eqx.nn.MLP(3, 2, 4, 1, key=jr.key(0)))
    adapted = loraify(network, rank=1, scale=1.0, key=jr.key(1))

    @eqx.filter_jit
    @eqx.filter_value_and_grad
    def loss(network, xs):
        run = quax.quaxify(lambda network, xs: jax.vmap(network)(xs))
        return jnp.sum(run(network, xs) ** 2)

    value, gradient = loss(adapted, POINTS)
    return value, weights(gradient)


@problem
def quax_zeros():
    """Zeros that are known as such."""
    zero = Zero((3, 3), jnp.float64)
    summed = eqx.filter_jit(quax.quaxify(lambda x, y: x * 2 + y))(zero, POINTS)
    return summed, quax.quaxify(jnp.dot)(POINTS, zero).shape
