"""JAX's explanations are overheard, and said in a few words."""

import logging

import jax
import jax.numpy as jnp
import pytest

from vernal.debug._cache_misses import (
    CacheMiss,
    cache_misses_reported_to,
    jax_explains,
    read_cache_miss,
)

HEAD = "TRACING CACHE MISS at train.py:7:3 (<module>):\n"
SEEN = (
    HEAD + "  for step defined at /d/train.py:3\n"
    "  all previously seen cache keys differ. For the closest previous key:\n"
)
TYPES = SEEN + "  different input types:\n"
TREE = SEEN + "  different input pytree:\n"
LONG = "PyTreeDef(" + "*, " * 40 + ")"


@pytest.mark.parametrize(
    ("text", "reason"),
    [
        (TYPES + "  * at x, now f32[4] and before f32[3]", "x: f32[3] -> f32[4]"),
        (
            TYPES + "  * at x['a'][0], now f32[4] and before f32[3]\n"
            "  * at y, now i32[] and before i8[]",
            "x['a'][0]: f32[3] -> f32[4]; y: i8[] -> i32[]",
        ),
        (
            TYPES + "  * at x, now f32[]({}){weak_type=True} and before f32[]({}){weak_type=False}"
            "https://docs.jax.dev/en/latest/type_promotion.html#weak-types",
            "x: f32[] -> f32[] (weak)",
        ),
        (
            TREE + "  * at input path [0][1], now <class 'jax.Static'> with pytree metadata "
            "Static(val=3) and before <class 'jax.Static'> with pytree metadata Static(val=2), so the "
            "pytree node metadata does not match",
            "args[1]: 2 -> 3",
        ),
        (
            TREE
            + "  * at input path [1], now <class 'dict'> with 1 child and before <class 'dict'> "
            "with 0 child, so the numbers of children do not match, with the symmetric difference of "
            "key sets: {'n'}",
            "kwargs: dict with 0 child -> dict with 1 child, keys {'n'}",
        ),
        (
            TREE + f"  * at input path [0], now {LONG}'b'{LONG} and before {LONG}'a'{LONG}",
            "args: …, *, *, )'a'PyTreeDef… -> …, *, *, )'b'PyTreeDef…",
        ),
        (
            SEEN + "  Tracing context doesn't match, e.g. due to config or context manager.\n"
            "  * jax_enable_x64 differs: now True and before False",
            "jax_enable_x64: False -> True",
        ),
        (SEEN + "  cache miss explanation unavailable", "JAX does not say what differs"),
        (SEEN + "  something new\n  in two lines", "something new; in two lines"),
        (HEAD + "  never seen function:\n    step id=14 defined at /d/train.py:3", "first call"),
        (
            HEAD
            + "  never seen function:\n    step id=14 defined at /d/train.py:3\n  but seen another "
            "function defined on the same line; maybe the function is\n  being re-defined",
            "a new function each time: make and jit it once, outside of the loop",
        ),
    ],
)
def test_a_paragraph_is_read(text, reason):
    assert read_cache_miss(text) == CacheMiss("step", "/d/train.py", 3, reason)


def test_a_function_without_a_place_and_an_unknown_paragraph_are_borne():
    text = HEAD + "  never seen function:\n    <unknown> id=14"
    assert read_cache_miss(text) == CacheMiss("<unknown>", "", 0, "first call")
    assert read_cache_miss(HEAD + "  for reasons of its own") is None


def test_explanations_are_heard_and_not_printed(caplog):
    heard = []
    before = jax.config.values["jax_explain_cache_misses"]
    with cache_misses_reported_to(heard.append), cache_misses_reported_to(heard.append):
        jax.jit(lambda pear: pear + 1)(jnp.ones(2))
        assert jax_explains()
    assert [miss.function for miss in heard] == ["<lambda>", "<lambda>"]
    assert heard[0].file == __file__
    assert not caplog.records
    assert jax.config.values["jax_explain_cache_misses"] == before
    assert not jax_explains()
    # Nobody listens any more, and other records were never touched.
    jax.jit(lambda pear: pear + 2)(jnp.ones(2))
    logging.getLogger("jax").warning("a warning")
    assert len(heard) == 2
    assert [record.getMessage() for record in caplog.records] == ["a warning"]


def test_who_had_asked_for_explanations_still_sees_them(caplog):
    heard = []
    jax.config.update("jax_explain_cache_misses", True)
    try:
        with cache_misses_reported_to(heard.append):
            jax.jit(lambda pear: pear + 1)(jnp.ones(2))
        assert jax.config.values["jax_explain_cache_misses"]
    finally:
        jax.config.update("jax_explain_cache_misses", False)
    assert len(heard) == 1
    assert "CACHE MISS" in caplog.text


def test_a_silenced_logger_is_noticed():
    logger = logging.getLogger("jax")
    level = logger.level
    with cache_misses_reported_to(lambda miss: None):
        logger.setLevel(logging.ERROR)
        try:
            assert not jax_explains()
        finally:
            logger.setLevel(level)
