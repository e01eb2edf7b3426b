"""`Enumeration`: as in Equinox, under every transformation, and what it refuses."""

import copy
import pickle
import re
from typing import Any

import equinox
import jax
import jax.numpy as jnp
import numpy as np
import pytest

import vernal
from vernal.modules import Module
from vernal.runtime import Enumeration, RuntimeCheckError


class Result(Enumeration):
    ok = "all is well"
    slow = "it took too long"
    failed = "it did not converge"


class Detailed(Result):
    """What may happen in detail."""

    singular = "the matrix is singular"


class Other(Enumeration):
    strange = "how strange"
    ok = "all is well"


class Both(Result, Other):
    last = "the last"


class TheirResult(equinox.Enumeration):
    ok = "all is well"
    slow = "it took too long"
    failed = "it did not converge"


class TheirOther(equinox.Enumeration):
    strange = "how strange"
    ok = "all is well"


class TheirBoth(TheirResult, TheirOther):
    last = "the last"


NAME = f"{__name__}.Result"


def members(cls: Any) -> list[Any]:
    return [getattr(cls, name) for name in ("ok", "slow", "failed")]


def batch(*items: Any) -> Any:
    return jax.tree.map(lambda *xs: jnp.stack(xs), *items)


# What it is.


def test_a_member_is_a_module_with_one_int32():
    assert isinstance(Result.slow, Module)
    (leaf,) = jax.tree.leaves(Result.slow)
    assert isinstance(leaf, np.ndarray) and leaf.dtype == np.int32 and leaf.shape == ()
    assert leaf == 1 and Result.slow._value is leaf


def test_making_one_does_not_start_a_backend():
    assert all(isinstance(leaf, np.ndarray) for leaf in jax.tree.leaves(list(Both)))


def test_messages_positions_and_membership():
    assert [len(cls) for cls in (Result, Detailed, Both, Enumeration)] == [3, 4, 5, 0]
    assert [Result[item] for item in Result] == [
        "all is well",
        "it took too long",
        Result[Result.failed],
    ]
    assert Result.ok in Result and Result.ok not in Detailed and Detailed.ok not in Result
    assert (
        3 not in Result and isinstance(Result.ok, Result) and not isinstance(Result.ok, Enumeration)
    )
    assert bool(Enumeration)
    assert [list(cls) for cls in (Result,)] == [members(Result)]


def test_it_prints_its_message():
    assert repr(Result.ok) == str(Result.ok) == f"{NAME}<all is well>"
    assert vernal.tree_pformat({"a": Result.ok}) == f"{{'a': {NAME}<all is well>}}"
    many = batch(Result.ok, Result.failed)
    assert repr(many) == f"{NAME}<['all is well' 'it did not converge']>"
    assert Result[many] == "['all is well' 'it did not converge']"


def test_what_is_not_known_is_told_as_such():
    seen = []
    jax.jit(lambda r: seen.append((Result[r], repr(r), r.is_traced())))(Result.ok)
    assert seen == [("traced", f"{NAME}<traced>", True)]
    assert not Result.ok.is_traced()
    assert Result[jax.tree.map(lambda x: x + 7, Result.ok)] == "unknown"
    for other in (lambda x: None, lambda x: True, lambda x: jax.ShapeDtypeStruct((), jnp.int32)):
        assert Result[jax.tree.map(other, Result.ok)] == "unknown"
    deleted = batch(Result.ok)
    deleted._value.delete()
    assert "unknown" in repr(deleted)


def test_the_documentation_lists_the_members():
    assert "- `ok`: all is well\n- `slow`" in Result.__doc__
    assert Detailed.__doc__.startswith("What may happen in detail.")
    assert "- `singular`: the matrix" in Detailed.__doc__


def test_it_survives_pickling_and_copying():
    for again in (
        pickle.loads(pickle.dumps(Result.slow)),
        copy.deepcopy(Result.slow),
        copy.copy(Result.slow),
        pickle.loads(pickle.dumps(batch(Result.slow)))._value[0] == 1 and Result.slow,
    ):
        assert again in Result and again == Result.slow and Result[again] == "it took too long"


# Comparison.


def test_equality_agrees_with_equinox_and_is_known_at_once():
    for ours, theirs in ((Result, TheirResult),):
        for a, x in zip(members(ours), members(theirs), strict=True):
            for b, y in zip(members(ours), members(theirs), strict=True):
                assert (a == b).dtype == bool and bool(a == b) == bool(x == y)
                assert bool(a != b) == bool(x != y)

    @jax.jit
    def inside():
        assert Result.ok != Result.slow and not (Result.ok == Result.slow)
        return Result.where(False, Result.ok, Result.slow) == Result.slow

    assert inside()


def test_batches_compare_element_by_element():
    many = batch(Result.ok, Result.slow, Result.ok)
    np.testing.assert_array_equal(many == Result.ok, [True, False, True])
    np.testing.assert_array_equal(many != many, [False] * 3)


def test_members_can_be_keys():
    table = {Result.ok: 1, Result.failed: 2}
    assert table[pickle.loads(pickle.dumps(Result.failed))] == 2
    assert hash(Result.ok) == hash(jax.device_put(Result.ok)) != hash(Detailed.ok)


@pytest.mark.parametrize(
    "make",
    [lambda: batch(Result.ok), lambda: jax.eval_shape(lambda: Result.ok)],
    ids=["batch", "shape"],
)
def test_only_a_known_member_can_be_hashed(make):
    with pytest.raises(TypeError, match="only a single member with a known value"):
        hash(make())
    with pytest.raises(TypeError, match="only a single member with a known value"):
        jax.jit(hash)(Result.ok)


@pytest.mark.parametrize("other", [Detailed.ok, 0, None, "all is well"], ids=str)
def test_members_of_different_enumerations_do_not_compare(other):
    for compare in (lambda: Result.ok == other, lambda: Result.ok != other):
        with pytest.raises(
            ValueError, match="only be compared with members of the same enumeration"
        ):
            compare()


# Choosing.


@pytest.mark.parametrize(
    "pred", [True, np.bool_(True), jnp.array(True)], ids=["bool", "numpy", "jax"]
)
def test_where_with_a_known_condition_is_known(pred):
    assert Result.where(pred, Result.ok, Result.slow) is Result.ok
    assert (
        jax.jit(lambda: Result.where(pred, Result.ok, Result.slow).is_traced() or Result.ok)()
        == Result.ok
    )


def test_where_with_a_traced_condition():
    f = jax.jit(lambda p: Result.where(p, Result.ok, Result.slow))
    assert f(True) == Result.ok and f(False) == Result.slow
    seen = []
    jax.jit(lambda p: seen.append(Result.where(p, Result.ok, Result.ok)))(True)
    assert seen[0] is Result.ok


def test_where_chooses_between_batches():
    a, b = batch(Result.ok, Result.slow), batch(Result.failed, Result.failed)
    np.testing.assert_array_equal(Result.where(False, a, b)._value, [2, 2])
    np.testing.assert_array_equal(Result.where(jnp.array(True), a, Result.ok)._value, [0, 1])
    np.testing.assert_array_equal(Result.where(False, a, Result.ok)._value, [0, 0])
    chosen = jax.vmap(Result.where, in_axes=(0, None, None))(
        jnp.array([True, False]), *members(Result)[:2]
    )
    np.testing.assert_array_equal(chosen._value, [0, 1])


def test_where_refuses_other_conditions_and_members():
    for pred in (jnp.array([True, False]), 1, jnp.array(1)):
        with pytest.raises(ValueError, match="must be a scalar bool"):
            Result.where(pred, Result.ok, Result.slow)
    for wrong in (Detailed.ok, 0):
        with pytest.raises(ValueError, match="not a member of the enumeration .*Result"):
            Result.where(True, Result.ok, wrong)


def test_it_passes_through_the_transformations():
    def body(carry, x):
        carry = Result.where(x > 1, Result.failed, carry)
        return carry, carry

    last, seen = jax.lax.scan(body, Result.ok, jnp.arange(3))
    assert last == Result.failed and Result[seen].count("all is well") == 2
    looped = jax.lax.while_loop(
        lambda r: r == Result.ok, lambda r: Result.where(r == Result.ok, Result.slow, r), Result.ok
    )
    assert looped == Result.slow
    out = jax.grad(lambda x: (x**2, Result.where(x > 0, Result.ok, Result.slow)), has_aux=True)(2.0)
    assert out[1] == Result.ok
    assert vernal.filter_jit(lambda r: r)(Result.slow) == Result.slow
    branch = jax.lax.cond(True, lambda: Result.ok, lambda: Result.failed)
    assert branch == Result.ok
    jax.vmap(lambda r: r)(batch(*members(Result)))


def test_batches_spread_over_devices_stay_there():
    mesh = jax.make_mesh((8,), ("data",))
    with jax.set_mesh(mesh):
        ok = jax.device_put(jnp.arange(8) % 2 == 0, jax.P("data"))

        @jax.jit
        def run(ok):
            result = jax.vmap(lambda p: Other.where(p, Other.ok, Other.strange))(ok)
            return result, Both.promote(result), result == Other.ok

        out = run(ok)
        assert all(x.sharding.spec == jax.P("data") for x in jax.tree.leaves(out))
        assert "all-gather" not in run.lower(ok).compile().as_text()
    np.testing.assert_array_equal(out[2], ok)
    np.testing.assert_array_equal(
        out[1]._value, [int(Both.ok._value), int(Both.strange._value)] * 4
    )


# Inheritance.


def test_children_have_the_members_of_their_parents_first_as_in_equinox():
    names = ["ok", "slow", "failed", "strange", "last"]
    ours = [int(getattr(Both, name)._value) for name in names]
    assert ours == [int(getattr(TheirBoth, name)._value) for name in names]
    assert Both[Both.strange] == "how strange"


def test_promotion_keeps_the_name():
    for parent in (Result, Other):
        for item in parent:
            promoted = Both.promote(item)
            assert promoted in Both and Both[promoted] == parent[item] and not promoted.is_traced()
    promoted = jax.jit(Both.promote)(Other.strange)
    assert promoted == Both.strange
    many = Both.promote(batch(Other.strange, Other.ok))
    np.testing.assert_array_equal(many._value, [3, 0])
    assert Detailed.promote(Result.slow)._value is Result.slow._value
    assert jax.jit(lambda: Both.promote(jax.device_put(Other.ok)) == Both.ok)()


@pytest.mark.parametrize("item", [Detailed.ok, Other.ok, 3], ids=str)
def test_only_members_of_parents_are_promoted(item):
    with pytest.raises(ValueError, match="of a parent enumeration can be promoted"):
        Detailed.promote(item)


def test_two_messages_for_one_name_warn_and_the_last_counts():
    with pytest.warns(UserWarning, match="two messages for `ok`, 'all is well' and 'fine'"):

        class Child(Result):
            ok = "fine"

    assert len(Child) == 3 and Child[Child.ok] == "fine" and Result[Result.ok] == "all is well"


# Errors at run time.


def test_a_member_raises_its_message():
    @vernal.filter_jit
    def run(x, result):
        return result.error_if(x, result != Result.ok)

    assert run(jnp.array(1.0), Result.ok) == 1
    with pytest.raises(RuntimeCheckError, match="it took too long"):
        run(jnp.array(1.0), Result.slow)
    with pytest.raises(RuntimeCheckError, match="it did not converge"):
        Result.failed.error_if(jnp.array(1.0), True)
    x = jnp.array(1.0)
    assert Result.failed.error_if(x, False) is x


def test_a_batch_of_members_raises_their_messages():
    many = batch(Result.ok, Result.slow, Result.failed)
    with pytest.raises(RuntimeCheckError) as raised:
        many.error_if(jnp.ones(3), many != Result.ok)
    text = str(raised.value)
    assert (
        "it took too long" in text and "it did not converge" in text and "all is well" not in text
    )
    with pytest.raises(RuntimeCheckError, match="all is well"):
        many.error_if(jnp.ones(3), True)
    with pytest.raises(RuntimeCheckError, match="it did not converge"):
        vernal.filter_vmap(lambda x, r: r.error_if(x, r == Result.failed))(jnp.ones(3), many)


# Refusals.


@pytest.mark.parametrize("name", ["where", "promote"])
def test_reserved_names_are_refused(name):
    with pytest.raises(ValueError, match=f"`{name}` is a method of every enumeration"):
        type(Result)("Bad", (Enumeration,), {name: "x", "__module__": "m", "__qualname__": "Bad"})


@pytest.mark.parametrize("value", [3, None, lambda self: 1], ids=["number", "None", "method"])
def test_members_are_declared_by_strings(value):
    with pytest.raises(ValueError, match="declared by its message"):
        type(Result)("Bad", (Enumeration,), {"a": value, "__module__": "m", "__qualname__": "Bad"})


def test_an_enumeration_has_no_instances():
    with pytest.raises(TypeError, match="cannot be instantiated"):
        Result()


def test_members_are_fixed():
    with pytest.raises(AttributeError, match="members of an enumeration are fixed"):
        Result.ok = "else"
    Result.note = "anything else may be noted"
    assert Result.note and len(Result) == 3


@pytest.mark.parametrize("item", [Detailed.ok, 0, "ok"], ids=str)
def test_only_members_have_a_message(item):
    with pytest.raises(ValueError, match=re.escape(f"not a member of the enumeration {NAME}")):
        Result[item]
