# %% [markdown]
# # A neural controlled differential equation, with Diffrax
#
# Which way does a spiral turn? It is observed at irregular times, some of its points are missing, and a network decides
# as it moves along the path: dy = f(y) dX. Diffrax solves the equation and Vernal is the model; Diffrax imports
# `equinox`, which after `vernal.compat.install()` is Vernal. (Kidger, Morrill, Foster, Lyons, "Neural controlled
# differential equations", 2020, arXiv:2005.08926.)

# %%
import operator

import jax
import jax.numpy as jnp
import matplotlib.pyplot as plt
import optax

import vernal
import vernal.compat
from vernal import nn

vernal.compat.install()

import diffrax  # noqa: E402 (it imports `equinox`)

HIDDEN, LENGTH = 8, 40


def spirals(key, count):
    """Times, points with their times in front, and which way each turns (1 or 0)."""
    time_key, phase_key, gap_key, noise_key = jax.random.split(key, 4)
    waits = jax.random.uniform(time_key, (count, LENGTH), minval=0.02, maxval=0.28)
    ts = jnp.cumsum(waits, axis=1)
    turns = jnp.arange(count) % 2
    angles = ts * (2 * turns - 1)[:, None] + 6.3 * jax.random.uniform(phase_key, (count, 1))
    xy = jnp.exp(-0.3 * ts)[..., None] * jnp.stack([jnp.cos(angles), jnp.sin(angles)], axis=-1)
    xy = xy + 0.05 * jax.random.normal(noise_key, xy.shape)
    missing = jax.random.bernoulli(gap_key, 0.3, xy.shape).at[:, jnp.array([0, -1])].set(False)
    return ts, jnp.concatenate([ts[..., None], jnp.where(missing, jnp.nan, xy)], axis=-1), turns


# %% [markdown]
# The network gives a matrix for each hidden state, which acts on the velocity of the observed path. A last `tanh` keeps
# the equation from running away.


# %%
class Field(vernal.Module):
    mlp: nn.MLP

    def __init__(self, key):
        self.mlp = nn.MLP(
            HIDDEN,
            HIDDEN * 3,
            32,
            1,
            activation=jax.nn.softplus,
            final_activation=jnp.tanh,
            key=key,
        )

    def __call__(self, t, y, args):
        return self.mlp(y).reshape(HIDDEN, 3)


class NeuralCDE(vernal.Module):
    initial: nn.Linear
    field: Field
    readout: nn.Linear

    def __init__(self, key):
        initial, field, readout = jax.random.split(key, 3)
        self.initial = nn.Linear(3, HIDDEN, key=initial)
        self.field = Field(field)
        self.readout = nn.Linear(HIDDEN, "scalar", key=readout)

    def __call__(self, ts, coefficients):
        path = diffrax.CubicInterpolation(ts, coefficients)
        hidden = diffrax.diffeqsolve(
            diffrax.ControlTerm(self.field, path).to_ode(),
            diffrax.Heun(),
            t0=ts[0],
            t1=ts[-1],
            dt0=0.1,
            y0=self.initial(path.evaluate(ts[0])),
            max_steps=128,
        ).ys[-1]
        return self.readout(hidden)


def loss_of(model, ts, coefficients, turns):
    logits = jax.vmap(model)(ts, coefficients)
    return optax.sigmoid_binary_cross_entropy(logits, turns).mean(), ((logits > 0) == turns).mean()


@vernal.filter_jit
def step(model, optimiser, state, ts, coefficients, turns):
    gradient = vernal.filter_value_and_grad(loss_of, has_aux=True)
    (loss, right), gradients = gradient(model, ts, coefficients, turns)
    model, state = optimiser.update(model, gradients, state)
    return model, state, loss, right


# Missing values are bridged by cubic Hermite splines, which look back only.
ts, seen, turns = spirals(jax.random.key(0), 512)
coefficients = jax.jit(jax.vmap(diffrax.backward_hermite_coefficients))(ts, seen)
train, test = slice(0, 384), slice(384, 512)

model = NeuralCDE(jax.random.key(1))
optimiser = vernal.Optimizer(optax.adam, 1e-2)
state = optimiser.init(model)
history = []
for i in range(1, 121):
    batch = jax.random.choice(jax.random.key(i), 384, (64,))
    rows = jax.tree.map(operator.itemgetter(batch), (ts, coefficients, turns))
    model, state, loss, right = step(model, optimiser, state, *rows)
    history.append(float(loss))
    if i % 30 == 0:
        print(f"step {i}: loss {loss:.3f}, right {right:.0%}", flush=True)
held_out = jax.tree.map(operator.itemgetter(test), (ts, coefficients, turns))
_, named = vernal.filter_jit(loss_of)(model, *held_out)
print(f"unseen spirals: {named:.1%} right")
assert named > 0.9

# %%
figure, (left, right) = plt.subplots(1, 2, figsize=(8, 3.5), layout="constrained")
for i, colour in ((0, "C0"), (1, "C1")):
    left.plot(
        *seen[i, :, 1:].T, "o", color=colour, markersize=3, label="left" if turns[i] else "right"
    )
    path = diffrax.CubicInterpolation(*jax.tree.map(operator.itemgetter(i), (ts, coefficients)))
    left.plot(*jax.vmap(path.evaluate)(jnp.linspace(0, ts[i, -1], 200))[:, 1:].T, color=colour)
left.set(title="observed points, and the path between them")
left.legend()
right.semilogy(history)
right.set(xlabel="step", ylabel="loss")
figure.savefig("neural_cde.png", dpi=110)
