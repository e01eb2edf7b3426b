"""Generated classes: whatever the fields are, a module is a tree of arrays."""

import collections
import copy
import pickle
from typing import Any, NamedTuple

import cloudpickle
import hypothesis.strategies as st
import jax
import jax.numpy as jnp
import jax.tree_util as jtu
import numpy as np
import pytest
from hypothesis import given, settings

import vernal
from vernal import Module, field

# jaxtyping, under which our constructors run here, draws names for its own use with `random`.
pytestmark = pytest.mark.filterwarnings("ignore:Do not use the `random` module inside strategies")


class Pair(NamedTuple):
    first: Any
    second: Any


def array(shape):
    return jnp.full(shape, 0.5)


ARRAYS = st.sampled_from([(), (2,), (2, 3)]).map(array)
STATIC = st.one_of(
    st.none(),
    st.booleans(),
    st.integers(-2, 2),
    st.sampled_from([0.0, -0.0, 1.0, float("nan"), 2j]),
    st.text(max_size=2),
    st.sampled_from([jax.nn.relu, jnp.tanh, jnp.add, len, int, np.float32, ...]),
    st.tuples(st.integers(0, 1), st.text(max_size=1)),
    st.frozensets(st.integers(0, 2), max_size=2),
)
# No module whose class is made here: they come in through `modules`.
LEAF = st.one_of(ARRAYS, STATIC)
VALUES = st.recursive(
    LEAF,
    lambda inner: st.one_of(
        st.lists(inner, max_size=3),
        st.lists(inner, max_size=3).map(tuple),
        st.dictionaries(st.sampled_from("abc"), inner, max_size=3).map(
            lambda d: dict(sorted(d.items()))
        ),
        st.tuples(inner, inner).map(lambda t: Pair(*t)),
        st.tuples(inner).map(lambda t: vernal.Partial(jnp.add, *t)),
        st.lists(st.tuples(st.sampled_from("xyz"), inner), max_size=2).map(collections.OrderedDict),
    ),
    max_leaves=6,
)


@st.composite
def classes(draw, base=Module, prefix="f"):
    """A class with up to four fields, some static, some with defaults, some keyword-only; and how to call it."""
    annotations, namespace, arguments = {}, {"__module__": __name__}, {}
    for i in range(draw(st.integers(0, 4))):
        name = f"{prefix}{i}"
        static = draw(st.booleans())
        value = draw(STATIC if static else VALUES)
        settings: dict[str, Any] = {"static": static, "kw_only": draw(st.booleans())}
        how = draw(st.sampled_from(["given", "default", "factory", "unset"]))
        if (
            how in ("default", "unset")
            and type(value).__hash__ is not None
            and not _has_array(value)
        ):
            settings["default"] = value
        elif how == "factory":
            settings["default_factory"] = lambda value=value: value
        else:
            how = "given"
        settings["kw_only"] = True if how == "given" else settings["kw_only"]
        annotations[name] = Any
        namespace[name] = field(**settings)
        if how == "given":
            arguments[name] = value
    namespace["__annotations__"] = annotations
    if draw(st.booleans()):
        namespace["method"] = lambda self: len(jax.tree.leaves(self))
    return type(Module)("Generated", (base,), namespace), arguments


def _has_array(value):
    return any(isinstance(leaf, jax.Array) for leaf in jtu.tree_leaves(value))


@st.composite
def modules(draw):
    cls, arguments = draw(classes())
    if draw(st.booleans()):
        cls, more = draw(classes(cls, "g"))
        arguments |= more
    module = cls(**arguments)
    if draw(st.booleans()):
        cls, arguments = draw(classes(prefix="h"))
        arguments["inner"] = draw(st.sampled_from([module, [module, jnp.tanh], {"m": (module, 1)}]))
        cls = type(Module)(
            "Outer", (cls,), {"__annotations__": {"inner": Any}, "inner": field(kw_only=True)}
        )
        module = cls(**arguments)
    return module


def structure(tree):
    return jtu.tree_structure(tree)


@given(modules())
def test_leaves_are_arrays_and_the_round_trip_is_exact(m):
    leaves, treedef = jtu.tree_flatten(m)
    assert all(isinstance(leaf, jax.Array) for leaf in leaves)
    again = treedef.unflatten(leaves)
    assert structure(again) == treedef
    assert all(a is b for a, b in zip(jax.tree.leaves(again), leaves, strict=True))
    assert again == m
    assert hash(again) == hash(m)


@given(modules())
def test_paths_lead_to_the_leaves(m):
    for path, leaf in jtu.tree_leaves_with_path(m):
        found = m
        for key in path:
            if isinstance(key, jtu.GetAttrKey):
                found = getattr(found, key.name)
            elif isinstance(key, jtu.SequenceKey):
                found = found[key.idx]
            else:
                found = found[key.key]
        assert found is leaf


@given(modules())
def test_masks_axes_and_nones_keep_the_structure(m):
    for value in (True, 0, "name", 1.5, jnp.tanh, object()):
        mask = jax.tree.map(lambda _: value, m)  # noqa: B023 (used up at once)
        assert structure(mask) == structure(m)
        assert jax.tree.leaves(mask) == [value] * len(jax.tree.leaves(m))
    nothing = jax.tree.map(lambda _: None, m)
    assert jax.tree.leaves(nothing) == []
    assert structure(jax.tree.map(lambda a, b: a, m, m)) == structure(m)
    assert vernal.tree_equal(vernal.combine(m, nothing), m)


@settings(max_examples=15)
@given(modules())
def test_plain_transformations_take_and_return_it(m):
    jitted = jax.jit(lambda m: m)(m)
    assert structure(jitted) == structure(m)
    carried, _ = jax.lax.scan(lambda c, _: (c, None), m, None, length=2)
    assert structure(carried) == structure(m)
    chosen = jax.lax.cond(jnp.array(True), lambda a: a, lambda a: a, m)
    assert structure(chosen) == structure(m)
    stacked = jax.tree.map(lambda x: jnp.stack([x, x]), m)
    if jax.tree.leaves(m):
        mapped = jax.vmap(lambda m: m)(stacked)
        assert structure(mapped) == structure(m)
    grads = jax.grad(lambda m: sum((jnp.sum(x) for x in jax.tree.leaves(m)), jnp.zeros(())))(m)
    assert structure(grads) == structure(m)
    for out in (jitted, carried, chosen):
        assert vernal.tree_equal(out, m)


@given(modules())
def test_filter_jit_takes_and_returns_it(m):
    out = vernal.filter_jit(lambda m: m)(m)
    assert structure(out) == structure(m)


@given(modules())
def test_pickles_and_copies_have_the_same_treedef(m):
    assert structure(copy.deepcopy(m)) == structure(m)
    assert structure(copy.copy(m)) == structure(m)
    assert structure(pickle.loads(cloudpickle.dumps(m))) == structure(m)
    assert pickle.loads(cloudpickle.dumps(structure(m))) == structure(m)


@given(modules())
def test_partition_and_combine_are_inverse(m):
    for predicate in (vernal.is_array, vernal.is_inexact_array, lambda x: x.ndim > 1):
        chosen, rest = vernal.partition(m, predicate)
        assert structure(chosen).num_leaves + structure(rest).num_leaves == structure(m).num_leaves
        assert structure(vernal.combine(chosen, rest)) == structure(m)


@given(modules(), st.data())
def test_every_value_can_be_replaced_by_itself(m, data):
    from vernal.trees import values_with_paths

    places = values_with_paths(m)
    if not places:
        return
    path, value = data.draw(st.sampled_from(places))

    def where(tree):
        for key in path:
            name = getattr(key, "name", None)
            tree = (
                getattr(tree, name)
                if name is not None
                else tree[getattr(key, "idx", getattr(key, "key", None))]
            )
        return tree

    if path:
        assert structure(vernal.tree_at(where, m, value)) == structure(m)
        marked = vernal.tree_at(where, m, jnp.full((7,), 7.0))
        assert where(marked).shape == (7,)
        assert sum(leaf.shape == (7,) for leaf in jax.tree.leaves(marked)) == 1


@settings(max_examples=25)
@given(st.data())
def test_the_fields_layout_round_trips_too(data):
    cls, arguments = data.draw(classes())
    fields = type(Module)("F", (cls,), {}, layout="fields")
    m = fields(**arguments)
    leaves, treedef = jtu.tree_flatten(m)
    assert structure(treedef.unflatten(leaves)) == treedef
