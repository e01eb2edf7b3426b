"""What a pipeline refuses: it never gives a result that is not that of the stack on one device."""

import functools
import inspect

import jax
import jax.numpy as jnp
import pytest
from jax import lax

import vernal
from tests.sharding.test_pipeline import ALL, STAGE, assert_close, batch, dropping, spread, stack_of
from vernal import nn

# Without the checks of annotations that the tests run under.

unchecked = inspect.unwrap(nn.pipeline)


def refused(error, match, stack=None, x=None, **options):
    run = spread(4, options.pop("parts", 2), **options)
    with pytest.raises(error, match=rf"(?s){match}"):
        run(stack_of() if stack is None else stack, batch() if x is None else x)


@pytest.mark.parametrize("name", ["other", ("stage",), None])
@pytest.mark.sample(3)
def test_an_axis_that_is_not_one_of_the_mesh(name):
    def around(run, stack, x):
        return unchecked(stack, x, axis_name=name, microbatches=2)

    refused(ValueError, "runs over an axis of `filter_shard_map`.*got: ", around=around)


def test_an_axis_of_vmap_or_without_the_check_or_none():
    text = "runs over an axis of `filter_shard_map`.*check_vma=False"
    refused(ValueError, text, check_vma=False)
    run = functools.partial(nn.pipeline, axis_name="stage", microbatches=2)
    with pytest.raises(ValueError, match=rf"(?s){text}"):
        jax.vmap(run, axis_name="stage")(stack_of(), jnp.ones((8, 2, 4)))
    with pytest.raises(ValueError, match=rf"(?s){text}"):
        run(stack_of(), batch())


def test_layers_that_are_not_a_stack():
    def around(run, stack, x):
        return unchecked([stack], x, axis_name="stage", microbatches=2)

    refused(TypeError, r"runs a `Stack`.*nn\.Stack\.of\(layers\)", around=around)


def test_layers_that_cannot_be_divided():
    def around(run, stack, x):
        return run(stack_of(6), x)

    refused(ValueError, "equal stages.*multiple of 4 layers.*6 layers", around=around)


def test_layers_that_are_whole_on_every_device_or_cut_by_hand():
    text = "must be cut into stages.*2 of 8 layers"
    refused(ValueError, text, around=lambda run, stack, x: run(stack_of(), x))
    half = jax.tree.map(lambda a: a[:2], stack_of())
    refused(ValueError, text, around=lambda run, stack, x: run(half, x))

    def again(run, stack, x):
        return run(vernal.tree_at(lambda s: s.num_layers, stack, 4), x)

    refused(ValueError, "must be cut into stages.*1 of 4 layers", around=again)


def test_an_input_or_a_key_that_differs_between_stages():
    text = "same on all of its devices.*does not vary over 'stage'"
    refused(ValueError, text, of_x=STAGE, out_specs=ALL)

    def key(run, stack, x):
        return run(stack, x, key=jax.random.fold_in(jax.random.key(0), lax.axis_index("stage")))

    refused(ValueError, text, around=key)


@pytest.mark.parametrize(
    "x",
    [batch(6), jnp.ones(()), {}, {"a": batch(), "b": batch(4)}],
    ids=["rows", "no rows", "nothing", "different rows"],
)
def test_rows_that_cannot_be_divided(x):
    refused(ValueError, "equal micro-batches.*a multiple of microbatches=4", x=x, parts=4)


@pytest.mark.parametrize("parts", [0, -1, 2.0, True])
def test_a_wrong_number_of_micro_batches(parts):
    def around(run, stack, x):
        return unchecked(stack, x, axis_name="stage", microbatches=parts)

    refused(ValueError, "argument `microbatches`.*at least 1", around=around)


@pytest.mark.parametrize(
    "change", [lambda x: x[:, :2], lambda x: x.astype(jnp.bfloat16), lambda x: (x, x)]
)
@pytest.mark.sample(3)
def test_layers_that_change_their_input(change):
    stack = nn.Stack(lambda key: nn.Lambda(change), 4, key=jax.random.key(0))
    refused(ValueError, "must return what the next one takes", stack=stack)


KEEPS = "must not keep anything besides its result"


def normalised(key):
    return nn.Sequential([nn.Linear(4, 4, key=key), nn.BatchNorm(4, num_spatial_dims=0)])


def test_layers_with_state_only_in_inference():
    stack = nn.Stack(normalised, 4, key=jax.random.key(0))
    refused(NotImplementedError, KEEPS, stack=stack)

    def applied(run, stack, x):
        return nn.apply(stack, x, method=run)[0]

    refused(NotImplementedError, KEEPS, stack=stack, around=applied)
    calm = nn.inference_mode(stack)
    assert_close(vernal.filter_jit(spread(4, 2))(calm, batch()), calm(batch()))


def test_keys_and_captures_of_the_model():
    key = jax.random.key(1)
    refused(NotImplementedError, KEEPS, stack=nn.keys(dropping(), key))

    def keyed(run, stack, x):
        return nn.apply(stack, x, method=run, key=key)[0]

    refused(NotImplementedError, KEEPS, stack=dropping(), around=keyed)

    def caught(run, stack, x):
        return nn.apply(stack, x, method=run, capture="layers.up")[0]

    refused(NotImplementedError, KEEPS, around=caught)
