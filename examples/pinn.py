# %% [markdown]
# # A physics-informed network
#
# A network `u(t, x)` learns to solve Burgers' equation with viscosity,
#
#     u_t + u u_x = nu u_xx,   u(0, x) = -sin(pi x),   u(t, -1) = u(t, 1) = 0,
#
# from the equation alone: no solution is shown to it. The loss holds a second derivative in `x`, and is itself
# differentiated with respect to the network. (Raissi, Perdikaris, Karniadakis, "Physics-informed neural networks",
# 2019, doi:10.1016/j.jcp.2018.10.045.)

# %%
import jax
import jax.numpy as jnp
import matplotlib.pyplot as plt
import numpy as np
import optax

import vernal
from vernal import nn

VISCOSITY = 0.05


class Solution(vernal.Module):
    """Meets the initial and boundary values by construction, so that the loss is the equation alone."""

    network: nn.MLP

    def __init__(self, key):
        self.network = nn.MLP(2, "scalar", 32, 3, activation=jnp.tanh, key=key)

    def __call__(self, t, x):
        return -jnp.sin(jnp.pi * x) + t * (1 - x**2) * self.network(jnp.stack([t, x]))


def residual(u, t, x):
    """How far `u` is from solving the equation at a point."""
    u_t, u_x = jax.grad(u, argnums=(0, 1))(t, x)
    u_xx = jax.grad(jax.grad(u, argnums=1), argnums=1)(t, x)
    return u_t + u(t, x) * u_x - VISCOSITY * u_xx


@vernal.filter_jit
def step(u, optimiser, state, key):
    t, x = jax.random.uniform(key, (2, 512), minval=jnp.array([[0.0], [-1.0]]))

    @vernal.filter_value_and_grad
    def loss(u):
        return jnp.mean(jax.vmap(residual, in_axes=(None, 0, 0))(u, t, x) ** 2)

    value, gradients = loss(u)
    u, state = optimiser.update(u, gradients, state)
    return u, state, value


STEPS = 3000
u = Solution(jax.random.key(0))
optimiser = vernal.Optimizer(optax.adam, optax.cosine_decay_schedule(5e-3, STEPS))
state = optimiser.init(u)
for i in range(1, STEPS + 1):
    u, state, value = step(u, optimiser, state, jax.random.key(i))
    if i % 500 == 0:
        print(f"step {i}: mean squared residual {value:.1e}", flush=True)

# %% [markdown]
# The truth, by the Cole-Hopf transformation: a quotient of two integrals against a Gaussian, by Gauss-Hermite
# quadrature.

# %%
nodes, weights = np.polynomial.hermite.hermgauss(100)


def truth(t, x):
    y = x - np.sqrt(4 * VISCOSITY * t) * nodes
    potential = np.exp(-np.cos(np.pi * y) / (2 * np.pi * VISCOSITY)) * weights
    return -np.sum(np.sin(np.pi * y) * potential) / np.sum(potential)


xs = np.linspace(-1, 1, 101)
figure, axis = plt.subplots(figsize=(6, 3.5), layout="constrained")
errors = []
for t in (0.0, 0.25, 0.5, 1.0):
    learnt = jax.vmap(u, in_axes=(None, 0))(jnp.float32(t), jnp.asarray(xs, jnp.float32))
    exact = np.array([truth(max(t, 1e-9), x) for x in xs])
    errors.append(np.abs(learnt - exact).max())
    (line,) = axis.plot(xs, learnt, label=f"t = {t}")
    axis.plot(xs, exact, "k:", linewidth=1)
axis.set(xlabel="x", ylabel="u", title="learnt, and exact (dotted)")
axis.legend()
print(f"largest error: {max(errors):.1e}")
assert max(errors) < 0.05
figure.savefig("pinn.png", dpi=110)
