"""Batch normalisation: over which axes, by which statistics, and what becomes of the running ones."""

import inspect

import equinox as eqx
import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
from jax.sharding import AxisType, NamedSharding
from jax.sharding import PartitionSpec as P

import vernal
from vernal import nn, tree_at

step = jax.jit(nn.apply)


def close(a, b, tolerance=1e-5):
    jax.tree.map(
        lambda a, b: np.testing.assert_allclose(a, b, rtol=tolerance, atol=tolerance), a, b
    )


def statistics(norm):
    """The running mean and variance in a layer."""
    return norm.running_mean.value, norm.running_var.value


def with_random_weights(norm, key):
    """The layer with weights, biases and running statistics as after many batches."""
    values = jax.random.uniform(key, (4, norm.input_size), minval=0.5, maxval=2.0)
    norm = tree_at(lambda m: m.num_batches_tracked.value, norm, jnp.array(1000.0))
    return tree_at(lambda m: (m.weight, m.bias, *statistics(m)), norm, tuple(values))


def by_hand(norm, xs):
    """What a layer of images does in training, by NumPy in double precision."""
    xs, axes = np.asarray(xs, np.float64), (0, 2, 3)
    mean, var = (f(xs, axes, keepdims=True) for f in (np.mean, np.var))
    scale, shift = (np.asarray(a)[:, None, None] for a in (norm.weight, norm.bias))
    running = [
        norm.momentum * np.asarray(old) + (1 - norm.momentum) * new
        for old, new in zip(statistics(norm), (xs.mean(axes), xs.var(axes, ddof=1)), strict=True)
    ]
    # A channel holds more than a few values, and the mean over channels differs: the two variances do too.
    return (xs - mean) / np.sqrt(var + norm.eps) * scale + shift, tuple(running)


def image_norm(key, axis_name=None, num_spatial_dims=2):
    norm = nn.BatchNorm(3, axis_name, momentum=0.8, num_spatial_dims=num_spatial_dims)
    return with_random_weights(norm, key)


def test_every_way_to_say_which_axes_are_the_batch_gives_the_same(getkey):
    key, xs = getkey(), 3 * jax.random.normal(getkey(), (6, 3, 2, 2)) + 1

    def over(name, apply=nn.apply):
        return jax.vmap(apply, in_axes=(None, 0), out_axes=(0, None), axis_name=name)

    def mapped(norm, xs):
        return jax.vmap(norm, axis_name="batch")(xs)

    @jax.jit
    def every_way(xs):
        leading, named = image_norm(key), image_norm(key, "batch", None)
        both, two = image_norm(key, "batch"), image_norm(key, ["outer", "inner"], None)
        folded = xs.reshape(2, 3, 3, 2, 2)
        found = {
            "leading": nn.apply(leading, xs),
            "two leading": nn.apply(leading, folded),
            "named inside of apply": nn.apply(named, xs, method=mapped),
            "named outside of apply": over("batch")(named, xs),
            "named and leading": over("batch")(both, folded),
            "two names": over("outer", over("inner"))(two, folded),
        }
        return {way: (ys.reshape(xs.shape), statistics(m)) for way, (ys, m) in found.items()}

    expected = by_hand(image_norm(key), xs)
    for outcome in every_way(xs).values():
        close(outcome, expected)


def test_several_axes_of_batch_are_said_to_be_such(getkey):
    # All axes of one length: nothing but the number of spatial axes tells them apart.
    xs = jax.random.normal(getkey(), (3, 3, 3))
    flat, norm = step(nn.BatchNorm(3, num_spatial_dims=0), xs)
    images, other = step(nn.BatchNorm(3, num_spatial_dims=1), xs.swapaxes(1, 2))
    close((flat, statistics(norm)), (images.swapaxes(1, 2), statistics(other)))


@pytest.mark.parametrize("mode", ["batch", "ema"])
def test_both_protocols_agree_in_values_state_and_gradients(mode, getkey):
    xs = 2 * jax.random.normal(getkey(), (4, 3)) - 1
    weights = jax.random.normal(getkey(), xs.shape)
    inside = nn.BatchNorm(3, mode=mode)
    outside, state = nn.make_with_state(nn.BatchNorm)(3, mode=mode)

    def loss_inside(norm, xs):
        total = 0.0
        for x in (xs, xs**2):
            ys, norm = nn.apply(norm, x)
            total += (weights * ys).sum()
        return total, norm

    def loss_outside(norm, xs, state):
        total = 0.0
        for x in (xs, xs**2):
            ys, state = norm(x, state)
            total += (weights * ys).sum()
        return total, state

    @jax.jit
    def both(state):
        return (
            jax.value_and_grad(loss_inside, (0, 1), has_aux=True)(inside, xs),
            jax.value_and_grad(loss_outside, (0, 1), has_aux=True)(outside, xs, state),
            jax.grad(lambda xs: nn.apply(inside, xs)[1].running_mean.value.sum())(xs),
        )

    ((a, after), grads), ((b, state), expected), to_the_buffers = both(state)
    close(
        (a, grads[0].weight, grads[0].bias, grads[1]),
        (b, expected[0].weight, expected[0].bias, expected[1]),
    )
    close(statistics(after), (state.get(outside.running_mean), state.get(outside.running_var)))
    # Buffers: no derivative reaches the running statistics, nor leaves them.
    assert not np.any(grads[0].running_mean.value) and not np.any(grads[0].running_var.value)
    np.testing.assert_array_equal(to_the_buffers, 0)


def test_ema_is_equinoxs_over_several_steps(getkey):
    ours, state = nn.make_with_state(nn.BatchNorm)(3, "b", momentum=0.9, mode="ema")
    theirs, expected = eqx.nn.make_with_state(eqx.nn.BatchNorm)(3, "b", momentum=0.9, mode="ema")

    def run(norm, xs, weights, state):
        def loss(xs):
            mapped = jax.vmap(norm, axis_name="b", in_axes=(0, None), out_axes=(0, None))
            ys, new = mapped(xs, state)
            return (weights * ys).sum(), (ys, new)

        grad, (ys, new) = jax.grad(loss, has_aux=True)(xs)
        return ys, grad, new

    both = jax.jit(lambda *args: (run(ours, *args[:-1]), run(theirs, *args[:-2], args[-1])))
    for i in range(4):
        xs = (1 + i) * jax.random.normal(getkey(), (4, 3, 5)) + i
        weights = jax.random.normal(getkey(), xs.shape)
        (*ours_out, state), (*theirs_out, expected) = both(xs, weights, state, expected)
        close(ours_out, theirs_out)
        mean, var = expected.get(theirs.ema_state_index)
        close((state.get(ours.running_mean), state.get(ours.running_var)), (mean, var))
    used = nn.inference_mode(ours)(xs[0], state)[0]
    close(used, eqx.nn.inference_mode(theirs)(xs[0], expected)[0])


def test_training_by_the_batch_is_equinoxs(getkey):
    ours, state = nn.make_with_state(nn.BatchNorm)(3, "b")
    theirs, expected = eqx.nn.make_with_state(eqx.nn.BatchNorm)(3, "b", mode="batch")
    xs = jax.random.normal(getkey(), (4, 3, 2, 2)) + 1

    def run(norm, state):
        mapped = jax.vmap(norm, axis_name="b", in_axes=(0, None), out_axes=(0, None))
        return mapped(xs, state)[0]

    close(*jax.jit(lambda a, b: (run(ours, a), run(theirs, b)))(state, expected))


@pytest.mark.parametrize("mode", ["batch", "ema"])
def test_inference_is_sane_from_the_first_step_on(mode, getkey):
    xs = jax.random.normal(getkey(), (200, 2))
    norm = nn.BatchNorm(2, mode=mode)
    infer = jax.jit(lambda norm, xs: nn.apply(norm, xs, train=False)[0])
    close(infer(norm, xs), xs / np.sqrt(1 + 1e-5))
    for _ in range(2):
        _, norm = step(norm, xs)
        spread = infer(norm, xs).std(0)
        assert jnp.all((spread > 0.7) & (spread < 1.4))


def in_training(norm, xs):
    return norm(xs, inference=False)


def test_inference_uses_the_running_statistics_and_maps_over_leading_axes(getkey):
    norm = nn.inference_mode(image_norm(getkey()))
    xs = jax.random.normal(getkey(), (2, 4, 3, 2, 2))

    @jax.jit
    def all_ways(norm, xs):
        ys, after = nn.apply(norm, xs, train=False)
        return norm(xs), jax.vmap(jax.vmap(norm))(xs), ys, statistics(after)

    direct, mapped, applied, after = all_ways(norm, xs)
    mean, var, scale, shift = (
        np.asarray(a)[:, None, None] for a in (*statistics(norm), norm.weight, norm.bias)
    )
    expected = (np.asarray(xs) - mean) / np.sqrt(var + 1e-5) * scale + shift
    close([direct, mapped, applied], [expected] * 3)
    close(after, statistics(norm))
    # A named axis is not asked for, and the setting can be changed for one call.
    named = nn.BatchNorm(3, "batch")
    close(named(xs[0, 0], inference=True), xs[0, 0], tolerance=1e-4)
    train = jax.jit(lambda m, xs: nn.apply(m, xs, method=in_training, train=False))
    trained = train(norm, xs[0])
    close((trained[0], statistics(trained[1])), by_hand(norm, xs[0]))


def sharded_over(kind):
    return jax.make_mesh((4, 2), ("rows", "columns"), axis_types=(kind, kind))


def test_devices_normalise_by_the_whole_batch(getkey):
    key, xs = getkey(), jax.random.normal(getkey(), (16, 3, 2, 2)) * 3 + 1
    weights = jax.random.normal(getkey(), xs.shape)
    mesh, names = sharded_over(AxisType.Auto), ("rows", "columns")

    def of(run):
        def loss(norm, xs):
            ys, norm = run(norm, xs)
            return (weights * ys).sum(), (ys, norm)

        return jax.jit(jax.value_and_grad(loss, (0, 1), has_aux=True))

    spread = jax.shard_map(nn.apply, mesh=mesh, in_specs=(P(), P(names)), out_specs=(P(names), P()))
    (_, (ys, norm)), grads = of(spread)(image_norm(key, names), xs)
    (_, (expected, alone)), expected_grads = of(nn.apply)(image_norm(key), xs)
    close((ys, statistics(norm)), (expected, statistics(alone)))
    close(grads[1], expected_grads[1], 1e-4)
    close(
        (grads[0].weight, grads[0].bias), (expected_grads[0].weight, expected_grads[0].bias), 1e-4
    )


@pytest.mark.parametrize("kind", [AxisType.Auto, AxisType.Explicit], ids=["auto", "explicit"])
def test_a_sharded_array_is_one_batch(kind, getkey):
    norm, xs = nn.BatchNorm(3), jax.random.normal(getkey(), (8, 3))
    expected = jax.jit(nn.apply)(norm, xs)
    mesh = sharded_over(kind)
    with jax.set_mesh(mesh):
        spread = jax.device_put(xs, NamedSharding(mesh, P("rows")))
        ys, after = jax.jit(nn.apply)(norm, spread)
    close((ys, statistics(after)), (expected[0], statistics(expected[1])))
    assert ys.sharding.spec[0] == "rows"


def test_half_precision_goes_in_and_out_and_statistics_are_in_float32(getkey):
    norm = nn.BatchNorm(2, dtype=jnp.bfloat16, momentum=0.5)
    xs = (30 * jax.random.normal(getkey(), (64, 2)) + 300).astype(jnp.bfloat16)
    ys, after = step(norm, xs)
    assert (ys.dtype, norm.weight.dtype) == (jnp.bfloat16, jnp.bfloat16)
    assert after.running_var.value.dtype == jnp.float32
    wide = np.asarray(xs, np.float64)
    close(statistics(after), (wide.mean(0), wide.var(0, ddof=1)), 1e-4)
    close(ys.astype(jnp.float32), (wide - wide.mean(0)) / wide.std(0), 0.02)
    # A model that is cast as a whole keeps the types that it was given.
    half = jax.tree.map(lambda a: a.astype(jnp.bfloat16), norm)
    assert statistics(jax.eval_shape(nn.apply, half, xs)[1])[0].dtype == jnp.bfloat16


def test_the_variance_of_a_far_away_batch_is_exact(getkey):
    xs = 1e4 + jax.random.normal(getkey(), (50, 2))
    _, norm = step(nn.BatchNorm(2, momentum=0.0), xs)
    close(norm.running_var.value, np.asarray(xs, np.float64).var(0, ddof=1), 1e-3)


def test_running_statistics_are_buffers(getkey):
    norm, xs = nn.BatchNorm(3, "b", mode="ema"), jax.random.normal(getkey(), (4, 3))
    mask = vernal.trainable(norm)
    assert (mask.weight, mask.bias) == (True, True)
    assert sum(jax.tree.leaves(mask)) == 2 and len(jax.tree.leaves(mask)) == 5
    norm = nn.BatchNorm(3)
    optimizer = vernal.optim.Optimizer(optax.adamw, 0.1, weight_decay=0.5)

    @jax.jit
    def train(norm, state):
        def loss(norm):
            ys, norm = nn.apply(norm, xs)
            return (ys**3).sum(), norm

        grads, norm = vernal.filter_grad(loss, has_aux=True)(norm)
        assert grads.running_mean.value == vernal.NoGradient()
        return norm, *optimizer.update(norm, grads, state)

    applied, trained, _ = train(norm, optimizer.init(norm))
    close(statistics(trained), statistics(applied))
    assert np.all(np.asarray(trained.weight) != 1)


def test_it_is_carried_by_scan_and_mapped_over_as_an_ensemble(getkey):
    xs = jax.random.normal(getkey(), (5, 4, 3)) + 1
    norm = with_random_weights(nn.BatchNorm(3, momentum=0.5), getkey())

    @jax.jit
    def all_at_once(norm, xs):
        last, ys = jax.lax.scan(lambda m, x: nn.apply(m, x)[::-1], norm, xs)
        norms = jax.tree.map(lambda a: jnp.stack([a, a + 1]), norm)
        return last, ys, *jax.vmap(nn.apply, in_axes=(0, None))(norms, xs[0])

    last, ys, both, norms = all_at_once(norm, xs)
    for x, y in zip(xs, ys, strict=True):
        expected, norm = step(norm, x)
        close(y, expected)
    close(statistics(last), statistics(norm))
    weight, bias = np.asarray(norm.weight), np.asarray(norm.bias)
    plain = (np.asarray(both[0]) - bias) / weight
    close(both[1], plain * (weight + 1) + bias + 1, 1e-4)
    close(norms.running_mean.value[1] - norms.running_mean.value[0], 0.5 * np.ones(3))


def test_momentum_can_be_changed_and_the_affine_map_left_out(getkey):
    xs = jax.random.normal(getkey(), (4, 3))
    norm = nn.BatchNorm(3, channelwise_affine=False)
    assert norm.weight is None and norm.bias is None
    norm = tree_at(lambda m: m.momentum, norm, 0.0)
    close(nn.apply(norm, xs)[1].running_mean.value, xs.mean(0))


def test_training_without_taking_the_new_statistics_is_refused(getkey):
    with pytest.raises(RuntimeError, match="(?s)would be lost.*BatchNorm.*nn.apply"):
        nn.BatchNorm(3)(jnp.ones((2, 3)))


def test_an_input_whose_channels_are_elsewhere_is_refused():
    norm = nn.inference_mode(nn.BatchNorm(3))
    for shape in [(2, 3, 5, 5), (16, 8, 3), (3, 3, 3)]:
        with pytest.raises(
            ValueError,
            match=r"(?s)channel axis.*is ambiguous.*\(batch, channels=3\).*num_spatial_dims=2",
        ):
            norm(jnp.ones(shape))
    with pytest.raises(
        ValueError,
        match=r"(?s)was given an input of the wrong shape.*\(\.\.\., channels=3\).*num_spatial_dims=1",
    ):
        norm(jnp.ones((3, 5)))
    with pytest.raises(ValueError, match=r"(?s)expected: \(channels=3, any\)\n *got: \(4, 5\)"):
        nn.BatchNorm(3, "batch")(jnp.ones((4, 5)))
    with pytest.raises(ValueError, match="was given an input of the wrong shape"):
        nn.BatchNorm(3, num_spatial_dims=2)(jnp.ones((3, 3)))


def test_a_batch_of_one_and_a_missing_axis_are_refused():
    with pytest.raises(ValueError, match="(?s)too small for statistics.*at least 2.*got: 1 in"):
        nn.BatchNorm(3)(jnp.ones(3))
    with pytest.raises(ValueError, match="(?s)too small for statistics.*at least 1"):
        nn.BatchNorm(3, mode="ema")(jnp.ones((0, 3)))
    with pytest.raises(ValueError, match="(?s)was called outside of that axis.*'batch'"):
        nn.BatchNorm(3, "batch")(jnp.ones(3))


@pytest.mark.parametrize(
    ("settings", "text"),
    [
        ({"mode": "legacy"}, 'one of "batch" and "ema"'),
        ({"momentum": 1.5}, "from 0 to 1"),
        ({"dtype": jnp.complex64}, "real numbers"),
        ({"input_size": 0}, "input_size"),
        ({"num_spatial_dims": -1}, "num_spatial_dims"),
    ],
    ids=["mode", "momentum", "dtype", "input_size", "num_spatial_dims"],
)
def test_wrong_settings_are_refused(settings, text):
    with pytest.raises(ValueError, match=text):
        inspect.unwrap(nn.BatchNorm.__init__)(
            object.__new__(nn.BatchNorm), **({"input_size": 3} | settings)
        )


def test_complex_numbers_are_refused():
    with pytest.raises(ValueError, match="(?s)argument `x`.*real numbers"):
        nn.BatchNorm(3)(jnp.ones((2, 3), jnp.complex64))


def after_steps(norm, batches):
    for xs in batches:
        _, norm = step(norm, xs)
    return norm


@pytest.mark.parametrize("momentum", [0.0, 0.5, 0.99, 0.9999, None])
def test_running_statistics_are_the_weighted_average_of_all_batches(momentum, getkey):
    batches = [(1 + i) * jax.random.normal(getkey(), (8, 3)) + i for i in range(5)]
    norm = after_steps(nn.BatchNorm(3, momentum=momentum), batches)
    weights = np.array([(1.0 if momentum is None else momentum) ** (4 - i) for i in range(5)])
    wide = np.asarray(batches, np.float64)
    moments = wide.mean(1), wide.var(1, ddof=1)
    close(statistics(norm), tuple(np.average(m, axis=0, weights=weights) for m in moments), 1e-4)
    assert norm.num_batches_tracked.value == 5


def test_with_momentum_one_the_first_batch_sets_running_statistics_in_mode_ema(getkey):
    batches = jax.random.normal(getkey(), (3, 8, 3)) + 2
    first = batches[0].mean(0), batches[0].var(0)
    norm = nn.BatchNorm(3, momentum=1.0, mode="ema")
    for xs in batches:
        ys, norm = step(norm, xs)
        close(statistics(norm), first)
        close(ys, (xs - first[0][None]) / jnp.sqrt(first[1] + 1e-5)[None], 1e-4)
    assert norm.num_batches_tracked.value == 3
    # The last one alone with momentum 0; the mean of all without momentum.
    last = after_steps(nn.BatchNorm(3, momentum=0.0, mode="ema"), batches)
    close(statistics(last), (batches[2].mean(0), batches[2].var(0)))
    every = after_steps(nn.BatchNorm(3, momentum=None, mode="ema"), batches)
    close(statistics(every), (batches.mean((0, 1)), batches.var(1).mean(0)))


def test_with_momentum_one_statistics_stay(getkey):
    norm = nn.BatchNorm(3, momentum=1.0)
    close(
        statistics(after_steps(norm, [jax.random.normal(getkey(), (8, 3))] * 2)), statistics(norm)
    )


def test_one_step_is_enough_for_inference(getkey):
    xs = 5 * jax.random.normal(getkey(), (256, 3)) + 30
    for mode in ("batch", "ema"):
        ys, norm = step(nn.BatchNorm(3, mode=mode), xs)
        close(nn.inference_mode(norm)(xs), ys, 0.02)


SPELLINGS = {
    "frozen": lambda model: vernal.freeze(model, "norm"),
    "frozen by a function": lambda model: vernal.freeze(model, lambda m: m.norm),
    "the statistics alone": lambda model: vernal.freeze(model, "norm.running_*"),
    "the mean alone": lambda model: vernal.freeze(model, "norm.running_mean"),
    "the variance alone": lambda model: vernal.freeze(model, "norm.running_var"),
    "the count alone": lambda model: vernal.freeze(model, "norm.num_batches_tracked"),
    "with more": lambda model: vernal.freeze(model, ["norm", "**.bias"]),
    "inference mode": nn.inference_mode,
    "inference mode of a part": lambda model: tree_at(
        lambda m: m.norm, model, replace_fn=nn.inference_mode
    ),
    "a flag": lambda model: tree_at(lambda m: m.norm.inference, model, True),
}


class WithHead(vernal.Module):
    norm: nn.BatchNorm
    head: nn.Linear

    def __call__(self, xs):
        return self.head(self.norm(xs))


@pytest.mark.parametrize("affine", [True, False])
@pytest.mark.parametrize("train", [None, True, False])
@pytest.mark.parametrize("spelling", SPELLINGS.values(), ids=SPELLINGS)
@pytest.mark.sample(4)
def test_fine_tuning_keeps_the_statistics_and_uses_them(spelling, train, affine, getkey):
    norm = nn.BatchNorm(3, channelwise_affine=affine)
    pretrained = after_steps(norm, [2 * jax.random.normal(getkey(), (16, 3)) + 1])
    model = spelling(WithHead(pretrained, nn.Linear(3, 3, key=getkey())))
    xs = jax.random.normal(getkey(), (4, 3))

    @vernal.filter_jit
    def tune(model):
        def loss(model):
            ys, model = nn.apply(model, xs, train=train)
            return (ys**2).sum(), (ys, model)

        grads, (ys, model) = vernal.filter_grad(loss, has_aux=True)(model)
        return ys, vernal.apply_updates(model, grads)

    ys, tuned = tune(model)
    for before, after in zip(
        (*statistics(pretrained), pretrained.num_batches_tracked.value),
        (*statistics(tuned.norm), tuned.norm.num_batches_tracked.value),
        strict=True,
    ):
        np.testing.assert_array_equal(before, after)
    close(ys, model.head(nn.inference_mode(pretrained)(xs)))


def test_weights_may_be_trained_while_the_statistics_are_frozen(getkey):
    xs = 3 * jax.random.normal(getkey(), (8, 3)) + 1
    norm = after_steps(nn.BatchNorm(3), [xs])
    tuned = vernal.unfreeze(vernal.freeze(norm, "**"), "weight")
    ys, after = step(tuned, 2 * xs)
    close(ys, nn.inference_mode(norm)(2 * xs))
    assert vernal.tree_equal(after, tuned)
    assert vernal.trainable(tuned).weight and not vernal.trainable(tuned).bias


def test_an_unfrozen_layer_trains_again(getkey):
    xs = jax.random.normal(getkey(), (4, 3))
    unfrozen = vernal.unfreeze(vernal.freeze(nn.BatchNorm(3), "**"))
    assert vernal.tree_equal(unfrozen, nn.BatchNorm(3))
    # Frozen weights alone do not stop the statistics: they are no part of what was frozen.
    for norm in (unfrozen, vernal.freeze(unfrozen, ["weight", "bias"])):
        assert step(norm, xs)[1].num_batches_tracked.value == 1


def test_a_frozen_layer_with_its_state_outside_keeps_it(getkey):
    norm, state = nn.make_with_state(nn.BatchNorm)(3)
    xs = jax.random.normal(getkey(), (4, 3)) + 5
    ys, after = vernal.freeze(norm, "**")(xs, state)
    close(after.get(norm.running_mean), np.zeros(3))
    close(ys, xs, 1e-3)


@pytest.mark.parametrize("mode", ["batch", "ema"])
def test_a_count_of_integers_counts_as_one_of_floats(mode, getkey):
    norm, xs = nn.BatchNorm(3, mode=mode), jax.random.normal(getkey(), (8, 3)) + 5
    _, expected = step(tree_at("num_batches_tracked", norm, jnp.array(100.0)), xs)
    for dtype in (jnp.int32, jnp.uint8):
        _, after = step(tree_at("num_batches_tracked", norm, jnp.array(100, dtype)), xs)
        close(statistics(after), statistics(expected))
        assert after.num_batches_tracked.value == jnp.array(101, dtype)
    # The greatest uint8 does not wrap around to a first batch.
    full = tree_at("num_batches_tracked", norm, jnp.array(255, jnp.uint8))
    assert step(full, xs)[1].num_batches_tracked.value == 255


def test_momentum_is_no_parameter(getkey):
    norm = nn.BatchNorm(3, momentum=np.float64(0.5))
    assert type(norm.momentum) is float and norm == nn.BatchNorm(3, momentum=0.5)
    by_surgery = tree_at("momentum", norm, jnp.array(0.5))
    assert vernal.params(by_surgery).momentum is vernal.params(by_surgery).running_mean.value
    xs = jax.random.normal(getkey(), (8, 3))
    close(statistics(step(by_surgery, xs)[1]), statistics(step(norm, xs)[1]))
    with pytest.raises(ValueError, match="(?s)argument `momentum`.*from 0 to 1.*1.5"):
        nn.apply(tree_at("momentum", norm, 1.5), xs)
    for wrong in ("0.9", [0.5], np.ones(1), getkey()):
        with pytest.raises(ValueError, match="(?s)`BatchNorm` was not given a number.*`momentum`"):
            inspect.unwrap(nn.BatchNorm.__init__)(object.__new__(nn.BatchNorm), 3, momentum=wrong)
