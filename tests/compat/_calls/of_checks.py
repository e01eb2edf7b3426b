"""Errors at run time, and files of leaves."""

import io
import tempfile
from pathlib import Path

import jax
import jax.numpy as jnp
import numpy as np

from .registry import calls

ONE = jnp.ones(2)


@calls("error_if", "internal.error_if")
def error_if(name, eqx):
    yield name, ONE, False, "wrong"
    yield name, ONE, jnp.array(False), "wrong"
    yield name, ONE, jnp.array([False, False]), "wrong"
    yield name, ONE, np.bool_(False), "wrong"
    yield name, (ONE, "text", 1), jnp.array(False), "wrong"
    yield name, 1.0, False, "wrong"
    yield name, 1.0, jnp.array(False), "wrong"
    yield name, "text", False, "wrong"
    yield name, "text", jnp.array(False), "wrong"
    yield name, np.ones(2), jnp.array(False), "wrong"
    yield name, np.ones(2), False, "wrong"
    yield name, ONE, True, "wrong"
    yield name, ONE, jnp.array(True), "wrong"
    yield name, ONE, jnp.array([False, True]), "wrong"
    yield name, 1.0, True, "wrong"
    yield lambda: name(ONE, jnp.array(True), "wrong", on_error="off")
    yield lambda: name(ONE, jnp.array(True), "wrong", on_error="nan")
    yield lambda: name(jnp.ones(2, int), jnp.array(True), "wrong", on_error="nan")
    yield lambda: name(ONE, jnp.array(True), "wrong", on_error="another")
    yield lambda: name(ONE, jnp.array(True), "wrong", on_error="raise")
    yield lambda: eqx.filter_jit(lambda x: name(x, x > 0, "wrong"))(-ONE)
    yield lambda: eqx.filter_jit(lambda x: name(x, x > 0, "wrong"))(ONE)
    yield lambda: eqx.filter_jit(lambda x: name(x, True, "wrong"))(ONE)
    yield lambda: jax.vmap(lambda x: name(x, x > 2, "wrong"))(ONE)
    yield lambda: jax.vmap(lambda x: name(x, x > 0, "wrong"))(ONE)
    yield lambda: jax.grad(lambda x: name(x, x > 2, "wrong") ** 2)(1.0)
    yield lambda: eqx.filter_jit(lambda x: [name(x, x > 0, "wrong"), x][1])(ONE)
    yield name, ONE, 1, "wrong"
    yield name, ONE, jnp.array(1.0), "wrong"
    for pred in (0, 0.0, np.int64(0), np.array(0), jnp.array(0), jnp.zeros(2), jnp.array([0, 2])):
        yield lambda pred=pred: name(ONE, pred, "wrong")
    yield lambda: eqx.filter_jit(lambda x, p: name(x, p, "wrong"))(ONE, jnp.zeros(2))
    yield lambda: eqx.filter_jit(lambda x, p: name(x, p, "wrong"))(ONE, jnp.ones(2))
    yield name, ONE, "text", "wrong"
    yield name, ONE, None, "wrong"
    yield lambda: name(x=ONE, pred=False, msg="wrong")
    yield lambda: name(ONE, False, msg=1)


@calls("branched_error_if", "internal.branched_error_if")
def branched_error_if(name, eqx):
    two = ["first", "second"]
    yield name, ONE, False, 0, two
    yield name, ONE, jnp.array(False), jnp.array(1), two
    yield name, ONE, jnp.array(False), jnp.array(5), two
    for pred in (0, 1, jnp.zeros(()), jnp.array(2)):
        yield lambda pred=pred: name(ONE, pred, 1, two)
    yield name, ONE, True, 0, two
    yield name, ONE, jnp.array(True), jnp.array(1), two
    yield lambda: name(ONE, jnp.array(True), jnp.array(5), two)
    yield lambda: eqx.filter_jit(lambda x, i: name(x, True, i, two))(ONE, jnp.array(1))
    yield lambda: name(ONE, jnp.array([False, True]), jnp.array([0, 1]), two)
    yield lambda: name(ONE, jnp.array(True), 0, two, on_error="off")
    yield name, ONE, False, 0, []
    yield name, ONE, False, 0.5, two
    yield name, ONE, False, "text", two
    yield lambda: name(x=ONE, pred=False, index=0, msgs=two)


@calls("EquinoxRuntimeError", "EquinoxTracetimeError")
def errors(name, eqx):
    yield lambda: issubclass(name, RuntimeError)
    yield lambda: str(name("text"))
    yield lambda: name.__name__
    yield lambda: eqx.error_if(ONE, jnp.array(True), "wrong")


def written(eqx, tree, **options):
    file = io.BytesIO()
    eqx.tree_serialise_leaves(file, tree, **options)
    return file


def there_and_back(eqx, tree, like=None, **options):
    file = written(eqx, tree)
    file.seek(0)
    return eqx.tree_deserialise_leaves(file, tree if like is None else like, **options)


TREE = {"a": ONE, "b": np.arange(3), "c": 1, "d": 2.5, "e": True, "f": jnp.tanh, "g": None, "h": 1j}


@calls("tree_serialise_leaves")
def tree_serialise_leaves(name, eqx):
    yield lambda: list(written(eqx, TREE).getvalue()[:6])
    yield lambda: len(written(eqx, TREE).getvalue())
    yield lambda: name(io.BytesIO(), TREE)
    yield lambda: len(written(eqx, [jnp.ones(2, "bfloat16"), np.float32(1)]).getvalue())
    yield lambda: len(written(eqx, [ONE, "text", object]).getvalue())
    yield lambda: len(written(eqx, []).getvalue())
    yield lambda: written(eqx, [jax.random.key(0)])
    yield lambda: len(written(eqx, [ONE, ONE], filter_spec=lambda f, x: None).getvalue())
    yield lambda: len(
        written(
            eqx, [ONE, 1], filter_spec=[lambda f, x: None, eqx.default_serialise_filter_spec]
        ).getvalue()
    )
    yield lambda: written(eqx, [ONE], filter_spec=1)
    yield lambda: name(path_or_file=io.BytesIO(), pytree=TREE)
    yield lambda: name("/nowhere/file", ONE)
    yield name, 1, ONE
    yield lambda: jax.jit(lambda x: written(eqx, x))(ONE)

    def suffixes(file_name):
        with tempfile.TemporaryDirectory() as folder:
            name(Path(folder) / file_name, ONE)
            return sorted(path.name for path in Path(folder).iterdir())

    yield suffixes, "model"
    yield suffixes, "model.eqx"
    yield suffixes, "model.bin"
    yield lambda: len(written(eqx, eqx.nn.Linear(2, 1, key=jax.random.key(0))).getvalue())


@calls("tree_deserialise_leaves")
def tree_deserialise_leaves(name, eqx):
    yield lambda: there_and_back(eqx, TREE)
    yield lambda: there_and_back(eqx, [ONE], [jax.ShapeDtypeStruct((2,), "float32")])
    yield lambda: there_and_back(eqx, [ONE], [np.ones(2, "float32")])
    yield lambda: there_and_back(eqx, [np.ones(2, "float32")], [ONE])
    yield lambda: there_and_back(eqx, [1], [1.0])
    yield lambda: there_and_back(eqx, [1.5], [1])
    yield lambda: there_and_back(eqx, [1.5], [True])
    yield lambda: there_and_back(eqx, [np.float32(1)], [np.float32(2)])
    yield lambda: there_and_back(eqx, [1, 1.5, 1j], [jnp.array(0), jnp.array(0.0), jnp.array(0j)])
    yield lambda: there_and_back(eqx, [np.arange(3)], [jax.ShapeDtypeStruct((3,), "int32")])
    yield lambda: there_and_back(eqx, [np.ones(2)], [ONE])
    yield lambda: there_and_back(eqx, [np.ones(2)], [np.ones(2, "float32")])
    yield lambda: there_and_back(eqx, [2**40], [jnp.array(0)])
    yield lambda: there_and_back(eqx, [jnp.ones(2, "bfloat16")])
    yield lambda: there_and_back(eqx, [ONE], [jnp.ones(3)])
    yield lambda: there_and_back(eqx, [ONE], [jnp.ones(2, int)])
    yield lambda: there_and_back(eqx, [ONE], [1.0])
    yield lambda: there_and_back(eqx, [ONE], [ONE, ONE])
    yield lambda: there_and_back(eqx, [ONE, ONE], [ONE])
    yield lambda: there_and_back(eqx, [ONE], [])
    yield lambda: there_and_back(eqx, [ONE, 1.0], filter_spec=eqx.default_deserialise_filter_spec)
    yield lambda: there_and_back(eqx, [ONE], filter_spec=1)
    yield lambda: there_and_back(eqx, [jnp.ones(())], [jnp.asarray(1.0)])
    yield lambda: there_and_back(eqx, [jnp.asarray(1.0)])
    yield lambda: there_and_back(eqx, [np.float32(1)], [jnp.asarray(1.0)])
    yield lambda: there_and_back(eqx, [ONE], filter_spec=lambda f, x: 5)
    yield lambda: name(io.BytesIO(b"wrong"), [ONE])
    yield lambda: name(io.BytesIO(), [ONE])
    yield lambda: name("/nowhere/file", [ONE])
    yield name, 1, [ONE]

    def more_in_a_file():
        with tempfile.TemporaryDirectory() as folder:
            eqx.tree_serialise_leaves(Path(folder) / "a", [ONE, ONE])
            return name(Path(folder) / "a", [ONE])

    yield more_in_a_file
    yield (
        lambda: (
            there_and_back(eqx, layer := eqx.nn.Linear(2, 1, key=jax.random.key(0)), layer).weight
        )
    )
    yield lambda: name(path_or_file=io.BytesIO(), like=[])


@calls("default_serialise_filter_spec")
def default_serialise_filter_spec(name, eqx):
    for thing in (ONE, np.ones(2), np.float32(1), 1, 1.0, True, 1j, jnp.tanh, "text", None):
        file = io.BytesIO()
        yield lambda file=file, thing=thing: (name(file, thing), len(file.getvalue()))
    yield lambda: name(f=io.BytesIO(), x=1)


@calls("default_deserialise_filter_spec")
def default_deserialise_filter_spec(name, eqx):
    def read(thing, like):
        file = io.BytesIO()
        eqx.default_serialise_filter_spec(file, thing)
        file.seek(0)
        return name(file, like)

    for thing in (ONE, np.ones(2), np.float32(1), 1, 1.0, True, 1j):
        for like in (thing, 1.0, ONE):
            yield read, thing, like
    yield read, jnp.tanh, jnp.tanh
    yield read, ONE, jax.ShapeDtypeStruct((2,), "float32")
    yield read, "text", "text"
    yield name, io.BytesIO(), ONE
    yield lambda: name(f=io.BytesIO(), x="text")
