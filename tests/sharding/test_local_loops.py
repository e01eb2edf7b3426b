"""Loops whose length depends on the data, on many devices: inside `filter_shard_map` no device waits for another."""

import jax
import jax.numpy as jnp
import numpy as np
from jax import P, lax

import vernal
from vernal import debug, loops, nn
from vernal.sharding import data_parallel, make_mesh, place, shard_batch


def relax(model, x):
    """Repeats until the largest number is small: as often as the data requires."""
    return loops.while_loop(
        lambda x: jnp.max(jnp.abs(x)) > 0.05,
        lambda x: 0.5 * x + 0.1 * model(x),
        x,
        kind="checkpointed",
        max_steps=16,
    )


def loss(model, x):
    return jnp.mean(jax.vmap(lambda x: relax(model, x))(x) ** 2)


value_and_grad = vernal.filter_value_and_grad(loss)


def test_an_adaptive_loop_sends_nothing_while_it_runs():
    model = nn.Linear(3, 3, use_bias=False, key=jax.random.key(0))
    x = np.asarray(jax.random.normal(jax.random.key(1), (8, 3)))
    expected = vernal.filter_jit(value_and_grad)(model, x)

    # The whole batch goes on until its last example is done, and asks all devices each time.
    mesh = make_mesh(data=4, devices=jax.devices()[:4], automatic=True)
    given = place(model, mesh, data_parallel()), shard_batch(x, mesh, "data")
    together = vernal.filter_jit(value_and_grad).lower(*given).compile()
    assert any(row.at_least for row in debug.collectives(together).rows)

    mesh = make_mesh(data=4, devices=jax.devices()[:4])

    @vernal.filter_jit
    @vernal.filter_shard_map(mesh=mesh, in_specs=(None, P("data")), out_specs=None, check_vma=False)
    def apart(model, x):
        return lax.pmean(value_and_grad(model, x), "data")

    given = place(model, mesh, data_parallel()), shard_batch(x, mesh, "data")
    sent = debug.collectives(apart.lower(*given).compile())
    assert 1 <= sent.count() <= 2
    assert not any(row.at_least for row in sent.rows)
    found = apart(*given)
    np.testing.assert_allclose(found[0], expected[0], rtol=1e-5)
    np.testing.assert_allclose(found[1].weight, expected[1].weight, rtol=1e-5, atol=1e-7)
