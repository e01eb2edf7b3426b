import inspect

import equinox as eqx
import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest

import vernal
from vernal import nn


def flat(model):
    """The arrays of a model of either library, in the order of its fields."""
    return [leaf for leaf in jax.tree.leaves(model) if hasattr(leaf, "shape")]


@pytest.mark.parametrize(("n_in", "n_out"), [(2, 3), ("scalar", "scalar")])
@pytest.mark.parametrize("depth", [1, 2, 4])
@pytest.mark.parametrize("scan", [False, True])
@pytest.mark.parametrize("prelu", [False, True])
@pytest.mark.sample(6)
def test_weights_values_and_gradients_are_equinox_s(getkey, n_in, n_out, depth, scan, prelu):
    key = getkey()

    def build(lib):
        act = (lib.PReLU(), lib.PReLU()) if prelu else (jax.nn.tanh, jax.nn.softplus)
        return lib.MLP(n_in, n_out, 4, depth, *act, scan=scan, key=key)

    ours, theirs = build(nn), build(eqx.nn)
    assert [a.shape for a in flat(ours)] == [a.shape for a in flat(theirs)]
    assert all(map(jnp.array_equal, flat(ours), flat(theirs)))
    x = jax.random.normal(getkey(), () if n_in == "scalar" else (n_in,))
    their_arrays, their_rest = eqx.partition(theirs, eqx.is_array)

    @jax.jit
    def both(ours, their_arrays):
        peer = eqx.combine(their_arrays, their_rest)
        return (
            jax.value_and_grad(lambda m: m(x).sum())(ours),
            eqx.filter_value_and_grad(lambda m: m(x).sum())(peer),
        )

    for a, b in zip(*map(flat, both(ours, their_arrays)), strict=True):
        np.testing.assert_allclose(a, b, atol=1e-5)


@pytest.mark.parametrize("prelu", [False, True])
def test_the_final_activation_follows_the_only_layer_too(getkey, prelu):
    # Equinox leaves it out if `depth=0`, without a word.
    key = getkey()
    final = nn.PReLU() if prelu else jax.nn.softplus
    model = nn.MLP(2, 3, 4, 0, final_activation=final, key=key)
    peer = eqx.nn.MLP(2, 3, 4, 0, key=key)
    x = jax.random.normal(getkey(), (2,))
    assert jnp.allclose(model(x), final(peer(x)), atol=1e-6)


@pytest.mark.parametrize("biases", [(True, False), (False, True), (False, False)])
@pytest.mark.parametrize("depth", [0, 2])
def test_biases_are_where_they_were_asked_for(getkey, biases, depth):
    key = getkey()
    use_bias, use_final_bias = biases
    options = {"use_bias": use_bias, "use_final_bias": use_final_bias}
    ours = nn.MLP(2, 3, 4, depth, **options, key=key)
    theirs = eqx.nn.MLP(2, 3, 4, depth, **options, key=key)
    x = jax.random.normal(getkey(), (2,))
    assert jnp.allclose(ours(x), theirs(x), atol=1e-6)
    assert [layer.use_bias for layer in ours.layers] == [use_bias] * depth + [use_final_bias]


def test_scan_gives_the_numbers_of_the_plain_loop(getkey):
    key = getkey()
    x = jax.random.normal(getkey(), (2,))
    plain = nn.MLP(2, 3, 4, 6, nn.PReLU(), key=key)
    scanned = nn.MLP(2, 3, 4, 6, nn.PReLU(), scan=True, key=key)
    assert scanned.layers[1].weight.shape == (5, 4, 4)
    assert jnp.allclose(plain(x), scanned(x), atol=1e-6)
    assert jnp.allclose(plain(x), jax.jit(scanned)(x), atol=1e-6)


@pytest.mark.parametrize("dtype", [jnp.bfloat16, jnp.float16, jnp.complex64])
@pytest.mark.parametrize("scan", [False, True])
@pytest.mark.sample(3)
def test_the_dtype_goes_through_all_layers(getkey, dtype, scan):
    model = nn.MLP(2, 3, 4, 3, jnp.tanh, dtype=dtype, scan=scan, key=getkey())
    assert {leaf.dtype for leaf in jax.tree.leaves(model)} == {jnp.dtype(dtype)}
    assert model(jnp.ones(2, dtype)).dtype == dtype


def test_an_activation_may_mix_the_neurons_of_its_layer(getkey):
    model = nn.MLP(2, 3, 4, 1, final_activation=jax.nn.softmax, key=getkey())
    assert jnp.allclose(model(jnp.ones(2)).sum(), 1.0)


def test_all_of_jax_takes_the_model_as_it_is(getkey):
    model = nn.MLP(2, 2, 4, 2, key=getkey())
    x = jax.random.normal(getkey(), (5, 2))
    expected = jnp.stack([model(row) for row in x])
    assert jnp.allclose(jax.jit(jax.vmap(model))(x), expected, atol=1e-6)
    (last, _), _ = jax.lax.scan(lambda c, _: ((c[1](c[0]), c[1]), None), (x[0], model), length=2)
    assert jnp.allclose(last, model(model(x[0])), atol=1e-6)
    chosen = jax.lax.cond(jnp.array(True), lambda m: m, lambda m: m, model)
    assert jnp.allclose(chosen(x[0]), expected[0], atol=1e-6)
    optimiser = optax.adam(1e-3)
    grads = jax.grad(lambda m: (jax.vmap(m)(x) ** 2).sum())(model)
    # Optax itself promotes implicitly.
    with jax.numpy_dtype_promotion("standard"):
        updates, _ = optimiser.update(grads, optimiser.init(model))
    assert jax.tree.structure(optax.apply_updates(model, updates)) == jax.tree.structure(model)


def test_a_model_is_one_trace_for_equal_structures(getkey):
    traces = []

    @jax.jit
    def run(model, x):
        traces.append(1)
        return model(x)

    for _ in range(3):
        run(nn.MLP(2, 2, 4, 2, key=getkey()), jnp.ones(2))
    assert len(traces) == 1


def test_the_model_runs_under_an_explicit_mesh(getkey):
    mesh = jax.make_mesh((4,), ("batch",), axis_types=(jax.sharding.AxisType.Explicit,))
    models = [
        (nn.MLP(3, 2, 4, 3, nn.PReLU(), scan=True, key=getkey()), (8, 3)),
        (nn.Conv2d(3, 4, 3, padding=1, padding_mode="REFLECT", key=getkey()), (8, 3, 6, 6)),
        (nn.ConvTranspose2d(3, 4, 3, 2, key=getkey()), (8, 3, 3, 3)),
        (nn.AvgPool2d(2, 2), (8, 3, 6, 6)),
        (nn.MaxPool2d(2, 2), (8, 3, 6, 6)),
        (nn.AdaptiveAvgPool2d(4), (8, 3, 6, 6)),
    ]
    for model, shape in models:
        x = jax.random.normal(getkey(), shape)
        expected = jax.vmap(model)(x)
        with jax.set_mesh(mesh):
            sharded = jax.device_put(x, jax.sharding.PartitionSpec("batch"))
            for y in jax.jit(lambda m, x: (m(x), jax.vmap(m)(x)))(model, sharded):
                assert jax.typeof(y).sharding.spec[0] == "batch"
                np.testing.assert_allclose(np.asarray(y), expected, atol=1e-5)


def test_a_wrong_input_is_that_of_the_model_and_not_of_its_first_layer(getkey):
    model = nn.MLP(2, 3, 4, 1, key=getkey())
    with pytest.raises(ValueError, match=r"(?s)`MLP` was given an input.*\(\.\.\., in_size=2\)"):
        model(jnp.ones((5, 3)))


@pytest.mark.parametrize("argument", ["width_size", "depth"])
def test_negative_sizes_are_refused(getkey, argument):
    sizes = {"in_size": 2, "out_size": 2, "width_size": 2, "depth": 2, argument: -1}
    with pytest.raises(ValueError, match="was given a wrong size") as error:
        nn.MLP(**sizes, key=getkey())
    assert f"where: argument `{argument}`" in str(error.value)


@pytest.mark.parametrize("scan", [False, True])
def test_an_activation_that_needs_a_key_is_refused(scan, getkey):
    text = r"(?s)cannot be random.*MLP\((final_)?activation=.*Dropout.*nn\.Sequential"
    random = nn.Sequential([jnp.tanh, nn.Dropout(0.5)])
    for activations in ((nn.Dropout(0.5),), (random,), (jnp.tanh, nn.Dropout(0.5, inference=True))):
        with pytest.raises(ValueError, match=text):
            nn.MLP(2, 3, 4, 2, *activations, scan=scan, key=getkey())
    model = nn.MLP(2, 3, 4, 2, scan=scan, key=getkey())
    for where in ("activation", "final_activation"):
        wrong = vernal.tree_at(where, model, nn.Dropout(0.5))
        with pytest.raises(ValueError, match=text):
            nn.apply(wrong, jnp.ones(2), key=getkey())


@pytest.mark.parametrize("activation", ["relu", None])
def test_an_activation_that_is_no_function_is_refused(activation, getkey):
    for argument in ("activation", "final_activation"):
        with pytest.raises(ValueError, match=rf"(?s)must be a function.*MLP\({argument}=...\)"):
            inspect.unwrap(nn.MLP.__init__)(
                object.__new__(nn.MLP), 2, 2, 2, 1, **{argument: activation}, key=getkey()
            )
    with pytest.raises(ValueError, match="(?s)must be a function.*RNNCell"):
        inspect.unwrap(nn.RNNCell.__init__)(
            object.__new__(nn.RNNCell), 2, 2, activation=activation, key=getkey()
        )


@pytest.mark.parametrize("scan", [True, False])
def test_an_activation_that_is_put_in_has_arrays_for_every_neuron(scan, getkey):
    key, x = getkey(), jax.random.normal(getkey(), (5, 3))
    built = nn.MLP(3, 2, 4, 3, nn.PReLU(), nn.PReLU(), scan=scan, key=key)
    plain = nn.MLP(3, 2, 4, 3, scan=scan, key=key)
    for where, shape, wrongs in [
        ("activation", (3, 4), [(), (4,), (4, 4), (3,), (3, 5)]),
        ("final_activation", (2,), [(), (3,)]),
    ]:
        for wrong in wrongs:
            model = vernal.tree_at(where, plain, nn.PReLU(jnp.full(wrong, 0.25)))
            with pytest.raises(
                ValueError, match=rf"(?s)`{where}` of MLP.*leading axes \({shape[0]},"
            ):
                model(x)
        plain = vernal.tree_at(where, plain, nn.PReLU(jnp.full(shape, 0.25)))
    np.testing.assert_allclose(plain(x), built(x), rtol=1e-6)


@pytest.mark.parametrize("scan", [True, False])
@pytest.mark.parametrize(("depth", "width"), [(4, 4), (2, 4), (3, 5)])
def test_an_activation_has_arrays_for_the_layers_that_were_put_in(depth, width, scan, getkey):
    x = jax.random.normal(getkey(), (5, 3))
    model = nn.MLP(3, 2, 4, 3, nn.PReLU(), nn.PReLU(), scan=scan, key=getkey())
    other = nn.MLP(3, 2, width, depth, nn.PReLU(), nn.PReLU(), scan=scan, key=getkey())
    model = vernal.tree_at("layers", model, other.layers)
    with pytest.raises(ValueError, match=rf"(?s)`activation` of MLP.*axes \({depth}, {width}\)"):
        model(x)
    model = vernal.tree_at("activation", model, other.activation)
    np.testing.assert_allclose(model(x), other(x), rtol=1e-6)


@pytest.mark.parametrize("scan", [True, False])
def test_a_final_activation_has_arrays_for_the_last_layer_that_was_put_in(scan, getkey):
    x = jax.random.normal(getkey(), (5, 3))
    model = nn.MLP(3, 2, 4, 3, nn.PReLU(), nn.PReLU(), scan=scan, key=getkey())
    for out, axes in [(5, r"\(5,\)"), (1, r"\(1,\)")]:
        other = vernal.tree_at(lambda m: m.layers[-1], model, nn.Linear(4, out, key=getkey()))
        with pytest.raises(
            ValueError, match=rf"(?s)`final_activation` of MLP.*leading axes {axes}"
        ):
            other(x)
    scalar = nn.MLP(3, "scalar", 4, 3, scan=scan, key=getkey())
    with pytest.raises(ValueError, match="`PReLU` was given an input of the wrong shape"):
        vernal.tree_at("final_activation", scalar, nn.PReLU(jnp.ones(2)))(x)
    put_in = vernal.tree_at("final_activation", scalar, nn.PReLU())
    np.testing.assert_allclose(put_in(x), nn.PReLU()(scalar(x)), rtol=1e-6)


def test_layers_that_are_not_stacked_are_refused_by_scan(getkey):
    plain = nn.MLP(3, 2, 4, 3, key=getkey())
    scanned = nn.MLP(3, 2, 4, 3, scan=True, key=getkey())
    with pytest.raises(
        ValueError, match=r"(?s)scan=True must store the layers.*as one.*scan=False"
    ):
        vernal.tree_at("layers", scanned, plain.layers)(jnp.ones(3))
    with pytest.raises(ValueError, match=r"(?s)`Linear` has the wrong shape"):
        vernal.tree_at("layers.1", scanned, plain.layers[1])(jnp.ones(3))
