"""A pipeline of stages, against the stack on one device."""

import functools
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax import P, lax

import vernal
from vernal import debug, nn, runtime
from vernal.sharding import make_mesh

STAGE, ALL = P("stage"), P()


class Block(vernal.Module):
    up: nn.Linear
    down: nn.Linear

    def __init__(self, size, key):
        one, two = jax.random.split(key)
        self.up, self.down = nn.Linear(size, 8, key=one), nn.Linear(8, size, key=two)

    def __call__(self, x):
        return x + self.down(jnp.tanh(self.up(x)))


def stack_of(layers=8, size=4, **options):
    return nn.Stack(lambda key: Block(size, key), layers, key=jax.random.key(0), **options)


def batch(rows=8, *, size=4, dtype=jnp.float32):
    return jax.random.normal(jax.random.key(1), (rows, size), dtype)


def mesh_of(stages, **others):
    number = int(np.prod([stages, *others.values()]))
    return make_mesh(stage=stages, **others, automatic=True, devices=jax.devices()[:number])


def spread(stages, parts, *, of_x=ALL, out_specs=None, around=None, mesh=None, **options):
    """The pipeline as a function of the stack, the batch and further arguments of `around`."""

    def run(stack, x, **more):
        return nn.pipeline(stack, x, axis_name="stage", microbatches=parts, **more)

    around = around or (lambda run, stack, x: run(stack, x))
    return vernal.filter_shard_map(
        functools.partial(around, run),
        mesh=mesh or mesh_of(stages),
        in_specs=(STAGE, of_x),
        out_specs=of_x if out_specs is None else out_specs,
        **options,
    )


def scalar(y):
    return sum(jnp.sum(jnp.sin(a)) for a in jax.tree.leaves(y))


def with_gradients(fn):
    """The result of `fn(stack, x)`, and the gradient of a function of it."""

    def run(stack, x):
        def loss(both):
            return scalar(fn(*both))

        return fn(stack, x), vernal.filter_grad(loss)((stack, x))

    return vernal.filter_jit(run)


def assert_close(found, want, rtol=1e-6):
    """Equal up to `rtol` of the largest element."""
    assert jax.tree.structure(found) == jax.tree.structure(want)
    for a, b in zip(jax.tree.leaves(found), jax.tree.leaves(want), strict=True):
        assert a.dtype == b.dtype
        a, b = np.asarray(a, np.float64), np.asarray(b, np.float64)
        np.testing.assert_allclose(a, b, rtol=0, atol=rtol * max(np.abs(b).max(initial=0.0), 1e-3))


def one_device(stack, x, **more):
    return stack(x, **more)


TWO = pytest.param(2, marks=pytest.mark.slow)


@pytest.mark.parametrize("parts", [1, TWO, 4, 8])
@pytest.mark.parametrize("stages", [1, TWO, 4, 8])
@pytest.mark.sample(3)
def test_values_and_gradients_are_those_of_one_device(stages, parts):
    stack, x = stack_of(), batch()
    found = with_gradients(spread(stages, parts))(stack, x)
    assert_close(found, with_gradients(one_device)(stack, x))


@pytest.mark.parametrize("checkpoint", [True, jax.checkpoint_policies.dots_saveable])
def test_the_stack_says_what_is_computed_again(checkpoint):
    stack, x = stack_of(checkpoint=checkpoint, unroll=2), batch()
    found = with_gradients(spread(4, 4))(stack, x)
    assert_close(found[0], one_device(stack, x))
    assert_close(found[1], with_gradients(one_device)(stack, x)[1])


@pytest.mark.parametrize("order", ["reverse of reverse", "forward of reverse"])
def test_second_derivatives_are_those_of_one_device(order):
    stack, x = stack_of(4), batch(4)
    direction = jax.tree.map(jnp.cos, (stack, x))

    def second(fn):
        gradient = vernal.filter_grad(lambda both: scalar(fn(*both)))

        def run(both):
            if order == "forward of reverse":
                return vernal.filter_jvp(gradient, (both,), (direction,))[1]

            def products(both):
                return jax.tree.map(jnp.vdot, gradient(both), direction)

            return vernal.filter_grad(lambda both: sum(jax.tree.leaves(products(both))))(both)

        return vernal.filter_jit(run)((stack, x))

    assert_close(second(spread(4, 2)), second(one_device), rtol=3e-6)


def scans(jaxpr):
    for eqn in jaxpr.eqns:
        if eqn.primitive.name == "scan":
            yield eqn.params["length"]
        elif inner := eqn.params.get("jaxpr", eqn.params.get("call_jaxpr")):
            yield from scans(getattr(inner, "jaxpr", inner))


@pytest.mark.parametrize("stages", [1, 4])
@pytest.mark.parametrize("parts", [1, 8])
def test_the_bubble_is_that_of_the_formula(stages, parts):
    program = jax.make_jaxpr(lambda *args: spread(stages, parts)(*args))(stack_of(), batch())
    (ticks,) = scans(program.jaxpr)
    assert ticks == parts + stages - 1
    assert (ticks - parts) / ticks == (stages - 1) / (parts + stages - 1)


def test_what_is_sent():
    stack, x = stack_of(), batch()

    def counts(fn):
        found = debug.collectives(vernal.filter_jit(fn).lower(stack, x).compile())
        return found.count("collective-permute"), found.count("all-reduce"), found.count()

    pipe = spread(4, 8)
    # One permutation at each of 11 ticks; at the end the last stage sends its results to all.
    assert counts(pipe) == (11, 1, 12)
    # The gradient comes back from stage to stage.
    assert counts(vernal.filter_grad(lambda stack, x: scalar(pipe(stack, x)))) == (22, 1, 23)
    assert counts(spread(1, 8))[0] == 0


def test_a_mesh_of_stages_and_data():
    stack, x = stack_of(), batch()
    mesh = mesh_of(4, data=2)
    pipe = spread(4, 2, of_x=P("data"), mesh=mesh)
    assert_close(with_gradients(pipe)(stack, x), with_gradients(one_device)(stack, x))
    program = vernal.filter_jit(vernal.filter_grad(lambda stack, x: scalar(pipe(stack, x))))
    found = debug.collectives(program.lower(stack, x).compile())
    # Gradients are summed over the data together, after all of the 5 ticks.
    assert (found.count("collective-permute"), found.count("all-reduce")) == (10, 2)


@pytest.mark.parametrize("explicit", [False, True])
def test_data_on_an_axis_that_is_not_mapped_over(explicit):
    stack, x = stack_of(), batch()
    mesh = make_mesh(stage=4, data=2, automatic=not explicit)
    placed = jax.device_put(
        (stack, x), tuple(jax.NamedSharding(mesh, p) for p in (STAGE, P("data")))
    )
    pipe = spread(4, 2, mesh=mesh, axis_names={"stage"})
    found = with_gradients(pipe)(*placed)
    assert found[0].sharding.is_equivalent_to(placed[1].sharding, 2)
    assert_close(found, with_gradients(one_device)(stack, x))


class Head(vernal.Module):
    before: nn.Linear
    stack: nn.Stack
    after: nn.Linear


def test_gradients_inside_are_those_of_one_device():
    one, two = jax.random.split(jax.random.key(2))
    model = Head(nn.Linear(3, 4, key=one), stack_of(), nn.Linear(4, 2, key=two))
    x = batch(size=3)
    mesh = mesh_of(4, data=2)

    def loss(run, model, x):
        return jnp.mean(model.after(run(model.stack, model.before(x))) ** 2)

    def step(model, x):
        run = functools.partial(nn.pipeline, axis_name="stage", microbatches=2)
        return vernal.filter_value_and_grad(lambda m: lax.pmean(loss(run, m, x), "data"))(model)

    def of_stages(path, _):
        return STAGE if path[0].name == "stack" else ALL

    specs = jax.tree_util.tree_map_with_path(of_stages, model)
    mapped = vernal.filter_shard_map(
        step, mesh=mesh, in_specs=(specs, P("data")), out_specs=(ALL, specs)
    )
    found = vernal.filter_jit(mapped)(model, x)
    want = vernal.filter_value_and_grad(functools.partial(loss, one_device))(model, x)
    assert_close(found[0], want[0])
    assert_close(found[1], want[1])


class Parallel(vernal.Module):
    """Its hidden features are split over an axis of the mesh."""

    first: jax.Array
    second: jax.Array

    def __call__(self, x):
        return x + lax.psum(jnp.tanh(x @ self.first) @ self.second, "model")


ring = functools.partial(nn.ring_attention, axis_name="model")


class Attending(vernal.Module):
    linear: nn.Linear

    def __call__(self, x, attention=ring):
        y = self.linear(x).reshape((*x.shape[:-1], 2, -1))
        return x + attention(y, y, y, causal=True).reshape(x.shape)


def test_layers_that_are_split_themselves():
    def draw(key, *shape):
        return jax.random.normal(jax.random.key(key), shape) / 2

    stack = nn.Stack(lambda key: Parallel(draw(0, 4, 6), draw(1, 6, 4)), 4, key=jax.random.key(0))
    specs = jax.tree.unflatten(
        jax.tree.structure(stack), [P("stage", None, "model"), P("stage", "model")]
    )
    run = functools.partial(nn.pipeline, axis_name="stage", microbatches=4)
    mesh = mesh_of(4, model=2)
    mapped = vernal.filter_shard_map(run, mesh=mesh, in_specs=(specs, ALL), out_specs=ALL)
    found = with_gradients(mapped)(stack, batch())

    def one(stack, x):
        for layer in stack:
            x = x + jnp.tanh(x @ layer.first) @ layer.second
        return x

    assert_close(found, with_gradients(one)(stack, batch()), rtol=3e-6)


def test_attention_round_a_ring_inside_a_stage():
    stack = nn.Stack(lambda key: Attending(nn.Linear(8, 8, key=key)), 4, key=jax.random.key(0))
    x = jax.random.normal(jax.random.key(1), (4, 6, 8))
    pipe = spread(4, 2, of_x=P(None, "model"), mesh=mesh_of(4, model=2))

    def one(stack, x):
        return functools.reduce(lambda x, layer: layer(x, nn.attention), stack, x)

    found, want = with_gradients(pipe)(stack, x), with_gradients(one)(stack, x)
    assert_close(found, want, rtol=3e-6)


def test_a_batch_in_two_byte_numbers():
    stack = jax.tree.map(lambda a: a.astype(jnp.bfloat16), stack_of())
    x = batch(dtype=jnp.bfloat16)
    found, want = with_gradients(spread(4, 4))(stack, x), with_gradients(one_device)(stack, x)
    assert_close(found[0], want[0], rtol=1e-2)
    # Summed over the micro-batches in these numbers.
    assert_close(found[1], want[1], rtol=5e-2)


class Masked(vernal.Module):
    """Takes a tree, and returns the parts that it does not change."""

    linear: nn.Linear

    def __call__(self, given):
        rows = given["rows"] + jnp.where(given["mask"][:, None], self.linear(given["rows"]), 0)
        return given | {"rows": rows}


def test_a_tree_with_arrays_that_are_passed_along():
    stack = nn.Stack(lambda key: Masked(nn.Linear(4, 4, key=key)), 4, key=jax.random.key(0))
    x = {"rows": batch(), "mask": jnp.arange(8) % 3 > 0, "number": jnp.arange(8, dtype=jnp.int32)}
    found = vernal.filter_jit(spread(4, 2))(stack, x)
    assert_close(found, stack(x))


class Roots(vernal.Module):
    """Has an infinite derivative at zero, and a domain that every layer keeps."""

    weight: jax.Array

    def __call__(self, x):
        return jnp.sqrt(x * self.weight - 1) + 1


def test_the_bubble_gives_no_nan():
    # On what stages compute on in the bubble, layers give infinite derivatives: only the first one maps 0 to 2.
    stack = nn.Stack(
        lambda key, at: Roots(at),
        4,
        each={"at": jnp.array([2.0, 1.5, 1.5, 1.5])},
        key=jax.random.key(0),
    )
    x = jnp.ones((4, 1))

    def one(stack, x):
        return functools.reduce(lambda x, layer: layer(x), stack, x)

    stack = vernal.tree_at(lambda s: s.layers.weight, stack, jnp.array([2.0, 1.0, 1.0, 1.0]))
    found, want = with_gradients(spread(4, 2))(stack, x), with_gradients(one)(stack, x)
    assert all(np.isfinite(a).all() for a in jax.tree.leaves(found))
    assert_close(found, want)

    def forward(fn):
        return jax.jvp(lambda x: fn(stack, x), (x,), (x,))[1]

    assert_close(jax.jit(lambda: forward(spread(4, 2)))(), forward(one))


class Dropping(vernal.Module):
    linear: nn.Linear
    dropout: nn.Dropout

    def __call__(self, x, *, key: Any = None):
        return self.dropout(self.linear(x), key=key)


def dropping():
    return nn.Stack(
        lambda key: Dropping(nn.Linear(4, 4, key=key), nn.Dropout(0.5)), 4, key=jax.random.key(0)
    )


@pytest.mark.parametrize("key", [jax.random.key(3), jax.random.PRNGKey(3)], ids=["typed", "raw"])
def test_each_layer_and_micro_batch_has_a_key(key):
    stack, x = dropping(), batch()

    def one(stack, x):
        parts = [stack(x[m::2], key=jax.random.fold_in(key, m)) for m in range(2)]
        return jnp.stack(parts, axis=1).reshape(x.shape)

    pipe = spread(4, 2, around=lambda run, stack, x: run(stack, x, key=key))
    assert_close(with_gradients(pipe)(stack, x), with_gradients(one)(stack, x))
    # Layers without randomness ignore it, as in a stack.
    assert_close(vernal.filter_jit(pipe)(stack_of(), x), stack_of()(x))


def test_layers_without_arrays():
    stack = nn.Stack(lambda key: nn.Lambda(jnp.tanh), 4, key=jax.random.key(0))
    assert_close(vernal.filter_jit(spread(4, 2))(stack, batch()), stack(batch()))


def test_an_empty_batch():
    assert vernal.filter_jit(spread(4, 2))(stack_of(), batch(0)).shape == (0, 4)


def test_memory_does_not_grow_with_the_ticks():
    stack = nn.Stack(lambda key: Block(64, key), 4, key=jax.random.key(0), checkpoint=True)

    def temporary(parts):
        pipe = spread(4, parts)
        gradient = vernal.filter_grad(lambda stack, x: scalar(pipe(stack, x)))
        program = vernal.filter_jit(gradient).lower(stack, batch(16, size=64)).compile()
        return program.memory_analysis().temp_size_in_bytes

    # Were the weights kept for every tick, it would be four times as much.
    assert temporary(16) < 1.3 * temporary(2)


class Checked(vernal.Module):
    limit: jax.Array

    def __call__(self, x):
        return runtime.error_if(x, jnp.any(x > self.limit), "too large")


def test_a_check_in_a_layer():
    stack = nn.Stack(lambda key: Checked(jnp.array(5.0)), 4, key=jax.random.key(0))
    run = vernal.filter_jit(spread(4, 2))
    assert_close(run(stack, batch()), batch())
    with pytest.raises(vernal.runtime.RuntimeCheckError, match="too large"):
        run(stack, batch() + 10)
