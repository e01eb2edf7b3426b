"""Any tree as text, and printing never fails."""

import dataclasses
import functools
from typing import Any

import jax
import jax.numpy as jnp
import ml_dtypes
import numpy as np
import pytest
import wadler_lindig as wl

from vernal.show import is_traced, short, tree_pformat, tree_pprint


@dataclasses.dataclass(repr=False)
class Layer:
    weight: Any
    act: Any = None

    def __repr__(self):
        return tree_pformat(self)


class Mute:
    def __repr__(self):
        raise RuntimeError("mute")


class Hostile:
    def __getattr__(self, name):
        raise RuntimeError(name)

    def __call__(self):
        pass


class Documented:
    def __pdoc__(self, **kwargs):
        return wl.TextDoc(f"documented {kwargs['indent']} {kwargs['struct_as_array']}")


class BadlyDocumented:
    def __pdoc__(self, **kwargs):
        raise RuntimeError("no document")


def plain(x):
    return x


@functools.lru_cache
def cached(x):
    return x


DTYPES = {
    "bool": bool,
    "i8": np.int8,
    "i4": jnp.int4,
    "u32": np.uint32,
    "f16": np.float16,
    "f32": np.float32,
    "bf16": ml_dtypes.bfloat16,
    "f8_e4m3fn": ml_dtypes.float8_e4m3fn,
    "f8_e5m2": ml_dtypes.float8_e5m2,
    "c64": np.complex64,
}


@pytest.mark.parametrize("name, dtype", DTYPES.items())
def test_arrays_are_a_dtype_and_a_shape(name, dtype):
    assert short(jnp.zeros((2, 3), dtype)) == f"{name}[2,3]"
    assert short(np.zeros((2, 3), dtype)) == f"{name}[2,3](numpy)"
    assert short(jax.ShapeDtypeStruct((2, 3), dtype)) == f"{name}[2,3](struct)"


@pytest.mark.parametrize(
    "value, text",
    [
        (jnp.asarray(1.0), "weak_f32[]"),
        (jax.ShapeDtypeStruct((), jnp.float32, weak_type=True), "weak_f32[](struct)"),
        (np.zeros(2), "f64[2](numpy)"),
        (np.float32(1), "np.float32(1.0)"),
        (np.zeros(2, jax.dtypes.float0), "float0[2](numpy)"),
        (np.array(["ab"]), "<U2[1](numpy)"),
        (jax.nn.relu, "<wrapped function relu>"),
        (jax.jit(jnp.sum), "<wrapped function sum>"),
        (jax.custom_jvp(max), "<wrapped function max>"),
        (jax.custom_vjp(max), "<wrapped function max>"),
        (cached, "<wrapped function cached>"),
        (plain, "<function plain>"),
        (Layer.__repr__, "<function Layer.__repr__>"),
        (functools.wraps(plain)(lambda x: x), "<wrapped function plain>"),
        (functools.partial(max, 1), "partial(<built-in function max>, 1)"),
        (jax.tree_util.Partial(max, jnp.zeros(2)), "partial(<built-in function max>, f32[2])"),
        (int, "int"),
        (np.dtype("float32"), "dtype('float32')"),
        ("text", "'text'"),
        (None, "None"),
        (..., "..."),
        (Layer(jnp.zeros(2), jax.nn.relu), "Layer(weight=f32[2], act=<wrapped function relu>)"),
        ([True, {"a": (1,)}], "[True, {'a': (1,)}]"),
    ],
)
def test_every_kind_of_value_has_one_line(value, text):
    assert short(value) == text


def test_keys_show_their_implementation(getkey):
    assert short(getkey()) == "key<fry>[]"
    assert short(jax.random.split(getkey(), 3)) == "key<fry>[3]"


def test_long_values_are_cut():
    assert short("x" * 200) == "'" + "x" * 76 + "..."
    assert len(short(list(range(1000)), limit=20)) == 20


def test_text_over_several_lines_becomes_one_line():
    class Tall:
        def __repr__(self):
            return "a\n   b"

    assert short(Tall()) == "a b"


def test_tracers_look_like_arrays_under_every_transformation():
    seen = []

    def look(x):
        seen.append((tree_pformat([x]), is_traced(x)))
        tree_pformat([x], short_arrays=False)
        return x.sum()

    x = jnp.ones((2, 3))
    jax.jit(look)(x)
    jax.grad(look)(x)
    jax.vmap(look)(x)
    assert seen == [("[f32[2,3]]", True), ("[f32[2,3]]", True), ("[f32[3]]", True)]
    assert not is_traced(x)


def test_deleted_arrays_can_still_be_shown():
    x = jnp.ones(3)
    x.delete()
    assert tree_pformat([x]) == "[f32[3]]"
    assert tree_pformat([x], short_arrays=False) == "[f32[3](deleted)]"


def test_elements_are_shown_on_request():
    assert tree_pformat({"a": jnp.arange(2)}, short_arrays=False) == (
        "{'a': Array([0, 1], dtype=int32)}"
    )
    assert "0." in tree_pformat(np.zeros(2), short_arrays=False)


def test_shapes_are_shown_as_arrays_on_request():
    struct = jax.ShapeDtypeStruct((2,), jnp.float32)
    assert tree_pformat([struct]) == "[ShapeDtypeStruct(shape=(2,), dtype=float32)]"
    assert tree_pformat([struct], struct_as_array=True) == "[f32[2]]"


def test_references_are_shown_without_being_read():
    ref = jax.new_ref(jnp.ones(2))
    assert short(ref) == "Ref(f32[2])"
    assert "1." in tree_pformat(ref, short_arrays=False)


def test_truncated_leaves_show_their_class_only():
    text = tree_pformat([[1], 2.0], truncate_leaf=lambda x: x == [1])
    assert text == "[list(...), 2.0]"


def test_width_and_indent_are_respected():
    text = tree_pformat(Layer(jnp.zeros(2), "b" * 10), width=20, indent=4)
    assert text == "Layer(\n    weight=f32[2],\n    act='bbbbbbbbbb'\n)"


def test_a_class_can_say_how_it_looks():
    assert tree_pformat([Documented()], struct_as_array=True) == "[documented 2 True]"


def test_pprint_prints_the_same(capsys):
    tree_pprint({"a": jnp.zeros(3), "b": [None]}, width=10)
    assert capsys.readouterr().out == "{\n  'a':\n  f32[3],\n  'b':\n  [None]\n}\n"


def test_repr_of_a_dataclass_may_be_its_pformat():
    assert repr([Layer(Layer(1))]) == "[Layer(weight=Layer(weight=1))]"


def test_fields_that_are_missing_do_not_make_repr_fail():
    partly = object.__new__(Layer)
    assert repr(partly).startswith("Layer(weight=<")
    assert "Layer(" in short([partly, 1])


def test_masks_and_odd_leaves_can_be_shown():
    assert repr(Layer(True, object)) == "Layer(weight=True, act=object)"
    assert "object object" in repr(Layer(object(), None))


@pytest.mark.parametrize("make", [Mute, Hostile])
def test_an_object_that_cannot_print_itself_is_named_in_its_place(make):
    text = tree_pformat(Layer(jnp.zeros(2), {"k": [make(), 3]}), width=200)
    assert text.startswith("Layer(weight=f32[2], act={'k': [<")
    assert make.__name__ in text and text.endswith(", 3]})")


def test_a_hook_that_fails_does_not_make_repr_fail():
    assert (
        tree_pformat([BadlyDocumented()])
        == "[<BadlyDocumented that cannot be printed: RuntimeError>]"
    )


def test_cycles_and_great_depth_do_not_make_repr_fail():
    cycle = []
    cycle.append(cycle)
    assert "recursive" in tree_pformat(cycle)
    deep = []
    for _ in range(5000):
        deep = [deep]
    assert isinstance(tree_pformat(deep), str)


def test_a_cycle_beside_an_object_that_cannot_print_itself_ends():
    cycle: list[Any] = [Mute()]
    cycle.append(cycle)
    assert tree_pformat(cycle) == "[<Mute that cannot be printed: RuntimeError>, <recursive>]"


def test_a_field_that_cannot_be_read_does_not_make_repr_fail():
    @dataclasses.dataclass
    class Locked:
        a: int

        @property
        def b(self):
            raise RuntimeError("locked")

    Locked.__dataclass_fields__["b"] = Locked.__dataclass_fields__["a"]
    Locked.__dataclass_fields__["b"].name = "b"
    text = tree_pformat({"x": Locked(1), "y": 2})
    assert text == "{'x': <Locked that cannot be printed: RuntimeError>, 'y': 2}"
