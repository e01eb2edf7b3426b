"""What PyTorch has no name for is left out of ours: `layers` of a `Sequential`, `init` of a state and so on."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest

import vernal
from tests.nn._filled import filled
from vernal import nn
from vernal.saving import from_torch, load, save, to_torch


def make(key):
    inner = nn.Sequential([nn.BatchNorm(2), jnp.tanh])
    return {"body": nn.Sequential([nn.Linear(3, 2, key=key), inner])}


MODEL = filled(make, jax.random.key(0))
NORM = ["weight", "bias", "running_mean", "running_var", "num_batches_tracked"]
NAMES = {"body.0.weight", "body.0.bias", *(f"body.1.0.{name}" for name in NORM)}


def equal(a, b):
    assert jax.tree.structure(a) == jax.tree.structure(b)
    jax.tree.map(np.testing.assert_array_equal, a, b)


def test_names_are_those_of_pytorch_without_rules():
    tensors = to_torch(MODEL)
    assert set(tensors) == NAMES
    equal(from_torch(jax.eval_shape(lambda: MODEL), tensors), MODEL)


@pytest.mark.parametrize(
    "rules",
    [
        {"body.**": "net.**"},
        {"body": "net"},
        {"body.*.*": "net.*.*", "body.1.*.*": "net.1.*.*"},
        # The full names may stand in a rule as well.
        {"body.layers.1.layers.0.running_mean": "net.1.0.running_mean"}
        | {f"body.1.0.{name}": f"net.1.0.{name}" for name in NORM if name != "running_mean"}
        | {"body.layers.0.*": "net.0.*"},
    ],
)
def test_rules_may_leave_them_out_too(rules):
    renamed = {name.replace("body", "net"): x for name, x in to_torch(MODEL).items()}
    assert set(to_torch(MODEL, rules)) == set(renamed)
    equal(from_torch(jax.eval_shape(lambda: MODEL), renamed, rules), MODEL)


def test_a_leaf_may_not_have_two_rules_whichever_of_its_names_they_have():
    rules = {"body.0.*": "net.*", "body.layers.0.weight": "net.weight"}
    with pytest.raises(ValueError, match=r"body\.layers\.0\.weight: more than one path matches it"):
        to_torch(MODEL, rules)


def test_a_leaf_without_a_tensor_is_told_by_its_own_name_and_that_of_the_tensor():
    tensors = to_torch(MODEL)
    del tensors["body.1.0.running_var"]
    match = r"body\.layers\.1\.layers\.0\.running_var: missing.*from 'body\.1\.0\.running_var'"
    with pytest.raises(ValueError, match=match):
        from_torch(MODEL, tensors)


def test_a_cast_model_has_the_names_of_the_model():
    cast = nn.cast(MODEL["body"], nn.Policy(compute=jnp.bfloat16))
    assert {f"body.{name}" for name in to_torch(cast)} == NAMES
    equal(from_torch(jax.eval_shape(lambda: cast), to_torch(cast)), cast)


def test_nothing_is_left_out_where_two_leaves_would_have_one_name():
    class Both(vernal.Module):
        _vernal_passed_over = "inner"
        inner: dict[str, jax.Array]
        w: jax.Array

    assert set(to_torch(Both({"w": jnp.ones(1)}, jnp.zeros(1)))) == {"inner.w", "w"}
    assert set(to_torch(Both({"v": jnp.ones(1)}, jnp.zeros(1)))) == {"v", "w"}


def test_only_the_layers_of_a_sequential_are_without_a_name_of_their_field():
    class WithHead(nn.Sequential):
        head: jax.Array

        def __init__(self, layers, head):
            super().__init__(layers)
            self.head = head

    model = WithHead(MODEL["body"].layers, jnp.ones(1))
    assert {f"body.{name}" for name in to_torch(model)} == NAMES | {"body.head"}


def test_the_count_of_batches_becomes_an_integer_and_nothing_else_does():
    norm = vernal.tree_at(lambda m: m.num_batches_tracked.value, nn.BatchNorm(2), jnp.array(7.0))
    like = to_torch(norm) | {"num_batches_tracked": np.array(0)}
    state = to_torch(norm, like=like)
    assert state["num_batches_tracked"].dtype == np.int64 and state["num_batches_tracked"] == 7
    equal(from_torch(norm, state), norm)
    broken = vernal.tree_at(lambda m: m.num_batches_tracked.value, norm, jnp.array(7.5))
    with pytest.raises(ValueError, match=r"num_batches_tracked: expected i64\[\], found f32\[\]"):
        to_torch(broken, like=like)
    with pytest.raises(ValueError, match=r"weight: expected i64\[2\], found f32\[2\]"):
        to_torch(norm, like=like | {"weight": np.ones(2, int)})
    endless = vernal.tree_at(lambda m: m.num_batches_tracked.value, norm, jnp.array(jnp.inf))
    state = to_torch(endless, like=like, ignore=["num_batches_tracked"])
    assert state["num_batches_tracked"] == 0 and list(state) == list(like)


def test_files_of_our_own_keep_the_full_names(tmp_path):
    save(tmp_path / "model", MODEL)
    equal(load(tmp_path / "model", jax.eval_shape(lambda: MODEL)), MODEL)
    rename = {"body.layers.0.*": "elsewhere.*"}
    with pytest.raises(ValueError, match=r"missing(.|\n)*elsewhere\.bias"):
        load(tmp_path / "model", MODEL, rename=rename)
    with pytest.raises(ValueError, match="the paths do not match the tree"):
        load(tmp_path / "model", MODEL, rename={"body.0.*": "body.0.*"})


@pytest.mark.parametrize(
    ("dtype", "number"), [(np.int32, 2**40), (np.int8, 300), (np.uint8, -1), (np.uint8, 300)]
)
def test_integers_that_do_not_fit_are_refused(dtype, number):
    match = "a number that does not fit into"
    with pytest.raises(ValueError, match=match):
        from_torch({"a": jnp.zeros(2, dtype)}, {"a": np.array([1, number])})
    fits = from_torch({"a": jnp.zeros(2, dtype)}, {"a": np.array([1, 7])})
    assert fits["a"].dtype == dtype and fits["a"].tolist() == [1, 7]
    if abs(number) < 2**31:
        with pytest.raises(ValueError, match=match):
            to_torch({"a": jnp.array([1, number])}, like={"a": np.zeros(2, dtype)})


@pytest.mark.parametrize("count", [jnp.inf, jnp.nan, 300.0, 1e30, 0.5])
def test_counts_that_are_no_integers_or_do_not_fit_are_refused(count):
    with pytest.raises(ValueError, match="does not fit|expected i8"):
        to_torch({"n": jnp.array(count)}, like={"n": np.array(3, np.int8)})


def test_a_nan_is_written_like_any_other_number():
    model = {"a": jnp.array([jnp.nan, 1.0]), "b": jnp.array(jnp.nan)}
    for tensors in (to_torch(model), to_torch(model, like=to_torch(model))):
        equal(from_torch(model, tensors), model)
