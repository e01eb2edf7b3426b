"""What a loop refuses, and in what words."""

import inspect

import jax.numpy as jnp
import pytest

from vernal.loops import fori_loop, map, scan, while_loop

# Unwrapped: the type checker that the tests run under would answer first.
WHILE, SCAN, FORI, MAP = (inspect.unwrap(f) for f in (while_loop, scan, fori_loop, map))
X = jnp.ones(3)


def loop(**options):
    return WHILE(lambda x: x[0] < 9, lambda x: 2 * x, X, **options)


def total(**options):
    return SCAN(lambda c, x: (c + x, None), 0.0, X, **options)


def count(upper=5, **options):
    return FORI(0, upper, lambda i, x: 2 * x, X, **options)


VALUES = {
    "kind": (
        lambda: loop(kind="reverse"),
        "(?s)while_loop was given an unknown kind.*'lax' or .*'reverse'",
    ),
    "scan kind": (lambda: total(kind="bounded"), "scan was given an unknown kind"),
    "fori kind": (lambda: count(kind=None), "(?s)fori_loop was given an unknown kind.*got: None"),
    "checkpoints with lax": (
        lambda: loop(checkpoints=3),
        "(?s)while_loop with kind='lax' does not use `checkpoints`.*only with kind=\"checkpointed\"",
    ),
    "checkpoints with bounded": (
        lambda: loop(kind="bounded", max_steps=3, checkpoints=3),
        "with kind='bounded' does not use `checkpoints`",
    ),
    "base with lax": (lambda: loop(base=16), "with kind='lax' does not use `base`"),
    "base with checkpointed": (
        lambda: loop(kind="checkpointed", base=4),
        "with kind='checkpointed' does not use `base`",
    ),
    "scan checkpoints": (lambda: total(checkpoints="all"), "does not use `checkpoints`"),
    "scan unroll": (
        lambda: total(kind="checkpointed", unroll=2),
        "scan with kind='checkpointed' does not use `unroll`",
    ),
    "fori unroll": (
        lambda: count(jnp.array(3), unroll=2),
        "(?s)fori_loop with kind='lax' does not use `unroll`.*known bounds",
    ),
    "fori max_steps": (lambda: count(max_steps=9), "does not use `max_steps`"),
    "fori checkpoints": (lambda: count(checkpoints=9), "does not use `checkpoints`"),
    "fori base": (lambda: count(base=9), "does not use `base`"),
    "map checkpoints": (lambda: MAP(jnp.sin, X, checkpoints=2), "does not use `checkpoints`"),
    "negative": (
        lambda: loop(max_steps=-1),
        "(?s)`max_steps` of while_loop is too small.*0 or more",
    ),
    "no checkpoints": (
        lambda: loop(kind="checkpointed", checkpoints=0),
        "(?s)`checkpoints` of while_loop is too small.*expected: 1 or more.*got: 0",
    ),
    "base 1": (lambda: loop(kind="bounded", max_steps=3, base=1), "`base` of while_loop is too"),
    "no batch": (lambda: MAP(jnp.sin, X, batch_size=0), "`batch_size` of map is too small"),
    "no length": (lambda: SCAN(lambda c, x: (c, x), X), "the number of steps of scan is unknown"),
    "nothing to slice": (
        lambda: SCAN(lambda c, x: (c, x), X, {"a": 1.0, "b": jnp.array(1.0)}),
        r"(?s)scan cannot slice a scalar.*xs\['b'\].*got: .*f32\[\]",
    ),
    "lengths": (
        lambda: SCAN(lambda c, x: (c, x), X, (X, X[1:])),
        r"(?s)scan was given different numbers of steps.*xs\[0\]: 3, xs\[1\]: 2",
    ),
    "length": (lambda: total(length=4), r"length: 4, xs: 3"),
    "map lengths": (lambda: MAP(jnp.sin, (X, X[1:])), "map was given different numbers"),
}
TYPES = {
    "no condition": (
        lambda: WHILE(True, jnp.sin, X),
        "(?s)while_loop needs a function.*`cond_fun`",
    ),
    "no body": (lambda: WHILE(jnp.any, X, X), "(?s)while_loop needs a function.*`body_fun`"),
    "no step": (lambda: SCAN("f", X, X), "scan needs a function"),
    "no fori body": (lambda: FORI(0, 2, None, X), "fori_loop needs a function"),
    "no map": (lambda: MAP(3, X), "map needs a function"),
    "traced steps": (
        lambda: loop(max_steps=jnp.array(3)),
        r"(?s)`max_steps` of while_loop must be known.*a Python int.*i32\[\]",
    ),
    "bool steps": (lambda: loop(max_steps=True), "(?s)`max_steps` of while_loop.*got: True"),
    "bounded by nothing": (
        lambda: loop(kind="bounded"),
        "(?s)`max_steps` of while_loop must be known.*got: None",
    ),
    "fori bounded by nothing": (
        lambda: count(jnp.array(3), kind="bounded"),
        "`max_steps` of fori_loop must be known",
    ),
    "checkpoints": (
        lambda: loop(kind="checkpointed", checkpoints="all"),
        "(?s)`checkpoints` of while_loop.*got: 'all'",
    ),
    "scan checkpoints": (
        lambda: total(kind="checkpointed", checkpoints=2.0),
        '(?s)`checkpoints` of scan.*a Python int, or "all"',
    ),
    "base": (lambda: loop(kind="bounded", max_steps=3, base=2.0), "`base` of while_loop must"),
    "length": (lambda: total(length=3.0), "`length` of scan must be known while tracing"),
    "bound": (
        lambda: count(3.0),
        "(?s)the bounds of fori_loop must be integers.*`upper`.*got: 3.0",
    ),
    "bound array": (
        lambda: count(X),
        "(?s)the bounds of fori_loop must be integers.*`upper`.*i32|f32",
    ),
    "condition": (
        lambda: WHILE(lambda x: x < 3, lambda x: x, X),
        r"(?s)condition of a loop must be a scalar bool.*got: bool\[3\].*jnp.any",
    ),
    "condition is a number": (
        lambda: WHILE(lambda x: x[0], lambda x: x, X),
        r"(?s)condition of a loop must be a scalar bool.*`<lambda>`.*got: f32\[\]",
    ),
    "condition is nothing": (
        lambda: WHILE(lambda x: None, lambda x: x, X, max_steps=0),
        "must be a scalar bool",
    ),
    "no pair": (
        lambda: SCAN(lambda c, x: c, X, X),
        r"(?s)function that scan is given must return a pair.*\(carry, y\).*got: f32\[3\]",
    ),
}


@pytest.mark.parametrize("case", VALUES)
def test_a_wrong_value_is_refused(case):
    call, text = VALUES[case]
    with pytest.raises(ValueError, match=text):
        call()


@pytest.mark.parametrize("case", TYPES)
def test_a_wrong_type_is_refused(case):
    call, text = TYPES[case]
    with pytest.raises(TypeError, match=text):
        call()


@pytest.mark.parametrize("kind", ["lax", "checkpointed", "bounded"])
def test_an_error_of_a_function_is_its_own(kind):
    def fails(x):
        raise KeyError("no, says the user")

    with pytest.raises(KeyError, match="no, says the user"):
        WHILE(lambda x: True, fails, X, kind=kind, max_steps=3)
