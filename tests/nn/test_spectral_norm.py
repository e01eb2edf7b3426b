"""Spectral normalisation: the largest singular value, how it is found, and who keeps the vectors."""

import equinox as eqx
import jax
import jax.numpy as jnp
import numpy as np
import pytest

import vernal
from vernal import nn, tree_at


def close(a, b, tolerance=1e-5):
    jax.tree.map(
        lambda a, b: np.testing.assert_allclose(a, b, rtol=tolerance, atol=tolerance), a, b
    )


@jax.jit
def in_training(normed, x):
    """The result, its gradient with respect to the layer's weight, and the new vectors."""

    def loss(normed):
        y, normed = nn.apply(normed, x)
        return (y**2).sum(), (y, normed)

    grads, (y, normed) = jax.grad(loss, has_aux=True)(normed)
    return y, grads, normed


def test_it_is_equinoxs_in_training_and_in_inference(getkey):
    layer = nn.Conv2d(2, 4, 3, key=getkey())
    ours = nn.SpectralNorm(layer, num_power_iterations=2, key=getkey())
    theirs = tree_at_eqx(eqx.nn.Conv2d(2, 4, 3, key=getkey()), layer)
    theirs, state = eqx.nn.make_with_state(eqx.nn.SpectralNorm)(
        theirs, "weight", num_power_iterations=2, key=getkey()
    )
    # They begin somewhere else.
    state = state.set(theirs.uv_index, ours.vectors.value)
    x = jax.random.normal(getkey(), (2, 4, 5))

    def in_theirs(weight, state):
        y, new = eqx.tree_at(lambda m: m.layer.weight, theirs, weight)(x, state)
        return (y**2).sum(), (y, new)

    step = jax.jit(jax.grad(in_theirs, has_aux=True))
    weight = layer.weight
    for _ in range(2):
        y, grads, ours = in_training(ours, x)
        grad, (expected, state) = step(weight, state)
        close((y, ours.vectors.value), (expected, state.get(theirs.uv_index)))
        close(grads.layer.weight, grad, 1e-4)
        weight = weight - 0.01 * grad
        ours = tree_at(lambda m: m.layer.weight, ours, weight)
        theirs = eqx.tree_at(lambda m: m.layer.weight, theirs, weight)
    used = jax.jit(lambda x, state: eqx.nn.inference_mode(theirs)(x, state)[0])(x, state)
    close(jax.jit(nn.inference_mode(ours))(x), used, 1e-4)


def tree_at_eqx(theirs, ours):
    where = lambda m: (m.weight, m.bias)  # noqa: E731 (both need the same)
    return eqx.tree_at(where, theirs, where(ours))


def _linear(dtype=jnp.float32):
    return lambda key: nn.Linear(4, 3, use_bias=False, dtype=dtype, key=key)


LAYERS = {
    "a matrix": (_linear(), (4,)),
    "a convolution": (lambda key: nn.Conv1d(2, 4, 3, key=key), (2, 5)),
    "a vector": (lambda key: nn.RMSNorm(4, use_bias=False), (4,)),
    "complex numbers": (_linear(jnp.complex64), (4,)),
}


def test_many_iterations_find_the_largest_singular_value(getkey):
    @jax.jit
    def every_layer(key):
        found = {}
        for name, (make, shape) in LAYERS.items():
            layer = make(key)
            x = jax.random.normal(key, shape, layer.weight.dtype)
            normed = nn.SpectralNorm(layer, num_power_iterations=200, key=key)
            y, normed = nn.apply(normed, x)
            matrix = layer.weight.reshape(layer.weight.shape[0], -1)
            left, singular, right = jnp.linalg.svd(matrix, full_matrices=False)
            exact = layer.weight / singular[0].astype(matrix.dtype)
            expected = tree_at(lambda m: m.weight, layer, exact)(x)
            u, v = normed.vectors.value
            found[name] = (y, jnp.outer(u, v.conj())), (expected, jnp.outer(left[:, 0], right[0]))
        return found

    for ours, expected in every_layer(getkey()).values():
        close(ours, expected, 1e-3)


def test_the_first_vectors_have_had_fifteen_iterations(getkey):
    key, layer = getkey(), nn.Linear(5, 4, key=getkey())
    first = nn.SpectralNorm(layer, key=key).vectors.value
    v = jax.random.normal(key, (5,))
    for _ in range(15):
        u = layer.weight @ v
        u = u / jnp.linalg.norm(u)
        v = layer.weight.T @ u
        v = v / jnp.linalg.norm(v)
    close(first, (u, v), 1e-4)


def test_the_gradient_holds_the_vectors_constant_and_is_exact_at_the_singular_vectors(getkey):
    with jax.enable_x64(True):
        layer = nn.Linear(3, 2, use_bias=False, key=getkey())
        normed = nn.SpectralNorm(layer, num_power_iterations=300, key=getkey())
        x = jax.random.normal(getkey(), (3,))

        def exact(weight):
            return ((weight / jnp.linalg.svd(weight, compute_uv=False)[0] @ x) ** 2).sum()

        y, grads, after = in_training(normed, x)
        close((y**2).sum(), exact(layer.weight))
        close(grads.layer.weight, jax.grad(exact)(layer.weight))
        # Nothing reaches the vectors, and nothing comes from them.
        assert not any(np.any(g) for g in grads.vectors.value)
        moved = jax.grad(lambda m: nn.apply(m, x)[1].vectors.value[0].sum())(normed)
        assert not any(np.any(g) for g in jax.tree.leaves(moved))
        assert after.vectors.value[0].dtype == jnp.float64


def test_both_protocols_agree_and_inference_moves_nothing(getkey):
    layer, key, x = nn.Linear(3, 3, key=getkey()), getkey(), jnp.ones(3)
    inside = nn.SpectralNorm(layer, key=key)
    outside, state = nn.make_with_state(nn.SpectralNorm)(layer, key=key)

    @jax.jit
    def twice(inside, state):
        results = []
        for _ in range(2):
            a, inside = nn.apply(inside, x)
            b, state = outside(x, state)
            results.append((a, b))
        same, after = nn.apply(inside, x, train=False)
        return results, inside, state, after, same, inside(x, inference=True)

    results, inside, state, after, same, plain = twice(inside, state)
    close(*map(list, zip(*results, strict=True)))
    close(inside.vectors.value, state.get(outside.vectors))
    close((after.vectors.value, same), (inside.vectors.value, plain))
    with pytest.raises(RuntimeError, match="(?s)would be lost.*SpectralNorm"):
        inside(x)


def test_vectors_are_buffers_and_a_batch_shares_them(getkey):
    normed = nn.SpectralNorm(nn.Linear(3, 2, key=getkey()), key=getkey())
    mask = vernal.trainable(normed)
    assert jax.tree.leaves(mask.layer) == [True, True] and mask.vectors.value == (False, False)
    xs = jax.random.normal(getkey(), (4, 3))
    leading = jax.jit(nn.apply)(normed, xs)
    mapped = jax.jit(lambda m: nn.apply(m, xs, method=lambda m, xs: jax.vmap(m)(xs)))(normed)
    close(leading[0], mapped[0])
    close(leading[1].vectors.value, mapped[1].vectors.value)


def test_half_precision_weights_are_measured_in_float32(getkey):
    layer = nn.Linear(3, 4, dtype=jnp.bfloat16, key=getkey())
    normed = nn.SpectralNorm(layer, num_power_iterations=50, key=getkey())
    y, after = jax.jit(nn.apply)(normed, jnp.ones(3, jnp.bfloat16))
    assert (y.dtype, after.vectors.value[0].dtype) == (jnp.bfloat16, jnp.float32)
    u, v = after.vectors.value
    matrix = np.asarray(layer.weight, np.float32)
    close(u @ matrix @ v, np.linalg.svd(matrix, compute_uv=False)[0], 1e-4)


def test_a_weight_of_zeros_stays_one(getkey):
    layer = jax.tree.map(jnp.zeros_like, nn.Linear(3, 2, key=getkey()))
    y, grads, after = in_training(nn.SpectralNorm(layer, key=getkey()), jnp.ones(3))
    assert not np.any(y)
    assert all(np.all(np.isfinite(a)) for a in jax.tree.leaves((grads, after)))


def test_a_key_is_handed_on(getkey):
    class Noisy(nn.Linear):
        def __call__(self, x, *, key):
            return super().__call__(x) + jax.random.normal(key)

    normed, key = nn.SpectralNorm(Noisy(2, 2, key=getkey()), inference=True, key=getkey()), getkey()
    quiet = nn.SpectralNorm(nn.Linear(2, 2, key=getkey()), inference=True, key=getkey())
    quiet = tree_at(
        lambda m: (m.layer.weight, m.layer.bias, m.vectors.value),
        quiet,
        (normed.layer.weight, normed.layer.bias, normed.vectors.value),
    )
    noise = normed(jnp.ones(2), key=key) - quiet(jnp.ones(2))
    close(noise, jnp.full(2, jax.random.normal(key)))


def test_a_layer_without_such_a_weight_and_no_iterations_are_refused(getkey):
    layer = nn.Linear(2, 2, key=getkey())
    with pytest.raises(ValueError, match="(?s)no array to normalise.*`kernel`"):
        nn.SpectralNorm(layer, "kernel", key=getkey())
    with pytest.raises(ValueError, match="(?s)no array to normalise.*negative_slope"):
        nn.SpectralNorm(nn.PReLU(), "negative_slope", key=getkey())
    with pytest.raises(ValueError, match="(?s)wrong size.*num_power_iterations"):
        nn.SpectralNorm(layer, num_power_iterations=0, key=getkey())


SURGERY = {
    "initialise": lambda norm: nn.initialise(
        norm, {"layer.weight": jax.nn.initializers.normal(5.0)}, jax.random.key(7)
    ),
    "another weight": lambda norm: tree_at(
        lambda m: m.layer.weight, norm, 9 * jax.random.normal(jax.random.key(8), (20, 30))
    ),
    "other vectors": lambda norm: tree_at(
        lambda m: m.vectors.value,
        norm,
        tuple(jnp.ones(n) / n**0.5 for n in (20, 30)),
    ),
}


@pytest.mark.parametrize("train", [True, False])
@pytest.mark.parametrize("change", SURGERY.values(), ids=SURGERY)
@pytest.mark.sample(3)
def test_the_norm_is_one_after_surgery(change, train):
    linear = nn.Linear(30, 20, use_bias=False, key=jax.random.key(0))
    norm = nn.SpectralNorm(linear, key=jax.random.key(1))
    changed = change(norm)

    @jax.jit
    def matrix(norm):
        return jax.vmap(lambda x: nn.apply(norm, x, train=train)[0], out_axes=1)(jnp.eye(30))

    assert abs(np.linalg.norm(matrix(changed), 2) - 1) < 0.03
    grads = jax.grad(lambda norm: (matrix(norm) ** 2).sum())(changed)
    assert np.isfinite(grads.layer.weight).all() and grads.layer.weight.any()


NEW_WEIGHTS = {
    "normal": lambda random, shape: random.normal(size=shape),
    "few rows": lambda random, shape: (
        random.normal(size=shape) * (np.arange(shape[0]) % 5 == 0)[:, None]
    ),
    "two directions": lambda random, shape: (
        random.normal(size=(shape[0], 2)) @ random.normal(size=(2, shape[1]))
    ),
    "one large": lambda random, shape: _with_singular_values(
        random, shape, np.where(np.arange(min(shape)) == 0, 1.3, 1)
    ),
    "close to the largest": lambda random, shape: _with_singular_values(
        random, shape, np.linspace(1, 0.9, min(shape))
    ),
    "the identity": lambda random, shape: np.eye(*shape) + 0.01 * random.normal(size=shape),
}


def _with_singular_values(random, shape, values):
    left, right = (np.linalg.qr(random.normal(size=(n, n)))[0] for n in shape)
    return (left[:, : len(values)] * values) @ right[:, : len(values)].T


@pytest.mark.parametrize("shape", [(8, 8), (16, 256), (64, 16)], ids=str)
@pytest.mark.parametrize("kind", NEW_WEIGHTS.values(), ids=NEW_WEIGHTS)
@pytest.mark.sample(6)
def test_the_first_step_with_a_new_weight_has_norm_one(kind, shape):
    # Ten layers in one: one that keeps its weight goes on as it was.
    random = np.random.default_rng(0)
    weights = jnp.asarray([kind(random, shape) for _ in range(10)], jnp.float32)

    @jax.vmap
    def make(key):
        return nn.SpectralNorm(nn.Linear(*shape[::-1], use_bias=False, key=key), key=key)

    @jax.jit
    @jax.vmap
    def step(norm):
        used, norm = nn.apply(norm, jnp.eye(shape[1]), train=True)
        return used, norm

    old = make(jax.random.split(jax.random.key(0), 10))
    new = tree_at("layer.weight", old, weights.at[0].set(old.layer.weight[0]))
    (expected, _), (used, norm) = step(old), step(new)
    np.testing.assert_array_equal(used[0], expected[0])
    for _ in range(3):
        assert (np.linalg.norm(used[1:], 2, axis=(1, 2)) < 1.05).all()
        assert (np.linalg.norm(used[1:], 2, axis=(1, 2)) > 0.999).all()
        used, norm = step(norm)


# In training an estimate that falls behind by less is taken for PyTorch's after a large step.
@pytest.mark.parametrize("train, most", [(True, 1.5), (False, 1.1)], ids=["training", "inference"])
@pytest.mark.parametrize("nearness", [0.0, 1.0], ids=["unrelated", "resembling"])
@pytest.mark.parametrize(
    "shape", [(1, 3), (2, 2), (2, 9), (3, 3), (5, 4), (8, 8), (30, 8)], ids=str
)
@pytest.mark.sample(6)
def test_few_dimensions_have_their_bound_after_any_surgery(shape, nearness, train, most):
    @jax.jit
    @jax.vmap
    def norm_of(key):
        keys = jax.random.split(key, 3)
        linear = nn.Linear(*shape[::-1], use_bias=False, key=keys[0])
        norm = nn.SpectralNorm(linear, key=keys[1])
        weight = nearness * linear.weight + 0.4 * jax.random.normal(keys[2], shape)
        norm = tree_at("layer.weight", norm, weight)
        used, _ = nn.apply(norm, jnp.eye(shape[1]), train=train)
        return jnp.linalg.norm(used, 2)

    found = norm_of(jax.random.split(jax.random.key(0), 500))
    assert 0.999 < found.min() and found.max() < most + 0.001


@pytest.mark.parametrize("dtype", [jnp.complex64, jnp.bfloat16, jnp.float32], ids=str)
@pytest.mark.parametrize("scale", [1e-30, 1.0, 1e30])
@pytest.mark.parametrize("shape", [(2, 2), (3, 20), (20, 3)], ids=str)
@pytest.mark.sample(6)
def test_few_dimensions_of_any_kind(shape, scale, dtype, getkey):
    linear = nn.Linear(*shape[::-1], use_bias=False, dtype=dtype, key=getkey())
    norm = nn.SpectralNorm(linear, key=getkey())
    wide = jnp.complex64 if dtype == jnp.complex64 else jnp.float32
    weights = jax.random.normal(getkey(), (50, *shape), wide)
    norm = nn.inference_mode(norm)
    made = jax.jit(jax.vmap(lambda w: tree_at("layer.weight", norm, w).normalised(w)))
    used = made((scale * weights).astype(dtype))
    rounding = 0.01 if dtype == jnp.bfloat16 else 0
    norms = np.linalg.norm(used.astype(wide), 2, axis=(1, 2))
    assert 0.999 - rounding < norms.min() and norms.max() < 1.101 + rounding


def test_in_inference_vectors_that_fit_are_used_as_they_are(getkey):
    norm = nn.SpectralNorm(nn.Linear(4, 4, use_bias=False, key=getkey()), key=getkey())
    weight, (u, v) = norm.layer.weight, norm.vectors.value
    expected = weight / (u @ weight @ v)
    found = jax.vmap(nn.inference_mode(norm), out_axes=1)(jnp.eye(4))
    np.testing.assert_allclose(found, expected, rtol=1e-5, atol=1e-6)


@pytest.mark.parametrize("bad", [0.0, jnp.nan, jnp.inf])
@pytest.mark.sample(3)
def test_the_norm_returns_after_a_weight_that_has_none(bad, getkey):
    weight = jax.random.normal(getkey(), (4, 3))
    layer = nn.Linear(3, 4, use_bias=False, key=getkey())
    normed = nn.SpectralNorm(layer, key=getkey())
    spoilt = vernal.tree_at("layer.weight", normed, jnp.full((4, 3), bad))
    broken = nn.SpectralNorm(spoilt.layer, key=getkey())
    step = vernal.filter_jit(lambda model: nn.apply(model, jnp.ones(3))[1])
    for model in (spoilt, broken):
        # One step at the weight that has no direction.
        after = step(model)
        mended = vernal.tree_at("layer.weight", after, weight)
        matrix = jax.vmap(nn.inference_mode(mended))(jnp.eye(3)).T
        np.testing.assert_allclose(jnp.linalg.norm(matrix, 2), 1, rtol=0.01)
        matrix = jax.vmap(nn.inference_mode(step(mended)))(jnp.eye(3)).T
        np.testing.assert_allclose(jnp.linalg.norm(matrix, 2), 1, rtol=0.01)


def test_vectors_of_zeros_that_were_loaded_do_not_stay(getkey):
    normed = nn.SpectralNorm(nn.Linear(3, 4, use_bias=False, key=getkey()), key=getkey())
    zeros = vernal.tree_at(lambda m: m.vectors.value, normed, (jnp.zeros(4), jnp.zeros(3)))
    matrix = jax.vmap(nn.inference_mode(zeros))(jnp.eye(3)).T
    np.testing.assert_allclose(jnp.linalg.norm(matrix, 2), 1, rtol=0.1)


def test_a_cell_that_takes_a_hidden_state_is_normalised(getkey):
    cell = nn.GRUCell(3, 4, key=getkey())
    normed = nn.inference_mode(nn.SpectralNorm(cell, "weight_hh", key=getkey()))
    sigma = jnp.linalg.norm(cell.weight_hh, 2)
    divided = vernal.tree_at("weight_hh", cell, cell.weight_hh / sigma)
    x, h = jnp.ones(3), jax.random.normal(getkey(), (4,))
    np.testing.assert_allclose(normed(x, h), divided(x, h), rtol=0.05)


def test_a_new_direction_is_found_of_which_the_vectors_have_no_part():
    layer = nn.Linear(4, 4, use_bias=False, key=jax.random.key(0))
    layer = vernal.tree_at("weight", layer, jnp.diag(jnp.array([3.0, 1.0, 2.0, 1.0])))
    normed = nn.SpectralNorm(layer, key=jax.random.key(1))
    for _ in range(50):
        _, normed = nn.apply(normed, jnp.ones(4))
    for new in ([3.0, 50.0, 2.0, 1.0], [0.0, 1.0, 2.0, 1.0]):
        changed = vernal.tree_at("layer.weight", normed, jnp.diag(jnp.array(new)))
        for train in (False, True):
            used = nn.apply(changed, jnp.eye(4), train=train)[0]
            np.testing.assert_allclose(jnp.linalg.norm(used, 2), 1.0, rtol=1e-3)


@pytest.mark.parametrize("size", [16, 128])
def test_in_inference_another_direction_that_became_the_largest_is_found(size):
    random = np.random.default_rng(size)
    left, right = (np.linalg.qr(random.normal(size=(size, size)))[0] for _ in range(2))
    singular = np.sort(random.uniform(0.1, 1, size=size))[::-1].copy()
    layer = nn.Linear(size, size, use_bias=False, key=jax.random.key(0))
    matrix = jnp.asarray((left * singular) @ right.T, jnp.float32)
    normed = nn.SpectralNorm(tree_at("weight", layer, matrix), key=jax.random.key(1))
    _, normed = nn.apply(normed, jnp.ones(size))
    # The vectors stay a singular pair, of what is no longer the largest. (Less than a sixth larger may be missed.)
    for factor in (1.3, 1.5, 2.0, 10.0):
        singular[5] = factor * singular[0]
        changed = jnp.asarray((left * singular) @ right.T, jnp.float32)
        used = nn.inference_mode(tree_at("layer.weight", normed, changed))
        norm = np.linalg.svd(nn.resolve(used).weight, compute_uv=False)[0]
        np.testing.assert_allclose(norm, 1, rtol=1e-3)


@pytest.mark.parametrize(
    ("size", "dtype"),
    [
        (1e20, "float32"),
        (1e38, "float32"),
        (1e-13, "float32"),
        (1e-30, "float32"),
        (1e-5, "float16"),
    ],
)
@pytest.mark.sample(3)
def test_the_norm_is_one_for_weights_of_any_size(size, dtype, getkey):
    layer = nn.Linear(6, 5, use_bias=False, key=getkey())
    layer = tree_at("weight", layer, (size * layer.weight).astype(dtype))
    normed, eye = nn.SpectralNorm(layer, key=getkey()), jnp.eye(6, dtype=dtype)
    for train in (True, False):
        used = jax.jit(lambda m, train=train: nn.apply(m, eye, train=train)[0])(normed)
        assert used.dtype == dtype
        close(np.linalg.norm(used.astype(float), 2), 1.0, 0.02)
    grads = jax.grad(lambda m: nn.apply(m, eye)[0].sum())(normed).layer.weight
    assert not np.isnan(grads).any()


def test_vectors_whose_u_belongs_to_another_weight_are_noticed():
    layer = nn.Linear(4, 9, use_bias=False, key=jax.random.key(0))
    layer = tree_at("weight", layer, jax.random.normal(jax.random.key(3), (9, 4)))
    normed = nn.SpectralNorm(layer, key=jax.random.key(1))
    # `v` is nearly the direction of `W^* u` for this one, but `u` is not that of `W v`.
    normed = tree_at("layer.weight", normed, jax.random.normal(jax.random.key(214), (9, 4)))
    for train in (True, False):
        y, _ = nn.apply(normed, jnp.eye(4), train=train)
        assert jnp.linalg.norm(y, 2) < 1.01


@pytest.mark.parametrize("sizes", [(3, 0), (0, 3), (0, 0)])
def test_a_layer_without_inputs_or_outputs(sizes, getkey):
    normed = nn.SpectralNorm(nn.Linear(*sizes, key=getkey()), key=getkey())
    for train in (True, False):
        y, normed = nn.apply(normed, jnp.ones(sizes[0]), train=train)
        assert y.shape == (sizes[1],) and jnp.all(jnp.isfinite(y))
