import importlib
import inspect
import json
import re

import jax
import jax.numpy as jnp
import pytest

from vernal import error_if, filter_jit, nn
from vernal.runtime import RuntimeCheckError
from vernal.saving import export, load_exported, save

X = jnp.ones((4, 3))
MODEL = nn.Linear(3, 2, key=jax.random.key(0))


@pytest.fixture(scope="module")
def data():
    def apply(model, x, y, n, *, flag=True):
        return model(x) + y

    return export(apply, MODEL, X, X[:, :2], 2, shapes={"{x,y}": "batch, ..."})


@pytest.fixture(scope="module")
def loaded(data):
    return load_exported(data)


Y = X[:, :2]
WRONG = {
    "another rank": ((MODEL, X[0], Y, 2), r"x: expected f32\[batch,3\], got f32\[3\]"),
    "another size": ((MODEL, X[:, :2], Y, 2), r"x: expected f32\[batch,3\], got f32\[4,2\]"),
    "another dtype": ((MODEL, X.astype(int), Y, 2), r"x: expected f32\[batch,3\], got i32\[4,3\]"),
    "a number": ((MODEL, 1.0, Y, 2), r"x: expected f32\[batch,3\], got 1\.0"),
    "another value": ((MODEL, X, Y, 3), r"n: expected 2, got 3"),
    "another type": ((MODEL, X, Y, 2.0), r"n: expected 2, got 2\.0"),
    "another tree": (
        ({"weight": X}, {"a": X}, Y, None),
        r"model\.weight: expected f32\[2,3\], got f32\[4,3\][\s\S]*"
        r"x\.a: not expected, got f32\[4,3\]|x\.a: not expected[\s\S]*model\.bias: missing, expected f32\[2\]",
    ),
    "something missing": (({}, X, Y, None), r"model\.bias: missing[\s\S]*n: missing, expected 2"),
    "something twice": (
        ({"a": {"b": X}, "a.b": X}, X, Y, 2),
        r"model\.a\.b: not expected, got f32\[4,3\]",
    ),
    "too many": ((MODEL, X, Y, 2, 3), r"expected: apply\(model, x, y, n\)[\s\S]*too many"),
    "too few": ((MODEL, X, Y), r"expected: apply[\s\S]*missing a required argument: 'n'"),
}


@pytest.mark.parametrize(("args", "text"), WRONG.values(), ids=WRONG)
def test_wrong_arguments_are_told_by_name(loaded, args, text):
    with pytest.raises(TypeError, match=rf"a call of the exported `apply`[\s\S]*({text})"):
        loaded(*args)


def test_leaves_that_are_given_twice_and_sizes_that_contradict_are_refused(loaded):
    twice = {"weight": MODEL.weight, "bias": MODEL.bias, "x.y": X}
    f = load_exported(export(lambda tree: tree["a"]["b"], {"a": {"b": X}}))
    with pytest.raises(TypeError, match=r"tree\.a\.b: given twice"):
        f({"a": {"b": X}, "a.b": X})
    with pytest.raises(TypeError, match=r"model\.x\.y: not expected"):
        loaded(twice, X, Y, 2)
    with pytest.raises(ValueError, match=r"\['y'\]\.shape\[0\] \(= 2\)[\s\S]*'batch'"):
        loaded(MODEL, X, Y[:2], 2)
    with pytest.raises(ValueError, match="exported for platforms"):
        load_exported(export(jnp.sin, X, platforms=["cuda"]))(X)


def checked(x):
    x = error_if(x, x.sum() < 0, "the sum is negative")
    return jax.vmap(lambda row: error_if(row, row[0] < 0, "a row is negative"))(x)


@jax.custom_vjp
def checked_behind(x):
    return 2 * x


checked_behind.defvjp(
    lambda x: (2 * x, None), lambda _, g: (error_if(2 * g, g.sum() < 0, "a bad cotangent"),)
)


@pytest.mark.parametrize("function", [checked, filter_jit(checked)], ids=["plain", "compiled"])
def test_checks_are_refused_with_their_places_or_dropped(function):
    assert jnp.allclose(function(X), X)
    with pytest.raises(ValueError, match=r"(?s)run-time checks.*checks=\"drop\"") as caught:
        export(function, X)
    text = str(caught.value)
    for message in ("the sum is negative", "a row is negative"):
        at = rf'{message}\n +File "{re.escape(__file__)}", line \d+, in checked\n'
        assert re.search(at, text)
    loaded = load_exported(export(function, X, checks="drop", vjp_order=1))
    assert jnp.array_equal(loaded(-X), -X)
    assert jnp.array_equal(jax.grad(lambda x: loaded(x).sum())(-X), X)
    # The function itself still has them.
    with pytest.raises(RuntimeCheckError, match="the sum is negative"):
        filter_jit(function)(-X)


def test_a_check_in_a_derivative_is_refused_only_with_the_derivative():
    assert jnp.array_equal(load_exported(export(checked_behind, X))(X), 2 * X)
    with pytest.raises(ValueError, match=r"(?s)run-time checks.*a bad cotangent"):
        export(checked_behind, X, vjp_order=1)
    loaded = load_exported(export(checked_behind, X, vjp_order=1, checks="drop"))
    assert jnp.array_equal(jax.grad(lambda x: -loaded(x).sum())(X), -2 * X)


def prints(x):
    jax.debug.print("{}", x)
    return x


def asks(x):
    return jax.jit(lambda x: jax.pure_callback(lambda x: x, x, x))(x)


@jax.custom_vjp
def asks_behind(x):
    return x


asks_behind.defvjp(lambda x: (x, None), lambda _, g: (asks(g),))


def test_other_calls_of_python_are_refused_with_their_places():
    for function, text in ((prints, "debug_print"), (asks, "pure_callback")):
        with pytest.raises(ValueError, match=rf"(?s)calls Python.*{text}.*in {function.__name__}"):
            export(function, X, checks="drop")
    with pytest.raises(ValueError, match="(?s)calls Python.*in a derivative"):
        export(asks_behind, X, vjp_order=1)


REFUSED = {
    "no function": (TypeError, "only functions can be exported", lambda: inspect.unwrap(export)(X)),
    "a function as an argument": (
        TypeError,
        r"(?s)cannot take.*argument f\.0.*<.*sin",
        lambda: export(lambda x, f: x, X, [jnp.sin]),
    ),
    "a function as a result": (
        TypeError,
        r"(?s)cannot return.*the result\['a'\]\[1\]",
        lambda: export(lambda x: {"a": (x, jnp.sin)}, X),
    ),
    "too few": (TypeError, "missing a required argument: 'x'", lambda: export(lambda x: x)),
    "a platform": (
        ValueError,
        "(?s)unknown platform.*gpu",
        lambda: export(jnp.sin, X, platforms=["gpu"]),
    ),
    "a platform that is no list": (
        ValueError,
        "unknown platform",
        lambda: export(jnp.sin, X, platforms="cpu"),
    ),
    "an order": (ValueError, "vjp_order", lambda: export(jnp.sin, X, vjp_order=-1)),
    "a shape of no argument": (
        ValueError,
        "(?s)the paths do not match.*where: export.*'y'",
        lambda: export(jnp.sin, X, shapes={"y": "b, ..."}),
    ),
    "a shape of a number": (
        ValueError,
        "(?s)`shapes` names an argument that is not an array.*got: 2",
        lambda: export(lambda x, n: x, X, 2, shapes={"n": "b"}),
    ),
    "no constraint": (
        ValueError,
        "(?s)constraints on symbolic sizes cannot be read.*batch >=",
        lambda: export(jnp.sin, X, shapes={"x": "batch, ..."}, constraints=["batch >="]),
    ),
    "a constraint on nothing": (
        ValueError,
        "(?s)no such size in `shapes`: length",
        lambda: export(jnp.sin, X, shapes={"x": "batch, ..."}, constraints=["length >= 2"]),
    ),
    "a constraint on nothing, as such": (
        ValueError,
        "(?s)constraints on symbolic sizes cannot be read.*no such size in `shapes`: length",
        lambda: export(jnp.sin, X, shapes={"x": "batch, ..."}, constraints=["length >= 2"]),
    ),
    "constraints in one text": (
        ValueError,
        "(?s)constraints on symbolic sizes cannot be read.*a single string, not a list",
        lambda: export(jnp.sin, X, shapes={"x": "batch, ..."}, constraints="batch >= 2"),
    ),
    "a model of shapes": (
        ValueError,
        "(?s)no values to store.*weight|weight(?s:.*)no values",
        lambda: export(jax.eval_shape(lambda: MODEL), X),
    ),
    "a path": (TypeError, "read_bytes", lambda: inspect.unwrap(load_exported)("model.vernal")),
}


@pytest.mark.parametrize(("error", "text", "call"), REFUSED.values(), ids=REFUSED)
def test_what_cannot_be_exported_or_loaded_is_refused(error, text, call):
    with pytest.raises(error, match=text):
        call()


def test_damaged_bytes_are_refused(data):
    for end in (0, 7, 100, len(data) // 2, len(data) - 1):
        with pytest.raises(ValueError, match="the file is damaged"):
            load_exported(data[:end])
    size = 8 + int.from_bytes(data[:8], "little")
    for at in (20, size // 2, size + 1, (size + len(data)) // 2, len(data) - 1):
        flipped = bytearray(data)
        flipped[at] ^= 1
        with pytest.raises(ValueError, match="the file is damaged"):
            load_exported(bytes(flipped))


def test_other_files_and_programs_are_refused(data, tmp_path, monkeypatch):
    save(tmp_path / "arrays", {"program": X})
    with pytest.raises(ValueError, match="(?s)no exported function.*vernal.load"):
        load_exported((tmp_path / "arrays").read_bytes())
    with monkeypatch.context() as patch:
        patch.setattr(json, "loads", lambda text, **_: _newer(text))
        with pytest.raises(ValueError, match="newer version of Vernal"):
            load_exported(data)
    with monkeypatch.context() as patch:
        patch.setattr(jax.export, "deserialize", lambda _: 1 / 0)
        with pytest.raises(
            ValueError, match="(?s)this version of JAX cannot read.*division by zero"
        ):
            load_exported(data)


_loads = json.loads


def _newer(text):
    found = _loads(text)
    return found | {"exported": 2} if "exported" in found else found


def test_a_program_that_somebody_has_made_to_call_python_is_refused(monkeypatch):
    real = jax.export.export

    def careless(*args, **kwargs):
        check = jax.export.DisabledSafetyCheck.custom_call("xla_ffi_python_cpu_callback")
        return real(*args, **kwargs, disabled_checks=[check])

    def forged(x):
        return jax.ffi.ffi_call("xla_ffi_python_cpu_callback", x, has_side_effect=True)(x)

    monkeypatch.setattr(jax.export, "export", careless)
    data = export(forged, X)
    with pytest.raises(ValueError, match="(?s)would call Python.*xla_ffi_python_cpu_callback"):
        load_exported(data)


def test_without_flatbuffers_the_error_says_what_to_install(data, monkeypatch):
    def missing(name):
        raise ImportError(f"No module named {name!r}")

    monkeypatch.setattr(importlib, "import_module", missing)
    for call in (lambda: export(jnp.sin, X), lambda: load_exported(data)):
        with pytest.raises(ImportError, match=r"pip install vernal\[export\]"):
            call()
