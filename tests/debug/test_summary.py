"""`summary` shows what is in a model and what it does, without running it."""

from typing import Any

import jax
import jax.numpy as jnp
import pytest

from vernal import Module, Partial, field, filter_jit, filter_vmap, freeze, nn
from vernal.debug import summary
from vernal.nn import (
    MLP,
    BatchNorm,
    Dropout,
    LayerNorm,
    Linear,
    Sequential,
    Shared,
    Stack,
    inference_mode,
    keys,
    make_with_state,
)
from vernal.show import human_bytes, human_count


def vector(n):
    return jax.ShapeDtypeStruct((n,), jnp.float32)


def row(text, name):
    """The cells of the row of a layer."""
    [line] = [line for line in text.splitlines() if line.split()[:1] == [name]]
    return line.split()


def output(text, name):
    return " ".join(row(text, name)[2:-4])


def test_a_layer_that_does_nothing_costs_nothing():
    # Not -2, what XLA says of the constraints of its two arguments.
    model = nn.Sequential([nn.Dropout(0.1, inference=True)])
    assert row(summary(model, jnp.ones(3)), ".layers[0]")[-1] == "0"


def test_totals_and_flops_of_an_mlp_are_the_true_ones(getkey):
    model = MLP(64, 32, 128, 3, key=getkey())
    x = jnp.ones(64)
    text = summary(model, x)
    leaves = jax.tree.leaves(model)
    size, nbytes = sum(a.size for a in leaves), sum(a.nbytes for a in leaves)
    total = row(text, "total")
    assert total[1] == f"{size:,}" and " ".join(total[2:4]) == human_bytes(nbytes)
    analysis = jax.jit(model).lower(x).compile().cost_analysis()
    assert human_count(int(analysis["flops"])) == total[-1]
    assert row(text, ".layers[3]") == [
        ".layers[3]",
        "Linear",
        "f32[32]",
        "4,128",
        "16.1",
        "KiB",
        "8.2k",
    ]
    assert text == summary(model, vector(64))


def test_frozen_parameters_have_a_column_where_there_are_any(getkey):
    model = MLP(2, 3, 4, 1, key=getkey())
    assert "frozen" not in summary(model)
    frozen = freeze(model, "layers.0")
    for text in (summary(frozen), summary(frozen, vector(2))):
        sizes = {".layers[0]": "12 12 48 B", ".layers[1]": "15 0 60 B", "total": "27 12 108 B"}
        assert all(numbers in " ".join(row(text, name)) for name, numbers in sizes.items())


def test_buffers_are_not_parameters_and_have_a_column_where_there_are_any(getkey):
    model = Sequential([Linear(3, 4, key=getkey()), BatchNorm(4)])
    x = jax.ShapeDtypeStruct((8, 3), jnp.float32)
    sizes = {".layers[0]": "16 0 64 B", ".layers[1]": "8 9 68 B", "total": "24 9 132 B"}
    for text in (summary(model), summary(model, x)):
        assert "frozen" not in text
        assert all(numbers in " ".join(row(text, name)) for name, numbers in sizes.items())
    frozen = summary(freeze(model, "layers[1]"))
    assert row(frozen, "total")[1:4] == ["24", "8", "9"]


def test_what_a_model_never_trains_is_a_buffer_in_each_row(getkey):
    class Distilled(Module):
        student: Linear
        teacher: Linear = field(trainable=False)

    model = Distilled(Linear(2, 2, key=getkey()), Linear(2, 3, key=getkey()))
    text = summary(model)
    assert row(text, "total")[1:3] == ["6", "9"]
    assert row(text, ".teacher")[2:4] == ["0", "9"]


def test_nothing_is_allocated_or_run(getkey):
    class Huge(Module):
        weight: Any

        def __call__(self, x):
            return self.weight @ x

    n = 10**7
    model = Huge(jax.ShapeDtypeStruct((n, n), jnp.float32))
    text = summary(model, vector(n))
    assert output(text, "model") == f"f32[{n}]"
    assert row(text, "total")[1] == f"{n * n:,}" and row(text, "total")[-1] == "200.0T"


class Mixed(Module):
    layers: list
    heads: dict
    unused: Linear
    name: str = "text"

    def __init__(self, key):
        k = jax.random.split(key, 4)
        self.layers = [Linear(4, 4, key=k[0]), jax.nn.relu, jnp.ravel, [LayerNorm(4)]]
        self.heads = {"a": Linear(4, 2, key=k[1]), "f": jax.nn.relu}
        self.unused = Linear(3, 3, key=k[2])

    def __call__(self, x):
        first, relu, ravel, [norm] = self.layers
        x = ravel(relu(first(first(x))))
        x = jax.jit(lambda x: norm(x))(x)
        return {"out": self.heads["f"](self.heads["a"](x)), "name": self.name}


def test_layers_in_mixed_containers_are_found_by_path(getkey):
    text = summary(Mixed(getkey()), jnp.ones(4))
    assert output(text, ".layers[0]") == "f32[4] (2 calls)"
    assert row(text, ".layers[3][0]")[1:3] == ["LayerNorm", "f32[4]"]
    assert row(text, ".heads['a']")[1:3] == ["Linear", "f32[2]"]
    assert row(text, ".unused")[1:4] == ["Linear", "not", "called"]
    assert row(text, ".unused")[-1] == "-"
    assert output(text, "model") == "{'name': 'text', 'out': f32[2]}"


class Crossing(Module):
    """Calls each layer through another transformation."""

    jitted: Linear
    filter_jitted: Linear
    vmapped: Linear
    scanned: Linear
    remat: Linear
    wrapped: Any
    partial: Partial
    same: Linear

    def __init__(self, key):
        make = lambda: Linear(4, 4, key=key)  # noqa: E731 (eight times the same)
        self.jitted, self.filter_jitted, self.vmapped = make(), make(), make()
        self.scanned = jax.vmap(lambda k: Linear(4, 4, key=k))(jax.random.split(key, 3))
        self.remat, self.wrapped = make(), filter_vmap(make())
        self.partial, self.same = Partial(make()), make()

    def __call__(self, x):
        x = jax.jit(self.jitted)(x)
        x = call_jitted(self.filter_jitted, call_jitted(self.same, x))
        x = jax.vmap(self.vmapped)(jnp.stack([x, x]))
        x = self.wrapped(x)[0]
        x = jax.lax.scan(lambda x, layer: (layer(x), None), x, self.scanned)[0]
        x = jax.checkpoint(lambda layer, x: layer(x))(self.remat, x)
        return self.partial(x)


@filter_jit
def call_jitted(layer, x):
    return layer(x)


@pytest.mark.parametrize("time", ["first", "second"])
def test_layers_are_seen_through_every_transformation(time):
    text = summary(Crossing(jax.random.key(0)), jnp.ones(4))
    names = [
        "jitted",
        "filter_jitted",
        "vmapped",
        "scanned",
        "remat",
        "wrapped.fn",
        "partial.func",
        "same",
    ]
    assert [output(text, f".{name}") for name in names] == ["f32[4]"] * len(names)
    assert output(text, ".wrapped") == "f32[2,4]"
    assert row(text, ".scanned")[-4] == "60"


class Stacking(Module):
    layers: list[Linear]

    def __call__(self, x):
        stacked = jax.tree.map(lambda *xs: jnp.stack(xs), *self.layers)
        return jax.lax.scan(lambda x, layer: (layer(x), None), x, stacked)[0]


def test_a_model_may_stack_its_layers(getkey):
    text = summary(Stacking([Linear(3, 3, key=getkey()) for _ in range(2)]), jnp.ones(3))
    assert output(text, "model") == "f32[3]"


class Indirect(Module):
    """Uses its layers in other ways than by calling them."""

    sequence: Sequential
    mlp: MLP
    linear: Linear

    def __call__(self, x, *, key=None):
        assert isinstance(self.linear, Linear) and len(self.sequence) == 2
        assert self.linear in [self.linear] and self.linear.in_features == 3
        first, _ = self.sequence
        assert type(first).__name__ and callable(self.sequence[1])
        x = self.sequence(x, key=key) + first(x)
        return self.mlp.__call__(x) @ self.linear.weight


def make_indirect(key):
    sequence = Sequential([Linear(3, 3, key=key), Dropout(0.5)])
    return Indirect(sequence, MLP(3, 3, 3, 1, key=key), Linear(3, 3, key=key))


def test_a_watched_layer_is_the_layer(getkey):
    text = summary(make_indirect(getkey()), jnp.ones(3), key=getkey())
    assert output(text, ".sequence.layers[0]") == "f32[3] (2 calls)"
    assert row(text, ".mlp.layers[1]")[1:3] == ["Linear", "f32[3]"]
    assert row(text, ".linear")[2:4] == ["not", "called"]


class Keyless(Module):
    def __call__(self, x):
        return 2 * x


def test_a_watched_layer_is_given_a_key_only_if_the_layer_takes_one():
    text = summary(Sequential([Keyless(), Dropout(inference=True)]), jnp.ones(3))
    assert row(text, ".layers[0]")[1:3] == ["Keyless", "f32[3]"]


def test_different_outputs_of_one_layer_are_all_shown(getkey):
    class Twice(Module):
        norm: LayerNorm

        def __call__(self, x):
            return self.norm(x), self.norm(x.astype(jnp.bfloat16))

    text = summary(Twice(LayerNorm(3)), jnp.ones(3))
    assert output(text, ".norm") == "f32[3], bf16[3] (2 calls)"


def test_an_array_in_two_places_counts_once_in_the_total(getkey):
    class Tied(Module):
        a: Linear
        b: Linear
        steps: jax.Array

    layer = Linear(2, 2, key=getkey())
    text = summary(Tied(layer, layer, jnp.arange(3)))
    assert row(text, ".a")[1:] == row(text, ".b")[1:] == ["Linear", "6", "24", "B"]
    assert row(text, "total") == ["total", "6", "36", "B"]


def test_without_an_example_the_model_is_not_called(getkey):
    text = summary(MLP(2, 2, 2, 1, key=getkey()))
    assert "output" not in text and "FLOPs" not in text
    assert row(text, "total") == ["total", "12", "48", "B"]


def test_a_module_that_cannot_be_called_has_no_output(getkey):
    class Table(Module):
        values: jax.Array

    class Model(Module):
        table: Table

        def __call__(self, x):
            return self.table.values * x

        def encode(self, x):
            return self(x) + 1

    model = Model(Table(jnp.ones(3)))
    assert row(summary(model, jnp.ones(3)), ".table") == [".table", "Table", "3", "12", "B", "-"]
    text = summary(model.encode, jnp.ones(3))
    assert output(text, ".__self__") == "f32[3]" and row(text, "total")[-1] == "6"


def test_a_stack_counts_all_of_its_layers(getkey):
    make = lambda key: Linear(8, 8, key=key)  # noqa: E731 (twice the same)
    nested = Stack(lambda key: Stack(make, 2, key=key), 3, key=getkey())
    text = summary(Sequential([make(getkey()), nested]), vector(8))
    one, stack = ".layers[0]", ".layers[1]"
    assert output(text, f"{stack}.layers") == "f32[8] (3 calls)"
    assert output(text, f"{stack}.layers.layers") == "f32[8] (6 calls)"
    flops = {name: row(text, name)[-1] for name in (one, stack, f"{stack}.layers.layers", "total")}
    assert list(flops.values()) == ["136", "816", "816", "952"]


def test_layers_that_change_their_state_are_counted():
    model = Sequential([BatchNorm(4), jax.nn.relu])
    text = summary(model, jax.ShapeDtypeStruct((8, 4), jnp.float32))
    training = row(text, ".layers[0]")[-1]
    used = row(summary(inference_mode(model), jnp.ones((8, 4))), ".layers[0]")[-1]
    assert row(text, "total")[-1] != "-" and int(training) > int(used) > 0


def test_what_shared_weights_return_is_shown_by_the_names_of_the_layers(getkey):
    class Tied(Module):
        shared: Shared

        def __call__(self, x):
            first, second = self.shared()
            return second(first(x))

    layers = Linear(2, 2, key=getkey()), Linear(2, 2, key=getkey())
    model = Tied(Shared(layers, lambda pair: pair[1].weight, lambda pair: pair[0].weight))
    assert output(summary(model, vector(2)), ".shared") == "(Linear, Linear)"


def test_flops_that_need_the_surroundings_of_the_call_are_left_out():
    class Mean(Module):
        def __call__(self, x):
            return jax.lax.pmean(x, "batch")

    class Model(Module):
        mean: Mean

        def __call__(self, x):
            return jax.vmap(self.mean, axis_name="batch")(x)

    text = summary(Model(Mean()), jnp.ones((2, 3)))
    assert row(text, ".mean")[2] == "f32[3]" and row(text, ".mean")[-1] == "-"
    assert row(text, "total")[-1] != "-"


def test_random_keys_are_no_parameters():
    class Noise(Module):
        key: jax.Array

        def __call__(self, x, key):
            return x + jax.random.normal(key, x.shape)

    text = summary(Noise(jax.random.key(0)), jnp.ones(3), jax.random.key(1))
    assert output(text, "model") == "f32[3]" and row(text, "total")[1] == "0"


def test_an_error_of_the_model_is_its_own(getkey):
    with pytest.raises(ValueError, match="`MLP` was given an input of the wrong shape") as info:
        summary(MLP(3, 2, 4, 1, key=getkey()), jnp.ones(5))
    assert info.value.__cause__ is None


@pytest.mark.parametrize("model", [lambda x: x, jax.vmap(jnp.sin), [jnp.ones(3)]])
def test_what_hides_its_arrays_is_refused(model):
    with pytest.raises(TypeError, match="a summary needs a model whose arrays can be seen"):
        summary(model, jnp.ones(3))


class Training(Module):
    first: Linear
    norm: BatchNorm
    dropout: Dropout
    blocks: Stack

    def __init__(self, key):
        self.first = Linear(4, 4, key=key)
        self.norm = BatchNorm(4)
        self.dropout = Dropout(0.5)
        self.blocks = Stack(
            lambda key: Sequential([Linear(4, 4, key=key), Dropout(0.5)]), 3, key=key
        )

    def __call__(self, x, *, key=None):
        return self.blocks(self.dropout(jax.nn.relu(self.norm(self.first(x))), key=key))


def test_a_model_in_training_needs_no_key_and_has_a_row_for_each_layer(getkey):
    model, x = Training(getkey()), jax.ShapeDtypeStruct((5, 4), jnp.float32)
    names = [
        "model",
        ".first",
        ".norm",
        ".dropout",
        ".blocks",
        ".blocks.layers",
        ".blocks.layers.layers[0]",
        ".blocks.layers.layers[1]",
    ]
    rows = [line.split()[0] for line in summary(model).splitlines()[2:-2]]
    assert rows == names
    text = summary(model, x)
    assert row(text, ".dropout")[2] == "f32[5,4]"
    assert row(text, "total")[-1] != "-"
    key = jax.eval_shape(lambda: jax.random.key(0))
    assert row(summary(model, x, key=key), "total")[-1] != "-"
    assert row(summary(keys(model, getkey()), x), "total")[-1] == row(text, "total")[-1]


def test_state_outside_of_the_model_leaves_no_row():
    model, _ = make_with_state(BatchNorm)(4)
    assert [line.split()[0] for line in summary(model).splitlines()[2:-2]] == ["model"]


def test_a_call_of_a_module_is_the_module():
    linear = nn.Linear(3, 2, key=jax.random.key(0))
    x = jnp.ones(3)
    for model in (linear.__call__, nn.Sequential([linear.__call__])):
        text = str(summary(model, x))
        assert "Linear" in text and "f32[2]" in text
