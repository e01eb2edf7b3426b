"""Everything that takes a path takes the same paths, means the same leaves, and says the same of a mistake."""

import re

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax import P

import vernal
from vernal import nn
from vernal.saving import export, from_torch, load, load_exported, save, to_torch
from vernal.sharding import fsdp, init_sharded, make_mesh, place, shardings
from vernal.trees import Pattern, match_paths, named_leaves, tree_at, tree_paths

MESH = make_mesh(data=4, model=2)


class Net(vernal.Module):
    layers: list
    heads: dict
    scale: jax.Array

    def __init__(self):
        keys = jax.random.split(jax.random.key(0))
        self.layers = [nn.Linear(4, 4, key=key) for key in keys]
        self.heads = {"a.b": jnp.ones(4), "0": jnp.ones(4)}
        self.scale = jnp.ones(4)

    def __call__(self, x):
        for layer in self.layers:
            x = layer(x)
        return x * self.scale


NET = Net()
ALL = [
    "layers.0.weight",
    "layers.0.bias",
    "layers.1.weight",
    "layers.1.bias",
    'heads."0"',
    'heads."a.b"',
    "scale",
]


def changed(before, after):
    pairs = zip(jax.tree.leaves(before), jax.tree.leaves(after), strict=True)
    return [bool((a != b).any()) if a.shape == b.shape else True for a, b in pairs]


def marks(tree, is_marked):
    return [is_marked(leaf) for leaf in jax.tree.leaves(tree)]


# Each: which leaves of NET are chosen by paths.


def frozen(paths):
    return vernal.modules.frozen_leaves(vernal.freeze(NET, paths))


def unfrozen(paths):
    everything = vernal.freeze(NET, "**")
    return [not bit for bit in vernal.modules.frozen_leaves(vernal.unfreeze(everything, paths))]


def trained(paths):
    return jax.tree.leaves(vernal.trainable(NET, paths))


def matched(paths):
    return jax.tree.leaves(match_paths(NET, dict.fromkeys(paths, True), default=False))


def replaced(paths):
    [path] = paths
    return changed(NET, tree_at(path, NET, replace_fn=lambda x: jax.tree.map(lambda a: a + 1, x)))


def initialised(paths):
    def new(key, shape, dtype):
        return jnp.full(shape, 7, dtype)

    return changed(NET, nn.initialise(NET, dict.fromkeys(paths, new), jax.random.key(0)))


def initialised_within(paths):
    def new(key, shape, dtype):
        return jnp.full(shape, 7, dtype)

    rules = {(Net, path): new for path in paths}
    return changed(NET, nn.initialise(NET, rules, jax.random.key(0)))


def kept(paths):
    policy = nn.Policy(params=jnp.bfloat16)
    model = nn.cast(NET, policy, keep=dict.fromkeys(paths, jnp.float16)).model
    return marks(model, lambda x: x.dtype == jnp.float16)


def spread(paths):
    found = shardings(NET, MESH, dict.fromkeys(paths, P("data")), default=P())
    return marks(found, lambda x: x.spec == P("data"))


def placed(paths):
    found = place(NET, MESH, dict.fromkeys(paths, P("data")), default=P())
    return marks(found, lambda x: x.sharding.spec == P("data"))


def made_sharded(paths):
    rules = dict.fromkeys(paths, P("data"))
    found = init_sharded(lambda _: NET, jax.random.key(0), MESH, rules, default=P())
    return marks(found, lambda x: "data" in x.sharding.spec)


def fully_sharded(paths):
    rules = dict.fromkeys(paths, P("data"))
    found = fsdp(NET, MESH, "model", min_bytes=10**9, rules=rules)
    return [spec == P("data") for spec in found.values()]


def taken_from_torch(paths):
    theirs = {name: np.ones(leaf.shape, np.float32) for name, leaf in named_leaves(NET).items()}
    model = jax.tree.map(lambda x: jnp.zeros(x.shape), NET)
    tree, _ = from_torch(model, theirs, dict.fromkeys(paths), strict=False)
    return [not bit for bit in changed(model, tree)]


def given_to_torch(paths):
    made = to_torch(NET, dict.fromkeys(paths))
    return [name not in made for name in named_leaves(NET)]


def loaded(paths, tmp_path):
    save(tmp_path / "net", jax.tree.map(jnp.zeros_like, NET))
    like = jax.tree.map(jnp.ones_like, NET)
    tree, _ = load(tmp_path / "net", like, rename=dict.fromkeys(paths), strict=False)
    return [not bit for bit in changed(like, tree)]


def exported(paths):
    def total(layers, heads, scale):
        return sum(jnp.sum(x) for x in jax.tree.leaves((layers, heads, scale)))

    shapes = dict.fromkeys(paths, "n, ...")
    data = export(total, NET.layers, NET.heads, NET.scale, shapes=shapes)
    arguments = load_exported(data).signature.partition("(")[2]
    sizes = dict(re.findall(r"(\S+): f32\[(\w+)", arguments))
    return [sizes[name] == "n" for name in ALL]


PARTS = [frozen, unfrozen, trained, replaced]
RULES = [
    matched,
    initialised,
    initialised_within,
    kept,
    spread,
    placed,
    made_sharded,
    fully_sharded,
    taken_from_torch,
    given_to_torch,
    loaded,
    exported,
]


def chosen(function, paths, tmp_path):
    more = (tmp_path,) if function is loaded else ()
    bits = function(list(paths), *more)
    names = list(named_leaves(NET))
    return {name for name, bit in zip(names, bits, strict=True) if bit}


LEAVES = {
    # What is printed, of a leaf and of a part.
    ".layers[0].weight": ALL[:1],
    "model.layers[0].weight": ALL[:1],
    "tree.layers[0].weight": ALL[:1],
    ".heads['a.b']": ALL[5:6],
    "model.heads['0']": ALL[4:5],
    ".scale": ALL[6:],
    ".layers[0]": ALL[:2],
    ".layers": ALL[:4],
    "model.heads": ALL[4:6],
    # Names.
    "layers.0.weight": ALL[:1],
    'heads."a.b"': ALL[5:6],
    "heads.0": ALL[4:5],
    "layers.1": ALL[2:4],
    # Wildcards, in both.
    "layers.*.weight": [ALL[0], ALL[2]],
    ".layers[*].weight": [ALL[0], ALL[2]],
    "**.bias": [ALL[1], ALL[3]],
    "**": ALL,
    ".layers[1].**": ALL[2:4],
}


@pytest.mark.parametrize("function", [*PARTS, *RULES])
def test_a_path_means_the_same_leaves_everywhere(function, tmp_path):
    for path, names in LEAVES.items():
        assert chosen(function, [path], tmp_path) == set(names), path


def test_a_star_is_one_part_of_the_tree_or_one_leaf():
    for function in (frozen, unfrozen, trained):
        assert all(function("*"))
    assert [*map(bool, matched("*"))] == [name == "scale" for name in ALL]


MISSES = {
    "layer.0.weight": "did you mean 'layers.0.weight'?",
    ".layers[0].wieght": "did you mean 'layers.0.weight'?",
    "**.bais": "did you mean '**.bias'?",
    "net.layers[0].bias": "did you mean '.layers[0].bias'?",
}


@pytest.mark.parametrize("function", [*PARTS, *RULES])
def test_a_miss_is_told_alike_everywhere(function, tmp_path):
    for path, near in MISSES.items():
        said = f"(Net, {path!r})" if function is initialised_within else repr(path)
        line = re.escape(f"got: {said}: no leaf there; {near}")
        with pytest.raises(ValueError, match=rf"the paths do not match the tree\n[\s\S]*{line}"):
            chosen(function, [path], tmp_path)


@pytest.mark.parametrize("function", RULES)
def test_a_rule_for_parts_says_how_to_reach_the_leaves(function, tmp_path):
    for path in (".layers[*]", "layers.*", "{layers}.[01]"):
        end = "[01]" if "01" in path else "*"
        line = re.escape(f": a part, not a leaf; for the leaves in it, write 'layers.{end}.**'")
        with pytest.raises(ValueError, match=line):
            chosen(function, [path], tmp_path)


@pytest.mark.parametrize("function", RULES)
def test_two_rules_for_one_leaf_are_told_alike_everywhere(function, tmp_path):
    two = [".layers[0].weight", "layers.0.weight"]
    texts = [f"(Net, {path!r})" if function is initialised_within else repr(path) for path in two]
    line = re.escape(f"layers.0.weight: more than one path matches it, {' and '.join(texts)}")
    with pytest.raises(ValueError, match=rf"the paths do not match the tree[\s\S]*{line}"):
        chosen(function, two, tmp_path)


# --- what is printed can be pasted


def test_what_a_summary_prints_can_be_pasted():
    table = vernal.debug.summary(NET)
    rows = [line.split()[0] for line in table.splitlines() if "Linear" in line or "Net" in line]
    assert rows == ["model", ".layers[0]", ".layers[1]"]
    for row, names in zip(rows, [ALL, ALL[:2], ALL[2:4]], strict=True):
        assert chosen(frozen, [row], None) == set(names)


def test_what_an_explanation_prints_can_be_pasted():
    @vernal.filter_jit
    def run(model, x):
        return model(x)

    other = tree_at(".layers[1].bias", NET, jnp.ones(4, jnp.float16))
    with jax.numpy_dtype_promotion("standard"):
        run(NET, jnp.ones(4)), run(other, jnp.ones(4))
    [path] = re.findall(r"(\S+): f32\[4\] -> f16\[4\]", run.explain())
    assert path == "model.layers[1].bias"
    assert chosen(frozen, [path], None) == {"layers.1.bias"}


def test_what_the_refusal_of_a_module_prints_can_be_pasted():
    class Bad(vernal.Module):
        parts: dict

    with pytest.raises(ValueError, match="this value can change in place") as caught:
        Bad({"a.b": [jnp.ones(2), {1}]})
    [path] = re.findall(r"where: (\S+) of ", str(caught.value))
    assert path == ".parts['a.b'][1]"
    assert tree_at(path, Bad({"a.b": [jnp.ones(2), "text"]}), "other").parts["a.b"][1] == "other"


def test_what_a_difference_prints_can_be_pasted():
    other = tree_at(".heads['a.b']", NET, jnp.ones(3))
    [difference] = vernal.show.diff(NET, other)
    assert tree_at(difference.path_text, NET, jnp.ones(3)) == other


def test_names_are_their_own_patterns():
    assert all(map(Pattern.matches, map(Pattern, ALL), ALL))
    assert jax.tree.leaves(tree_paths(NET)) == ALL
