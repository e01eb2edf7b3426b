# %% [markdown]
# # An LSTM that reads sequences of any length
#
# Which of three waves was it: a sine, a square or a saw tooth? Each is heard through noise, at an unknown pitch, and
# for 20 to 60 steps. Sequences are padded to one length, and the LSTM is told where each ends, so that padding changes
# nothing.

# %%
import jax
import jax.numpy as jnp
import matplotlib.pyplot as plt
import optax

import vernal
from vernal import nn

LONGEST, NAMES = 60, ("sine", "square", "saw tooth")


def waves(key, count):
    """Sequences of shape (count, LONGEST, 1), padded with zeros, with their lengths and kinds."""
    kind, length, pitch, phase, noise = jax.random.split(key, 5)
    kinds = jax.random.randint(kind, (count,), 0, 3)
    lengths = jax.random.randint(length, (count,), 20, LONGEST + 1)
    pitches = jax.random.uniform(pitch, (count, 1), minval=0.04, maxval=0.15)
    turns = pitches * jnp.arange(LONGEST) + jax.random.uniform(phase, (count, 1))
    sine = jnp.sin(2 * jnp.pi * turns)
    shapes = jnp.stack([sine, jnp.sign(sine), 2 * (turns % 1) - 1])
    heard = shapes[kinds, jnp.arange(count)] + 0.3 * jax.random.normal(noise, (count, LONGEST))
    heard = jnp.where(jnp.arange(LONGEST) < lengths[:, None], heard, 0.0)
    return heard[..., None], lengths, kinds


class Listener(vernal.Module):
    lstm: nn.LSTM
    head: nn.Linear

    def __init__(self, key):
        lstm, head = jax.random.split(key)
        self.lstm = nn.LSTM(1, 32, bidirectional=True, key=lstm)
        self.head = nn.Linear(64, 3, key=head)

    def __call__(self, sequences, lengths):
        _, (hidden, _) = self.lstm(sequences, length=lengths)
        # The last state of each direction: (batch, 2, 32).
        return self.head(hidden.reshape(len(sequences), -1))


@vernal.filter_jit
def step(model, optimiser, state, key):
    sequences, lengths, kinds = waves(key, 128)

    @vernal.filter_value_and_grad
    def loss(model):
        logits = model(sequences, lengths)
        return optax.softmax_cross_entropy_with_integer_labels(logits, kinds).mean()

    value, gradients = loss(model)
    model, state = optimiser.update(model, gradients, state)
    return model, state, value


model = Listener(jax.random.key(0))
optimiser = vernal.Optimizer(optax.adam, 5e-3)
state = optimiser.init(model)
losses = []
for i in range(1, 401):
    model, state, value = step(model, optimiser, state, jax.random.key(i))
    losses.append(float(value))
    if i % 100 == 0:
        print(f"step {i}: loss {value:.3f}", flush=True)

sequences, lengths, kinds = waves(jax.random.key(10_000), 1000)
right = model(sequences, lengths).argmax(-1) == kinds
print(f"unseen waves named correctly: {right.mean():.1%}")
assert right.mean() > 0.9

# %% [markdown]
# What stands after the end of a sequence is not read.

# %%
padded_otherwise = jnp.where(jnp.arange(LONGEST)[:, None] < lengths[:, None, None], sequences, 7.0)
assert (model(padded_otherwise, lengths) == model(sequences, lengths)).all()

# %%
figure, axes = plt.subplots(1, 3, figsize=(9, 2.5), sharey=True, layout="constrained")
for kind, axis in enumerate(axes):
    example = int(jnp.argmax(kinds == kind))
    heard = sequences[example, : lengths[example], 0]
    said = model(sequences[example][None], lengths[example][None]).argmax()
    axis.plot(heard, marker=".", linewidth=0.8)
    axis.set(title=f"{NAMES[kind]}: heard as {NAMES[said]}", xlabel="time")
figure.savefig("lstm.png", dpi=110)
