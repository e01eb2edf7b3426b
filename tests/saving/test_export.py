import json
import os
import subprocess
import sys
import textwrap
from pathlib import Path

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from vernal import (
    Module,
    Partial,
    filter_custom_jvp,
    filter_custom_vjp,
    filter_grad,
    filter_jit,
    nn,
)
from vernal.loops import scan, while_loop
from vernal.saving import export, load_exported
from vernal.trees import named_leaves

ROOT = Path(__file__).parents[2]
KEY = jax.random.key(0)
X = jnp.linspace(-0.5, 0.5, 12).reshape(4, 3)
SIZES = {"x": "batch, ..."}


class Net(Module):
    """Not known to the process that runs it."""

    stack: nn.Stack
    norm: nn.LayerNorm
    dropout: nn.Dropout

    def __init__(self, key):
        self.stack = nn.Stack(lambda k: nn.Linear(3, 3, key=k), 2, key=key)
        self.norm = nn.LayerNorm(3)
        self.dropout = nn.Dropout(0.5)

    def __call__(self, x, *, key):
        return self.dropout(self.norm(self.stack(x)), key=key)


ELSEWHERE = """
    import json, sys
    import jax, jax.numpy as jnp, numpy as np

    counts = {}
    count = lambda event, **_: counts.update({event: counts.get(event, 0) + 1})
    jax.monitoring.register_event_listener(count)
    float(jnp.ones(2).sum())  # something is compiled before

    import vernal
    vernal.saving.compilation_cache(sys.argv[1])

    def hits(f, *args):
        counts.clear()
        out = jax.device_get(f(*args))
        return out, counts.get("/jax/compilation_cache/cache_hits", 0)

    loaded = vernal.saving.load_exported(open("net.vernal", "rb").read())
    given = np.load("given.npz")
    key = jax.random.key(7)
    x, weights = jnp.asarray(given["x"]), jnp.asarray(given["weights"])
    out, plain = hits(lambda: loaded(x, key=key))
    gradient = vernal.filter_grad(lambda f: jnp.sum(weights * f(x, key=key)))(loaded)
    np.savez(sys.argv[2], out=out, **gradient.arrays)

    @vernal.filter_jit
    def checked(x):
        return vernal.error_if(x, x.sum() < -100, "negative") * 2

    message = ""
    _, with_check = hits(checked, x)
    try:
        checked(x - 1000)
    except vernal.runtime.RuntimeCheckError as error:
        message = error.message
    print(json.dumps({
        "signature": loaded.signature, "message": message, "plain": plain, "checked": with_check,
        "modules": [name for name in sys.modules if "test_export" in name],
    }))
"""


@pytest.mark.slow
def test_a_process_without_the_source_runs_it_and_finds_its_programs_on_the_disk_next_time(
    tmp_path,
):
    model, weights = Net(KEY), jnp.arange(15.0).reshape(5, 3)
    x = jnp.sin(jnp.arange(15.0)).reshape(5, 3)
    data = export(model, X, keywords={"key": KEY}, shapes=SIZES, vjp_order=1)
    (tmp_path / "net.vernal").write_bytes(data)
    (tmp_path / "elsewhere.py").write_text(textwrap.dedent(ELSEWHERE))
    np.savez(tmp_path / "given.npz", x=x, weights=weights)
    environment = {**os.environ, "PYTHONPATH": str(ROOT / "src"), "JAX_PLATFORMS": "cpu"}
    environment.pop("JAX_ENABLE_COMPILATION_CACHE", None)

    def elsewhere(out):
        command = [sys.executable, "elsewhere.py", "new/cache", out]
        run = subprocess.run(
            command, cwd=tmp_path, env=environment, capture_output=True, text=True, timeout=200
        )
        assert run.returncode == 0, run.stderr
        with np.load(tmp_path / out) as found:
            return json.loads(run.stdout), dict(found)

    first, found = elsewhere("first.npz")
    assert first["signature"] == "Net(x: f32[batch,3], key: key<fry>[]) -> f32[batch,3]"
    assert first["modules"] == []

    @filter_jit
    def here(model, x):
        def loss(model):
            out = model(x, key=jax.random.key(7))
            return jnp.sum(weights * out), out

        return filter_grad(loss, has_aux=True)(model)

    gradient, out = here(model, x)
    assert np.allclose(found["out"], out, atol=1e-5)
    assert 0 < np.sum(out == 0) < out.size
    for name, g in named_leaves(gradient).items():
        assert np.allclose(found[name], g, atol=1e-4), name

    # What holds a check calls Python, which JAX 0.10 does not keep.
    second, _ = elsewhere("second.npz")
    newer = jax.__version_info__ >= (0, 11)
    assert first["message"] == second["message"] == "negative"
    assert (first["plain"], first["checked"]) == (0, 0)
    assert second["plain"] > 0
    assert second["checked"] == (1 if newer else 0)


def test_loops_custom_rules_and_attention_are_exported_with_their_derivatives():
    attention = nn.MultiheadAttention(1, 3, key=KEY)

    @filter_custom_jvp
    def triple(x):
        return jnp.sin(x)

    @triple.def_jvp
    def _(primals, tangents):
        return jnp.sin(primals[0]), 3 * jnp.cos(primals[0]) * tangents[0]

    @filter_custom_vjp
    def fivefold(x):
        return jnp.sin(x)

    @fivefold.def_fwd
    def _(perturbed, x):
        return jnp.sin(x), x

    @fivefold.def_bwd
    def _(residual, g, perturbed, x):
        return 5 * g * jnp.cos(residual)

    def program(x):
        def body(carry):
            x, n = carry
            return jnp.sin(x), n + 1

        x, _ = while_loop(lambda c: c[1] < 3, body, (x, 0), max_steps=400, kind="checkpointed")
        x, _ = scan(lambda x, _: (x * 1.5, None), x, None, length=2, kind="checkpointed")
        x = fivefold(triple(x))
        return attention(x[None], x[None], x[None], causal=True)[0]

    platforms = ["cpu", "cuda", "tpu"]
    loaded = load_exported(
        export(program, X, shapes={"x": "length, ..."}, vjp_order=1, platforms=platforms)
    )
    assert loaded.platforms == tuple(platforms)
    assert loaded.signature == "program(x: f32[length,3]) -> f32[length,3]"

    @jax.jit
    def both(x):
        def pullback(f):
            out, back = jax.vjp(f, x)
            return out, *back(jnp.cos(out))

        return pullback(program), pullback(loaded)

    for wanted, found in zip(*both(X[:3]), strict=True):
        assert jnp.allclose(wanted, found, atol=1e-5)
        assert jnp.abs(wanted).max() > 1e-2


def test_modules_go_in_and_out_as_their_leaves_by_name():
    layer = nn.Linear(3, 2, key=KEY)
    shapes = jax.tree.map(lambda x: jax.ShapeDtypeStruct(x.shape, x.dtype), layer)

    def step(layer, x, mode, *, scale=2.0):
        new = jax.tree.map(lambda p: scale * p, layer)
        return new, {"y": [layer(x)], 3: None}, mode

    loaded = load_exported(export(step, shapes, X, "train"))
    assert loaded.signature == (
        "step(layer.bias: f32[2], layer.weight: f32[2,3], x: f32[4,3], mode: 'train') -> "
        "({'weight': f32[2,3], 'bias': f32[2]}, {'y': [f32[4,2]], 3: None}, 'train')"
    )
    out, found, mode = loaded(layer, np.asarray(X), mode="train")
    assert (mode, list(found), found[3]) == ("train", ["y", 3], None)
    assert jnp.allclose(found["y"][0], layer(X), atol=1e-6)
    again = jax.tree.structure(layer).unflatten(out.values())
    assert jnp.allclose(again.weight, 2 * layer.weight)
    # What came out goes in.
    assert jnp.allclose(loaded(out, X, "train")[1]["y"][0], again(X), atol=1e-6)

    nested = load_exported(
        export(lambda pair: pair[0](X) + pair[1]["a.b"], (layer, {"a.b": 1.0 + X[:, :2]}))
    )
    flat = named_leaves(layer)
    for first in (layer, {"weight": layer.weight, "bias": layer.bias}, flat):
        assert jnp.allclose(nested([first, {"a.b": X[:, :2]}]), layer(X) + X[:, :2], atol=1e-6)


def test_whatever_holds_arrays_is_exported_with_them():
    layer, scale = nn.Linear(3, 2, key=KEY), jnp.array([2.0, 3.0])
    functions = {
        "a module": (layer, ["bias", "weight"]),
        "a compiled module": (filter_jit(layer), ["fn.bias", "fn.weight"]),
        "a closure": (lambda x: layer(x), ["values.0", "values.1"]),
        "a compiled closure": (jax.jit(lambda x: layer(x)), ["values.0", "values.1"]),
        "a method": (layer.__call__, ["__self__.bias", "__self__.weight"]),
        "a partial": (Partial(lambda s, x: s[None] * layer(x), scale), ["args.0", "func.values.0", "func.values.1"]),
        "what closes over a global": (lambda x: GLOBAL[None] * x, []),
    }  # fmt: skip
    for what, (function, names) in functions.items():
        loaded = load_exported(export(function, X))
        assert sorted(loaded.arrays) == names, what
        assert len(loaded.constants) == (not names), what
        assert jnp.allclose(loaded(X), function(X), atol=1e-6), what


GLOBAL = jnp.array([1.0, -1.0, 2.0])


def test_dtypes_weak_types_and_keys_are_what_they_were():
    state = {
        "weak": jnp.asarray(2.0),
        "half": jnp.ones(3, jnp.bfloat16),
        "key": jax.random.key(3, impl="rbg"),
        "numpy": np.int8(3),
    }

    def mixed(x):
        noise = jax.random.uniform(state["key"], (3,), jnp.bfloat16)
        return state["weak"] * state["half"] + noise, state["numpy"] * x

    loaded = load_exported(export(mixed, jnp.ones(2, jnp.int8)))
    found, wanted = loaded(np.full(2, 5, np.int8)), mixed(jnp.full(2, 5, jnp.int8))
    assert [x.dtype for x in found] == [x.dtype for x in wanted] == [jnp.bfloat16, jnp.int8]
    assert all(jnp.array_equal(a, b) for a, b in zip(found, wanted, strict=True))


def test_higher_derivatives_are_those_that_were_asked_for():
    def cube(x):
        return x**3

    x = jnp.asarray(2.0, jnp.float32)
    twice = load_exported(export(cube, x, vjp_order=2))
    assert jax.grad(jax.grad(twice))(x) == 12
    never = load_exported(export(cube, x))
    assert never(x) == 8
    with pytest.raises(ValueError, match="without its derivative[\\s\\S]*vjp_order=1"):
        jax.grad(never)(x)


def several(x):
    """A program that depends on the number of rows."""
    return x[:8] if x.shape[0] >= 8 else x


def test_constraints_say_what_a_symbolic_size_is():
    x = jnp.arange(36.0).reshape(12, 3)
    with pytest.raises(Exception, match="inconclusive"):
        export(several, x, shapes=SIZES)
    constraints = ["batch >= 8", "mod(batch, 2) == 0"]
    loaded = load_exported(export(several, x, shapes=SIZES, constraints=constraints))
    np.testing.assert_array_equal(loaded(x), x[:8])
    for rows in (11, 6):
        with pytest.raises(ValueError, match="the function was not exported for these sizes"):
            loaded(x[:rows])
