"""`export`: a function and its arrays as bytes that another process can run without their source.

The function is traced, and the arrays it closes over become arguments of the program; `jax.export`
turns the program into StableHLO. The bytes are a safetensors file: the program as one array of bytes,
the function's arrays beside it (not inside, where the compiler would fold them into constants), and
the signature in JSON. So it holds no Python code.
"""

import importlib
import inspect
import json
import re
from collections.abc import Callable, Mapping, Sequence
from typing import Any, Literal

import jax
import jax.export
import jax.numpy as jnp
import numpy as np
from jax.core import eval_jaxpr

from .._ground import callable_name, equations_in, is_none
from ..show import listed, message, short, type_error, value_error
from ..transforms import awaited, closure_to_pytree, place_of_equation, without_checks
from ..trees import has_shape, match_paths, named_leaves, split
from ._encoding import encode
from ._export_signature import Signature, bind_example, describe, parameters_of, plain_values
from ._file import as_bytes
from ._leaves import leaves_by_name

PROGRAM, ARRAYS, CONSTANTS = "program", "arrays.", "constants."
VERSION = 1
_PLATFORMS = ("cpu", "cuda", "rocm", "tpu")
_CALLBACKS = ("pure_callback", "io_callback", "debug_callback", "debug_print")
_MOST_LISTED = 5
# A name in the syntax of `jax.export.symbolic_shape`.
_NAME = re.compile(r"[A-Za-z_]\w*")
_FUNCTIONS = "mod", "floordiv", "max", "min"


def export(
    function: Callable[..., Any],
    *example: Any,
    keywords: Mapping[str, Any] | None = None,
    shapes: Mapping[str, str] | None = None,
    constraints: Sequence[str] = (),
    platforms: Sequence[str] | None = None,
    vjp_order: int = 0,
    checks: Literal["refuse", "drop"] = "refuse",
) -> bytes:
    """Exports a function and its arrays as bytes, which `load_exported` turns into a function again in
    a process that has neither its source nor its classes.

    The program is StableHLO, made by `jax.export`; JAX promises that its newer versions can read it
    for six months. The bytes cannot run Python code. The program runs on one device. It can be part of
    another compiled function, but cannot be mapped by `vmap`: use a symbolic size instead.

    Args:
        function: a module, a method of one, the result of `filter_jit`, or any other function. The
            arrays that it holds or closes over are stored, and are leaves of the loaded function.
        *example: arguments like those of later calls: any trees of arrays (or
            `jax.ShapeDtypeStruct`s in their place) and of bools, ints, floats and strings, which later
            calls must repeat. The parts of a module that are not arrays (its sizes, its activation
            function) become part of the program.
        keywords: keyword arguments, likewise. Parameters left out keep their defaults.
        shapes: sizes that may vary, as in `jax.export.symbolic_shape`, by the name of the argument
            (or path, see `vernal.trees.Pattern`): `{"x": "batch, ..."}` for a first axis of any
            size and others as in the example. A letter or word is the same size in all arguments.
        constraints: conditions on these sizes that the program depends on, as in
            `jax.export.symbolic_shape`: `["batch >= 2", "mod(length, 8) == 0"]`. The loaded function
            refuses other sizes.
        platforms: the platforms to run on, of `"cpu"`, `"cuda"`, `"rocm"` and `"tpu"`. Default: the
            platform of this process.
        vjp_order: how often `jax.grad` may be applied to the loaded function.
        checks: what to do about run-time checks (`vernal.runtime.error_if`, and those of layers),
            which call Python and so cannot be exported: `"refuse"` to export the function, or
            `"drop"` them.

    Returns:
        The bytes. Write them to a file with `pathlib.Path.write_bytes`; `load_exported` detects
        damage. They are a safetensors file, so other programs can read the arrays.

    Raises:
        TypeError: if `function` is not callable or the example does not fit it; if the example or the
            result holds something that a file cannot store.
        ValueError: for checks that may not be dropped, with their places; for other calls to Python
            (`jax.debug.print`, `jax.pure_callback`, progress meters), with theirs; for an unknown
            platform; if `shapes` does not fit the arguments, or a constraint is not valid.
        ImportError: if the package `flatbuffers` is not installed, which `jax.export` needs:
            `pip install vernal[export]`.

    Example:
        >>> import jax, jax.numpy as jnp
        >>> import vernal
        >>> from vernal.saving import export, load_exported
        >>> model = vernal.nn.Linear(3, 2, key=jax.random.key(0))
        >>> data = export(model, jnp.ones((1, 3)), shapes={"x": "batch, ..."})
        >>> loaded = load_exported(data)
        >>> print(loaded.signature)
        Linear(x: f32[batch,3]) -> f32[batch,2]
        >>> x = jnp.ones((5, 3))
        >>> bool(jnp.allclose(loaded(x), model(x)))
        True
    """
    _check_options(function, platforms, vjp_order)
    need_flatbuffers("export")
    name = callable_name(function)
    function = closure_to_pytree(function)
    bound = bind_example(function, example, dict(keywords or {}))
    inputs = _with_sizes(dict(bound.arguments), shapes, constraints)
    values = plain_values(leaves_by_name(inputs, "the arguments of export"))
    # The reported places of checks end at this frame.
    traced = awaited(_Traced, function, bound.signature, inputs)
    signature = Signature(name, parameters_of(bound), values, traced.output)
    program = awaited(_exported, traced, name, platforms, vjp_order, checks)
    return _packed(program, traced, signature)


def _check_options(function: Any, platforms: Any, vjp_order: int) -> None:
    if not callable(function):
        raise type_error(
            "only functions can be exported",
            where="argument `function`",
            expected="a module that can be called, or a function",
            got=short(function),
            instead="vernal.save for a tree of arrays; export(f, x) rather than export(f(x))",
        )
    unknown = [p for p in platforms or () if p not in _PLATFORMS]
    if unknown or platforms is not None and (isinstance(platforms, str) or not platforms):
        raise value_error(
            "unknown platform",
            where="argument `platforms`",
            expected=f"some of {', '.join(_PLATFORMS)}",
            got=short(platforms),
            instead='platforms=["cpu", "cuda"] for CPUs and the GPUs of NVIDIA; "rocm" for those of AMD',
        )
    if vjp_order < 0:
        raise value_error(
            "the order of differentiation cannot be negative",
            where="argument `vjp_order`",
            expected="0 or more",
            got=str(vjp_order),
            instead="vjp_order=1 for jax.grad of the loaded function",
        )


def need_flatbuffers(where: str) -> None:
    """Raises `ImportError` without the package that `jax.export` needs to read and write; `where` is the function that
    needs it."""
    # By name, so that type-checking this file does not need the package.
    try:
        importlib.import_module("flatbuffers")
    except ImportError as error:
        raise ImportError(
            message(
                "jax.export writes and reads with the package flatbuffers, which is not installed",
                where=f"vernal.saving.{where}",
                expected="flatbuffers",
                got=str(error),
                instead="pip install flatbuffers, or pip install vernal[export]",
            )
        ) from error


def _with_sizes(
    inputs: dict[str, Any], shapes: Mapping[str, str] | None, constraints: Sequence[str]
) -> dict[str, Any]:
    """The example with symbolic sizes."""
    scope = _scope(shapes, constraints)
    if shapes is None:
        return inputs

    def sized(leaf: Any, shape: str | None) -> Any:
        if shape is None:
            return leaf
        if not has_shape(leaf):
            raise value_error(
                "`shapes` names an argument that is not an array",
                where=f"shapes={{...: {shape!r}}}",
                expected="the name of an array",
                got=short(leaf),
                instead="leave it out of `shapes`",
            )
        sizes = jax.export.symbolic_shape(shape, scope=scope, like=leaf.shape)
        return jax.ShapeDtypeStruct(sizes, leaf.dtype)

    found = match_paths(inputs, shapes, default=None, where="export(function, ..., shapes=...)")
    return jax.tree.map(sized, inputs, found, is_leaf=is_none)


def _scope(shapes: Mapping[str, str] | None, constraints: Sequence[str]) -> Any:
    """The symbolic scope with the constraints."""
    try:
        if isinstance(constraints, str):
            raise ValueError("a single string, not a list")
        named = " ".join((shapes or {}).values())
        unknown = set(_NAME.findall(" ".join(constraints))) - {*_NAME.findall(named), *_FUNCTIONS}
        if unknown:
            raise ValueError(f"no such size in `shapes`: {listed(sorted(unknown))}")
        return jax.export.SymbolicScope(tuple(constraints))
    except ValueError as error:
        raise value_error(
            "the constraints on symbolic sizes cannot be read",
            where="argument `constraints`",
            expected="a list of comparisons of sizes that `shapes` names",
            got=f"{short(constraints)}\n{error}",
            instead='shapes={"x": "batch, ..."}, constraints=["batch >= 2"]',
        ) from error


def _abstract(x: Any) -> jax.ShapeDtypeStruct:
    """The abstract value of an array, without the devices of this process. It keeps the weak type: the
    function must compute the same as here."""
    aval: Any = x if isinstance(x, jax.ShapeDtypeStruct) else jax.typeof(x)
    return jax.ShapeDtypeStruct(aval.shape, aval.dtype, weak_type=aval.weak_type)


class _Traced:
    """A function that was traced for an example.

    Args:
        function: the function, with its arrays as leaves.
        signature: its parameters.
        inputs: the example, by parameter.

    Attributes:
        arrays: the function's arrays, by name.
        inputs: shapes and dtypes of the arrays of the arguments, by name.
        constants: what else it closes over.
        jaxpr: the program, a function of constants, arrays and inputs.
        output: the structure of its result.
    """

    def __init__(self, function: Any, signature: inspect.Signature, inputs: dict[str, Any]):
        leaves, rest = split((function, inputs), has_shape)
        shapes = [_abstract(x) for x in leaves]
        self.arrays = {n: x for n, x in named_leaves(function).items() if has_shape(x)}
        names = [name for name, leaf in named_leaves(inputs).items() if has_shape(leaf)]
        self.inputs = dict(zip(names, shapes[len(self.arrays) :], strict=True))
        self.output: list[Any] = []

        def run(leaves: list[Any]) -> list[Any]:
            fn, arguments = rest.fill(leaves)
            call = inspect.BoundArguments(signature, arguments)
            found: list[Any] = []
            self.output = describe(fn(*call.args, **call.kwargs), found)
            return found

        closed: Any = jax.make_jaxpr(run)(shapes)
        self.constants = list(map(jnp.asarray, closed.consts))
        self.jaxpr = closed.jaxpr

    def program(self, arrays: dict[str, Any], constants: list[Any], inputs: dict[str, Any]) -> Any:
        """The function to export. Its arguments are strongly typed, even if it was traced with weak types."""
        leaves = [arrays[n] for n in self.arrays] + [inputs[n] for n in self.inputs]
        return eval_jaxpr(self.jaxpr, constants, *leaves)


def _spec(x: Any) -> jax.ShapeDtypeStruct:
    return jax.ShapeDtypeStruct(x.shape, _abstract(x).dtype)


def _exported(
    traced: _Traced, name: str, platforms: Sequence[str] | None, vjp_order: int, checks: str
) -> bytes:
    """The program in the format of `jax.export`."""
    callbacks = [e for e in equations_in(traced.jaxpr) if e.primitive.name in _CALLBACKS]
    if callbacks:
        raise _calls_python(
            name, [f"{e.primitive.name}\n{place_of_equation(e)}" for e in callbacks]
        )

    # A new function at each call: JAX must not find the lowering with checks in its cache.
    def program(arrays: Any, constants: Any, inputs: Any) -> Any:
        return traced.program(arrays, constants, inputs)

    program.__name__ = program.__qualname__ = name
    specs = jax.tree.map(_spec, (traced.arrays, traced.constants, traced.inputs))
    make = jax.export.export(jax.jit(program), platforms=platforms)
    with without_checks() as left_out:
        try:
            data = make(*specs).serialize(vjp_order=vjp_order)
        except NotImplementedError as error:
            if "callback" not in str(error):
                raise
            raise _calls_python(
                name, ["in a derivative, or in an operation of another library"]
            ) from error
    if left_out and checks == "refuse":
        texts = dict.fromkeys(f"{_check_text(report)}\n{report.place}" for report in left_out)
        raise value_error(
            "the function has run-time checks, which call Python and so cannot be exported",
            where=f"export({name}, ...)",
            expected="a function without checks",
            got=listed(texts, "\n", _MOST_LISTED),
            instead='checks="drop" to export it without them',
        )
    return bytes(data)


def _check_text(report: Any) -> str:
    return report.explain if isinstance(report.explain, str) else "a check"


def _calls_python(name: str, where: list[str]) -> ValueError:
    return value_error(
        "the function calls Python while it runs, which an exported program cannot",
        where=f"export({name}, ...)",
        expected="a function without callbacks, prints and progress meters",
        got=listed(dict.fromkeys(where), "\n", _MOST_LISTED),
        instead="take them out; a progress meter can be NoProgressMeter(), a breakpoint on_error='raise'",
    )


def _packed(program: bytes, traced: _Traced, signature: Signature) -> bytes:
    """The file."""
    stored = {ARRAYS + name: encode(x, name) for name, x in traced.arrays.items()}
    for i, x in enumerate(traced.constants):
        stored[f"{CONSTANTS}{i}"] = encode(x, f"closed-over array {i}")
    stored[PROGRAM] = encode(np.frombuffer(program, np.uint8), PROGRAM)
    return as_bytes(stored, json.dumps({"exported": VERSION, **signature._asdict()}))
