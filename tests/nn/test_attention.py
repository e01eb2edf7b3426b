"""The core of attention against the formula written out, for every kind of mask and every way to compute it."""

import inspect

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from vernal import nn
from vernal.testing import GetKey

T, S, HEADS, KV_HEADS, SIZE, VALUE_SIZE = 11, 13, 4, 2, 6, 5


def reference(query, key, value, visible, bias, scale=None):
    """The formula, head by head, in NumPy's float64; `visible` and `bias` of shape `(heads, T, S)`."""
    query, key, value = (np.asarray(a, np.float64) for a in (query, key, value))
    out = np.zeros((*query.shape[:2], value.shape[-1]))
    for head in range(query.shape[1]):
        shared = head // (query.shape[1] // key.shape[1])
        scores = query[:, head] @ key[:, shared].T
        scores = scores * (query.shape[-1] ** -0.5 if scale is None else scale) + bias[head]
        powers = np.where(visible[head], np.exp(scores), 0)
        total = powers.sum(1, keepdims=True)
        out[:, head] = powers / np.where(total == 0, 1, total) @ value[:, shared]
    return out


def in_jax(query, key, value, visible, bias):
    """The formula once more, for its derivative: as sums of exponentials, without any trick."""
    group = query.shape[-2] // key.shape[-2]
    key, value = (jnp.repeat(a, group, axis=-2) for a in (key, value))
    scores = jnp.einsum("tnh,snh->nts", query, key) * query.shape[-1] ** -0.5 + bias
    powers = jnp.where(visible, jnp.exp(scores), 0)
    total = powers.sum(-1, keepdims=True)
    return jnp.einsum("nts,snh->tnh", powers / jnp.where(total == 0, 1, total), value)


ROWS, COLUMNS = np.arange(T)[:, None], np.arange(S)[None]
RANDOM = np.random.default_rng(0)
QUERY_SEGMENTS, KEY_SEGMENTS = np.arange(T) // 4, np.arange(S) // 5
MASK = RANDOM.random((T, S)) < 0.6
MASK[3] = False  # a query that sees nothing
HEAD_MASK = RANDOM.random((HEADS, T, S)) < 0.6
KEY_POSITIONS = RANDOM.permutation(S) - 3  # three of the places are empty
QUERY_POSITIONS = RANDOM.permutation(T)

CONDITIONS = {
    "everything": ({}, np.ones((T, S), bool)),
    "causal": ({"causal": True}, ROWS >= COLUMNS),
    "window": (
        {"window": 3, "mask": MASK[:, :1]},
        (abs(ROWS - COLUMNS) < 3) & MASK[:, :1],
    ),
    "causal window": (
        {"causal": True, "window": 3},
        (ROWS >= COLUMNS) & (ROWS - COLUMNS < 3),
    ),
    "segments": (
        {"segments": (QUERY_SEGMENTS, KEY_SEGMENTS), "causal": True, "window": 99},
        (QUERY_SEGMENTS[:, None] == KEY_SEGMENTS) & (ROWS >= COLUMNS),
    ),
    "mask": ({"mask": MASK}, MASK),
    "mask by head": ({"mask": HEAD_MASK, "window": 6}, HEAD_MASK & (abs(ROWS - COLUMNS) < 6)),
    "mask of keys": (
        {"mask": HEAD_MASK[:, :1], "causal": True},
        HEAD_MASK[:, :1] & (ROWS >= COLUMNS),
    ),
    "positions": (
        {
            "causal": True,
            "window": 7,
            "query_positions": QUERY_POSITIONS,
            "key_positions": KEY_POSITIONS,
        },
        (QUERY_POSITIONS[:, None] >= KEY_POSITIONS)
        & (QUERY_POSITIONS[:, None] - KEY_POSITIONS < 7)
        & (KEY_POSITIONS >= 0),
    ),
    "empty places": ({"key_positions": KEY_POSITIONS}, (KEY_POSITIONS >= 0) & (ROWS >= 0)),
}


def example(getkey, dtype=np.float32, batch=()):
    """Queries, keys, values, biases. Drawn by NumPy, which has nothing to compile."""
    draw = np.random.default_rng(getkey.seed).normal
    shapes = [(T, HEADS, SIZE), (S, KV_HEADS, SIZE), (S, KV_HEADS, VALUE_SIZE), (HEADS, T, S)]
    return [jnp.asarray(draw(size=(*batch, *shape)), dtype) for shape in shapes]


@pytest.fixture
def small_blocks(monkeypatch):
    """Blocks of few queries, so that short examples have several of them, the last one not full."""
    monkeypatch.setattr("vernal.nn._attention.block_rows", lambda *_: 2)


@pytest.mark.parametrize("name", CONDITIONS)
@pytest.mark.sample(6)
def test_it_is_the_formula_with_its_derivatives(name, getkey, small_blocks):
    conditions, visible = CONDITIONS[name]
    visible = np.broadcast_to(visible, (HEADS, T, S))
    with jax.enable_x64(True):
        *operands, bias = example(getkey, jnp.float64)
        point, direction = (*operands, bias), tuple(a[::-1] for a in (*operands, bias))
        weights = np.random.default_rng(1).normal(size=(T, HEADS, VALUE_SIZE))

        @jax.jit
        def all_ways(point, direction):
            def ours(implementation):
                def f(query, key, value, bias):
                    return nn.attention(
                        query, key, value, bias=bias, implementation=implementation, **conditions
                    )

                return f

            def derivatives(f):
                gradient = jax.grad(lambda *p: (f(*p) * weights).sum(), range(4))
                if name == "causal window":
                    return jax.jvp(f, point, direction), jax.jvp(gradient, point, direction)
                return jax.jvp(f, point, direction), gradient(*point)

            formula = derivatives(lambda q, k, v, bias: in_jax(q, k, v, visible, bias))
            return formula, derivatives(ours("dense")), derivatives(ours("blockwise"))

        formula, dense, blockwise = all_ways(point, direction)
        exact = reference(*operands, visible, bias)
        np.testing.assert_allclose(formula[0][0], exact, atol=1e-12)
        for way in (dense, blockwise):
            jax.tree.map(lambda a, b: np.testing.assert_allclose(a, b, atol=1e-10), way, formula)


@pytest.mark.parametrize("implementation", ["dense", "blockwise"])
def test_batch_axes_are_those_of_vmap(implementation, getkey, small_blocks):
    operands = example(getkey, batch=(2, 3))
    mask, segments, key_segments, positions = (
        np.random.default_rng(0).integers(*bounds, size=(2, 3, *shape))
        for bounds, shape in (
            ((0, 4), (1, T, S)),
            ((0, 2), (T,)),
            ((0, 2), (S,)),
            ((-1, T), (S,)),
        )
    )

    def loss(run):
        def f(operands):
            query, key, value, bias = operands
            y = run(query, key, value, bias, mask, segments, key_segments, positions)
            return (y**2).sum(), y

        return jax.value_and_grad(f, has_aux=True)

    def attend(query, key, value, bias, mask, segments, key_segments, positions):
        return nn.attention(
            query,
            key,
            value,
            bias=bias,
            mask=mask > 0,
            segments=(segments, key_segments),
            causal=True,
            key_positions=positions,
            implementation=implementation,
        )

    @jax.jit
    def both(operands):
        return loss(attend)(operands), loss(jax.vmap(jax.vmap(attend)))(operands)

    whole, mapped = both(operands)
    jax.tree.map(lambda a, b: np.testing.assert_allclose(a, b, rtol=1e-4, atol=1e-5), whole, mapped)


def test_half_precision_is_as_exact_as_it_can_be(getkey, small_blocks):
    dtype = jnp.bfloat16
    visible = np.broadcast_to(ROWS >= COLUMNS, (HEADS, T, S))
    *operands, bias = example(getkey, dtype)

    @jax.jit
    def both(operands, bias):
        def loss(operands, way):
            y = nn.attention(*operands, bias=bias, causal=True, implementation=way)
            return y.astype(jnp.float32).sum()

        ways = [jax.value_and_grad(loss)(operands, way) for way in ("dense", "blockwise")]
        return *ways, nn.attention(*operands, bias=bias, causal=True, scale=0.5)

    dense, blockwise, out = both(operands, bias)
    exact = reference(*operands, visible, np.asarray(bias, np.float64), scale=0.5)
    eps = float(jnp.finfo(dtype).eps)
    assert out.dtype == dtype and {a.dtype for a in dense[1]} == {jnp.dtype(dtype)}
    np.testing.assert_allclose(np.asarray(out, np.float64), exact, atol=max(4 * eps, 1e-5))
    for a, b in zip(jax.tree.leaves(dense), jax.tree.leaves(blockwise), strict=True):
        a, b = np.asarray(a, np.float32), np.asarray(b, np.float32)
        np.testing.assert_allclose(a, b, rtol=20 * eps, atol=20 * eps)


def test_products_of_half_precision_have_sums_in_single(getkey):
    jaxpr = jax.make_jaxpr(lambda q, k, v, b: nn.attention(q, k, v))(*example(getkey, jnp.bfloat16))
    kinds = {e.primitive.name: e.outvars[0].aval.dtype for e in _equations(jaxpr)}
    for name in ("dot_general", "exp", "reduce_sum", "reduce_max"):
        assert kinds[name] == jnp.float32


def _equations(jaxpr):
    for equation in jaxpr.eqns:
        yield equation
        for inner in jax.tree.leaves(list(equation.params.values())):
            if hasattr(inner, "eqns"):
                yield from _equations(inner)


def test_no_query_or_no_key_gives_nothing_or_zeros(getkey):
    query, key, value, _ = example(getkey)
    for way in ("dense", "blockwise"):
        none = nn.attention(query[:0], key, value, implementation=way)
        assert none.shape == (0, HEADS, VALUE_SIZE)
        assert not nn.attention(query, key[:0], value[:0], implementation=way).any()


def test_a_bias_of_minus_infinity_hides_and_has_finite_gradients(getkey):
    query, key, value, _ = example(getkey)
    bias = jnp.where(MASK, 0.0, -jnp.inf)

    def loss(operands, **condition):
        return (nn.attention(*operands, **condition) ** 2).sum()

    hidden, masked = jax.jit(
        lambda o: (
            jax.value_and_grad(loss)(o, bias=bias),
            jax.value_and_grad(loss)(o, mask=jnp.asarray(MASK)),
        )
    )((query, key, value))
    jax.tree.map(lambda a, b: np.testing.assert_allclose(a, b, atol=1e-5), hidden, masked)


def fused(monkeypatch, calls):
    """A machine with a GPU, whose fused kernel is JAX's own plain implementation."""
    plain = jax.nn.dot_product_attention

    def kernel(*args, implementation, **kwargs):
        calls.append((implementation, kwargs))
        with jax.numpy_dtype_promotion("standard"):  # JAX itself relies on it here.
            return plain(*args, implementation="xla", **kwargs)

    monkeypatch.setattr(jax.nn, "dot_product_attention", kernel)
    monkeypatch.setattr(jax, "default_backend", lambda: "gpu")


@pytest.mark.parametrize(
    "conditions", [{}, {"causal": True}, {"causal": True, "window": 3}, {"scale": 0.1}], ids=str
)
def test_a_gpu_uses_the_fused_kernel_where_it_applies(conditions, monkeypatch):
    draw = np.random.default_rng(0).normal
    query = jnp.asarray(draw(size=(2, 3, 7, 4, 8)), jnp.bfloat16)
    key, value = (jnp.asarray(draw(size=(2, 3, 7, 2, 8)), jnp.bfloat16) for _ in range(2))
    expected = nn.attention(query, key, value, **conditions)
    calls = []
    fused(monkeypatch, calls)
    for implementation in (None, "cudnn"):
        got = nn.attention(query, key, value, implementation=implementation, **conditions)
        difference = (got - expected).astype(jnp.float32)
        assert got.shape == expected.shape and abs(difference).max() < 0.03
    assert [name for name, _ in calls] == ["cudnn", "cudnn"]
    nn.attention(query, key, value, segments=jnp.zeros(7, int), **conditions)
    nn.attention(query, key, value, implementation="dense", **conditions)
    assert len(calls) == 2


@pytest.mark.parametrize(
    "conditions", [{}, {"causal": True}, {"causal": True, "window": 3}], ids=str
)
@pytest.mark.parametrize(
    "shape", [(6, 6), (6, 1), (4, 1, 6), (1, 3, 1, 6, 6), (2, 1, 4, 6, 6), (2, 3, 1, 1, 6)], ids=str
)
@pytest.mark.sample(3)
def test_the_fused_kernel_takes_a_mask(shape, conditions, monkeypatch):
    rng = np.random.default_rng(0)
    query = jnp.asarray(rng.normal(size=(2, 3, 6, 4, 8)), jnp.bfloat16)
    key, value = (jnp.asarray(rng.normal(size=(2, 3, 6, 2, 8)), jnp.bfloat16) for _ in range(2))
    # Some queries see no key at all.
    mask = jnp.asarray(rng.random(shape) < 0.3)

    def loss(operands):
        out = nn.attention(*operands, mask=mask, **conditions).astype(jnp.float32)
        return jnp.sum(out**2 * jnp.cos(jnp.arange(out.size).reshape(out.shape))), out

    of_both = jax.value_and_grad(loss, has_aux=True)
    (_, expected), slopes = of_both((query, key, value))
    calls = []
    fused(monkeypatch, calls)
    with jax.numpy_dtype_promotion("standard"):
        (_, got), found = of_both((query, key, value))
    assert [name for name, _ in calls] == ["cudnn"]
    assert not np.asarray(got == 0).all() and np.array_equal(got == 0, expected == 0)
    for a, b in zip([got, *found], [expected, *slopes], strict=True):
        np.testing.assert_allclose(a.astype(jnp.float32), b.astype(jnp.float32), atol=0.06)


@pytest.mark.parametrize(
    ("change", "conditions", "obstacle"),
    [
        ({"dtype": jnp.float32}, {}, "float16 or bfloat16, not float32"),
        ({"size": 6}, {}, "a multiple of 8, not"),
        ({"length": 0}, {}, "arrays that are not empty"),
        ({}, {"segments": np.zeros(5, int)}, "no positions, segments or bias"),
        ({}, {"bias": np.zeros((5, 5))}, "no positions, segments or bias"),
        ({}, {"mask": np.ones((5, 5), bool)}, "even numbers of queries and of keys"),
        ({}, {"window": 2}, "`causal=True` together with a window"),
        ({"queries": 4}, {"causal": True}, "as many queries as keys"),
    ],
)
def test_the_fused_kernel_says_what_it_cannot_do(change, conditions, obstacle):
    sizes = {"dtype": jnp.bfloat16, "size": 8, "length": 5, "queries": None} | change
    key = jnp.zeros((sizes["length"], 2, sizes["size"]), sizes["dtype"])
    query = key if sizes["queries"] is None else key[: sizes["queries"]]
    with pytest.raises(ValueError, match=f"(?s)the fused kernel cannot compute.*{obstacle}"):
        nn.attention(query, key, key, implementation="cudnn", **conditions)


def test_the_choice_is_by_size():
    def loops(length, **conditions):
        x = jax.ShapeDtypeStruct((length, 2, 8), jnp.float32)
        return "scan" in str(
            jax.make_jaxpr(lambda x: nn.attention(x, x, x, causal=True, **conditions))(x)
        )

    assert not loops(128) and loops(4096) and not loops(4096, implementation="dense")


def test_arrays_that_do_not_fit_each_other_are_refused():
    query, key, value, bias = example(GetKey(0))
    for wrong in (
        (query[0], key, value),
        (query[:, :3], key, value),
        (query[..., :2], key, value),
        (query, key[:3], value),
        (query[None], key, value),
        (query, key[:, :0], value[:, :0]),
    ):
        with pytest.raises(
            ValueError, match="(?s)queries, keys and values do not match.*heads a multiple of"
        ):
            nn.attention(*wrong)
    for dtype in (jnp.bfloat16, int):
        with pytest.raises(ValueError, match="must have the same floating-point dtype"):
            nn.attention(query, key, value.astype(dtype))
    with pytest.raises(ValueError, match="the same floating-point dtype"):
        nn.attention(*(a.astype(jnp.complex64) for a in (query, key, value)))


def test_conditions_that_do_not_fit_are_refused():
    query, key, value, bias = example(GetKey(0))

    def attention(**conditions):
        return inspect.unwrap(nn.attention)(query, key, value, **conditions)

    with pytest.raises(ValueError, match="an attention window must hold at least"):
        attention(window=0)
    with pytest.raises(ValueError, match="a tuple of segments must hold two arrays"):
        attention(segments=(jnp.zeros(T, int),))
    for wrong in (jnp.zeros(T, int), (jnp.zeros(T), jnp.zeros(S, int))):
        with pytest.raises(
            ValueError, match="(?s)must hold one integer for each of the.*`segments`"
        ):
            attention(segments=wrong)
    with pytest.raises(ValueError, match="(?s)one integer for each of the keys.*`key_positions`"):
        attention(causal=True, key_positions=jnp.arange(T))
    with pytest.raises(ValueError, match="(?s)a mask must be an array of bools.*float32.*bias"):
        attention(mask=bias)
    with pytest.raises(ValueError, match="(?s)add to the scores, not bools.*`bias`.*bool.*mask="):
        attention(bias=bias > 0)
    for wrong in (bias[:2], bias[0, 0], bias[None, None], bias[:, 1:]):
        with pytest.raises(ValueError, match="(?s)the bias must have one entry"):
            attention(bias=wrong)


@pytest.mark.parametrize("name", ["mask", "bias"])
def test_three_axes_where_there_are_as_many_heads_as_examples_are_refused(name, getkey):
    queries, keys, values = (jax.random.normal(getkey(), (4, 5, 4, 8)) for _ in range(3))
    numbers = jax.random.normal(getkey(), (4, 5, 5))
    numbers = numbers > -1 if name == "mask" else numbers
    with pytest.raises(
        ValueError, match=rf"(?s)is ambiguous: heads or batch.*{name}\[:, None\] for one"
    ):
        nn.attention(queries, keys, values, **{name: numbers})
    per_example = nn.attention(queries, keys, values, **{name: numbers[:, None]})
    alone = jax.vmap(lambda q, k, v, a: nn.attention(q, k, v, **{name: a}))
    np.testing.assert_allclose(per_example, alone(queries, keys, values, numbers), atol=1e-5)
    per_head = nn.attention(queries, keys, values, **{name: numbers[None]})
    assert not np.allclose(per_head, per_example, atol=1e-3)
