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
from ..trees import Paths, check_key, is_array_like, is_inexact_array, path_name
from ._places import Names, Place, keys_of
from ._weight_norm import WeightNorm

T = TypeVar("T")

Initialiser = Callable[..., Any]
Rule = str | type | tuple[type, str]

_INSTEAD = "narrow the rules until only one matches; a path in the whole model takes precedence over rules with classes"


@dataclasses.dataclass(frozen=True)
class _Weight:
    """An array that may be initialised.

    Attributes:
        path: where it is.
        value: its current value.
        names: its names in the single layers, if it is stacked.
        owners: the classes of the modules around it, and its name within each.
    """

    path: tuple[Any, ...]
    value: Any
    names: Names
    owners: tuple[tuple[type, str], ...]

    @property
    def name(self) -> str:
        return path_name(self.path)


def initialise(model: T, rules: Mapping[Rule, Initialiser], key: PRNGKeyArray) -> T:
    """Draws new initial values for the weights of a model, by rules.

    A rule is one of

    * a path (see `vernal.trees.Pattern`) of arrays or of a part: `"**.bias"`, `"blocks.**.proj.weight"`;
    * a class of layers, for the array `weight` of all its instances: `nn.Linear`;
    * such a class and a path within it: `(nn.Linear, "bias")`, `(nn.GRUCell, "weight_*")`.

    A `WeightNorm` keeps the length of its weight as `g`. When the weight is drawn anew, `g` becomes its new length,
    also if the rule of the weight, such as `**`, matches `g` too. (A rule that matches `g` but not the weight, such as
    `**.g`, draws it.) A rule for an array that is `vernal.nn.Parametrised` applies to all arrays that it is made of.

    A path that matches weights skips buffers, such as running statistics: `**` leaves `running_mean` alone, and
    `**.running_mean` draws it anew.

    Two rules of one kind for one array are an error, and so is a rule that matches no array. If a path in the whole
    model and a class both match, the path wins. An array without a rule is unchanged, and so are shapes, dtypes, frozen
    marks, and everything that is not an array of floating-point (or complex) numbers.

    Initialisers are called with `(key, shape, dtype)`, as those of `jax.nn.initializers`. These take the last axis for
    outputs and the one before for inputs, whereas weights here are `(outputs, inputs, *kernel)`. So an initialiser is
    called with the shape `(*kernel, inputs, outputs)`, and its result is transposed. "Fan in" is then the number of
    inputs of one output, in convolutions as well.

    Keys are folded from `key` and the name of each array, so an array gets the same values whatever else is in the
    model. In a `Stack` each layer is initialised separately, as the same layer in a list would be (`blocks.3.weight`);
    rules match the names of the leaves (`blocks.layers.weight`). To initialise the members of an ensemble, call
    `jax.vmap(lambda model, key: nn.initialise(model, rules, key))(models, keys)`.

    The usual recipes, with `from jax.nn import initializers as init`:

        # PyTorch's linear and convolutional layers (also the default here)
        {nn.Linear: init.variance_scaling(1 / 3, "fan_in", "uniform")}
        # He et al. 2015 (arXiv:1502.01852), for ReLU
        {nn.Conv: init.he_normal(), nn.Linear: init.he_normal(), "**.bias": init.zeros}
        # GPT-2: weights that write to the residual stream are smaller, by the number of writers
        {
            nn.Linear: init.normal(0.02),
            nn.Embedding: init.normal(0.02),
            "**.{attention.output,mlp.down}.weight": init.normal(0.02 / math.sqrt(2 * num_layers)),
            (nn.Linear, "bias"): init.zeros,
        }

    Args:
        model: any pytree with modules in it. Abstract arrays (`jax.ShapeDtypeStruct`) with a rule become arrays.
        rules: initialisers by rule.
        key: a JAX random key.

    Returns:
        The model with these arrays. (Under `jax.jit` with `out_shardings` they are created on their own devices.)

    Raises:
        ValueError: for a rule that matches no array, two rules of one kind for one array, or an initialiser that fails
            or returns another shape or dtype.
        TypeError: for something that is not a rule or not an initialiser.

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
    # A rule that matches weights skips the running statistics among them.
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
    """For every `WeightNorm`, the path of its lengths, the path of its weight, and the function that computes one from
    the other."""
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
    """Refuses what is not a rule, or not an initialiser."""
    if not callable(initialiser):
        raise type_error(
            "an initialiser must be a function",
            where=f"initialise(model, {{{_text(rule)}: ...}}, key)",
            expected="a function (key, shape, dtype) -> array",
            got=short(initialiser),
            instead="for example jax.nn.initializers.constant(0.1)",
        )
    owner, text = rule if isinstance(rule, tuple) and len(rule) == 2 else (rule, "")
    if not isinstance(rule, str) and not (isinstance(owner, type) and isinstance(text, str)):
        raise type_error(
            "the key of a rule must say which arrays it is for",
            where="initialise(model, rules, key)",
            expected="a path, a class, or a pair of a class and a path",
            got=short(rule),
            instead='"**.bias", nn.Linear or (nn.Linear, "bias")',
        )


def _within(rule: type | tuple[type, str], weights: list[_Weight]) -> list[int]:
    """The indices of the arrays at a path within a module of a class."""
    owner, text = rule if isinstance(rule, tuple) else (rule, "weight")
    inside = _inside(owner, weights)
    return sorted({inside[j][0] for j in Paths(name for _, name in inside).leaves(text)})


def _inside(owner: type, weights: list[_Weight]) -> list[tuple[int, str]]:
    """The indices of the arrays in modules of a class, and their names within them."""
    return [
        (i, name)
        for i, weight in enumerate(weights)
        for cls, name in weight.owners
        if issubclass(cls, owner)
    ]


def _draw(initialiser: Initialiser, key: Any, weight: _Weight) -> Array:
    """New values for an array, drawn separately for each layer if it is stacked."""
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
        expected=f"an array {weight.value.dtype.name}{list(asked)} from initialiser(key, {asked}, dtype)",
        got=got,
    )


def _text(rule: Any) -> str:
    if isinstance(rule, tuple):
        return f"({', '.join(map(_text, rule))})"
    return rule.__name__ if isinstance(rule, type) else repr(rule)


def _near(rule: type | tuple[type, str], weights: list[_Weight]) -> str:
    """What the model has instead of the arrays that a rule with a class looks for."""
    owner, text = rule if isinstance(rule, tuple) else (rule, "weight")
    names = dict.fromkeys(name for _, name in _inside(owner, weights))
    if names:
        near = Paths(names).near(text)
        return near or f"no leaf there; the arrays of {owner.__name__} are {listed(names)}"
    classes = dict.fromkeys(cls.__name__ for weight in weights for cls, _ in weight.owners)
    return f"no such module; the classes with arrays are {listed(classes) or 'none'}"
