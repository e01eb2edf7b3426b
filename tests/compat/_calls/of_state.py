"""Layers with state, and what holds the state."""

import jax
import jax.numpy as jnp

from .of_layers import of_subclass
from .registry import calls

KEY = jax.random.key(0)
XS = jnp.arange(12.0).reshape(6, 2) ** 1.5


def counter(eqx):
    class Counter(eqx.Module):
        index: object

        def __init__(self, init=0):
            self.index = eqx.nn.StateIndex(jnp.array(init) if init is not None else init)

        def __call__(self, x, state):
            value = state.get(self.index)
            return x + value, state.set(self.index, value + 1)

    return Counter


@calls("nn.State", "nn.StateIndex", "nn.make_with_state", "nn.delete_init_state")
def state(name, eqx):
    Counter = counter(eqx)
    nn = eqx.nn

    def made():
        return nn.make_with_state(Counter)(5)

    def called(count):
        model, state = made()
        out = []
        for _ in range(count):
            y, state = eqx.filter_jit(model)(jnp.array(1), state)
            out.append(y)
        return out

    def used_twice():
        model, state = made()
        model(1, state)
        return model(1, state)

    def with_model(fn):
        return fn(*made())

    yield called, 3
    yield used_twice
    yield with_model, lambda m, s: s.get(m.index)
    yield with_model, lambda m, s: s.set(m.index, jnp.array(7)).get(m.index)
    yield with_model, lambda m, s: s.set(m.index, 7).get(m.index)
    yield with_model, lambda m, s: s.set(m.index, 7.5).get(m.index)
    yield with_model, lambda m, s: s.set(m.index, jnp.ones(2)).get(m.index)
    yield with_model, lambda m, s: s.set(m.index, "text")
    yield with_model, lambda m, s: s.set(item=m.index, value=jnp.array(7)).get(item=m.index)
    yield with_model, lambda m, s: s.get("text")
    yield with_model, lambda m, s: s.get(nn.StateIndex(jnp.array(1)))
    yield with_model, lambda m, s: s.substate(m).get(m.index)
    yield with_model, lambda m, s: s.update(s.substate(m).set(m.index, jnp.array(9))).get(m.index)
    yield with_model, lambda m, s: s.update(1)
    yield with_model, lambda m, s: jax.tree.leaves(s)
    yield with_model, lambda m, s: len(jax.tree.leaves(m))
    yield with_model, lambda m, s: jax.tree.map(lambda x: x + 1, s).get(m.index)
    yield with_model, lambda m, s: jax.vmap(lambda x: m(x, s)[0])(jnp.arange(2))
    yield lambda: nn.State(Counter(3)).get(Counter(3).index)
    yield lambda: len(jax.tree.leaves(nn.State(Counter(3))))
    yield lambda: len(jax.tree.leaves(nn.delete_init_state(Counter(3))))
    yield lambda: nn.make_with_state(lambda: [Counter(1), Counter(2)])()[1].get
    yield lambda: jax.tree.leaves(nn.make_with_state(lambda: [Counter(1), Counter(2)])()[1])
    yield lambda: nn.make_with_state(lambda: 1)()[0]
    yield lambda: nn.make_with_state(make_model=Counter)(init=2)[1].get is None
    yield lambda: nn.make_with_state(1)()
    yield lambda: nn.make_with_state(nn.Linear)(2, 3, key=KEY)[0].weight
    yield lambda: nn.StateIndex(init=jnp.array(3)).init
    yield lambda: nn.StateIndex(jnp.tanh)
    yield lambda: nn.StateIndex(1.5).init
    yield lambda: nn.delete_init_state(pytree=[1, jnp.ones(2)]) if name is None else 1
    yield lambda: nn.delete_init_state([1, jnp.ones(2)])
    yield nn.State
    yield lambda: nn.StateIndex[int]


@calls("nn.BatchNorm")
def batch_norm(name, eqx):
    def run(norm_args, options, steps=2, xs=XS, **call):
        norm, state = eqx.nn.make_with_state(name)(*norm_args, **options)
        for _ in range(steps):
            ys, state = jax.vmap(
                lambda x, s: norm(x, s, **call),
                in_axes=(0, None),
                out_axes=(0, None),
                axis_name="i",
            )(xs, state)
        test = eqx.nn.inference_mode(norm)
        zs, _ = jax.vmap(test, in_axes=(0, None), out_axes=(0, None), axis_name="i")(xs, state)
        return ys, zs, len(jax.tree.leaves(state))

    yield run, (2, "i"), {}
    for mode in ("ema", "batch"):
        yield run, (2, "i"), {"mode": mode}
        yield run, (2, "i"), {"mode": mode, "momentum": 0.5, "eps": 1e-2}, 3
        yield run, (2, "i"), {"mode": mode, "channelwise_affine": False}, 1
        yield run, (2, "i"), {"mode": mode, "inference": True}, 1
        yield run, (2, "i"), {"mode": mode, "dtype": "bfloat16"}, 1
        yield run, (2, "i"), {"mode": mode}, 1, XS.reshape(3, 2, 2)
        yield lambda mode=mode: run((2, "i"), {"mode": mode}, inference=True)
        yield lambda mode=mode: run((2, "i"), {"mode": mode}, key=KEY)
    yield run, (3, "i"), {"mode": "ema"}, 1
    yield run, (2, "j"), {"mode": "ema"}, 1
    yield run, (2, "i"), {"mode": "wrong"}, 1
    yield run, (2,), {"mode": "ema"}, 1
    yield lambda: [name(2, "i", mode="ema").weight, name(2, "i", mode="ema").bias]
    for field in (
        "input_size",
        "axis_name",
        "eps",
        "channelwise_affine",
        "momentum",
        "inference",
        "mode",
    ):
        yield lambda field=field: getattr(name(2, "i", mode="batch"), field)
    yield lambda: name(2, "i", 1e-3, False, 0.9, True, None, "ema").momentum
    yield lambda: name(2, "i", mode="ema").is_stateful()

    for mode in ("ema", "batch"):
        for dtype in ("int32", "bool", "bfloat16", "complex64"):
            yield lambda mode=mode, dtype=dtype: run(
                (2, "i"), {"mode": mode}, 1, (XS % 3).astype(dtype)
            )

    def through_the_state(mode, inference):
        """The gradient of a later call with respect to the batch of an earlier one."""
        norm, state = eqx.nn.make_with_state(name)(2, "i", mode=mode, momentum=0.7)

        def over(xs, state, **options):
            return jax.vmap(
                lambda x, s: norm(x, s, **options),
                in_axes=(0, None),
                out_axes=(0, None),
                axis_name="i",
            )(xs, state)

        def loss(xs):
            _, after = over(xs, state)
            return (over(jnp.cos(XS), after, inference=inference)[0] ** 3).sum()

        return jax.grad(loss)(XS)

    for mode in ("ema", "batch"):
        for inference in (False, True):
            yield through_the_state, mode, inference


@calls("nn.SpectralNorm")
def spectral_norm(name, eqx):
    layer = eqx.nn.Linear(3, 2, key=KEY)

    def run(*args, steps=2, **options):
        norm, state = eqx.nn.make_with_state(name)(*args, **options, key=KEY)
        for _ in range(steps):
            y, state = norm(jnp.ones(3), state)
        return y, eqx.nn.inference_mode(norm)(jnp.ones(3), state)[0], jax.tree.leaves(state)

    yield run, layer, "weight"
    yield lambda: run(layer, "weight", num_power_iterations=3)
    yield lambda: run(layer, "weight", inference=True)
    yield lambda: run(layer, "bias")
    yield lambda: run(layer, "missing")
    yield lambda: run(layer)
    yield lambda: name(layer, "weight")
    yield lambda: name(layer=layer, weight_name="weight", key=KEY).num_power_iterations
    yield lambda: name(layer, "weight", key=KEY).is_stateful()
    yield lambda: name[eqx.nn.Linear]
    yield lambda: [
        x.shape
        for model, state in [eqx.nn.make_with_state(name)(layer, "weight", key=KEY)]
        for x in state.get(model.uv_index)
    ]
    square = eqx.nn.Linear(2, 2, use_bias=False, key=KEY)
    yield lambda: eqx.nn.make_with_state(name)(square, "weight", key=KEY)[0].layer(XS[:2])


@calls("nn.WeightNorm")
def weight_norm(name, eqx):
    layer = eqx.nn.Linear(3, 2, key=KEY)
    yield lambda: name(layer)(jnp.ones(3))
    yield lambda: name(layer, axis=None)(jnp.ones(3))
    yield lambda: name(layer, "weight", 1)(jnp.ones(3))
    yield lambda: name(layer).g
    yield lambda: name(layer, axis=None).g
    yield lambda: [x.shape for x in jax.tree.leaves(name(layer))]
    yield lambda: name(layer, "bias")
    yield lambda: name(layer, "missing")
    yield lambda: name(layer, axis=5)
    yield lambda: name(layer)(jnp.ones(3), key=KEY)
    yield lambda: name(eqx.nn.Conv1d(2, 3, 2, key=KEY))(jnp.ones((2, 4)))
    yield lambda: name(layer) == name(layer)
    yield lambda: name(layer=layer, weight_name="weight", axis=0).weight_name
    yield lambda: of_subclass(eqx, name, layer)
    yield lambda: name(eqx.nn.Linear(2, 2, use_bias=False, key=KEY))(XS[:2])
    yield lambda: name[eqx.nn.Linear]


@calls("nn.StatefulLayer")
def stateful_layer(name, eqx):
    class Layer(name):
        def __call__(self, x, state, *, key=None):
            return x, state

    class WithNumber(name):
        scale: float = 2.0

        def __call__(self, x, state, *, key=None):
            return self.scale * x, state

    yield lambda: jax.tree.leaves(WithNumber())
    yield lambda: jax.tree.map(lambda x: 3 * x, WithNumber()).scale
    yield lambda: Layer().is_stateful()
    yield lambda: issubclass(name, eqx.Module)
    yield name
    yield lambda: isinstance(eqx.nn.BatchNorm(2, "i", mode="ema"), name)
    yield lambda: isinstance(eqx.nn.Identity(), name)
    yield lambda: eqx.nn.Sequential([Layer(), eqx.nn.Identity()])(1, "state")


@calls("nn.Shared")
def shared(name, eqx):
    class Model(eqx.Module):
        shared: object

        def __init__(self):
            pair = (eqx.nn.Embedding(3, 2, key=KEY), eqx.nn.Linear(2, 3, key=KEY))
            self.shared = name(pair, lambda p: p[1].weight, lambda p: p[0].weight)

        def __call__(self, i):
            embedding, linear = self.shared()
            return linear(embedding(i))

    yield lambda: Model()(jnp.array(1))
    yield lambda: len(jax.tree.leaves(Model()))
    yield lambda: name([1.0, 2.0], lambda t: t[0], lambda t: t[1])()
    yield lambda: name([jnp.ones(2), jnp.zeros(2)], lambda t: t[0], lambda t: t[1])()
    yield lambda: name([jnp.ones(2), jnp.zeros(3)], lambda t: t[0], lambda t: t[1])
    yield lambda: name(pytree=[1, 2], where=lambda t: t[0], get=lambda t: t[1])()
    yield lambda: name([1, 2], lambda t: 5, lambda t: t[1])
    yield lambda: eqx.filter_grad(lambda m: m(jnp.array(1)).sum())(Model()).shared.pytree[0].weight
