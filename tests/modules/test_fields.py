"""Declaring fields, converters, and numbers in fields annotated as arrays."""

import dataclasses
from typing import Annotated, Any, Optional, Union

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jaxtyping import Array, Complex, Float, Inexact, Int, Num, PRNGKeyArray, Shaped

from vernal import Module, field
from vernal.modules._fields import array_dtype_for
from vernal.show import short


def test_a_field_is_a_dataclass_field_with_metadata():
    f = field(converter=float, static=True, default=1, metadata={"unit": "m"})
    assert isinstance(f, dataclasses.Field)
    assert dict(f.metadata) == {"unit": "m", "converter": float, "static": True}
    assert dict(field().metadata) == {}


@pytest.mark.parametrize(
    ("key", "given"), [("static", {"static": True}), ("converter", {"converter": int})]
)
def test_metadata_may_not_repeat_an_argument(key, given):
    with pytest.raises(TypeError, match=f"`{key}` was given to `field` and also in its metadata"):
        field(metadata={key: 1}, **given)


def test_metadata_alone_means_the_same_as_the_argument():
    class M(Module):
        n: int = dataclasses.field(metadata={"static": True})
        x: Any = dataclasses.field(metadata={"converter": jnp.asarray})

    m = M(1, [1.0])
    assert len(jax.tree.leaves(m)) == 1


def test_an_unknown_setting_of_a_field_is_refused():
    with pytest.raises(TypeError, match="unexpected keyword argument 'statik'"):
        field(statik=True)


def test_converters_run_once_after_init_and_also_on_defaults():
    seen = []

    def convert(x):
        seen.append(x)
        return x * 2

    class M(Module):
        x: int = field(converter=convert)
        y: int = field(converter=convert, default=5)

    m = M(1)
    assert (m.x, m.y) == (2, 10)
    assert seen == [1, 5]


def test_converters_run_after_post_init_and_before_the_checks():
    order = []

    class M(Module):
        x: Any = field(converter=lambda x: order.append("convert") or x)

        def __post_init__(self):
            order.append("post")
            self.x = self.x + 1

        def __check_init__(self):
            order.append("check")
            assert self.x == 2

    M(1)
    assert order == ["post", "convert", "check"]


def test_converters_see_what_the_user_wrote():
    seen = []

    class M(Module):
        x: Float[Array, " n"] = field(converter=lambda n: seen.append(n) or jnp.zeros(n))

    assert M(3).x.shape == (3,)
    assert type(seen[0]) is int


def test_a_number_that_a_converter_returns_becomes_the_array_of_the_annotation():
    class M(Module):
        x: jax.Array = field(converter=float)

    assert isinstance(M("2.5").x, jax.Array)


def test_converters_of_a_static_field_and_of_a_class_default():
    class M(Module):
        n: int = field(static=True, converter=int)
        k: Any = field(converter=str, default=3)

        def __init__(self, n):
            self.n = n

    m = M("7")
    assert m.n == 7
    assert m.k == "3"
    assert jax.tree.leaves(m) == []


NUMBERS_IN_FIELDS = [
    # annotation, number, dtype (None: stays a number)
    (jax.Array, 1, jnp.int32),
    (jax.Array, 1.0, jnp.float32),
    (jax.Array, True, jnp.bool_),
    (jax.Array, 1j, jnp.complex64),
    (Float[Array, ""], 1.0, jnp.float32),
    (Float[Array, ""], 1, jnp.float32),
    (Int[Array, ""], 1, jnp.int32),
    (Int[Array, ""], 1.0, None),
    (Inexact[Array, ""], 1, jnp.float32),
    (Complex[Array, ""], 1.0, jnp.complex64),
    (Num[Array, ""], 2, jnp.int32),
    (Shaped[Array, ""], True, jnp.bool_),
    (Float[Array, "..."], 1.5, jnp.float32),
    (Annotated[jax.Array, "note"], 1.0, jnp.float32),
    (Optional[jax.Array], 1.0, jnp.float32),  # noqa: UP045 (people write it)
    (jax.Array | None, 1, jnp.int32),
    (Union[Float[Array, ""], None], 1, jnp.float32),  # noqa: UP007 (likewise)
    ("jax.Array", 1.0, jnp.float32),
    ("Float[Array, '']", 1, jnp.float32),
    (jax.Array | float, 1.0, None),
    (jax.Array | float, 1, None),
    (jax.Array | int, 1, None),
    (Float[np.ndarray, ""], 1.0, None),
    (float, 1.0, None),
    (Any, 1.0, None),
    (object, 1, None),
    (list[jax.Array], 1.0, None),
    ("NotThere", 1.0, None),
    (np.ndarray, 1.0, None),
    (PRNGKeyArray, 1, None),
]


@pytest.mark.parametrize(("annotation", "number", "dtype"), NUMBERS_IN_FIELDS, ids=short)
def test_a_number_becomes_an_array_where_the_annotation_asks_for_one(annotation, number, dtype):
    cls = type(Module)(
        "M", (Module,), {"__annotations__": {"x": annotation}, "__module__": __name__}
    )
    x = cls(number).x
    if dtype is None:
        assert x is number
    else:
        assert isinstance(x, jax.Array)
        assert x.dtype == dtype
        assert x.shape == ()
        assert not x.weak_type


def test_the_same_holds_for_assignments_defaults_and_class_attributes():
    class Assigned(Module):
        x: jax.Array

        def __init__(self):
            self.x = 1.0

    class Default(Module):
        x: jax.Array = 1.0

    class OnTheClass(Module):
        x: jax.Array = 1.0

        def __init__(self):
            pass

    for cls in (Assigned, Default, OnTheClass):
        assert isinstance(cls().x, jax.Array), cls
        assert len(jax.tree.leaves(cls())) == 1
        assert jax.grad(lambda m: m.x * 3.0)(cls()).x == 3.0


def test_numbers_stay_numbers_in_static_fields_and_under_the_fields_layout():
    class Fixed(Module):
        x: jax.Array = field(static=True)

    class Fields(Module, layout="fields"):
        x: jax.Array

    assert type(Fixed(1.0).x) is float
    assert type(Fields(1.0).x) is float


def test_numpy_numbers_are_arrays_already():
    class M(Module):
        x: jax.Array

    assert type(M(np.float32(1)).x) is np.float32
    assert len(jax.tree.leaves(M(np.float32(1)))) == 1


def test_the_dtype_follows_the_precision_that_is_set():
    assert array_dtype_for(Float[Array, ""], 1) == jnp.float32
    with jax.enable_x64(True) if hasattr(jax, "enable_x64") else jax.experimental.enable_x64():
        assert array_dtype_for(Float[Array, ""], 1) == jnp.float64
    assert array_dtype_for(int, 1) is None


def test_the_generated_init_is_annotated_with_what_it_takes():
    def as_text(x: bytes) -> str:
        return x.decode()

    class M(Module):
        a: str = field(converter=as_text)
        b: Any = field(converter=lambda x: x)
        c: Any = field(converter=dict)
        d: int = 0

    annotations = M.__init__.__annotations__
    assert annotations["a"] is bytes
    assert annotations["b"] is Any
    assert annotations["c"] is Any
    assert annotations["d"] is int


def test_wrong_arguments_of_a_class_are_told_the_right_ones():
    class Base(Module):
        size: int

        def __init__(self, size, *rest, scale=1.0, **more):
            self.size = size + len(rest)

    class Layer(Base):
        pass

    with pytest.raises(TypeError, match="missing 1 required positional argument") as caught:
        Layer()
    assert caught.value.__notes__ == ["The arguments of Layer: size, *rest, scale=..., **more"]
    # What `__init__` itself raises has no such note.
    with pytest.raises(TypeError, match="can only concatenate str") as caught:
        Layer("text")
    assert not getattr(caught.value, "__notes__", [])


def test_a_missing_key_is_told_how_it_is_made():
    class Layer(Module):
        size: int

        def __init__(self, size, *, key):
            self.size = size

    with pytest.raises(
        TypeError, match="missing 1 required keyword-only argument: 'key'"
    ) as caught:
        Layer(2)  # pyright: ignore[reportCallIssue]
    assert caught.value.__notes__ == [
        "The arguments of Layer: size, key",
        "A key: key=jax.random.key(0), and a different one for each layer (jax.random.split)",
    ]
