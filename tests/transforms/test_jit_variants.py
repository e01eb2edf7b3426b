"""One function with many static variants: the right program for each. (`benchmarks/dispatch.py` times 1,000.)"""

import jax
import jax.numpy as jnp
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


def test_programs_of_one_name_are_not_told_of_each_others_compilations_for_ever():
    """A thousand programs of one lambda had a million notes, and called slowly."""
    f = vernal.filter_jit(lambda x, n: x)
    programs = [f(jnp.ones(2), n) is not None and n for n in range(20)]
    found = f._programs().by_key.values()
    assert len(found) == len(programs)
    assert all(len(program.attention) <= 1 for program in found)
    assert f.explain().count("compiled") == 0
    for n in programs:
        f(jnp.ones(2), n)
    assert not any(program.attention for program in found)
    assert f.trace_count == 20 and f.explain().count("compiled") == 0
