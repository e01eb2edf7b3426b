"""`hooked`: a module that hands what its call returns to a function first."""

import pickle

import jax
import jax.numpy as jnp
import numpy as np

import vernal
from vernal.modules import hooked


class Scale(vernal.Module):
    weight: jax.Array

    def __call__(self, x):
        return self.weight * x


class Shifted(Scale):
    shift: jax.Array

    def __call__(self, x):
        return super().__call__(x) + self.shift


def test_the_hook_sees_what_the_call_of_the_class_itself_returns():
    seen = []

    def hook(y):
        seen.append(y)
        return 10 * y

    plain = Shifted(jnp.array(2.0), jnp.array(1.0))
    layer = hooked(plain, hook)
    assert layer(3.0) == 70 and seen == [7] and plain(3.0) == 7
    assert type(layer) is Shifted and jax.tree.leaves(layer) == jax.tree.leaves(plain)
    assert hooked(layer, jnp.negative)(3.0) == -7


def test_the_hook_is_structure_and_goes_wherever_the_module_goes():
    layer = hooked(Scale(jnp.array(2.0)), jnp.negative)
    assert jax.tree.structure(layer) != jax.tree.structure(Scale(jnp.array(2.0)))
    frozen = vernal.freeze(layer, "weight")
    replaced = vernal.tree_at(lambda m: m.weight, frozen, jnp.array(3.0))
    for same, expected in (
        (jax.tree.map(lambda x: x + 1, layer), -9),
        (jax.jit(lambda m: m)(layer), -6),
        (vernal.filter_jit(lambda m: m)(layer), -6),
        (pickle.loads(pickle.dumps(layer)), -6),
        (replaced, -9),
        (vernal.unfreeze(replaced), -9),
    ):
        assert same(3.0) == expected
    y, _ = jax.lax.scan(
        lambda x, m: (m(x), None),
        jnp.array(1.0),
        jax.vmap(lambda w: hooked(Scale(w), jnp.negative))(jnp.array([2.0, 5.0])),
    )
    np.testing.assert_allclose(y, 10)
