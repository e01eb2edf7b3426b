"""`initialise`: new initial values for the weights of a model, by rules.

Each rule is a test and an initialiser. The test looks at where an array is: at its whole name, or at the modules
around it and its name within them.
"""

import dataclasses
from collections.abc import Callable, Iterator, Mapping
from typing import Any, TypeVar

import jax
import jax.numpy as jnp
import jax.tree_util as jtu
from jax import Array
from jaxtyping import PRNGKeyArray

from ..modules import Module, buffer_leaves
from ..show import listed, short, type_error, value_error
from ..trees import Paths, is_array_like, is_inexact_array, path_name
from ._layer_arguments import check_key
from ._places import Names, Place, keys_of
from ._weight_norm import WeightNorm

T = TypeVar("T")

Initialiser = Callable[..., Any]
Rule = str | type | tuple[type, str]

_INSTEAD = (
    "narrower rules where there are two; a path in the whole model goes before rules with classes"
)


@dataclasses.dataclass(frozen=True)
class _Weight:
    """An array that may be initialised.

    Attributes:
        path: where it is.
        value: what it is now.
        names: what the single layers call it, if it is stacked.
        owners: the classes of the modules around it, and what its name is within each.
    """

    path: tuple[Any, ...]
    value: Any
    names: Names
    owners: tuple[tuple[type, str], ...]

    @property
    def name(self) -> str:
        return path_name(self.path)


def initialise(model: T, rules: Mapping[Rule, Initialiser], key: PRNGKeyArray) -> T:
    """Draws initial values for the weights of a model anew, as rules say.

    A rule is one of

    * the path (see `vernal.trees.Pattern`) of arrays or of a part: `"**.bias"`, `"blocks.**.proj.weight"`;
    * a class of layers, for the array called `weight` of all its instances: `nn.Linear`;
    * such a class and a path within it: `(nn.Linear, "bias")`, `(nn.GRUCell, "weight_*")`.

    A `WeightNorm` keeps the length of its weight beside it: `g` follows where the weight is drawn anew, also if the
    rule of the weight, such as `**`, would mean `g` too. (`**.g` means nothing else, and draws it.) A rule for an
    array that is `vernal.nn.Parametrised` is for all arrays that it is made of.

    A path that means weights passes over buffers, such as running statistics: `**` draws no mean anew.
    `**.running_mean` does.

    Two rules of one kind for one array are an error, and so is a rule for no array. Where a path in the whole model
    and a class both apply, the path decides. An array without a rule stays as it is, and so do shapes, dtypes,
    frozen marks, and everything that is not an array of floating-point (or complex) numbers.

    Initialisers are called `(key, shape, dtype)`, as those of `jax.nn.initializers`. These take the last axis of an
    array for its outputs and the one before for its inputs, whereas weights here are `(outputs, inputs, *kernel)`; so
    an initialiser is asked for `(*kernel, inputs, outputs)`, and what it returns is transposed. "Fan in" is then what
    enters one output, in convolutions as well.

    Keys are folded from `key` and the name of each array, so an array is given the same values whatever else is in the
    model. In a `Stack` each layer is initialised by itself, as the layer in a list in its place would be
    (`blocks.3.weight`); rules see the names of the leaves (`blocks.layers.weight`). The members of an ensemble are
    initialised by `jax.vmap(lambda model, key: nn.initialise(model, rules, key))(models, keys)`.

    The usual recipes, with `from jax.nn import initializers as init`:

        # PyTorch's linear and convolutional layers (also the default here)
        {nn.Linear: init.variance_scaling(1 / 3, "fan_in", "uniform")}
        # He et al. 2015 (arXiv:1502.01852), for ReLU
        {nn.Conv: init.he_normal(), nn.Linear: init.he_normal(), "**.bias": init.zeros}
        # GPT-2: what writes to the residual stream is smaller, by the number of writers
        {
            nn.Linear: init.normal(0.02),
            nn.Embedding: init.normal(0.02),
            "**.{attention.output,mlp.down}.weight": init.normal(0.02 / math.sqrt(2 * num_layers)),
            (nn.Linear, "bias"): init.zeros,
        }

    Args:
        model: any pytree with modules in it. Where arrays are abstract (`jax.ShapeDtypeStruct`), those with a rule
            become arrays.
        rules: initialisers by rule.
        key: a JAX random key.

    Returns:
        The model with these arrays. (Under `jax.jit` with `out_shardings` they are made where they belong.)

    Raises:
        ValueError: for a rule that applies to no array, two rules of one kind for one array, or an initialiser that
            fails or returns another shape or dtype.
        TypeError: for a rule or an initialiser that is none.

    Example:
        >>> import jax
        >>> from jax.nn import initializers as init
        >>> from vernal import nn
        >>> model = nn.MLP(2, 1, 8, depth=2, key=jax.random.key(0))
        >>> rules = {nn.Linear: init.orthogonal(), "**.bias": init.zeros}
        >>> model = nn.initialise(model, rules, jax.random.key(1))
        >>> print(abs(model.layers[1].weight @ model.layers[1].weight.T - jax.numpy.eye(8)).max() < 1e-5)
        True
    """
    check_key("initialise", key)
    _check_rules(rules)
    weights = list(_weights(model, Place(), (), ()))
    paths = Paths(weight.path for weight in weights)
    by_path, idle = paths.rules(rule for rule in rules if isinstance(rule, str))
    leaves = [path for path, _ in jtu.tree_leaves_with_path(model)]
    held = {p for p, buffer in zip(leaves, buffer_leaves(model), strict=True) if buffer}
    buffers = [weight.path in held for weight in weights]
    # A rule that means weights does not mean the running statistics among them.
    of_weights = {
        text for texts, buffer in zip(by_path, buffers, strict=True) if not buffer for text in texts
    }
    found: list[list[Rule]] = [
        [text for text in texts if not (buffer and text in of_weights)]
        for texts, buffer in zip(by_path, buffers, strict=True)
    ]
    lost: list[str] = []
    for rule in rules:
        if not isinstance(rule, str):
            within = _within(rule, weights)
            for i in within:
                if not by_path[i]:
                    found[i].append(rule)
            if not within:
                lost.append(f"{_text(rule)}: {_near(rule, weights)}")
    norms = list(_norms(model, Place(), ()))
    number = {weight.path: i for i, weight in enumerate(weights)}
    for of_g, of_v, _ in norms:
        if of_g in number and of_v in number:
            g, v = number[of_g], number[of_v]
            found[g] = [rule for rule in found[g] if rule not in found[v]]
    several = any(len(some) > 1 for some in found)
    if idle or lost or several:
        raise paths.refusal(
            "initialise(model, rules, key)",
            idle,
            found,
            others=lost,
            text=_text,
            instead=_INSTEAD if several else None,
        )
    chosen = [(weight, rules[some[0]]) for weight, some in zip(weights, found, strict=True) if some]
    keys = keys_of(key, [weight.names for weight, _ in chosen])
    new = {
        weight.path: _draw(initialiser, k, weight)
        for (weight, initialiser), k in zip(chosen, keys, strict=True)
    }
    for of_g, of_v, norm in norms:
        if of_v in new and of_g not in new:
            new[of_g] = norm(new[of_v])
    return jtu.tree_map_with_path(lambda path, leaf: new.get(path, leaf), model)


def _weights(
    node: Any, place: Place, path: tuple[Any, ...], owners: tuple[tuple[type, int], ...]
) -> Iterator[_Weight]:
    if is_inexact_array(node) or (
        isinstance(node, jax.ShapeDtypeStruct) and jnp.issubdtype(node.dtype, jnp.inexact)
    ):
        within = tuple((cls, path_name(path[start:])) for cls, start in owners)
        yield _Weight(path, node, place.names, within)
        return
    if isinstance(node, Module):
        owners = (*owners, (type(node), len(path)))
    for key, part, below in place.parts(node):
        yield from _weights(part, below, (*path, key), owners)


def _norms(
    node: Any, place: Place, path: tuple[Any, ...]
) -> Iterator[tuple[tuple[Any, ...], tuple[Any, ...], Callable[[Array], Array]]]:
    """Where the lengths are in every `WeightNorm`, where their weight is, and what makes them of it."""
    if isinstance(node, WeightNorm):
        names = ("g",), ("layer", node.weight_name)
        of_g, of_v = ((*path, *map(jtu.GetAttrKey, text)) for text in names)
        norm = node.norm
        for _ in place.names.shape:
            norm = jax.vmap(norm)
        yield of_g, of_v, norm
    for key, part, below in place.parts(node):
        yield from _norms(part, below, (*path, key))


def _check_rules(rules: Any) -> None:
    if not isinstance(rules, Mapping):
        raise type_error(
            "the rules must be a dictionary",
            where="initialise(model, rules, key)",
            expected="initialisers by path, or by a class of layers",
            got=short(rules),
            instead='{"**.weight": jax.nn.initializers.he_normal()}',
        )
    for rule, initialiser in rules.items():
        _check(rule, initialiser)


def _check(rule: Any, initialiser: Any) -> None:
    """Refuses what is not a rule, or no initialiser."""
    if not callable(initialiser):
        raise type_error(
            "an initialiser is a function",
            where=f"initialise(model, {{{_text(rule)}: ...}}, key)",
            expected="a function (key, shape, dtype) -> array",
            got=short(initialiser),
            instead="for example jax.nn.initializers.constant(0.1)",
        )
    owner, text = rule if isinstance(rule, tuple) and len(rule) == 2 else (rule, "")
    if not isinstance(rule, str) and not (isinstance(owner, type) and isinstance(text, str)):
        raise type_error(
            "a rule says which arrays it is for",
            where="initialise(model, rules, key)",
            expected="a path, a class, or a pair of a class and a path",
            got=short(rule),
            instead='"**.bias", nn.Linear or (nn.Linear, "bias")',
        )


def _within(rule: type | tuple[type, str], weights: list[_Weight]) -> list[int]:
    """Which arrays are in a module of a class, at a path in that module."""
    owner, text = rule if isinstance(rule, tuple) else (rule, "weight")
    inside = _inside(owner, weights)
    return sorted({inside[j][0] for j in Paths(name for _, name in inside).leaves(text)})


def _inside(owner: type, weights: list[_Weight]) -> list[tuple[int, str]]:
    """The arrays in modules of a class, and what they are called in there."""
    return [
        (i, name)
        for i, weight in enumerate(weights)
        for cls, name in weight.owners
        if issubclass(cls, owner)
    ]


def _draw(initialiser: Initialiser, key: Any, weight: _Weight) -> Array:
    """New values for an array: for each layer by itself, if it is stacked."""
    stacked = len(weight.names.shape)
    shape, dtype = weight.value.shape[stacked:], weight.value.dtype
    asked = (*shape[2:], *shape[1::-1])

    def one(key: Any) -> Any:
        try:
            return initialiser(key, asked, dtype)
        except (TypeError, ValueError) as error:
            raise _unfit(weight, asked, f"{type(error).__name__}: {error}") from error

    for _ in weight.names.shape:
        one = jax.vmap(one)
    made = one(key)
    if not is_array_like(made):
        raise _unfit(weight, asked, short(made))
    drawn = jnp.asarray(made)
    if drawn.shape[stacked:] != asked or drawn.dtype != dtype:
        raise _unfit(weight, asked, f"{drawn.dtype.name}{list(drawn.shape[stacked:])}")
    return jnp.moveaxis(drawn, (-1, -2), (stacked, stacked + 1)) if len(shape) > 1 else drawn


def _unfit(weight: _Weight, asked: tuple[int, ...], got: str) -> ValueError:
    return value_error(
        "the initialiser does not fit the array",
        where=weight.name,
        expected=f"an array {weight.value.dtype.name}{list(asked)} of initialiser(key, {asked}, dtype)",
        got=got,
    )


def _text(rule: Any) -> str:
    if isinstance(rule, tuple):
        return f"({', '.join(map(_text, rule))})"
    return rule.__name__ if isinstance(rule, type) else repr(rule)


def _near(rule: type | tuple[type, str], weights: list[_Weight]) -> str:
    """What there is instead of what a rule with a class is looking for."""
    owner, text = rule if isinstance(rule, tuple) else (rule, "weight")
    names = dict.fromkeys(name for _, name in _inside(owner, weights))
    if names:
        near = Paths(names).near(text)
        return near or f"no leaf there; the arrays of {owner.__name__} are {listed(names)}"
    classes = dict.fromkeys(cls.__name__ for weight in weights for cls, _ in weight.owners)
    return f"no such module; the classes with arrays are {listed(classes) or 'none'}"
