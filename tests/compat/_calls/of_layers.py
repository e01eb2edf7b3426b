"""Layers without state: linear ones, cells, attention, dropout."""

import dataclasses

import jax
import jax.numpy as jnp
import numpy as np

from .registry import calls

KEY = jax.random.key(0)
ONE = jnp.ones(3)


SQUARE = jnp.array([[1.0, 2.0], [3.0, 5.0]])


def leaves(tree):
    return jax.tree.leaves(tree)


def doubled(eqx):
    class Weight(eqx.Module):
        w: jax.Array

        def __matmul__(self, x):
            return 2 * (self.w @ x)

    return Weight(SQUARE)


def of_parts(eqx, name, *args, **options):
    """An instance of a subclass that sets Equinox's fields itself."""

    class Layer(name):
        def __init__(self):
            made = name(*args, **options)
            ours = {
                "together",
                "key",
                "scan",
                "num_key_value_heads",
                "disjoint",
                "num_spatial_dims",
            }
            for field in {f.name for f in dataclasses.fields(made)} - ours:
                setattr(self, field, getattr(made, field))

    return Layer()


def of_subclass(eqx, name, *args, **options):
    """What a subclass that adds a number to a layer holds."""

    class Layer(name):
        scale: float
        text: str

        def __init__(self):
            super().__init__(*args, **options)
            self.scale, self.text = 2.0, "text"

    layer = Layer()
    return leaves(layer)[-2:], jax.tree.map(lambda x: 3 * x, layer).scale


@calls("nn.Linear")
def linear(name, eqx):
    yield lambda: name(3, 2, key=KEY)
    yield lambda: name(3, 2, key=KEY)(ONE)
    yield lambda: name(3, 2, key=jax.random.PRNGKey(0))(ONE)
    yield lambda: leaves(name(3, 2, key=KEY))
    yield lambda: name(3, 2, use_bias=False, key=KEY)
    yield lambda: name("scalar", "scalar", key=KEY)(jnp.array(2.0))
    yield lambda: name("scalar", 2, key=KEY)(jnp.array(2.0))
    yield lambda: name(0, 2, key=KEY)(jnp.ones(0))
    yield lambda: name(3, 2, dtype="bfloat16", key=KEY)(ONE)
    yield lambda: name(3, 2, dtype=jnp.float16, key=KEY).weight
    yield lambda: name(3, 2, dtype=complex, key=KEY).weight
    yield lambda: name(3, 2, key=KEY)(ONE, key=KEY)
    yield lambda: name(3, 2, key=KEY)(np.ones(3))
    yield lambda: name(3, 2, key=KEY)(jnp.ones(3, int))
    yield lambda: name(3, 2, key=KEY)(jnp.ones(3, "bfloat16"))
    yield lambda: name(3, 2, key=KEY)(jnp.ones(4))
    yield lambda: name(3, 2, key=KEY)(jnp.ones((4, 3)))
    yield lambda: name(3, 2, key=KEY)([1.0, 1.0, 1.0])
    yield lambda: jax.vmap(name(3, 2, key=KEY))(jnp.ones((4, 3)))
    yield lambda: name(3, 2)
    yield lambda: name(3, "wrong", key=KEY)
    yield lambda: name(-1, 2, key=KEY)
    yield lambda: name(in_features=3, out_features=2, use_bias=True, dtype=None, key=KEY)(x=ONE)
    yield lambda: eqx.filter_grad(lambda m: m(ONE).sum())(name(3, 2, key=KEY)).weight
    # A matrix has the vectors in its columns, if that is what the formula says.
    yield lambda: name(2, 2, key=KEY)(SQUARE)
    yield lambda: name(2, 2, use_bias=False, key=KEY)(SQUARE)
    yield lambda: name(2, 3, use_bias=False, key=KEY)(jnp.ones((2, 4)))
    for bias in (0.5, np.float32(0.5), jnp.array(0.5), jnp.ones(1)):
        yield lambda bias=bias: eqx.tree_at(lambda m: m.bias, name(2, 2, key=KEY), bias)(SQUARE[0])
    yield lambda: eqx.tree_at(lambda m: m.weight, name(2, 2, key=KEY), np.ones((2, 3)))(ONE)
    yield lambda: eqx.tree_at(lambda m: m.weight, name(2, 2, key=KEY), doubled(eqx))(SQUARE[0])
    yield lambda: of_subclass(eqx, name, 2, 2, key=KEY)


@calls("nn.Identity")
def identity(name, eqx):
    yield name
    yield lambda: name(1, 2, a=3)(ONE)
    yield lambda: name()(ONE, key=KEY)
    yield lambda: name()("text")
    yield lambda: name()()
    yield lambda: leaves(name())


@calls("nn.Lambda")
def lambda_(name, eqx):
    yield lambda: name(jnp.tanh)(ONE)
    yield lambda: name(fn=jnp.tanh)(ONE, key=KEY)
    yield lambda: name(eqx.nn.PReLU())(-ONE)
    yield lambda: len(leaves(name(eqx.nn.PReLU())))
    yield lambda: name(1)(ONE)
    yield name
    yield lambda: name(jnp.tanh).fn is jnp.tanh


@calls("nn.PReLU")
def prelu(name, eqx):
    yield name
    yield lambda: name()(-ONE)
    yield lambda: name(0.5)(-ONE)
    yield lambda: name(jnp.array([0.1, 0.2, 0.3]))(-ONE)
    yield lambda: name(init_alpha=0.5).negative_slope
    yield lambda: name()(x=ONE)
    yield lambda: name()(-jnp.ones(2, int))
    yield lambda: name("text")
    yield lambda: name(1)(-jnp.ones(2, int))
    yield lambda: name(np.float32(0.5))(-jnp.ones(2, "bfloat16"))
    yield lambda: name(0.5)(-jnp.ones(2, "bfloat16"))
    yield lambda: of_subclass(eqx, name)


@calls("nn.Dropout")
def dropout(name, eqx):
    yield lambda: name()(ONE, key=KEY)
    yield lambda: name(0.3)(jnp.ones((4, 5)), key=KEY)
    yield lambda: name(0.3)(jnp.ones(5, "bfloat16"), key=KEY)
    yield lambda: name(0)(ONE)
    yield lambda: name(1.0)(ONE, key=KEY)
    yield lambda: name(1.5)(ONE, key=KEY)
    yield lambda: name(-0.5)(ONE, key=KEY)
    yield lambda: name(0.5)(ONE)
    yield lambda: name(0.5, True)(ONE)
    yield lambda: name(0.5)(ONE, inference=True)
    yield lambda: name(0.5, True)(ONE, key=KEY, inference=False)
    yield lambda: name(0.5, deterministic=True)(ONE)
    yield lambda: name(0.5)(ONE, deterministic=True)
    yield lambda: name(0.5).deterministic
    yield lambda: [name().p, name().inference]
    yield lambda: leaves(name(0.3))
    yield lambda: name(p=0.5, inference=False)(x=ONE, key=KEY)
    yield lambda: jax.vmap(lambda k: name(0.5)(ONE, key=k))(jax.random.split(KEY, 3))
    yield lambda: name("text")(ONE, key=KEY)
    yield lambda: name(jnp.array(0.5))(ONE, key=KEY)
    yield lambda: eqx.filter_grad(lambda d: d(ONE, key=KEY).sum())(name(jnp.array(0.5))).p
    yield lambda: jax.grad(lambda p: name(p)(ONE, key=KEY).sum())(0.3)
    for dtype in ("int32", "int8", "bool"):
        yield lambda dtype=dtype: name(0.5)(jnp.ones(4, dtype), key=KEY)
    yield lambda: name(0.5)(jnp.array(1.0), key=KEY)
    for p in (jnp.float32(0.5), np.float32(0.5)):
        yield lambda p=p: name(p)(jnp.ones(4, "bfloat16"), key=KEY)
    yield lambda: of_subclass(eqx, name)
    yield lambda: of_parts(eqx, name, 0.3)(ONE, key=KEY)
    yield lambda: dataclasses.replace(name(0.5), p=0.1).p


@calls("nn.Embedding")
def embedding(name, eqx):
    yield lambda: name(4, 3, key=KEY)
    yield lambda: name(4, 3, key=KEY)(1)
    yield lambda: name(4, 3, key=KEY)(jnp.array(1))
    yield lambda: name(4, 3, key=KEY)(np.int64(2))
    yield lambda: name(4, 3, key=KEY)(jnp.array(9))
    yield lambda: name(4, 3, key=KEY)(-1)
    yield lambda: name(4, 3, key=KEY)(jnp.array([0, 1]))
    yield lambda: name(4, 3, key=KEY)(1.0)
    yield lambda: name(4, 3, key=KEY)("text")
    yield lambda: jax.vmap(name(4, 3, key=KEY))(jnp.array([0, 1]))
    yield lambda: name(weight=jnp.ones((4, 3)))(1)
    yield lambda: name(4, 3, weight=jnp.ones((4, 3)))
    yield lambda: name(4, 2, weight=jnp.ones((4, 3)))
    yield lambda: name(weight=jnp.ones(4))
    yield lambda: name(4, 3, dtype="bfloat16", key=KEY).weight
    yield lambda: name(4, 3)
    yield name
    yield lambda: name(num_embeddings=4, embedding_size=3, key=KEY)(x=1, key=KEY)
    yield lambda: of_subclass(eqx, name, 4, 3, key=KEY)


@calls("nn.RotaryPositionalEmbedding")
def rotary(name, eqx):
    xs = jnp.arange(12.0).reshape(3, 4)
    yield lambda: name(4)(xs)
    yield lambda: name(4)(xs.astype("bfloat16"))
    yield lambda: name(4, dtype=jnp.float16)(xs)
    yield lambda: (eqx.clear_caches(), name(4, 10.0)(xs), eqx.clear_caches())[1]
    yield lambda: (eqx.clear_caches(), name(4)(xs), name(4, 10.0)(xs), eqx.clear_caches())[2]
    yield lambda: name(3)(jnp.ones((3, 3)))
    yield lambda: name(4)(jnp.ones((3, 6)))
    yield lambda: name(4)(jnp.ones(4))
    yield lambda: name(-4)
    yield lambda: name(embedding_size=4, theta=100.0).embedding_size
    yield lambda: name(4).theta
    yield lambda: leaves(name(4))
    yield lambda: name(4)(x=xs, key=KEY)
    yield lambda: name.rotate_half(xs)
    yield lambda: name.precompute_freqs_cis(4, 3, 1e4, jnp.float32)


@calls("nn.GRUCell", "nn.LSTMCell")
def cells(name, eqx):
    def hidden(like=1.0):
        one = like * jnp.ones(2)
        return (one, one) if name.__name__ == "LSTMCell" else one

    yield lambda: name(3, 2, key=KEY)
    yield lambda: name(3, 2, key=KEY)(ONE, hidden())
    yield lambda: leaves(name(3, 2, key=KEY))
    yield lambda: name(3, 2, use_bias=False, key=KEY)(ONE, hidden())
    yield lambda: name(3, 2, False, "bfloat16", key=KEY).weight_ih
    yield lambda: name(3, 2, key=KEY)(jnp.ones(4), hidden())
    yield lambda: name(3, 2, key=KEY)(ONE, 1.0)
    yield lambda: name(3, 2, key=KEY)(ONE)
    yield lambda: name(3, 2, key=KEY)(input=ONE, hidden=hidden(), key=KEY)
    yield lambda: name(input_size=3, hidden_size=2, use_bias=True, dtype=None, key=KEY)(
        ONE, hidden()
    )
    yield lambda: name(3, 2)
    square = (SQUARE, SQUARE.T) if name.__name__ == "LSTMCell" else SQUARE
    yield lambda: name(2, 2, use_bias=False, key=KEY)(SQUARE, square)
    yield lambda: eqx.tree_at(lambda c: c.bias, name(3, 2, key=KEY), 0.5)(ONE, hidden())
    yield lambda: of_subclass(eqx, name, 3, 2, key=KEY)


@calls("nn.MLP")
def mlp(name, eqx):
    yield lambda: name(3, 2, 4, 2, key=KEY)(ONE)
    yield lambda: name(3, 2, 4, 0, key=KEY)(ONE)
    yield lambda: [x.shape for x in leaves(eqx.filter(name(3, 2, 4, 2, key=KEY), eqx.is_array))]
    yield lambda: name("scalar", "scalar", 4, 1, key=KEY)(jnp.array(1.0))
    yield lambda: name(3, 2, 4, 1, jnp.tanh, jnp.sin, False, False, key=KEY)(ONE)
    yield lambda: name(3, 2, 4, 1, activation=eqx.nn.PReLU(), key=KEY)(-ONE)
    yield lambda: name(3, 2, 4, 2, activation=eqx.nn.PReLU(), key=KEY).activation.negative_slope
    yield lambda: name(3, 2, 4, 3, scan=True, key=KEY)(ONE)
    yield lambda: name(3, 2, 4, 2, dtype="bfloat16", key=KEY)(ONE)
    yield lambda: len(name(3, 2, 4, 2, key=KEY).layers)
    yield lambda: type(name(3, 2, 4, 2, key=KEY).layers)
    for field in (
        "in_size",
        "out_size",
        "width_size",
        "depth",
        "use_bias",
        "use_final_bias",
        "scan",
    ):
        yield lambda field=field: getattr(name(3, 2, 4, 2, key=KEY), field)
    yield lambda: name(3, 2, 4, 1, key=KEY)(jnp.ones(4))
    yield lambda: name(3, 2, 4, 1, key=KEY)(ONE, key=KEY)
    yield lambda: name(3, 2, 4, -1, key=KEY)
    yield lambda: name(3, 2, 4, 1.5, key=KEY)
    yield lambda: name(3, 2, 4, 1)
    yield lambda: name(in_size=3, out_size=2, width_size=4, depth=1, key=KEY)(x=ONE)
    yield lambda: name(2, 2, 2, 1, key=KEY)(SQUARE)
    yield lambda: eqx.tree_at(
        lambda m: (m.layers[0].weight, m.layers[0].bias, m.layers[1].weight),
        name(3, 2, 4, 1, key=KEY),
        replace_fn=lambda x: x[:2] if x.shape[-1] != 4 or x.ndim == 1 else x[:, :2],
    )(ONE)
    yield lambda: [type(x) is eqx.nn.Linear for x in name(3, 2, 4, 1, key=KEY).layers]
    # An activation sees one unit at a time, and with `depth=0` there is none.
    for activation in (
        lambda x: x - jnp.mean(x),
        lambda x: x * jnp.size(x),
        lambda x: jax.random.normal(KEY, x.shape) * x,
        lambda x: jax.lax.cond(x > 0, lambda: x, lambda: 0.1 * x),
        jax.grad(jax.nn.softplus),
        jax.nn.softmax,
        eqx.nn.PReLU(),
        eqx.nn.Linear("scalar", "scalar", key=KEY),
    ):
        yield lambda a=activation: name(3, 2, 5, 2, activation=a, key=KEY)(ONE)
        yield lambda a=activation: name(3, 2, 5, 1, final_activation=a, key=KEY)(ONE)
        yield lambda a=activation: name(3, 2, 5, 0, final_activation=a, key=KEY)(ONE)
        yield lambda a=activation: name(3, "scalar", 5, 1, final_activation=a, key=KEY)(ONE)
    yield lambda: name(3, 2, 5, 1, final_activation=jnp.argmax, key=KEY)(ONE)
    yield lambda: of_parts(eqx, name, 3, 2, 4, 1, key=KEY)(ONE)
    yield lambda: len(leaves(name(3, 2, 4, 1, key=KEY)))
    yield lambda: of_subclass(eqx, name, 3, 2, 4, 1, key=KEY)


@calls("nn.Sequential")
def sequential(name, eqx):
    def model():
        return name([eqx.nn.Linear(3, 2, key=KEY), eqx.nn.Lambda(jnp.tanh), eqx.nn.Dropout(0.5)])

    yield lambda: model()(ONE, key=KEY)
    yield lambda: model()(ONE)
    yield lambda: model()[:2](ONE)
    yield lambda: model()[0](ONE)
    yield lambda: model()[-1].p
    yield lambda: model()[7]
    yield lambda: model()["a"]
    yield lambda: len(model())
    yield lambda: [type(layer).__name__ for layer in model()]
    yield lambda: type(model().layers)
    yield lambda: name([])(ONE)
    yield lambda: name([jnp.tanh])(ONE)
    yield lambda: name((eqx.nn.Identity(),))(ONE)
    yield lambda: name([1])(ONE)

    class Sub(name):
        def __init__(self, key):
            super().__init__([eqx.nn.Linear(3, 3, key=key), eqx.nn.Lambda(jnp.tanh)])

        def __call__(self, x, *, key=None):
            return super().__call__(x, key=key) + 1

    yield lambda: Sub(KEY)[1:](ONE)
    yield lambda: type(Sub(KEY)[:1]) is name
    yield lambda: model().is_stateful()
    yield lambda: name(layers=[eqx.nn.Identity()])(x=ONE)
    yield lambda: name(1)
    yield lambda: name([eqx.nn.Identity()])(ONE, "state")
    yield lambda: model()[:2](ONE, None)
    yield lambda: name([model()[:2], eqx.nn.Identity()])(ONE, state=None)


@calls("nn.MultiheadAttention")
def attention(name, eqx):
    xs = jnp.sin(jnp.arange(12.0)).reshape(3, 4)

    def layer(**options):
        return name(2, 4, key=KEY, **options)

    tril = np.tril(np.ones((3, 3), bool))
    yield lambda: layer()(xs, xs, xs)
    yield lambda: layer()(query=xs, key_=xs, value=xs)
    yield lambda: layer()(xs, xs, xs, mask=jnp.asarray(tril))
    yield lambda: layer()(xs, xs, xs, jnp.asarray(np.stack([tril, tril.T])))
    for dtype in ("float32", "int32"):
        yield lambda dtype=dtype: layer()(xs, xs, xs, jnp.asarray(tril.astype(dtype)))
    yield lambda: layer()(xs, xs, xs, jnp.ones((2, 2), bool))
    yield lambda: layer()(xs, xs, xs, jnp.zeros((3, 3), bool))
    yield lambda: layer(
        use_query_bias=True, use_key_bias=True, use_value_bias=True, use_output_bias=True
    )(xs, xs, xs)
    yield lambda: layer(key_size=3, value_size=5, output_size=6, qk_size=2, vo_size=3)(
        xs, jnp.ones((2, 3)), jnp.ones((2, 5))
    )
    yield lambda: layer(dropout_p=0.5)(xs, xs, xs, key=KEY)
    yield lambda: layer(dropout_p=0.5)(xs, xs, xs)
    yield lambda: layer(dropout_p=0.5)(xs, xs, xs, inference=True)
    yield lambda: layer(dropout_p=0.5, inference=True)(xs, xs, xs)
    yield lambda: layer(dropout_p=0.5)(xs, xs, xs, deterministic=True)
    yield lambda: layer()(xs, xs, xs, process_heads=lambda q, k, v: (2 * q, k, v))
    yield lambda: layer()(xs, xs, xs, process_heads=lambda q, k, v: (q[:1], k, v))
    yield lambda: layer(dtype="bfloat16")(xs, xs, xs)
    yield lambda: layer()(xs.astype("bfloat16"), xs, xs)
    yield lambda: [x.shape for x in leaves(eqx.filter(layer(), eqx.is_array))]
    yield lambda: layer().query_proj.weight
    for field in (
        "num_heads",
        "query_size",
        "key_size",
        "value_size",
        "output_size",
        "qk_size",
        "vo_size",
    ):
        yield lambda field=field: getattr(layer(), field)
    yield lambda: layer()(xs, jnp.ones((3, 5)), xs)
    yield lambda: layer()(xs, xs, jnp.ones((2, 4)))
    yield lambda: layer()(xs[0], xs[0], xs[0])
    yield lambda: layer()(xs)
    yield lambda: name(3, 4, key=KEY)
    yield lambda: name(2, 4)
    yield lambda: jax.vmap(layer())(xs[None], xs[None], xs[None])
    yield lambda: layer()(jnp.ones((0, 4)), xs, xs)
    # What is hidden by a mask does not count: not NaN, not infinity, and not in derivatives.
    hidden = jnp.array([[True, False, False], [True, True, False], [False, False, False]])
    for mask in (hidden, jnp.zeros((3, 3), bool), jnp.stack([hidden, hidden.T])):
        yield lambda mask=mask: jax.grad(lambda x: (layer()(x, x, x, mask) ** 2).sum())(xs)
        yield lambda mask=mask: jax.jvp(lambda x: layer()(x, x, x, mask), (xs,), (xs,))[1]
        yield (
            lambda mask=mask: (
                eqx.filter_grad(lambda m: (m(xs, xs, xs, mask) ** 2).sum())(
                    layer()
                ).query_proj.weight
            )
        )
        yield lambda mask=mask: layer()(1e20 * xs, 1e18 * xs, xs, mask)
    for bad in (jnp.nan, jnp.inf):
        yield lambda bad=bad: layer()(xs, xs.at[2].set(bad), xs, hidden)
        yield lambda bad=bad: jax.grad(lambda k: layer()(xs, k, xs, hidden).sum())(
            xs.at[2].set(bad)
        )
    yield lambda: layer(dtype="float16")(*[xs.astype("float16")] * 3)
    yield lambda: [
        type(getattr(layer(), f"{x}_proj")) is eqx.nn.Linear for x in ("query", "output")
    ]
    yield lambda: of_subclass(eqx, name, 2, 4, key=KEY)
    yield lambda: of_parts(eqx, name, 2, 4, key=KEY)(xs, xs, xs)
