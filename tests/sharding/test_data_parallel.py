"""Gradients and random numbers of one step that `filter_shard_map` spreads over the devices."""

import functools

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax import P, lax

import vernal
from vernal import nn
from vernal.sharding import data_parallel, gather, make_mesh, place, shard_batch

X = jnp.arange(48.0).reshape(16, 3) / 48


MESH = make_mesh(data=-1)


def spread(fn, *in_specs, **options):
    mapped = vernal.filter_shard_map(fn, mesh=MESH, in_specs=in_specs, **options)
    return vernal.filter_jit(mapped), shard_batch(X, MESH, "data")


def loss(model, x):
    return jnp.mean(model(x) ** 2)


@pytest.mark.parametrize("transform", [vernal.filter_grad, vernal.filter_value_and_grad])
def test_the_loss_of_one_device_has_no_gradient_by_what_all_share(transform):
    model = nn.Linear(3, 2, key=jax.random.key(0))
    run, x = spread(
        lambda model, x: lax.pmean(transform(loss)(model, x), "data"), P(), P("data"), out_specs=P()
    )
    with pytest.raises(ValueError, match=r"differs between devices(.|\n)*pmean\(loss, 'data'\)"):
        run(model, x)


def test_the_mean_loss_has_the_gradient_of_one_device():
    model = nn.Linear(3, 2, key=jax.random.key(0))

    @vernal.filter_value_and_grad
    def mean_loss(model, x):
        return lax.pmean(loss(model, x), "data")

    run, x = spread(mean_loss, P(), P("data"), out_specs=P())
    value, gradient = run(model, x)
    expected, expected_gradient = vernal.filter_value_and_grad(loss)(model, X)
    np.testing.assert_allclose(value, expected, rtol=1e-6)
    np.testing.assert_allclose(gradient.weight, expected_gradient.weight, rtol=1e-5)
    np.testing.assert_allclose(gradient.bias, expected_gradient.bias, rtol=1e-5)


def test_a_gradient_by_what_differs_between_devices_is_of_its_own_device():
    run, x = spread(vernal.filter_grad(lambda x: jnp.sum(x**2)), P("data"), out_specs=P("data"))
    np.testing.assert_allclose(run(x), 2 * X, rtol=1e-6)


@pytest.mark.parametrize("automatic", [True, False])
def test_one_array_of_each_device_does_not_hide_those_that_all_share(automatic):
    mesh = make_mesh(data=-1, automatic=automatic)
    spec = {"shared": P(), "local": P("data")}
    params = place({"shared": jnp.array([1.0, 2.0, 3.0]), "local": jnp.arange(8.0)}, mesh, spec)
    x = shard_batch(X[:8], mesh, "data")

    def loss(params, x):
        return jnp.mean((x @ params["shared"] + params["local"]) ** 2)

    def run(loss):
        mapped = vernal.filter_shard_map(
            vernal.filter_grad(loss), mesh=mesh, in_specs=(spec, P("data")), out_specs=spec
        )
        return vernal.filter_jit(mapped)(params, x)

    with pytest.raises(ValueError, match="differs between devices, and a differentiated array"):
        run(loss)
    found = run(lambda params, x: lax.pmean(loss(params, x), "data"))
    want = jax.grad(loss)(gather(params), X[:8])
    for name in want:
        np.testing.assert_allclose(found[name], want[name], rtol=1e-5)


@pytest.mark.parametrize("automatic", [True, False])
@pytest.mark.parametrize("name", ["filter_jacrev", "filter_hessian"])
def test_derivatives_by_reverse_mode_are_those_of_one_device_or_refused(name, automatic):
    mesh = make_mesh(data=-1, automatic=automatic)
    w = vernal.filter_shard(jnp.array([1.0, 2.0, 3.0]), jax.NamedSharding(mesh, P()))
    x = shard_batch(X[:8], mesh, "data")
    transform = getattr(vernal, name)

    def one(w, x):
        return jnp.sum(jnp.sin(w * x[0]))

    def run(fn):
        def mapped(w, x):
            return transform(lambda w: fn(w, x))(w)[None]

        return vernal.filter_jit(
            vernal.filter_shard_map(mapped, mesh=mesh, in_specs=(P(), P("data")), out_specs=P())
        )(w, x)[0]

    with pytest.raises(ValueError, match="output of .* differs between devices"):
        run(one)
    found = run(lambda w, x: lax.pmean(one(w, x), "data"))
    want = transform(lambda w: jnp.mean(jax.vmap(lambda x: one(w, x[None]))(X[:8])))(gather(w))
    np.testing.assert_allclose(found, want, rtol=1e-5, atol=1e-7)

    # What the message advises for the derivative on each device.
    def local(w, x):
        return transform(lambda w: one(w, x))(lax.pcast(w, "data", to="varying"))[None]

    each = vernal.filter_jit(
        vernal.filter_shard_map(local, mesh=mesh, in_specs=(P(), P("data")), out_specs=P("data"))
    )(w, x)
    want = jax.vmap(lambda x: transform(lambda w: one(w, x[None]))(gather(w)))(X[:8])
    np.testing.assert_allclose(each, want, rtol=1e-5, atol=1e-7)


def distinct_rows(y):
    return len({row.tobytes() for row in np.asarray(y)})


@pytest.mark.parametrize("how", ["closed over", "given", "apply"])
def test_devices_that_share_a_key_draw_different_masks(how):
    layer, key = nn.Dropout(0.5), jax.random.key(0)
    x = shard_batch(jnp.ones((16, 64)), MESH, "data")

    def given(x, key):
        return layer(x, key=key) if how == "given" else nn.apply(layer, x, key=key)[0]

    if how == "closed over":
        run = spread(functools.partial(layer, key=key), P("data"), out_specs=P("data"))[0]
        y = run(x)
    else:
        y = spread(given, P("data"), P(), out_specs=P("data"))[0](x, key)
    assert distinct_rows(y) == 16


def test_what_all_devices_share_keeps_its_mask():
    layer, key = nn.Dropout(0.5), jax.random.key(0)
    run, _ = spread(lambda x: layer(x, key=key), P(), out_specs=P())
    np.testing.assert_array_equal(run(X), layer(X, key=key))


def test_keys_that_differ_already_are_left_alone():
    layer, keys, wide = nn.Dropout(0.5), jax.random.split(jax.random.key(0), 8), jnp.ones((8, 64))
    run = spread(lambda x, keys: layer(x, key=keys[0]), P("data"), P("data"), out_specs=P("data"))[
        0
    ]
    alone = [layer(wide[0], key=key) for key in keys]
    together = run(*shard_batch((wide, keys), MESH, "data"))
    np.testing.assert_array_equal(together, jnp.stack(alone))


@pytest.mark.parametrize("sums", [True, False])
def test_a_rule_for_the_gradient_may_sum_over_the_devices_or_leave_it(sums):
    @vernal.filter_custom_vjp
    def total(w, x):
        return jnp.sum(w * x)

    @total.def_fwd
    def _(perturbed, w, x):
        return jnp.sum(w * x), x

    @total.def_bwd
    def _(x, ct, perturbed, w, _):
        part = ct * jnp.sum(x, axis=0, keepdims=True)
        return lax.psum(part, "data") if sums else part

    def loss(w, x):
        return lax.psum(total(w, x), "data")

    run, x = spread(vernal.filter_grad(loss), P(), P("data"), out_specs=P())
    np.testing.assert_allclose(run(jnp.ones((1, 3)), x)[0], jnp.sum(X, axis=0), rtol=1e-6)


@pytest.mark.parametrize("x", [np.ones((8, 3), np.float32), jnp.ones((8, 3))], ids=["numpy", "jax"])
@pytest.mark.parametrize("compiled", [True, False])
def test_a_batch_that_is_not_placed_is_told_by_its_name(x, compiled):
    mapped = vernal.filter_shard_map(
        lambda scale, x: scale * x, mesh=MESH, in_specs=(P(), P("data")), out_specs=P("data")
    )
    run = vernal.filter_jit(mapped) if compiled else mapped
    with pytest.raises(ValueError, match=r"does not lie on(.|\n)*argument x(.|\n)*shard_batch"):
        run(2.0, x)
    np.testing.assert_array_equal(run(2.0, shard_batch(x, MESH, "data")), 2 * np.ones((8, 3)))


def test_the_gradient_by_a_model_that_is_not_placed_says_so():
    model, x = nn.Linear(3, 2, key=jax.random.key(0)), shard_batch(X, MESH, "data")
    gradient = vernal.filter_grad(loss)
    compiled, want = vernal.filter_jit(gradient), gradient(model, X)
    with pytest.raises(Exception, match="sharded") as caught:
        compiled(model, x)
    assert "Place the model first" in "".join(caught.value.__notes__)
    found = compiled(place(model, MESH, data_parallel()), x)
    np.testing.assert_allclose(found.weight, want.weight, rtol=1e-5)
    with jax.set_mesh(MESH):
        found = gradient(model, x)
    np.testing.assert_allclose(found.weight, want.weight, rtol=1e-5)


def test_an_array_of_which_jax_does_not_know_the_mesh_is_advised_of():
    def loss(x):
        raise ValueError("Length of device assignment 1 is not equal to the size of the mesh 8")

    with pytest.raises(ValueError, match="Length of device") as caught:
        vernal.filter_grad(loss)(jnp.ones(()))
    assert "or under jax.set_mesh(mesh)" in "".join(caught.value.__notes__)
