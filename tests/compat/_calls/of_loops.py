"""The loops of `equinox.internal`."""

import jax
import jax.numpy as jnp
import numpy as np

from .registry import Counted, calls

KINDS = (
    {"kind": "lax"},
    {"kind": "checkpointed", "max_steps": 4},
    {"kind": "bounded", "max_steps": 4},
)


@calls("internal.while_loop")
def while_loop(name, eqx):
    def power(x, n=3, **options):
        return name(lambda c: c[0] < n, lambda c: (c[0] + 1, c[1] * x), (0, x), **options)

    two = jnp.array(2.0, jnp.float32)
    for kind in KINDS:
        yield lambda kind=kind: power(two, **kind)
        yield lambda kind=kind: power(2.0, **kind)
        yield lambda kind=kind: power(two, 0, **kind)
        yield lambda kind=kind: power(two, 10, **{**kind, "max_steps": 2})
        yield lambda kind=kind: power(two, **{**kind, "max_steps": 0})
        yield lambda kind=kind: power(two, **{**kind, "max_steps": jnp.array(3)})
        yield lambda kind=kind: power(two, **{**kind, "max_steps": -1})
        yield lambda kind=kind: jax.jvp(lambda x: power(x, **kind)[1], (two,), (two,))
        yield lambda kind=kind: jax.grad(lambda x: power(x, **kind)[1])(two)
        yield lambda kind=kind: jax.vmap(lambda x, n: power(x, n, **kind))(
            jnp.ones(2) * 2, jnp.array([1, 3])
        )
        yield lambda kind=kind: name(lambda c: c < 2, lambda c: [c], 1.0, **kind)
        yield lambda kind=kind: name(lambda c: c < 2, lambda c: c * 1.5, 1, **kind)
        yield lambda kind=kind: name(lambda c: "text", lambda c: c + 1, 1.0, **kind)
        yield lambda kind=kind: name(lambda c: jnp.array([True, False]), lambda c: c, 1.0, **kind)
        yield lambda kind=kind: name(lambda c: False, lambda c: c, "text", **kind)
        yield lambda kind=kind: name(
            lambda c: False, lambda c: c, (None, 1, np.ones(2), True), **kind
        )
        yield lambda kind=kind: name(
            lambda c: c[1] < 2, lambda c: (c[0], c[1] + 1), (two, 0), checkpoints=2, base=2, **kind
        )

        def buffered(kind=kind):
            def body(c):
                i, xs = c
                return i + 1, xs.at[i].set(i * 2.0)

            return name(lambda c: c[0] < 3, body, (0, jnp.zeros(3)), buffers=lambda c: c[1], **kind)

        yield buffered
    yield lambda: power(two, kind="bounded")
    yield lambda: power(two, kind="checkpointed")
    yield lambda: power(two, kind="checkpointed", checkpoints=2)
    yield lambda: power(two, kind="wrong")
    yield lambda: power(two)
    yield lambda: name(cond_fun=lambda c: c < 2, body_fun=lambda c: c + 1, init_val=0, kind="lax")

    def traces_of_body():
        body = Counted(lambda c: c + 1)
        jax.jit(lambda: name(lambda c: c < 2, body, 0, kind="lax"))()
        return body.count <= 2

    yield traces_of_body


@calls("internal.scan")
def scan(name, eqx):
    xs = jnp.arange(3.0)

    def step(carry, x):
        return carry * 2 + x, (carry, "text")[0]

    for kind in ("lax", "checkpointed"):
        yield lambda kind=kind: name(step, jnp.array(1.0), xs, kind=kind)
        yield lambda kind=kind: name(step, 1.0, xs, kind=kind)
        yield lambda kind=kind: name(lambda c, _: (c + 1, None), 0, None, 3, kind=kind)
        yield lambda kind=kind: name(lambda c, _: (c + 1, None), 0, None, kind=kind)
        yield lambda kind=kind: name(step, 1.0, xs, length=5, kind=kind)
        yield lambda kind=kind: name(step, 1.0, xs[:0], kind=kind)
        yield lambda kind=kind: name(lambda c, x: ([c], x), 1.0, xs, kind=kind)
        yield lambda kind=kind: name(lambda c, x: c, 1.0, xs, kind=kind)
        yield lambda kind=kind: jax.grad(lambda c: name(step, c, xs, kind=kind)[0])(1.0)
        yield lambda kind=kind: jax.jvp(lambda c: name(step, c, xs, kind=kind)[0], (1.0,), (1.0,))
        yield lambda kind=kind: name(step, 1.0, xs, kind=kind, checkpoints=2)
    yield lambda: name(step, 1.0, xs, kind="checkpointed", checkpoints="all")
    yield lambda: name(step, 1.0, xs, kind="wrong")
    yield lambda: name(step, 1.0, xs)
    yield lambda: name(f=step, init=1.0, xs=xs, kind="lax")


@calls("internal.buffer_at_set")
def buffer_at_set(name, eqx):
    xs = jnp.zeros(3)
    yield name, xs, 1, 5.0
    yield lambda: name(xs, 1, 5.0, pred=False)
    yield lambda: name(xs, 1, 5.0, pred=jnp.array(True))
    yield lambda: name(xs, slice(0, 2), jnp.ones(2))
    yield lambda: name(xs, 9, 5.0)
    yield lambda: name(xs, 9, 5.0, mode="drop")
    yield lambda: name(buffer=xs, item=1, x=5)
    yield lambda: name(xs, "text", 1.0)
    yield lambda: name(np.zeros(3), 1, 5.0)
