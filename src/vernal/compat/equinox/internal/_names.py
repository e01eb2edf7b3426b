"""Names of `equinox.internal` that Vernal itself does not use."""

import dataclasses
import os
import secrets
import types
from collections.abc import Callable, Sequence
from typing import Any, NoReturn

import jax
import jax.numpy as jnp
import jax.tree_util as jtu
import numpy as np
import wadler_lindig as wl

from .... import primitives
from ...._ground import instantiate_zeros, is_none
from ....primitives import create_vprim, nonbatchable
from ....show import message, tree_pformat
from ....transforms import filter_eval_shape
from ....trees import partition
from .._module import Module


@dataclasses.dataclass(init=False, eq=False)
class GetKey:
    """A source of random keys for tests, with the keys that Equinox draws. (`vernal.testing.GetKey` draws others.)

    Args:
        seed: None takes that of the environment variable `EQX_GETKEY_SEED`, if it is set, or draws one.

    Attributes:
        seed: the seed in use.
        call: the number of keys returned so far.
        key: the key that they are derived from.
    """

    seed: int
    call: int
    key: jax.Array

    def __init__(self, seed: int | None = None) -> None:
        theirs = os.environ.get("EQX_GETKEY_SEED")
        if seed is None:
            seed = int(theirs) if theirs else secrets.randbelow(2**31)
        self.seed, self.call, self.key = seed, 0, jax.random.PRNGKey(seed)

    def __call__(self) -> jax.Array:
        """Returns the next key.

        Returns:
            A key of JAX's legacy kind, `uint32[2]`.
        """
        self.call += 1
        return jax.random.fold_in(self.key, self.call)


def doc_repr(obj: Any, string: str) -> Any:
    """Returns an object unchanged; Equinox shows `string` for it in its documentation.

    Args:
        obj: anything.
        string: not used.

    Returns:
        `obj`.
    """
    return obj


def doc_remove_args(*args: str) -> Callable[[Any], Any]:
    """Returns a decorator that changes nothing; Equinox hides arguments in its documentation.

    Args:
        *args: not used.

    Returns:
        A decorator that returns its argument.
    """
    return lambda fn: fn


def str2jax(msg: str) -> Any:
    """A sentinel that passes through every transformation and prints as `msg`.

    Args:
        msg: its name.

    Returns:
        An instance of a new class of modules without leaves: two calls give different structures.
    """
    body = {"__repr__": lambda self: msg, "__module__": __name__}
    return types.new_class(msg, (Module,), exec_body=lambda namespace: namespace.update(body))()


def _filled(make: Callable[..., Any], fn: Callable[..., Any], inputs: tuple[Any, ...]) -> Any:
    out = filter_eval_shape(fn, *inputs)
    return jtu.tree_map(
        lambda x: make(x.shape, x.dtype) if isinstance(x, jax.ShapeDtypeStruct) else x, out
    )


def eval_empty(fn: Callable[..., Any], *inputs: Any) -> Any:
    """Arrays of unspecified values in the shapes of the result of `fn(*inputs)`.

    Args:
        fn: a function of arrays.
        *inputs: its arguments.

    Returns:
        The tree of arrays.
    """
    return _filled(jnp.empty, fn, inputs)


def eval_zero(fn: Callable[..., Any], *inputs: Any) -> Any:
    """Zeros in the shapes of the result of `fn(*inputs)`.

    Args:
        fn: a function of arrays.
        *inputs: its arguments.

    Returns:
        The tree of arrays.
    """
    return _filled(jnp.zeros, fn, inputs)


def scan_trick(
    fn: Callable[[Any], Any], intermediates: Sequence[Callable[[Any], Any]], init: Any
) -> Any:
    """Calls `fn`, the first intermediate, `fn`, the second, ..., `fn`, with `fn` traced once.

    Args:
        fn: a function from a carry to a carry.
        intermediates: functions likewise.
        init: the first carry.

    Returns:
        The last carry.
    """
    branches = [*intermediates, lambda carry: carry]

    def step(carry: Any, i: Any) -> Any:
        # A batched index would make every branch run.
        i = nonbatchable(i)
        return jax.lax.switch(i, branches, fn(carry)), None

    return jax.lax.scan(step, init, jnp.arange(len(branches)))[0]


def cached_filter_eval_shape(fn: Callable[..., Any], *args: Any, **kwargs: Any) -> Any:
    """`filter_eval_shape`, which is fast without its own cache.

    Args:
        fn: a function.
        *args: its arguments.
        **kwargs: likewise.

    Returns:
        The result of `fn`, with shapes in place of arrays.
    """
    return filter_eval_shape(fn, *args, **kwargs)


def hashable_partition(pytree: Any, filter_fn: Callable[[Any], bool]) -> tuple[Any, Any]:
    """Splits a tree into some of its leaves and one hashable value for everything else.

    Args:
        pytree: any tree.
        filter_fn: selects the leaves to split off.

    Returns:
        The selected leaves, in a tuple with None for the others; and the rest.
    """
    kept, rest = partition(pytree, filter_fn)
    leaves = jtu.tree_leaves(kept, is_leaf=is_none)
    others, treedef = jtu.tree_flatten(rest, is_leaf=is_none)
    return tuple(leaves), (tuple(others), treedef)


def hashable_combine(dynamic_leaves: Any, static: Any) -> Any:
    """Undoes `hashable_partition`.

    Args:
        dynamic_leaves: the leaves.
        static: the rest.

    Returns:
        The tree.
    """
    others, treedef = static
    return treedef.unflatten(
        [a if b is None else b for a, b in zip(dynamic_leaves, others, strict=True)]
    )


def left_broadcast_to(arr: jax.Array, shape: tuple[int, ...]) -> jax.Array:
    """Broadcasts with the axes of `arr` to the left.

    Args:
        arr: an array.
        shape: its shape, with further axes to the right.

    Returns:
        The array of that shape.
    """
    return jnp.broadcast_to(arr.reshape(arr.shape + (1,) * (len(shape) - arr.ndim)), shape)


def to_onnx(fn: Callable[..., Any]) -> NoReturn:
    """Not implemented.

    Args:
        fn: a function.

    Raises:
        NotImplementedError: always.
    """
    raise NotImplementedError(
        message(
            "Vernal does not write ONNX",
            where="equinox.internal.to_onnx(fn)",
            expected="a format that JAX can export",
            got="to_onnx",
            instead="`jax.export`, or the package jax2onnx",
        )
    )


def noinline(
    fn: Callable[..., Any], abstract_fn: Callable[..., Any] | None = None
) -> Callable[..., Any]:
    """`vernal.primitives.noinline`, which infers the shapes of the result.

    Args:
        fn: the function.
        abstract_fn: not used. (In Equinox, functions that share it may replace each other in a compiled program.)

    Returns:
        A function that is called like `fn`.
    """
    return primitives.noinline(fn)


class ContainerMeta(type):
    """The class of old enumerations: public attributes become numbered items.

    Kept for code from before `Enumeration`.
    """

    reverse_lookup: list[str]

    def __new__(mcs, name: str, bases: tuple[type, ...], dict: dict[str, Any]) -> Any:
        """Makes the class.

        Args:
            name: its name.
            bases: its bases.
            dict: its body.

        Returns:
            The class.
        """
        texts = {k: v for k, v in dict.items() if isinstance(v, str) and k[0] != "_"}
        numbers = {text: i for i, text in enumerate(texts)}
        cls: Any = super().__new__(mcs, name, bases, {**dict, **numbers})
        cls.reverse_lookup = list(texts.values())
        return cls

    def __getitem__(cls, item: int) -> str:
        return cls.reverse_lookup[item]

    def __len__(cls) -> int:
        return len(cls.reverse_lookup)


@dataclasses.dataclass(frozen=True)
class TreeWLCustom:
    """The printing of arrays, shapes and functions, for the `custom=` of `wadler_lindig`.

    Args:
        truncate_leaf: selects the nodes that print as `Name(...)`.
        short_arrays: whether arrays print as `f32[2,3]`.
        struct_as_array: whether shapes print like arrays.
    """

    truncate_leaf: Callable[[Any], bool]
    short_arrays: bool
    struct_as_array: bool

    def __call__(self, obj: Any) -> wl.AbstractDoc | None:
        """The document of an object.

        Args:
            obj: anything.

        Returns:
            Its document, or None to leave it to `wadler_lindig`.
        """
        leaf = isinstance(obj, jax.Array | np.ndarray | jax.ShapeDtypeStruct | types.FunctionType)
        if not leaf and not self.truncate_leaf(obj):
            return None
        return wl.TextDoc(
            tree_pformat(
                obj,
                short_arrays=self.short_arrays,
                struct_as_array=self.struct_as_array,
                truncate_leaf=self.truncate_leaf,
            )
        )


def _same_of_tangent(primals: Any, tangents: Any) -> Any:
    return announce_jaxpr_p.bind(*primals), list(tangents)


announce_jaxpr_p = create_vprim(
    "announce_jaxpr",
    lambda *xs: list(xs),
    lambda *xs: list(xs),
    _same_of_tangent,
    lambda cotangents, *xs: list(cotangents),
)


def _maybe_set(pred: Any, xs: Any, x: Any, *index: Any) -> list[Any]:
    return [jnp.where(pred, xs.at[index].set(x), xs)]


def _maybe_set_jvp(primals: Any, tangents: Any) -> Any:
    pred, xs, x, *index = primals
    xs_dot, x_dot = map(instantiate_zeros, tangents[1:3])
    return maybe_set_p.bind(*primals), _maybe_set(pred, xs_dot, x_dot, *index)


maybe_set_p = create_vprim(
    "maybe_set",
    _maybe_set,
    lambda pred, xs, x, *index: [xs],
    _maybe_set_jvp,
    # Its tangent is made of ordinary operations: there is nothing to transpose.
    lambda cotangents, *args: [None] * len(args),
)
