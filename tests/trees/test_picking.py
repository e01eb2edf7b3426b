from typing import Any

import jax
import jax.numpy as jnp
import pytest

import vernal
from vernal.show import path_text
from vernal.trees import picked_nodes, values_with_paths


class Layer(vernal.Module):
    weight: jax.Array
    rate: float
    items: list[Any]
    fixed: int = vernal.field(static=True, default=3)


LAYER = Layer(jnp.ones(2), 0.5, [jnp.zeros(1), "text", (1.5, None)])


def texts(found: Any) -> list[str]:
    return [path_text(path) for path, _ in found]


@pytest.mark.parametrize(
    ("where", "paths"),
    [
        (lambda m: m.weight, [".weight"]),
        (lambda m: m.rate, [".rate"]),
        (lambda m: (m.items[0], m.items[2][0]), [".items[0]", ".items[2][0]"]),
        (lambda m: [m.items, m.items[0]], [".items", ".items[0]"]),
        (lambda m: m.items[2][1], [".items[2][1]"]),
        (lambda m: m, ["(the tree itself)"]),
    ],
)
def test_picked_nodes_are_found_with_their_paths(where, paths):
    found = picked_nodes(where, LAYER)
    assert texts(found) == paths


def test_picked_nodes_are_the_nodes_themselves():
    (_, weight), (_, rate) = picked_nodes(lambda m: (m.weight, m.rate), LAYER)
    assert weight is LAYER.weight
    assert rate == 0.5


def test_what_is_not_in_the_tree_is_refused_under_the_name_the_user_knows():
    with pytest.raises(ValueError, match=r"(?s)static field.*function `wrt`.*tree\.fixed"):
        picked_nodes(lambda m: m.fixed, LAYER, "wrt")
    with pytest.raises(ValueError, match="`where` must use only the structure of the tree"):
        picked_nodes(lambda m: m.weight + 1, LAYER)


def test_all_values_have_paths_also_the_structure_of_modules():
    found = values_with_paths({"m": LAYER, "empty": ()})
    assert texts(found) == [
        "['empty']",
        "['m'].weight",
        "['m'].rate",
        "['m'].items[0]",
        "['m'].items[1]",
        "['m'].items[2][0]",
        "['m'].items[2][1]",
    ]
    values = [value for _, value in found]
    assert values[0] == ()
    assert values[1] is LAYER.weight
    assert values[2] == 0.5
    assert values[4:] == ["text", 1.5, None]
