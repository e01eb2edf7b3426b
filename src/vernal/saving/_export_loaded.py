"""`load_exported`: a function from the bytes that `export` made."""

import re
from typing import Any

import jax
import jax.export

from ..modules import Module, field
from ..show import short, spec_text, type_error, value_error
from ._export import ARRAYS, CONSTANTS, PROGRAM, VERSION, need_flatbuffers
from ._export_signature import Signature, output_text, rebuild
from ._file import StoredFile, read_bytes
from ._leaves import place

_WHERE = "load_exported(data)"
# How StableHLO names the function of a custom call, in its short and in its long form.
_CUSTOM_CALL = re.compile(r'custom_call\s*@"?([^\s"(]+)|call_target_name\s*=\s*"([^"]*)"')
# The names of custom calls that lead back into Python. `export` makes none.
_INTO_PYTHON = re.compile("(?i)python|callback|custom_?spmd|inspect_?sharding")


class _Program:
    """A program and its signature. Compares by identity.

    Args:
        exported: what `jax.export` read.
        signature: the function's signature, read from JSON.
    """

    def __init__(self, exported: Any, signature: Signature):
        (arrays, constants, inputs), _ = exported.in_tree.unflatten(exported.in_avals)
        self.exported = exported
        self.signature = signature
        self.arrays: dict[str, Any] = arrays
        self.constants: list[Any] = constants
        self.inputs: dict[str, Any] = inputs
        self.run = _compiled(exported, signature.function)

    def text(self) -> str:
        signature = self.signature
        known = {name: spec_text(x) for name, x in self.inputs.items()}
        known |= {name: repr(value) for name, value in signature.values.items()}
        # JAX sorts them by name; show them in the order of the parameters.
        order = [name for name, _ in signature.parameters]
        names = sorted(known, key=lambda name: order.index(name.split(".")[0]))
        inputs = ", ".join(f"{name}: {known[name]}" for name in names)
        output = output_text(signature.output, list(self.exported.out_avals))
        return f"{signature.function}({inputs}) -> {output}"


def _compiled(exported: Any, name: str) -> Any:
    def run(*args: Any) -> Any:
        return exported.call(*args)

    run.__name__ = run.__qualname__ = name
    if exported.has_vjp():
        return jax.jit(run)

    def refuse(*args: Any) -> Any:
        raise value_error(
            "the function was exported without its derivative",
            where=f"jax.grad of the exported `{name}`",
            expected="a function that was exported with vjp_order=1, or more for higher derivatives",
            got="vjp_order=0",
            instead="export(..., vjp_order=1)",
        )

    differentiated: Any = jax.custom_vjp(run)
    differentiated.defvjp(lambda *args: (run(*args), None), refuse)
    return jax.jit(differentiated)


class ExportedFunction(Module):
    """An exported function, as `load_exported` returns it.

    Its arrays are leaves: it can be differentiated with respect to them (if it was exported with
    `vjp_order=1`), be updated by an optimiser, and be an argument of other compiled functions. Only
    reverse-mode derivatives are available.

    Attributes:
        arrays: the arrays of the function by name, as `vernal.trees.named_leaves` names them.
        constants: the arrays that it closed over.

    Example:
        >>> import jax, jax.numpy as jnp
        >>> import vernal
        >>> from vernal.saving import export, load_exported
        >>> model = vernal.nn.Linear(3, 2, key=jax.random.key(0))
        >>> loaded = load_exported(export(model, jnp.ones(3), vjp_order=1))
        >>> list(loaded.arrays)
        ['bias', 'weight']
        >>> gradient = vernal.filter_grad(lambda f, x: f(x).sum())(loaded, jnp.ones(3))
        >>> gradient.arrays["bias"]
        Array([1., 1.], dtype=float32)
    """

    arrays: dict[str, Any]
    constants: list[Any]
    _program: Any = field(static=True)

    @property
    def signature(self) -> str:
        """Its arguments and result: names, shapes and dtypes."""
        return self._program.text()

    @property
    def platforms(self) -> tuple[str, ...]:
        """The platforms that it can run on."""
        return tuple(self._program.exported.platforms)

    def __call__(self, /, *args: Any, **kwargs: Any) -> Any:
        """Runs the function.

        Args:
            *args: arguments like those of the export: trees whose leaves have the same names. For a
                module, give the module, dictionaries and lists nested in the same way, or one
                dictionary of its leaves by name.
            **kwargs: likewise, by the names of the parameters.

        Returns:
            What the function returns. Tuples, lists and dictionaries keep their type; a module (or an
            object of any other class) becomes a dictionary of its leaves by name, which may be passed
            in again. `jax.tree.structure(module).unflatten(found.values())` is the module.

        Raises:
            TypeError: if the arguments differ from those of the export in name, shape, dtype or Python
                value; one error lists all differences.
            ValueError: if symbolic sizes contradict one another or the constraints; on another platform.
        """
        program = self._program
        given = program.signature.bind(args, kwargs)
        inputs = program.signature.arrays(given, program.inputs)
        try:
            out = program.run(self.arrays, self.constants, inputs)
        except ValueError as error:
            # XLA's whole message for sizes that break a constraint.
            if "refining shapes" not in str(error):
                raise
            raise value_error(
                "the function was not exported for these sizes",
                where=f"a call of the exported `{program.signature.function}`",
                expected=f"{self.signature}, with sizes within the constraints of the export",
                got=", ".join(f"{name}: {spec_text(x)}" for name, x in inputs.items()),
                instead="other sizes; or export it with other `constraints`",
            ) from error
        return rebuild(program.signature.output, out)


def load_exported(data: bytes) -> ExportedFunction:
    """Loads a function from the bytes that `export` made.

    Neither the source of the function nor the classes of its arguments are needed, and nothing in
    the bytes is run as Python code: they are arrays, JSON, and a StableHLO program, which is refused
    if it calls back into Python.

    Args:
        data: the result of `export`; from a file, `pathlib.Path(path).read_bytes()`.

    Returns:
        The function. `print(loaded.signature)` shows its arguments and result.

    Raises:
        TypeError: if `data` is not bytes.
        ValueError: if they are damaged, were not made by `export`, or were made by a version of Vernal
            or JAX whose programs this one cannot read; if the program calls Python.
        ImportError: if the package `flatbuffers` is not installed.

    Example:
        >>> import jax.numpy as jnp
        >>> from vernal.saving import export, load_exported
        >>> data = export(lambda pair, power: pair["a"] ** power, {"a": jnp.ones(2)}, 2)
        >>> load_exported(data)({"a": jnp.array([2.0, 3.0])}, 2)
        Array([4., 9.], dtype=float32)
        >>> load_exported(data)({"a": jnp.ones(3)}, 2)
        Traceback (most recent call last):
            ...
        TypeError: the arguments are not those that the function was exported for
          where: a call of the exported `<lambda>`
          got: pair.a: expected f32[2], got f32[3]
          instead: arrays of the shapes and dtypes it expects; or export the function again, ...
    """
    if not isinstance(data, (bytes, bytearray, memoryview)):
        raise type_error(
            "an exported function is loaded from bytes",
            where=_WHERE,
            expected="what `export` returned",
            got=short(data),
            instead="pathlib.Path(path).read_bytes() for the content of a file",
        )
    need_flatbuffers("load_exported")
    file = read_bytes(bytes(data), _WHERE)
    signature = _signature(file)
    content = file.array(file.entries[PROGRAM]).tobytes()
    try:
        exported = jax.export.deserialize(bytearray(content))
        text = _text(exported)
    # Another version may have changed anything.
    except Exception as error:
        raise value_error(
            "this version of JAX cannot read the program",
            where=_WHERE,
            expected=f"a program that was exported by JAX {jax.__version__}, or one somewhat older",
            got=str(error),
            instead="export it again, or update JAX",
        ) from error
    _refuse_callbacks(text)
    program = _Program(exported, signature)
    arrays = {name: _array(file, ARRAYS + name, aval) for name, aval in program.arrays.items()}
    constants = [_array(file, f"{CONSTANTS}{i}", x) for i, x in enumerate(program.constants)]
    return ExportedFunction(arrays, constants, program)


def _signature(file: StoredFile) -> Signature:
    kept = file.metadata()
    if PROGRAM not in file.entries or "exported" not in kept:
        raise value_error(
            "there is no exported function in the file",
            where=_WHERE,
            expected="what `export` returned",
            got="a safetensors file of arrays",
            instead="vernal.load for what vernal.save wrote",
        )
    if kept["exported"] != VERSION:
        raise value_error(
            "the function was exported by a newer version of Vernal",
            where=_WHERE,
            expected=f"version {VERSION} of the scheme",
            got=f"version {kept['exported']}",
            instead="update Vernal",
        )
    return Signature(**{name: kept[name] for name in Signature._fields})


def _array(file: StoredFile, name: str, aval: Any) -> Any:
    entry = file.entries[name]
    like = jax.ShapeDtypeStruct(aval.shape, aval.dtype)
    return place(file.array(entry), like, name, entry.remarks.get("key"))


def _text(exported: Any) -> str:
    """The text of a program and its derivatives."""
    behind = _text(exported.vjp()) if exported.has_vjp() else ""
    return exported.mlir_module() + behind


def _refuse_callbacks(text: str) -> None:
    """Refuses a program that was made to call into this process."""
    for found in _CUSTOM_CALL.finditer(text):
        target = found[1] or found[2]
        if _INTO_PYTHON.search(target):
            raise value_error(
                "the program would call Python, which `export` never writes",
                where=_WHERE,
                expected="a program of operations on arrays",
                got=f"a call of {target}",
                instead="do not run it: the file was changed after the export",
            )
