"""Errors that name the layer in which they were raised, by one note."""

import concurrent.futures
import contextlib
import functools
import gc
import inspect
import pickle
import traceback
import weakref
from pathlib import Path
from typing import Any

import cloudpickle
import jax
import jax.numpy as jnp
import pytest

import vernal
from vernal import Module, nn


class OwnError(Exception):
    """An error of the user's own, with arguments."""


class Failing(Module):
    weight: jax.Array

    def __call__(self, x: Any) -> Any:
        "Raises what it is given; multiplies anything else."
        if isinstance(x, BaseException):
            raise x
        return jnp.dot(x, self.weight)


class Block(Module):
    inner: Any

    def __call__(self, x):
        return self.inner(x)

    @vernal.filter_jit
    def compiled(self, x):
        return self.inner(x)


class Compiled(Module):
    inner: Any

    @vernal.filter_jit
    def __call__(self, x):
        return self.inner(x)


class Model(Module):
    blocks: Any

    def __call__(self, x):
        for block in self.blocks:
            x = block(x)
        return x

    def method(self, x):
        return self(x)

    def helper(self, x):
        raise OwnError(x)


def failing(rows=3):
    return Failing(jnp.ones((rows, 3)))


def model():
    """In the fourth of its blocks, a shape is wrong."""
    return Model([failing(), jnp.tanh, failing(), Block(failing(2)), failing()])


HERE = "Raised in model.blocks[3].inner (Model > Block > Failing)"


def notes_of(error):
    return [note for note in getattr(error, "__notes__", ()) if note.startswith("Raised in")]


def raised(call, *args):
    with pytest.raises(Exception) as info:
        call(*args)
    return info.value


def _sum(model, x):
    return jnp.sum(model(x))


def _branch(model, x):
    return jax.lax.cond(jnp.sum(x) > 0, lambda: _sum(model, x), lambda: 0.0)


WAYS = {
    "call": lambda model, x: model(x),
    "method": lambda model, x: model.method(x),
    "filter_jit": lambda model, x: vernal.filter_jit(model)(x),
    "filter_jit of a method": lambda model, x: vernal.filter_jit(model.method)(x),
    "jit": lambda model, x: jax.jit(model.method)(x),
    "jit with the model as an argument": vernal.filter_jit(lambda model, x: model(x)),
    "grad": vernal.filter_grad(_sum),
    "jit of grad of cond": vernal.filter_jit(vernal.filter_value_and_grad(_branch)),
    "vmap": lambda model, x: jax.vmap(model)(x[None]),
    "filter_vmap": lambda model, x: vernal.filter_vmap(model)(x[None]),
    "scan": lambda model, x: jax.lax.scan(lambda x, _: (model(x), None), x, length=2),
    "checkpoint": vernal.filter_checkpoint(lambda model, x: model(x)),
    "eval_shape": vernal.filter_eval_shape,
    "make_jaxpr": lambda model, x: vernal.filter_make_jaxpr(model)(x),
    "Partial": lambda model, x: vernal.Partial(model, x)(),
}


@pytest.mark.parametrize("way", WAYS)
def test_the_path_is_noted_once_in_every_transformation(way):
    error = raised(WAYS[way], model(), jnp.ones(3))
    assert isinstance(error, TypeError)
    assert notes_of(error) == [HERE]


@pytest.mark.parametrize(
    ("blocks", "note"),
    [
        ((failing(2),), "Raised in model.blocks[0] (Model > Failing)"),
        ([jnp.tanh, [failing(2)][0]], "Raised in model.blocks[1] (Model > Failing)"),
        (
            [nn.Sequential([jnp.tanh, failing(2)])],
            "Raised in model.blocks[0].layers[1] (Model > Sequential > Failing)",
        ),
        ([Compiled(failing(2))], "Raised in model.blocks[0].inner (Model > Compiled > Failing)"),
        ([Block(vernal.Partial(failing(2)))], "Raised in model.blocks[0].inner.func "),
        ([Block(Block(Block(failing(2))))], "Raised in model.blocks[0].inner.inner.inner (Model > Block > Block >"),
        ([nn.Stack.of([Block(failing(2))] * 3)], "Raised in model.blocks[0].layers.inner (Model > Stack > Block > F"),
    ],
)  # fmt: skip
def test_the_path_goes_through_containers_and_layers_of_layers(blocks, note):
    (found,) = notes_of(raised(Model(blocks), jnp.ones(3)))
    assert found.startswith(note)


def test_the_path_goes_through_dicts():
    class Named(Module):
        parts: dict[str, Any]

        def __call__(self, x):
            return self.parts["b"](x)

    error = raised(Named({"a": failing(), "b": failing(2)}), jnp.ones(3))
    assert notes_of(error) == ["Raised in model.parts['b'] (Named > Failing)"]


def test_a_layer_in_two_places_is_named_in_both():
    shared = failing(2)
    error = raised(Model([shared, shared]), jnp.ones(3))
    assert notes_of(error) == ["Raised in model.blocks[0] or .blocks[1] (Model > Failing)"]


def test_a_rebuilt_layer_is_known_by_its_structure_or_else_by_its_class_only():
    class Rebuilding(Module):
        inner: Any
        more: Any

        def __call__(self, x):
            return jax.tree.map(lambda leaf: leaf, self.inner)(x)

    for more in (None, jnp.tanh, [Block(failing(2))][1:], nn.Identity()):
        error = raised(Rebuilding(failing(2), more), jnp.ones(3))
        assert notes_of(error) == ["Raised in model.inner (Rebuilding > Failing)"]
    error = raised(Rebuilding(failing(2), [failing(2)]), jnp.ones(3))
    assert notes_of(error) == ["Raised in model > Failing (Rebuilding > Failing)"]


def test_a_module_that_calls_one_of_another_place_names_the_place():
    class Taking(Module):
        def __call__(self, fn, x):
            return fn(x)

    class Both(Module):
        inner: Any
        taking: Any

        def __call__(self, x):
            return self.taking(self.inner, x)

    error = raised(Both(failing(2), Taking()), jnp.ones(3))
    assert notes_of(error) == ["Raised in model.inner (Both > Taking > Failing)"]


def test_a_module_alone_needs_no_note():
    assert notes_of(raised(failing(2), jnp.ones(3))) == []
    assert notes_of(raised(model().helper, 1)) == []


def test_a_method_of_a_layer_inside_is_named_too():
    class Outer(Module):
        inner: Any

        def __call__(self, x):
            return self.inner.helper(x)

    assert notes_of(raised(Outer(model()), 1)) == ["Raised in model.inner (Outer > Model)"]


def test_the_calls_of_super_are_one_call():
    class Again(Block):
        def __call__(self, x):
            return super().__call__(x)

    assert notes_of(raised(Model([Again(failing(2))]), jnp.ones(3))) == [
        "Raised in model.blocks[0].inner (Model > Again > Failing)"
    ]


def test_an_error_of_the_user_stays_what_it_is():
    error = OwnError("a", 1)
    found = raised(Model([failing()]), error)
    assert found is error
    assert (type(found), found.args, found.__cause__) == (OwnError, ("a", 1), None)
    assert found.__notes__ == ["Raised in model.blocks[0] (Model > Failing)"]
    again = pickle.loads(pickle.dumps(found))
    assert (again.args, again.__notes__) == (found.args, found.__notes__)


@pytest.mark.parametrize(
    "error", [StopIteration(), StopAsyncIteration(), KeyboardInterrupt(), GeneratorExit(), SystemExit()], ids=repr
)  # fmt: skip
def test_what_is_no_error_has_no_note(error):
    with pytest.raises(type(error)) as info:
        Model([failing()])(error)
    assert not hasattr(info.value, "__notes__")


def test_an_error_that_is_raised_again_keeps_its_first_note():
    class Catching(Module):
        inner: Any

        def __call__(self, x):
            try:
                return self.inner(x)
            except OwnError as error:
                raise error

    class Outer(Module):
        inner: Any

        def __call__(self, x):
            return self.inner(x)

    error = raised(Outer(Catching(failing())), OwnError())
    first = notes_of(error)
    assert first == ["Raised in model.inner.inner (Outer > Catching > Failing)"]
    assert notes_of(raised(Model([failing()]), error)) == first


def test_an_error_that_a_model_survives_is_gone():
    class Surviving(Module):
        inner: Any

        def __call__(self, x):
            with contextlib.suppress(TypeError):
                return self.inner(x)
            return x

    assert Surviving(failing(2))(jnp.ones(3)).shape == (3,)


def test_a_traced_size_is_explained_and_named():
    class Sized(Module):
        def __call__(self, n):
            return jnp.zeros(n)

    error = raised(vernal.filter_jit(Block(Sized())), jnp.array(3))
    assert isinstance(error, vernal.transforms.TracedShapeError)
    assert notes_of(error) == ["Raised in model.inner (Block > Sized)"]


def test_nothing_is_kept_alive():
    def error_without_traceback(model):
        try:
            model(jnp.ones(3))
        except TypeError as error:
            return error.with_traceback(None)

    gc.collect()
    gc.disable()
    try:
        wrong = model()
        block = weakref.ref(wrong.blocks[3])
        error = error_without_traceback(wrong)
        del wrong
        assert block() is None
        assert notes_of(error) == [HERE]
    finally:
        gc.enable()


def test_no_tracer_leaks():
    def safe(x):
        with contextlib.suppress(TypeError):
            return model()(x)
        return x

    with jax.checking_leaks():
        assert jax.jit(safe)(jnp.ones(3)).shape == (3,)


def test_every_thread_names_its_own_model():
    def call(i):
        wrong = Model([*(failing() for _ in range(i)), failing(2)])
        return notes_of(raised(wrong, jnp.ones(3)))

    with concurrent.futures.ThreadPoolExecutor(4) as pool:
        for i, notes in enumerate(pool.map(call, range(24))):
            assert notes == [f"Raised in model.blocks[{i}] (Model > Failing)"]


def test_endless_recursion_is_still_a_recursion_error():
    class Endless(Module):
        inner: Any

        def __call__(self, x):
            return self.inner(self, x)

    class Back(Module):
        def __call__(self, outer, x):
            return outer(x)

    assert isinstance(raised(Endless(Back()), 1), RecursionError)


def test_a_tree_that_cannot_be_walked_does_not_hide_the_error():
    class Odd:
        pass

    def refuse(odd):
        raise OwnError("flattening")

    jax.tree_util.register_pytree_node(Odd, refuse, lambda aux, children: Odd())

    class Holding(Module):
        odd: Any
        inner: Any

        def __call__(self, x):
            return self.inner(x)

    holding = Holding(None, failing(2))
    vernal.modules.Module.__dict__["__dict__"].fget(holding)["odd"] = Odd()
    error = raised(holding, jnp.ones(3))
    assert isinstance(error, TypeError)
    assert notes_of(error) == []


def test_the_call_has_its_name_signature_and_source():
    call = Failing.__call__
    assert str(inspect.signature(call)) == "(self, x: Any) -> Any"
    assert str(inspect.signature(failing())) == "(x: Any) -> Any"
    assert call.__doc__ == "Raises what it is given; multiplies anything else."
    assert (call.__name__, call.__qualname__) == ("__call__", "Failing.__call__")
    assert "jnp.dot" in inspect.getsource(call)
    assert pickle.loads(pickle.dumps(call)) is call


def test_what_returns_before_it_runs_is_left_alone():
    class Lazily(Module):
        def __call__(self):
            yield 1

    class Later(Module):
        async def __call__(self):
            return 1

    assert inspect.isgeneratorfunction(Lazily.__call__)
    assert inspect.iscoroutinefunction(Later.__call__)


def test_a_class_that_travels_by_value_names_its_layers():
    class Local(Module):
        inner: Any

        def __call__(self, x):
            return self.inner(x)

    made = pickle.loads(cloudpickle.dumps(Local(Local(failing(2)))))
    assert notes_of(raised(made, jnp.ones(3))) == [
        "Raised in model.inner.inner (Local > Local > Failing)"
    ]


def test_transformed_functions_are_called_directly():
    for transformed in (vernal.filter_jit(jnp.sin), vernal.Partial(jnp.sin)):
        raw = inspect.unwrap(type(transformed).__call__)
        assert type(transformed).__call__.__module__ == raw.__module__
        assert "modules/_calls.py" not in inspect.getsourcefile(type(transformed).__call__.__code__)


def test_filtered_tracebacks_hold_the_users_frames():
    gradient = vernal.filter_jit(vernal.filter_grad(lambda model, x: model(x).sum()))
    error = raised(functools.partial(gradient, model()), jnp.ones(3))
    frames = traceback.extract_tb(error.__traceback__)
    package = Path(vernal.__file__).parent
    ours = [package in Path(frame.filename).parents for frame in frames]
    # Python adds what calls JAX once JAX has filtered the rest.
    assert sum(ours) == 2
    assert not any(ours[ours.index(True) + 2 :])
    assert "return jnp.dot(x, self.weight)" in [frame.line for frame in frames]
