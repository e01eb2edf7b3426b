"""Optimisers of cut weights: those that mix the elements of an array need automatic axes, and say so."""

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest

from vernal import Optimizer, filter_jit, nn
from vernal.sharding import fsdp, init_sharded, make_mesh, place

MIXED = {
    "muon": (optax.contrib.muon, {}),
    "lbfgs": (optax.lbfgs, {"linesearch": None}),
    "prodigy": (optax.contrib.prodigy, {}),
    "adaptive_grad_clip": (optax.adaptive_grad_clip, {}),
}
ALONE = {"adamw": (optax.adamw, {}), "adafactor": (optax.adafactor, {}), "sm3": (optax.sm3, {})}


@filter_jit
def step(opt, model, state):
    return opt.update(model, jax.tree.map(jnp.sin, model), state)


def trained(name, mesh):
    """A model after three steps, with its weights cut over the devices of a mesh, if there is one."""
    factory, settings = (MIXED | ALONE)[name]
    model = nn.MLP(64, 64, 256, depth=1, key=jax.random.key(0))
    opt = Optimizer(factory, 0.01, **settings)
    if mesh is None:
        state = opt.init(model)
    else:
        rules = fsdp(model, mesh, "data")
        model = place(model, mesh, rules)
        state = init_sharded(opt.init, model, mesh, rules, like=model)
    for _ in range(3):
        model, state = step(opt, model, state)
    return model


@pytest.mark.parametrize("automatic", [True, False])
@pytest.mark.parametrize("name", [*MIXED, *ALONE])
def test_steps_are_those_of_one_device_or_refused(name, automatic):
    mesh = make_mesh(data=8, automatic=automatic)
    if name in MIXED and not automatic:
        with pytest.raises(ValueError, match=rf"`{name}` does not say where(.|\n)*automatic=True"):
            trained(name, mesh)
        return
    found, want = trained(name, mesh), trained(name, None)
    assert not found.layers[0].weight.sharding.is_fully_replicated
    for a, b in zip(jax.tree.leaves(found), jax.tree.leaves(want), strict=True):
        np.testing.assert_allclose(a, b, rtol=1e-5, atol=1e-6)


def unplaced():
    """As JAX 0.10.2 does, where a factory makes arrays on no mesh."""

    def init(params):
        raise ValueError("Length of device assignment 1 is not equal to the size of the mesh 8")

    return optax.GradientTransformation(init, lambda updates, state, params=None: (updates, state))


def test_a_state_that_cannot_be_made_outside_of_a_compiled_function_names_the_way():
    model = nn.Linear(64, 64, key=jax.random.key(0))
    with pytest.raises(ValueError, match="^Length of device"):
        Optimizer(unplaced).init(model)
    mesh = make_mesh(data=8)
    model = place(model, mesh, fsdp(model, mesh, "data"))
    with pytest.raises(ValueError, match=r"`unplaced` does not say where(.|\n)*init_sharded"):
        Optimizer(unplaced).init(model)
