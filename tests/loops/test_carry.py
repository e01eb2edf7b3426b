"""What a loop carries: any tree, kept as it is but for its arrays."""

import functools

import jax
import jax.numpy as jnp
import numpy as np
import pytest

import vernal
from vernal.loops import fori_loop, scan, while_loop

KINDS = "lax", "checkpointed", "bounded"


class Pair(vernal.Module):
    value: jax.Array
    note: object
    tag: str = vernal.field(static=True)


def count_to(n, body, init, kind="lax", **options):
    """`body` n times."""
    return while_loop(lambda c: c["n"] < n, body, init, kind=kind, max_steps=n + 2, **options)


@pytest.mark.parametrize("kind", KINDS)
def test_a_carry_is_any_tree(kind):
    marker = object()
    init = {
        "n": 0,
        "pair": Pair(jnp.ones(2), jnp.tanh, "static"),
        "fn": jnp.sin,
        "text": "any",
        "nothing": None,
        "marker": marker,
        "key": jax.random.key(3),
        "numpy": np.arange(3, dtype=np.float32),
        "partial": functools.partial(jnp.add, 1),
        "flag": False,
        "empty": (),
        "module": vernal.nn.Linear(2, 2, key=jax.random.key(0)),
    }

    def body(c):
        assert c["text"] == "any" and c["marker"] is marker and c["pair"].tag == "static"
        return {
            **c,
            "n": c["partial"](c["n"]),
            "pair": vernal.tree_at(lambda p: p.value, c["pair"], c["module"](c["pair"].value)),
            "key": jax.random.split(c["key"])[0],
            "numpy": c["fn"](c["numpy"]),
            "flag": True,
        }

    out = count_to(3, body, init, kind)
    assert out["n"] == 3 and out["flag"].dtype == bool and out["flag"]
    assert out["fn"] is jnp.sin and out["text"] == "any" and out["marker"] is marker
    assert type(out["pair"]) is Pair and out["pair"].note is jnp.tanh
    assert out["empty"] == () and out["nothing"] is None
    np.testing.assert_allclose(out["numpy"], jnp.sin(jnp.sin(jnp.sin(init["numpy"]))), rtol=1e-6)
    model, value, key = init["module"], init["pair"].value, init["key"]
    for _ in range(3):
        value, key = model(value), jax.random.split(key)[0]
    np.testing.assert_allclose(out["pair"].value, value, rtol=1e-6)
    assert out["key"] == key
    batch = jax.vmap(
        lambda value: (
            count_to(3, body, vernal.tree_at(lambda c: c["pair"].value, init, value), kind)[
                "pair"
            ].value
        )
    )(jnp.stack([init["pair"].value] * 2))
    np.testing.assert_allclose(batch[1], value, rtol=1e-6)


@pytest.mark.parametrize("kind", KINDS)
def test_python_numbers_become_arrays_as_in_jax(kind):
    init = {"n": 0, "x": 1.0, "z": 1j, "flag": True, "half": jnp.ones((), jnp.bfloat16)}

    def body(c):
        # What is weakly typed gives way.
        return {**c, "n": c["n"] + 1, "x": c["x"] * c["half"], "flag": ~c["flag"]}

    ours = count_to(3, body, init, kind)
    jaxs = jax.lax.while_loop(lambda c: c["n"] < 3, body, init)
    # (JAX leaves a number a number where no step touches it.)
    assert {k: (v.dtype, v.weak_type) for k, v in ours.items()} == {
        k: (v.dtype, v.weak_type) for k, v in jax.tree.map(jnp.asarray, jaxs).items()
    }
    assert ours["x"].dtype == jnp.bfloat16 and ours["n"].weak_type


@pytest.mark.parametrize("kind", KINDS)
def test_a_number_takes_the_dtype_of_a_step(kind):
    def body(c):
        return {"n": c["n"] + 1, "x": jnp.float32(0.5) * jnp.float32(c["x"])}

    out = count_to(2, body, {"n": 0, "x": 1}, kind)
    assert out["x"].dtype == jnp.float32 and out["x"] == 0.25
    # Also if no step is taken.
    out = while_loop(lambda c: False, body, {"n": 0, "x": 1}, kind=kind, max_steps=0)
    assert out["x"].dtype == jnp.float32 and out["x"] == 1


def test_an_unhashable_or_unequal_leaf_is_compared_as_it_is():
    class Odd:
        __hash__ = None  # type: ignore[assignment] (how Python spells "unhashable")

        def __eq__(self, other):
            raise RuntimeError("not to be asked")

    odd = Odd()
    out = count_to(2, lambda c: {**c, "n": c["n"] + 1}, {"n": 0, "odd": odd})
    assert out["odd"] is odd


CHANGED = {
    "structure": (
        lambda c: {"n": c["n"] + 1, "x": (c["x"], c["x"])},
        r"(?s)must keep its structure.*where: what `body` returns.*carry\['x'\]: expected f32",
    ),
    "missing": (lambda c: {"n": c["n"]}, r"carry\['x'\]: expected f32.*got nothing"),
    "more": (lambda c: {**c, "y": 1.0}, r"carry\['y'\]: expected nothing, got"),
    "none": (lambda c: None, "must keep its structure"),
    "fixed": (lambda c: {**c, "fn": jnp.cos}, r"carry\['fn'\]: expected .*sin.*, got .*cos"),
    "array for a string": (lambda c: {**c, "fn": c["n"]}, r"carry\['fn'\]: expected .*sin.*, got"),
    "string for an array": (
        lambda c: {**c, "n": "three"},
        r"carry\['n'\]: expected .*, got 'three'",
    ),
    "shape": (
        lambda c: {**c, "x": c["x"][None]},
        r"(?s)must keep its type.*what `body` returns.*carry\['x'\]: expected float32\[3\], got float32\[1,3\]",
    ),
    "dtype": (
        lambda c: {**c, "x": c["x"].astype(jnp.bfloat16)},
        r"carry\['x'\]: expected float32\[3\], got bfloat16\[3\]",
    ),
    "number": (lambda c: {**c, "n": 1j}, r"carry\['n'\]: expected int32\[\], got complex64\[\]"),
}


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("case", CHANGED)
def test_what_a_step_must_keep_is_told_by_path(case, kind):
    change, text = CHANGED[case]

    def body(carry):
        return change(carry)

    init = {"n": jnp.array(0, jnp.int32), "x": jnp.zeros(3), "fn": jnp.sin}
    with pytest.raises(ValueError, match=text):
        while_loop(lambda c: c["n"] < 3, body, init, kind=kind, max_steps=3)


def test_every_loop_names_its_own_carry():
    def body(*args):
        return {"x": jnp.zeros(2)}

    init = {"x": jnp.zeros(3)}
    with pytest.raises(ValueError, match=r"(?s)what `body` returns.*\(i, carry\)\[1\]\['x'\]: exp"):
        fori_loop(0, 3, body, init)
    with pytest.raises(ValueError, match=r"(?s)what `body` returns.*\(i, carry\)\[1\]\['x'\]: exp"):
        fori_loop(0, jnp.array(3), body, init)
    with pytest.raises(
        ValueError, match=r"(?s)what `step` returns.*carry\['x'\]: expected float32\[3"
    ):

        def step(carry, x):
            return body(carry), None

        scan(step, init, length=3)


def test_a_buffer_must_come_back():
    init = {"n": 0, "x": jnp.zeros(3)}
    with pytest.raises(ValueError, match=r"carry\['x'\]: expected Buffer.*, got f32"):
        count_to(2, lambda c: {**c, "x": c["x"][0] * jnp.ones(3)}, init, buffers=lambda c: c["x"])
    with pytest.raises(ValueError, match=r"carry\['n'\]: expected f32.*, got Buffer"):
        count_to(2, lambda c: {"x": c["x"], "n": c["x"]}, init, buffers=lambda c: c["x"])


SELECTED = {
    "a function": lambda c: [c["x"], c["fn"]],
    "something else": lambda c: jnp.zeros(3),
}


@pytest.mark.parametrize("case", SELECTED)
def test_buffers_are_arrays_of_the_carry(case):
    init = {"n": 0, "x": jnp.zeros(3), "fn": jnp.sin}
    with pytest.raises(ValueError, match="`buffers` must select arrays of the carry"):
        count_to(2, lambda c: c, init, buffers=SELECTED[case])


def test_a_number_may_be_a_buffer():
    def body(c):
        return {**c, "n": c["n"] + 1, "y": c["y"].at[()].set(2.0, pred=c["n"] == 0)}

    out = count_to(2, body, {"n": 0, "y": 1.0}, buffers=lambda c: c["y"])
    assert out["y"] == 2 and out["n"] == 2


def test_buffers_may_select_trees_and_nothing():
    init = {"n": 0, "x": {"a": jnp.zeros(3), "b": [jnp.zeros(3)]}, "none": None}

    def body(c):
        x = jax.tree.map(
            lambda b: b.at[c["n"]].set(1.0),
            c["x"],
            is_leaf=lambda b: isinstance(b, vernal.loops.Buffer),
        )
        return {**c, "n": c["n"] + 1, "x": x}

    out = count_to(2, body, init, buffers=lambda c: (c["x"], c["none"], [c["x"]["a"]]))
    np.testing.assert_array_equal(out["x"]["b"][0], [1, 1, 0])
