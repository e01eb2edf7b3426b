"""What the pages of Equinox show their readers, as small problems in our own words."""

import io
import json

import diffrax as dfx
import equinox as eqx
import jax
import jax.numpy as jnp
import jax.random as jr
import optax

from .pages import filled, weights
from .registry import problem

IMAGES = jnp.sin(jnp.arange(4 * 64.0)).reshape(4, 1, 8, 8)
LABELS = jnp.array([0, 2, 1, 2])


def trained(model, loss, *data, steps=2, optimiser=None):
    """The losses of a few steps, and the weights after them."""
    optimiser = optimiser or optax.adamw(1e-2)
    state = optimiser.init(eqx.filter(model, eqx.is_inexact_array))

    @eqx.filter_jit
    def step(model, state, *data):
        value, gradient = eqx.filter_value_and_grad(loss)(model, *data)
        updates, state = optimiser.update(gradient, state, eqx.filter(model, eqx.is_array))
        return eqx.apply_updates(model, updates), state, value

    values = []
    for _ in range(steps):
        model, state, value = step(model, state, *data)
        values.append(value)
    return values, weights(model)


class Digits(eqx.Module):
    layers: list

    def __init__(self, key):
        a, b, c = jr.split(key, 3)
        self.layers = [
            eqx.nn.Conv2d(1, 2, kernel_size=3, key=a),
            eqx.nn.MaxPool2d(kernel_size=2),
            jax.nn.relu,
            jnp.ravel,
            eqx.nn.Linear(50, 8, key=b),
            jax.nn.sigmoid,
            eqx.nn.Linear(8, 3, key=c),
            jax.nn.log_softmax,
        ]

    def __call__(self, x):
        for layer in self.layers:
            x = layer(x)
        return x


def cross_entropy(model, xs, labels):
    scores = jax.vmap(model)(xs)
    return -jnp.mean(jnp.take_along_axis(scores, labels[:, None], axis=1))


@problem
def model_of_digits():
    """MNIST: a list of layers and functions, trained; and how often it is right."""
    model = filled(Digits(jr.key(0)))
    right = eqx.filter_jit(lambda m: jnp.mean(jnp.argmax(jax.vmap(m)(IMAGES), axis=1) == LABELS))
    return right(model), trained(model, cross_entropy, IMAGES, LABELS)


class Reader(eqx.Module):
    size: int
    cell: eqx.Module
    linear: eqx.nn.Linear
    bias: jax.Array

    def __init__(self, inputs, outputs, size, *, key):
        of_cell, of_linear = jr.split(key)
        self.size = size
        self.cell = eqx.nn.GRUCell(inputs, size, key=of_cell)
        self.linear = eqx.nn.Linear(size, outputs, use_bias=False, key=of_linear)
        self.bias = jnp.zeros(outputs)

    def __call__(self, xs):
        seen, _ = jax.lax.scan(lambda h, x: (self.cell(x, h), None), jnp.zeros(self.size), xs)
        return jax.nn.sigmoid(self.linear(seen) + self.bias)


@problem
def model_of_sequences():
    """RNN: which way does a spiral turn?"""

    def loss(model, xs, turns):
        guess = jax.vmap(model)(xs)[:, 0]
        return -jnp.mean(turns * jnp.log(guess) + (1 - turns) * jnp.log(1 - guess))

    ts = jnp.linspace(0.0, 3.0, 6)
    left = jnp.stack([jnp.sin(ts), jnp.cos(ts)], axis=1) / (1 + ts[:, None])
    spirals = jnp.stack([left, left * jnp.array([-1.0, 1.0])])
    model = filled(Reader(2, 1, 4, key=jr.key(0)))
    return trained(model, loss, spirals, jnp.array([0.0, 1.0]), optimiser=optax.adam(1e-2))


class Encoder(eqx.Module):
    """One layer of a transformer that reads both ways."""

    attention: eqx.nn.MultiheadAttention
    norms: list
    wide: eqx.nn.Linear
    narrow: eqx.nn.Linear
    dropout: eqx.nn.Dropout

    def __init__(self, size, key):
        a, b, c = jr.split(key, 3)
        self.attention = eqx.nn.MultiheadAttention(
            num_heads=2,
            query_size=size,
            use_query_bias=True,
            use_key_bias=True,
            use_value_bias=True,
            use_output_bias=True,
            dropout_p=0.25,
            key=a,
        )
        self.norms = [eqx.nn.LayerNorm(shape=size) for _ in range(2)]
        self.wide = eqx.nn.Linear(size, 2 * size, key=b)
        self.narrow = eqx.nn.Linear(2 * size, size, key=c)
        self.dropout = eqx.nn.Dropout(0.25)

    def __call__(self, xs, mask=None, enable_dropout=False, key=None):
        of_attention, of_rest = (None, None) if key is None else jr.split(key)
        quiet = not enable_dropout
        seen = self.attention(xs, xs, xs, mask=mask, inference=quiet, key=of_attention)
        xs = jax.vmap(self.norms[0])(xs + seen)
        out = jax.vmap(lambda x: self.narrow(jax.nn.gelu(self.wide(x))))(xs)
        out = self.dropout(out, inference=quiet, key=of_rest)
        return jax.vmap(self.norms[1])(xs + out)


class Bert(eqx.Module):
    tokens: eqx.nn.Embedding
    segments: eqx.nn.Embedding
    positions: eqx.nn.Embedding
    norm: eqx.nn.LayerNorm
    layers: list[Encoder]
    pooler: eqx.nn.Linear

    def __init__(self, size, key):
        keys = jr.split(key, 6)
        self.tokens = eqx.nn.Embedding(num_embeddings=7, embedding_size=size, key=keys[0])
        self.segments = eqx.nn.Embedding(num_embeddings=2, embedding_size=size, key=keys[1])
        self.positions = eqx.nn.Embedding(num_embeddings=5, embedding_size=size, key=keys[2])
        self.norm = eqx.nn.LayerNorm(shape=size)
        self.layers = [Encoder(size, key) for key in keys[3:5]]
        self.pooler = eqx.nn.Linear(in_features=size, out_features=size, key=keys[5])

    def __call__(self, words, segments, *, enable_dropout=False, key=None):
        found = jax.vmap(self.tokens)(words) + jax.vmap(self.segments)(segments)
        xs = jax.vmap(self.norm)(found + jax.vmap(self.positions)(jnp.arange(words.size)))
        # As the page has it: a mask of integers.
        mask = jnp.tile(jnp.asarray(words != 0, dtype=jnp.int32), (words.size, 1))
        for layer in self.layers:
            of_layer, key = (None, None) if key is None else jr.split(key)
            xs = layer(xs, mask, enable_dropout=enable_dropout, key=of_layer)
        return jnp.tanh(self.pooler(xs[0]))


@problem
def model_bert():
    """Reads padded sentences, with dropout while it learns."""
    words, segments = jnp.array([[3, 1, 4, 6, 0], [2, 5, 0, 0, 0]]), jnp.zeros((2, 5), int)

    def loss(model, keys):
        def one(words, segments, key):
            return model(words, segments, enable_dropout=True, key=key)

        return jnp.mean(jax.vmap(one)(words, segments, keys) ** 2)

    model = filled(Bert(4, jr.key(0)))
    read = eqx.filter_jit(lambda m: jax.vmap(m)(words, segments))(model)
    return read, trained(model, loss, jr.split(jr.key(1), 2), steps=1)


class VisionTransformer(eqx.Module):
    patch: eqx.nn.Linear
    positions: jax.Array
    first: jax.Array
    blocks: list[Encoder]
    head: eqx.nn.Sequential

    def __init__(self, size, key):
        keys = jr.split(key, 6)
        self.patch = eqx.nn.Linear(16, size, key=keys[0])
        self.positions = jr.normal(keys[1], (5, size))
        self.first = jr.normal(keys[2], (1, size))
        self.blocks = [Encoder(size, keys[3])]
        self.head = eqx.nn.Sequential([eqx.nn.LayerNorm(size), eqx.nn.Linear(size, 3, key=keys[4])])

    def __call__(self, image):
        patches = image.reshape(2, 4, 2, 4).transpose(0, 2, 1, 3).reshape(4, 16)
        xs = jnp.concatenate([self.first, jax.vmap(self.patch)(patches)]) + self.positions
        for block in self.blocks:
            xs = block(xs)
        return jax.nn.log_softmax(self.head(xs[0]))


@problem
def model_vision_transformer():
    """An image as a sequence of patches."""
    return trained(filled(VisionTransformer(4, jr.key(0))), cross_entropy, IMAGES, LABELS, steps=1)


class UNet(eqx.Module):
    """Down, up again, and across."""

    down: eqx.nn.Conv2d
    norm: eqx.nn.GroupNorm
    middle: eqx.nn.Conv2d
    up: eqx.nn.ConvTranspose2d
    out: eqx.nn.Conv2d
    of_time: eqx.nn.MLP

    def __init__(self, key):
        keys = jr.split(key, 5)
        self.down = eqx.nn.Conv2d(1, 4, kernel_size=3, stride=2, padding=1, key=keys[0])
        self.norm = eqx.nn.GroupNorm(groups=2, channels=4)
        self.middle = eqx.nn.Conv2d(4, 4, kernel_size=3, padding="SAME", key=keys[1])
        self.up = eqx.nn.ConvTranspose2d(4, 3, kernel_size=4, stride=2, padding=1, key=keys[2])
        self.out = eqx.nn.Conv2d(4, 1, kernel_size=1, key=keys[3])
        self.of_time = eqx.nn.MLP(2, 4, 4, 1, activation=jax.nn.silu, key=keys[4])

    def __call__(self, t, y):
        time = self.of_time(jnp.stack([jnp.sin(t), jnp.cos(t)]))
        low = jax.nn.silu(self.norm(self.down(y)) + time[:, None, None])
        low = low + self.middle(low)
        return self.out(jnp.concatenate([self.up(low), y]))


@problem
def model_unet_diffusion():
    """Score matching with a U-Net; then noise is carried back to an image by an equation."""

    def loss(model, images, ts, key):
        def one(image, t, key):
            noise = jr.normal(key, image.shape)
            spread = jnp.sqrt(-jnp.expm1(-t))
            guess = model(t, image * jnp.exp(-t / 2) + spread * noise)
            return jnp.mean((guess + noise / spread) ** 2) * spread**2

        return jnp.mean(jax.vmap(one)(images, ts, jr.split(key, len(images))))

    @eqx.filter_jit
    def drawn(model, key):
        term = dfx.ODETerm(lambda t, y, args: -0.5 * (y + model(t, y)))
        noise = jr.normal(key, (1, 8, 8))
        return dfx.diffeqsolve(
            term, dfx.Tsit5(), 1.0, 0.0, -0.5, noise, adjoint=dfx.DirectAdjoint()
        ).ys[-1]

    model = filled(UNet(jr.key(0)))
    fitted = trained(model, loss, IMAGES[:2], jnp.array([0.3, 0.8]), jr.key(1), steps=1)
    return drawn(model, jr.key(2)), fitted


class Mixer(eqx.Module):
    """Mixes the patches of an image, then what is in each."""

    patches: eqx.nn.MLP
    hidden: eqx.nn.MLP
    norm: eqx.nn.LayerNorm

    def __init__(self, key):
        a, b = jr.split(key)
        self.patches = eqx.nn.MLP(4, 4, 4, depth=1, key=a)
        self.hidden = eqx.nn.MLP(16, 16, 4, depth=1, key=b)
        self.norm = eqx.nn.LayerNorm((4, 16))

    def __call__(self, y):
        y = y.reshape(4, 16)
        y = y + jax.vmap(self.patches, in_axes=1, out_axes=1)(self.norm(y))
        return y + jax.vmap(self.hidden)(y)


@problem
def model_score_by_divergence():
    """Score matching without noise: the divergence of a network, by forward mode in random directions."""

    def loss(model, images, key):
        def one(image, key):
            v = jr.rademacher(key, (64,), dtype=float)
            score, along = eqx.filter_jvp(lambda x: model(x).ravel(), (image.ravel(),), (v,))
            return v @ along + 0.5 * jnp.sum(score**2)

        return jnp.mean(jax.vmap(one)(images, jr.split(key, len(images))))

    return trained(filled(Mixer(jr.key(0))), loss, IMAGES[:2], jr.key(1), steps=1)


class Generator(eqx.Module):
    up: eqx.nn.ConvTranspose2d
    norm: eqx.nn.BatchNorm
    out: eqx.nn.ConvTranspose2d

    def __init__(self, key):
        a, b = jr.split(key)
        self.up = eqx.nn.ConvTranspose2d(2, 4, kernel_size=4, key=a)
        self.norm = eqx.nn.BatchNorm(input_size=4, axis_name="batch", mode="ema")
        self.out = eqx.nn.ConvTranspose2d(4, 1, kernel_size=4, stride=2, padding=1, key=b)

    def __call__(self, noise, state):
        x, state = self.norm(self.up(noise), state)
        return jnp.tanh(self.out(jax.nn.relu(x))), state


class Critic(eqx.Module):
    conv: eqx.nn.Conv2d
    act: eqx.nn.PReLU
    norm: eqx.nn.BatchNorm
    out: eqx.nn.Linear

    def __init__(self, key):
        a, b = jr.split(key)
        self.conv = eqx.nn.Conv2d(1, 2, kernel_size=4, stride=2, padding=1, use_bias=False, key=a)
        self.act = eqx.nn.PReLU(0.2)
        self.norm = eqx.nn.BatchNorm(2, "batch", mode="batch")
        self.out = eqx.nn.Linear(32, "scalar", key=b)

    def __call__(self, image, state):
        x, state = self.norm(self.act(self.conv(image)), state)
        return self.out(jnp.ravel(x)), state


def batched(model, xs, state):
    run = jax.vmap(model, axis_name="batch", in_axes=(0, None), out_axes=(0, None))
    return run(xs, state)


@problem
def model_gan():
    """Two models with running statistics, each of which learns from the other."""
    generator, of_generator = eqx.nn.make_with_state(Generator)(jr.key(0))
    critic, of_critic = eqx.nn.make_with_state(Critic)(jr.key(1))
    generator, critic = filled(generator), filled(critic)
    noise = jr.normal(jr.key(2), (4, 2, 1, 1))

    @eqx.filter_jit
    @eqx.filter_value_and_grad(has_aux=True)
    def of_the_critic(critic, generator, of_critic, of_generator):
        made, of_generator = batched(generator, noise, of_generator)
        on_made, of_critic = batched(critic, made, of_critic)
        on_real, of_critic = batched(critic, IMAGES, of_critic)
        loss = jnp.mean(jax.nn.softplus(on_made)) + jnp.mean(jax.nn.softplus(-on_real))
        return loss, (of_critic, of_generator)

    @eqx.filter_jit
    @eqx.filter_value_and_grad(has_aux=True)
    def of_the_generator(generator, critic, of_critic, of_generator):
        made, of_generator = batched(generator, noise, of_generator)
        on_made, of_critic = batched(critic, made, of_critic)
        return jnp.mean(jax.nn.softplus(-on_made)), (of_critic, of_generator)

    (first, states), gradient = of_the_critic(critic, generator, of_critic, of_generator)
    critic = eqx.apply_updates(critic, jax.tree.map(lambda g: -0.1 * g, gradient))
    (second, states), gradient = of_the_generator(generator, critic, *states)
    asleep = eqx.nn.inference_mode(generator)
    return first, second, weights(gradient), batched(asleep, noise, states[1])[0]


class Counter(eqx.Module):
    index: eqx.nn.StateIndex
    linear: eqx.nn.SpectralNorm

    def __init__(self, key):
        a, b = jr.split(key)
        self.index = eqx.nn.StateIndex(jnp.array(0))
        linear = filled(eqx.nn.Linear(3, 3, key=a))
        self.linear = eqx.nn.SpectralNorm(linear, weight_name="weight", key=b)

    def __call__(self, x, state):
        count = state.get(self.index)
        x, state = self.linear(x, state)
        return x * (count + 1), state.set(self.index, count + 1)


@problem
def model_stateful():
    """State that a layer of one's own keeps, one for all and one for each of an ensemble."""
    model, state = eqx.nn.make_with_state(Counter)(jr.key(0))
    x, step = jnp.arange(3.0), eqx.filter_jit(lambda m, x, s: m(x, s))
    first, state = step(model, x, state)
    second, state = step(model, x, state)

    models, states = eqx.filter_vmap(eqx.nn.make_with_state(Counter))(jr.split(jr.key(1), 2))
    both, states = eqx.filter_vmap(lambda m, s: m(x, s))(models, states)
    part = states.substate(models)
    return first, second, state.get(model.index), both, part.get(models.index)


@problem
def model_on_devices():
    """Parallelism: the batch split over all devices, the model on each."""
    mesh = jax.make_mesh((jax.device_count(),), ("batch",), (jax.sharding.AxisType.Auto,))
    split = jax.sharding.NamedSharding(mesh, jax.sharding.PartitionSpec("batch"))
    everywhere = jax.sharding.NamedSharding(mesh, jax.sharding.PartitionSpec())
    model = filled(eqx.nn.MLP(2, 1, 4, 1, key=jr.key(0)))
    xs = jnp.sin(jnp.arange(16.0)).reshape(8, 2)

    @eqx.filter_jit(donate="none")
    def step(model, xs):
        model = eqx.filter_shard(model, everywhere)
        xs = eqx.filter_shard(xs, split)
        loss = eqx.filter_grad(lambda m, xs: jnp.mean(jax.vmap(m)(xs) ** 2))
        return eqx.filter_shard(loss(model, xs), everywhere)

    return weights(step(eqx.filter_shard(model, everywhere), eqx.filter_shard(xs, split)))


@problem
def model_in_a_file():
    """Serialisation: the arguments of a model in a line of JSON, then its leaves."""
    arguments, file = {"in_size": 2, "out_size": 1, "width_size": 4, "depth": 1}, io.BytesIO()

    def made(*, key, in_size, out_size, width_size, depth):
        return eqx.nn.MLP(in_size, out_size, width_size, depth, key=key)

    model = filled(made(key=jr.key(0), **arguments))
    file.write((json.dumps(arguments) + "\n").encode())
    eqx.tree_serialise_leaves(file, model)
    file.seek(0)
    read = json.loads(file.readline().decode())
    shape = eqx.filter_eval_shape(lambda key: made(key=key, **read), jr.key(1))
    back = eqx.tree_deserialise_leaves(file, shape)
    assert eqx.tree_equal(model, back)
    return weights(back), back(jnp.ones(2))
