"""The names of the individual layers of a model, and a random key for each name.

Keys that are folded from names (`keys`, `initialise`) do not change when something is added elsewhere. They must not
change either when a list of layers is stored stacked, so a name here is that of the layer in the list:
`blocks.3.norm.weight`, while the leaf is `blocks.layers.norm.weight` and holds this weight of all blocks along its
first axis.

A module renames its parts by a method `__unrolled__`. It returns pairs: the path from the module to the part (its keys
as text), and the name of the part instead: one name, or a sequence of names if the part is stacked. An empty name means
the module itself.
"""

import dataclasses
import hashlib
import math
from collections.abc import Iterator, Sequence
from typing import Any

import jax
import numpy as np

from ..trees import node_parts, path_name

# What `__unrolled__` returns.
Unrolled = Sequence[tuple[tuple[str, ...], str | Sequence[str]]]


@dataclasses.dataclass(frozen=True)
class Names:
    """The names of the nodes that one node holds, stacked.

    Attributes:
        texts: all names, in the order of the stacked axes.
        shape: the lengths of the stacked axes; `()` for a node that is not stacked.
    """

    texts: tuple[str, ...] = ("",)
    shape: tuple[int, ...] = ()

    def below(self, name: str | Sequence[str]) -> "Names":
        """The names of a part of each node: one name, or several along a further axis."""
        endings, axis = ((name,), ()) if isinstance(name, str) else (name, (len(name),))
        texts = (".".join(filter(None, (text, end))) for text in self.texts for end in endings)
        return Names(tuple(texts), self.shape + axis)


@dataclasses.dataclass(frozen=True)
class Place:
    """The place of a node, while walking down a tree.

    Attributes:
        names: the names of the node.
        pending: parts further below whose names differ from their paths: the rest of the path, and the names.
    """

    names: Names = Names()
    pending: tuple[tuple[tuple[str, ...], Names], ...] = ()

    def parts(self, node: Any) -> Iterator[tuple[Any, Any, "Place"]]:
        """The key, part and place of each part of the node at this place."""
        pending = list(self.pending)
        if hasattr(type(node), "__unrolled__"):
            pending += [(path, self.names.below(name)) for path, name in node.__unrolled__()]
        for key, part in node_parts(node) or []:
            text = path_name((key,))
            below = [(path[1:], names) for path, names in pending if path[0] == text]
            names = next((names for path, names in below if not path), self.names.below(text))
            yield key, part, Place(names, tuple(x for x in below if x[0]))


def keys_of(key: Any, places: Sequence[Names]) -> list[Any]:
    """A random key for every name: for each of `places`, an array of keys of its shape.

    A key is folded from 64 bits of a hash of the name: with fewer, the names of a large model might collide.
    """
    texts = [text for names in places for text in names.texts]
    if not texts:
        return []
    digests = b"".join(hashlib.blake2b(text.encode(), digest_size=8).digest() for text in texts)
    words = np.frombuffer(digests, "<u4").reshape(-1, 2)
    every = _folded(key, words)
    parts = jax.lax.split(every, [math.prod(names.shape) for names in places])
    return [
        part.reshape(names.shape + every.shape[1:])
        for part, names in zip(parts, places, strict=True)
    ]


@jax.jit
def _folded(key: Any, words: Any) -> Any:
    """A key for every pair of 32-bit words. (Compiled, so that JAX caches it.)"""
    fold = jax.random.fold_in
    return jax.vmap(lambda two: fold(fold(key, two[0]), two[1]))(words)
