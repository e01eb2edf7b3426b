"""Which leaves of a tree go into a file, and how a leaf is rebuilt from the elements in the file and the
corresponding leaf of `like`.

A leaf is *data* if it is an array (of JAX or NumPy, a NumPy scalar, a typed PRNG key, a
`ShapeDtypeStruct`) or a Python number. Everything else (functions, strings) is structure: files do
not hold it, and loading takes it from `like`.
"""

import functools
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np

from ..show import is_traced, short, shown_name, type_error, value_error
from ..trees import has_shape, is_array, is_sealed, named_leaves, refuse_sealed

# Subclasses (an `IntEnum`, say) are structure: in general they cannot be rebuilt from a number.
PYTHON: dict[type, np.dtype] = {
    bool: np.dtype(np.bool_),
    int: np.dtype(np.int64),
    float: np.dtype(np.float64),
    complex: np.dtype(np.complex128),
}


class Spec(NamedTuple):
    """The shape and dtype of a leaf. The dtype may be that of a typed PRNG key; byte order is ignored."""

    shape: tuple[int, ...]
    dtype: Any

    def __str__(self) -> str:
        return short(jax.ShapeDtypeStruct(self.shape, self.dtype)).removesuffix("(struct)")


def leaves_by_name(tree: Any, where: str) -> dict[str, Any]:
    """The leaves of a tree by their names in a file."""
    leaves = named_leaves(tree, is_leaf=is_sealed)
    for name, leaf in leaves.items():
        refuse_sealed(leaf, f"{shown_name(name)} of {where}" if name else where)
    return leaves


def is_key(leaf: Any) -> bool:
    """Whether a leaf is a typed PRNG key, or stands for one."""
    return isinstance(leaf, (jax.Array, jax.ShapeDtypeStruct)) and jnp.issubdtype(
        leaf.dtype, jax.dtypes.prng_key
    )


@functools.lru_cache(maxsize=64)
def key_spec(stored: tuple[int, ...], impl: str) -> Spec | None:
    """Shape and dtype of keys whose key data has the shape `stored`; None if JAX cannot make such keys."""
    data = jax.ShapeDtypeStruct(stored, np.uint32)
    try:
        keys = jax.eval_shape(lambda d: jax.random.wrap_key_data(d, impl=impl), data)
    except (TypeError, ValueError):
        return None
    return Spec(keys.shape, keys.dtype)


def spec_of(leaf: Any, name: str) -> Spec | None:
    """The spec of the entry for this leaf; None if it is structure. Raises `TypeError` if it holds data that a file
    cannot store."""
    if isinstance(leaf, (np.ndarray, np.generic)) and not is_array(leaf):
        raise type_error(
            f"an array of dtype {leaf.dtype} cannot be stored",
            where=name,
            expected="an array of numbers or bools",
            instead="keep strings and dates in the metadata, or in a static field",
        )
    if is_traced(leaf):
        raise type_error(
            "files cannot be written or read inside a function that is being traced",
            where=name,
            expected="an array with values",
            got=short(leaf),
            instead="save and load outside of jit, grad, vmap and their like",
        )
    if has_shape(leaf):
        dtype = leaf.dtype if is_key(leaf) else leaf.dtype.newbyteorder("=")
        return Spec(leaf.shape, dtype)
    if type(leaf) in PYTHON:
        return Spec((), PYTHON[type(leaf)])
    if hasattr(type(leaf), "__jax_array__"):
        raise type_error(
            f"a {type(leaf).__name__} can be stored as an array, but not restored from one",
            where=name,
            expected="an array, or a class that is registered as a pytree of arrays",
            instead="make its class a Module",
        )
    return None


def on_host(leaf: Any, name: str) -> np.ndarray:
    """The elements of a leaf, not a key, as a NumPy array. Raises `ValueError` if they cannot be read."""
    if isinstance(leaf, jax.ShapeDtypeStruct):
        raise value_error(
            "a ShapeDtypeStruct has no values to store",
            where=name,
            expected="an array",
            got=short(leaf),
            instead="save the model itself, not its skeleton",
        )
    try:
        value = np.asarray(leaf)
    except Exception as error:
        # Deleted, donated, or sharded over other processes: JAX has an error class for each.
        raise value_error(
            "the elements of an array cannot be read", where=name, got=str(error)
        ) from error
    if value.dtype == object:
        raise value_error(
            "a Python int is too large to be stored",
            where=name,
            expected="an int of at most 64 bits",
            got=f"{leaf.bit_length()} bits",
            instead="keep it in the metadata",
        )
    return value


def sharding_of(like: Any, name: str) -> jax.sharding.Sharding | None:
    """The sharding for an array (or a ShapeDtypeStruct); None if it has none. Raises `ValueError` if the sharding does
    not say which devices."""
    sharding = like.sharding
    if isinstance(getattr(sharding, "mesh", None), jax.sharding.AbstractMesh):
        # The result of `jax.eval_shape` for an array on a mesh.
        mesh = jax.sharding.get_mesh()
        if mesh.abstract_mesh != sharding.mesh:
            raise value_error(
                "the mesh of a sharding has no devices",
                where=name,
                expected="a sharding on a mesh of devices",
                got=str(sharding),
                instead="load inside of `with jax.set_mesh(mesh)`, or give `like` shardings on a mesh",
            )
        return jax.NamedSharding(mesh, sharding.spec)
    return sharding


def place(value: np.ndarray, like: Any, name: str, impl: str | None = None) -> Any:
    """A leaf of the kind and dtype of `like`, on the devices of `like`, with the elements of `value`.

    Args:
        value: the elements, possibly a view of a file. They are copied once; for an array that is
            sharded over several devices, piece by piece.
        like: data with the same shape, and a dtype that they can be converted to.
        name: its name in errors.
        impl: for keys, their implementation.
    """
    if type(like) in PYTHON:
        return type(like)(value.item())
    if isinstance(like, np.generic):
        return value.astype(like.dtype)[()]
    if isinstance(like, np.ndarray):
        return np.array(value, dtype=like.dtype)
    # An uncommitted array stays uncommitted: it may follow other arguments to their device.
    put = isinstance(like, jax.ShapeDtypeStruct) or like.committed
    sharding = sharding_of(like, name) if put else None
    if impl is not None:

        def keys(part: np.ndarray) -> jax.Array:
            return jax.random.wrap_key_data(jnp.asarray(np.array(part)), impl=impl)

        if sharding is None:
            return keys(value)
        return jax.make_array_from_callback(like.shape, sharding, lambda at: keys(value[at]))
    dtype = np.dtype(like.dtype)
    check_width(dtype, name)
    if value.shape == () and getattr(like, "weak_type", False):
        # An optimiser's counter, say. A change of its type would cause a recompilation.
        weak = jnp.asarray(value.item())
        if weak.dtype == like.dtype:
            return weak if sharding is None else jax.device_put(weak, sharding)
    # The copies are needed: on the CPU, JAX may keep using the memory it is given, which is the file.
    if sharding is None:
        return jnp.asarray(np.array(value, dtype))
    return jax.make_array_from_callback(
        value.shape, sharding, lambda at: np.array(value[at], dtype)
    )


_WIDE = ("int64", "uint64", "float64", "complex128")


def check_width(dtype: np.dtype, name: str) -> None:
    """Refuses a dtype that JAX would narrow."""
    wide = jax.config.jax_enable_x64  # pyright: ignore[reportAttributeAccessIssue] (added at run time)
    if dtype.name in _WIDE and not wide:
        raise value_error(
            f"JAX would truncate {dtype.name} to 32 bits",
            where=name,
            expected="64 bits, because `like` says so",
            instead='call jax.config.update("jax_enable_x64", True), or load into a NumPy array',
        )
