"""Looking into what is compiled."""

import io
from contextlib import redirect_stdout

import jax
import jax.numpy as jnp

from .registry import calls

ONE = jnp.ones(2)


def printed(call):
    with redirect_stdout(io.StringIO()) as text:
        call()
    return text.getvalue()


@calls("debug.announce_transform", "internal.announce_transform")
def announce_transform(name, eqx):
    def seen(call, **options):
        heard = []
        call(lambda x: name(x, announce=heard.append, **options))
        return sorted({str(words).split(":")[0] for words in heard})

    yield name, ONE
    yield name, (ONE, "text")
    yield seen, lambda fn: fn(ONE)
    yield seen, lambda fn: jax.jit(fn)(ONE)
    yield seen, lambda fn: jax.vmap(fn)(ONE)
    yield seen, lambda fn: jax.grad(fn)(1.0)
    yield lambda: seen(lambda fn: fn(ONE), name="x")
    yield lambda: jax.jit(lambda x: name(x, announce=str))(ONE)
    yield lambda: name(x=ONE, name="a", intermediates=True, announce=str)


@calls("debug.backward_nan", "internal.debug_backward_nan")
def backward_nan(name, eqx):
    yield name, ONE
    yield name, (ONE, "text")
    yield lambda: jax.grad(lambda x: 3 * name(x))(jnp.array(1.0))
    yield lambda: jax.grad(lambda x: 3 * name(x))(1.0)
    yield lambda: jax.grad(lambda x: jnp.sqrt(0 * name(x)))(jnp.array(1.0))
    yield lambda: jax.grad(lambda x: jnp.sqrt(0 * name(x, terminate=False)))(jnp.array(1.0))
    yield lambda: name(x=ONE, name="a", terminate=True)


@calls("debug.breakpoint_if", "internal.breakpoint_if")
def breakpoint_if(name, eqx):
    yield name, False
    yield name, jnp.array(False)
    yield name, jnp.array([False, False])
    yield lambda: jax.jit(lambda x: name(x > 2))(ONE)
    yield lambda: name(pred=False, token=None)
    yield name, "text"


@calls("debug.store_dce", "debug.inspect_dce", "internal.store_dce", "internal.inspect_dce")
def dce(name, eqx):
    room = getattr(eqx, "debug", None)
    stored, inspected = room.store_dce, room.inspect_dce

    def kept(label):
        @jax.jit
        def fn(x):
            return stored((x, 2 * x, "text"), label)[0]

        fn(ONE)
        return printed(lambda: inspected(label))

    yield kept, "a"
    yield kept, None
    yield lambda: jax.jit(lambda x: stored(x, "b"))(ONE)
    yield stored, ONE
    yield lambda: inspected("never")
    yield lambda: stored(x=ONE, name="c")
    yield lambda: inspected(name="a")


@calls("internal.assert_dce")
def assert_dce(name, eqx):
    yield name, ONE
    yield lambda: jax.jit(lambda x: (name(x), x)[1])(ONE)
    yield lambda: jax.jit(lambda x: name(x))(ONE)
    yield lambda: name(ONE, "message")
    yield lambda: name(x=ONE, msg="message")


@calls("debug.assert_max_traces")
def assert_max_traces(name, eqx):
    def twice(transform, *args):
        fn = transform(name(lambda x: x, max_traces=1))
        return [fn(arg) for arg in args]

    yield twice, jax.jit, ONE, ONE
    yield twice, jax.jit, ONE, jnp.ones(3)
    yield twice, eqx.filter_jit, ONE, ONE
    yield twice, eqx.filter_jit, 1, 2
    yield lambda: name(max_traces=1)(lambda x: x)(1)
    yield lambda: name(lambda x: x)
    yield lambda: name(fn=lambda x: x, max_traces=2)(1)
    yield lambda: name(lambda x: x, max_traces=0)(1)
    yield lambda: name(lambda x: x, max_traces=None)(1)
    yield lambda: name(printed, max_traces=1).__name__


@calls("debug.get_num_traces")
def get_num_traces(name, eqx):
    def count(transform, *args):
        fn = transform(eqx.debug.assert_max_traces(lambda x: x, max_traces=9))
        for arg in args:
            fn(arg)
        return name(fn)

    yield count, jax.jit
    yield count, jax.jit, ONE, ONE, jnp.ones(3)
    yield count, eqx.filter_jit, ONE, 1, 2
    yield count, lambda fn: fn, 1, 2
    yield name, len
    yield name, 1
    yield lambda: name(fn=eqx.debug.assert_max_traces(len, max_traces=1))
