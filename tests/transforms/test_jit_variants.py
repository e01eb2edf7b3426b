"""One function with many static variants: the right program for each. (`benchmarks/dispatch.py` times 1,000.)"""

import jax
import pytest

import vernal
from vernal import filter_jit

VARIANTS = 200


class Sized(vernal.Module):
    weight: object
    size: int = vernal.field(static=True)


KINDS = {
    "argument": lambda i: (None, i),
    "field": lambda i: (Sized(None, i), "text"),
    "function": lambda i: (Sized(lambda: i, 0), (i,)),
}


@pytest.mark.slow
@pytest.mark.parametrize("kind", KINDS)
def test_static_variants_each_get_their_own_program(kind):
    @filter_jit
    def f(model, other):
        return model, other

    variants = [KINDS[kind](i) for i in range(VARIANTS)]

    def check(variants):
        for model, other in variants:
            out, rest = f(model, other)
            assert rest == other
            assert out is model or (out.size, out.weight) == (model.size, model.weight)

    # Inside of a trace they are not compiled by XLA, which would take most of the time.
    jax.eval_shape(lambda: check(variants))
    assert f.trace_count == VARIANTS
    jax.eval_shape(lambda: check(variants))
    check(variants[::60])
    assert f.trace_count == VARIANTS
