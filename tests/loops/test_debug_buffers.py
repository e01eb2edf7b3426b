"""`debug_buffers`: every misuse of a buffer is found, nothing else is, and the loop is as always."""

import re

import jax
import jax.numpy as jnp
import numpy as np
import pytest

import vernal
from vernal.loops import debug_buffers, fori_loop, scan, while_loop
from vernal.runtime import RuntimeCheckError

XS = jnp.arange(1.0, 5.0)
BUFFER = {"buffers": lambda b: b, "kind": "checkpointed"}


def over(length, write):
    """A loop of 4 steps over a buffer."""
    return lambda xs: scan(
        lambda b, i: (write(b, i, xs), None), jnp.zeros(length), jnp.arange(4), **BUFFER
    )[0].sum()


def by_while(write, cond=lambda b, i: i < 4, **options):
    def run(xs):
        return while_loop(
            lambda c: cond(c[1], c[0]),
            lambda c: (c[0] + 1, write(c[1], c[0], xs)),
            (0, jnp.zeros(6)),
            buffers=lambda c: c[1],
            **options,
        )[1].sum()

    return run


def nested(wrong, **inner):
    """Two steps of an inner loop in each of four; the second of them may write where the first one wrote."""

    def outer(xs):
        def step(i, b):
            return fori_loop(
                0,
                2,
                lambda j, b: b.at[2 * i + j - jnp.where(j == 1, wrong, 0)].set(
                    xs[i] + j.astype(jnp.float32)
                ),
                b,
                **inner,
            )

        return fori_loop(0, 4, step, jnp.zeros(8), **BUFFER).sum()

    return outer


def accumulate(b, i, xs):
    return b.at[i].set(xs[i] * jnp.where(i == 0, 1.0, b[jnp.where(i == 0, 5, i - 1)]))


GOOD = {
    "checkpointed": by_while(accumulate, kind="checkpointed"),
    "checkpointed, bound": by_while(accumulate, kind="checkpointed", max_steps=5),
    "bounded": by_while(accumulate, kind="bounded", max_steps=5),
    "a place that is never written": over(8, lambda b, i, xs: b.at[i].set(b[i + 4] + xs[i])),
    "a read in vmap": over(
        8, lambda b, i, xs: b.at[i].set(jax.vmap(lambda j: b[j])(jnp.arange(4, 8)).sum() + xs[i])
    ),
    "a write that is not made": over(
        4, lambda b, i, xs: b.at[i].set(xs[i]).at[0].set(9.0, pred=i < 0)
    ),
    "out of bounds": over(4, lambda b, i, xs: b.at[i].set(xs[i]).at[7].set(9.0)),
    "empty": lambda xs: over(0, lambda b, i, xs: b.at[:].set(xs[:0]))(xs) + xs.sum(),
    "nested": nested(0, **BUFFER),
    "nested, unselected": nested(0, kind="checkpointed"),
}
TWICE, READ, ONE = (
    "is written twice",
    "is written after it was read",
    "is written twice by a single write",
)
BAD = {
    "twice": (over(4, lambda b, i, xs: b.at[i // 2].set(xs[i])), TWICE, 0, 1),
    "read": (over(4, lambda b, i, xs: b.at[i].set(xs[i] + b[i])), READ, 0, 0),
    "read in vmap": (
        over(4, lambda b, i, xs: b.at[i].set(jax.vmap(lambda j: b[j])(jnp.arange(4)) @ xs)),
        READ,
        0,
        0,
    ),
    "read in jit and cond": (
        over(
            4,
            lambda b, i, xs: b.at[i].set(
                jax.jit(lambda: jax.lax.cond(i == 2, lambda: b[3], lambda: xs[i]))()
            ),
        ),
        READ,
        3,
        3,
    ),
    "by one write": (over(4, lambda b, i, xs: b.at[jnp.array([1, 1])].set(xs[i])), ONE, 1, 0),
    "read by the condition": (
        by_while(
            lambda b, i, xs: b.at[i].set(xs[i]),
            lambda b, i: (b[i + 1] < 9) & (i < 3),
            kind="checkpointed",
        ),
        READ,
        1,
        1,
    ),
    "nested": (nested(1, **BUFFER), TWICE, 0, "1, in step 0 of the loop around it"),
    "nested, unselected": (
        nested(1, kind="checkpointed"),
        TWICE,
        0,
        "1, in step 0 of the loop around it",
    ),
}
WAYS = {
    "value": lambda f: f,
    "grad": jax.grad,
    "jvp": lambda f: lambda x: jax.jvp(f, (x,), (x,)),
    "hessian": jax.hessian,
}


@pytest.mark.parametrize("way", WAYS.values(), ids=WAYS)
@pytest.mark.parametrize("fn", GOOD.values(), ids=GOOD)
@pytest.mark.sample(12)
def test_what_keeps_the_contract_is_as_always(fn, way):
    fn = way(fn)
    expected = jax.tree.leaves(jax.jit(fn)(XS))
    with debug_buffers():
        checked = jax.tree.leaves(vernal.filter_jit(fn)(XS))
        mapped = jax.tree.leaves(vernal.filter_jit(jax.vmap(fn))(jnp.stack([XS, XS])))
    for a, b, c in zip(expected, checked, mapped, strict=True):
        np.testing.assert_allclose(a, b, rtol=1e-6)
        np.testing.assert_allclose(np.stack([a, a]), c, rtol=1e-6)


@pytest.mark.parametrize("way", WAYS.values(), ids=WAYS)
@pytest.mark.parametrize("fn, text, place, step", BAD.values(), ids=BAD)
@pytest.mark.sample(12)
def test_what_breaks_it_is_an_error(fn, text, place, step, way):
    text = (
        re.escape(f"an element of a buffer {text}\n")
        + rf"(?s:.)*at index \[{place}\]\n(?s:.)*at step {step}\n"
    )
    fn = way(fn)
    with debug_buffers(), pytest.raises(RuntimeCheckError, match=f"^{text}"):
        jax.block_until_ready(vernal.filter_jit(fn)(XS))
    with debug_buffers(), pytest.raises(RuntimeCheckError, match="^an element of a buffer"):
        jax.block_until_ready(vernal.filter_jit(jax.vmap(fn))(jnp.stack([XS, XS])))


def test_the_element_of_a_batch_is_told():
    def write(i, j):
        return fori_loop(
            0, 2, lambda k, b: b.at[jnp.where(k == 0, i, j)].set(1.0), jnp.zeros(4), **BUFFER
        )

    with (
        debug_buffers(),
        pytest.raises(RuntimeCheckError, match=r"at index \[3\]\n(?s:.)*index \(1,\)"),
    ):
        jax.block_until_ready(
            vernal.filter_jit(jax.vmap(write))(jnp.array([0, 3]), jnp.array([1, 3]))
        )


def test_a_compiled_function_is_compiled_again_and_only_inside():
    fn, *_ = BAD["twice"]
    compiled = vernal.filter_jit(fn)
    before = compiled(XS)
    with debug_buffers():
        with pytest.raises(RuntimeCheckError):
            jax.block_until_ready(compiled(XS))
        with debug_buffers(False):
            assert compiled(XS) == before
    assert compiled(XS) == before


def stale(write):
    def run(xs):
        def body(i, c):
            b, total = c
            new, read = write(b, i, xs[i])
            return new, total * jnp.sin(read)

        return fori_loop(
            0, 3, body, (jnp.full(6, 0.5), 1.0), kind="checkpointed", buffers=lambda c: c[0]
        )[1]

    return run


def after_the_write(write):
    """The write comes first in the program."""

    def run(b, i, x):
        new = b.at[i].set(x)
        return write(b, new, i, x)

    return run


@pytest.mark.parametrize("way", WAYS.values(), ids=WAYS)
@pytest.mark.parametrize(
    "write",
    [
        lambda b, new, i, x: (new, b[i]),
        lambda b, new, i, x: (new, jax.lax.cond(x > 0, lambda b: b[i], lambda b: x, b)),
        lambda b, new, i, x: (new.at[i + 3].set(b[i]), x),
        lambda b, new, i, x: (new, jax.vmap(lambda j: b[j])(i[None]).sum()),
    ],
)
@pytest.mark.sample(8)
def test_an_old_version_is_not_read_where_a_later_one_was_written(way, write):
    fn = way(stale(after_the_write(write)))
    text = "^an element of a buffer is read before it is written\n"
    with debug_buffers(), pytest.raises(RuntimeCheckError, match=text):
        jax.block_until_ready(vernal.filter_jit(fn)(XS))


def test_an_old_version_may_be_read_elsewhere():
    fn = stale(after_the_write(lambda b, new, i, x: (new, b[5] + new[i])))
    with debug_buffers():
        np.testing.assert_allclose(vernal.filter_jit(jax.grad(fn))(XS), jax.grad(fn)(XS))


@pytest.mark.parametrize("promotion", ["standard", "strict"])
def test_numbers_of_64_bits_change_nothing(promotion):
    def run(x):
        def step(c):
            return c[0] + 1, c[1].at[c[0]].set(x, pred=c[0] % 2 == 0)

        return while_loop(
            lambda c: c[0] < 3, step, (0, jnp.zeros(4)), buffers=lambda c: c[1], kind="checkpointed"
        )[1]

    with jax.enable_x64(), jax.numpy_dtype_promotion(promotion), debug_buffers():
        assert jax.jit(run)(jnp.array(0.5)).tolist() == [0.5, 0, 0.5, 0]
