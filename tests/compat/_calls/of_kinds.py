"""What counts as an array, and splitting trees by it."""

import jax
import jax.numpy as jnp
import jax.tree_util as jtu
import numpy as np

from .registry import calls

KEY = jax.random.key(0)


class LikeAnArray:
    def __jax_array__(self):
        return jnp.ones(2)


class LikeAnInteger:
    def __jax_array__(self):
        return jnp.ones(2, int)


THINGS = (
    *(1, 1.0, 1j, True, None, "a", b"a", len, jnp.tanh, object, [1.0], (), {}),
    *(np.ones(2), np.ones(2, int), np.float32(1), np.int8(1), np.bool_(True), np.array("a")),
    *(np.array(None), np.dtype("float32"), jnp.float32, jax.ShapeDtypeStruct((2,), "float32")),
    *(jnp.ones(2), jnp.array(1), jnp.ones(2, complex), jnp.ones(2, bool), jnp.ones(2, "bfloat16")),
    *(KEY, jnp.asarray(1.0), LikeAnArray(), LikeAnInteger(), LikeAnArray),
)


@calls("is_array", "is_array_like", "is_inexact_array", "is_inexact_array_like")
def kinds(name, eqx):
    for thing in THINGS:
        yield name, thing
    yield lambda: name(element=1.0)
    yield name
    yield lambda: jax.jit(lambda x: jnp.asarray(name(x)))(1.0)
    yield lambda: jax.vmap(lambda x: jnp.asarray(name(x)))(jnp.ones(2))


TREE = {"a": jnp.ones(2), "b": [1, np.ones(1), None], "c": (jnp.tanh, "text"), "d": 2.0}


@calls("filter")
def filter_(name, eqx):
    yield name, TREE, eqx.is_array
    yield lambda: name(TREE, eqx.is_array, inverse=True)
    yield lambda: name(TREE, eqx.is_array, replace=0)
    yield lambda: name(TREE, eqx.is_array, False, 0)
    yield name, TREE, True
    yield name, TREE, False
    yield name, TREE, {"a": True, "b": False, "c": eqx.is_array, "d": eqx.is_array_like}
    yield name, TREE, {"a": True, "b": [False, True, False], "c": False, "d": True}
    yield name, TREE, {"a": True, "b": [False, True, None], "c": False, "d": True}
    yield name, TREE, {"a": True}
    yield name, TREE, 1
    yield name, TREE, None
    yield name, TREE, np.bool_(True)
    yield name, TREE, jnp.array(True)
    yield name, None, True
    yield name, [], eqx.is_array
    yield name, [1, 2], lambda x: x == 1
    yield name, [1, 2], lambda x: x - 1
    yield name, [1, 2], lambda x: np.bool_(x == 1)
    yield name, [1, 2], lambda x: jnp.array(True)
    yield lambda: name(
        [(1, 2), 3], lambda x: isinstance(x, tuple), is_leaf=lambda x: type(x) is tuple
    )
    yield lambda: name(pytree=[1.0], filter_spec=True)


@calls("partition")
def partition(name, eqx):
    yield name, TREE, eqx.is_array
    yield name, TREE, eqx.is_inexact_array
    yield lambda: name(TREE, eqx.is_array, replace=0)
    yield lambda: name(TREE, eqx.is_array, "replaced")
    yield name, TREE, {"a": True, "b": False, "c": False, "d": True}
    yield name, TREE, {"a": True, "b": False}
    yield name, TREE, 1
    yield name, 1, True
    yield name, None, True
    yield lambda: name([None, 1], True, is_leaf=lambda x: x is None)
    yield lambda: jtu.tree_structure(name(TREE, eqx.is_array))


@calls("combine")
def combine(name, eqx):
    yield name, [1, None], [None, 2]
    yield name, [1, None], [3, 2]
    yield name, [None, None], [None, None]
    yield lambda: name([1, None, None], [None, 2, None], [None, None, 3])
    yield name, [1, None]
    yield name
    yield name, [1], [1, 2]
    yield name, {"a": 1}, {"b": 1}
    yield name, [None], [(1, 2)]
    yield name, None, [1, 2]
    yield name, [1, 2], None
    yield lambda: name(*eqx.partition(TREE, eqx.is_array))
    yield lambda: name(
        [None, (1, 2)], [(3, 4), None], is_leaf=lambda x: x is None or type(x) is tuple
    )


@calls("if_array")
def if_array(name, eqx):
    for thing in THINGS[:8] + THINGS[13:18]:
        yield lambda thing=thing: name(0)(thing)
    yield lambda: name(1)(jnp.ones(2))
    yield lambda: name(axis=None)(jnp.ones(2))
    yield lambda: repr(name(0))
    yield lambda: name(0) == name(0)
    yield lambda: {name(0): 1}[name(0)]
    yield lambda: name(0).axis
    yield lambda: name(0)(x=jnp.ones(2))
    yield name


@calls("apply_updates")
def apply_updates(name, eqx):
    yield name, [1.0, 2], [0.5, 3]
    yield name, {"a": jnp.ones(2), "b": "text"}, {"a": jnp.ones(2), "b": None}
    yield name, {"a": jnp.ones(2), "b": 2.0}, None
    yield name, [jnp.ones(2), (1.0, 2.0)], [jnp.ones(2), None]
    yield name, jnp.ones(2), 1.0
    yield name, jnp.ones(2), jnp.array(1.0)
    yield name, jnp.ones(2, "bfloat16"), jnp.ones(2)
    yield name, jnp.array(1.0, jnp.float32), 1
    yield name, jnp.ones(2, int), jnp.ones(2)
    yield name, 1.0, jnp.array(1.0)
    yield name, jnp.ones(2), jnp.ones((3, 2))
    yield name, np.ones(2, "float32"), jnp.ones(2)
    yield name, [1.0], [1.0, 2.0]
    yield name, {"a": 1.0}, {"b": 1.0}
    yield name, {"a": "text"}, {"a": 1.0}
    yield name, None, None
    yield lambda: name(model=jnp.ones(2), updates=jnp.ones(2))
    yield lambda: name(eqx.nn.PReLU(), eqx.filter_grad(lambda m: m(-1.0))(eqx.nn.PReLU()))
