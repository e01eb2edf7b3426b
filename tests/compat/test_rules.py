"""Where Equinox's rules differ from Vernal's, `vernal.compat` keeps Equinox's. Both are asked, wherever they can be."""

import equinox
import equinox.internal
import jax
import jax.numpy as jnp
import numpy as np
import pytest

import vernal
from vernal.compat import equinox as compat

BOTH = pytest.mark.parametrize("eqx", [equinox, compat], ids=["Equinox", "Vernal"])


@BOTH
def test_every_field_that_is_not_static_is_a_child(eqx):
    class Model(eqx.Module):
        weight: object
        activation: object
        rate: object
        name: str = eqx.field(static=True, default="model")

    model = Model(jnp.ones(2), jnp.tanh, 0.5)
    leaves = jax.tree.leaves(model)
    assert leaves[1] is jnp.tanh and leaves[2] == 0.5 and len(leaves) == 3
    kept, rest = eqx.partition(model, eqx.is_array)
    assert kept.activation is None and rest.weight is None
    assert eqx.combine(kept, rest).rate == 0.5
    assert eqx.filter_jit(lambda m: m.activation(m.weight) * m.rate)(model).shape == (2,)


@BOTH
def test_strict_and_abstract_are_only_arguments(eqx):
    class Base(eqx.Module, strict=True):
        def method(self):
            return 1

    class Derived(Base, strict=True):
        def method(self):
            return 2

    class Abstract(eqx.Module, strict=eqx.StrictConfig(force_abstact=True)):
        pass

    assert Derived().method() == 2
    with pytest.raises(TypeError, match="abstract"):
        Abstract()


@BOTH
def test_documentation_may_be_assigned_afterwards(eqx):
    class Model(eqx.Module):
        x: int

    Model.__init__.__doc__ = "**Arguments:** x"
    assert Model.__init__.__doc__ == "**Arguments:** x" and Model(1).x == 1


@BOTH
def test_a_static_field_of_old(eqx):
    with pytest.warns(UserWarning, match="static_field"):

        class Model(eqx.Module):
            x: object = eqx.static_field()

    assert jax.tree.leaves(Model(1)) == []


@BOTH
def test_rules_are_given_none_for_what_is_not_differentiated(eqx):
    seen = []

    @eqx.filter_custom_jvp
    def product(x, y, name):
        return x * y

    def rule(primals, tangents, **kwargs):
        (x, y, _), (x_dot, y_dot, name_dot) = primals, tangents
        seen.append((y_dot, name_dot))
        return x * y, x_dot * y

    assert product.def_jvp(rule) is None
    assert jax.grad(lambda x: product(x, jnp.array(3.0), "name"))(jnp.array(2.0)) == 3.0
    assert seen == [(None, None)]


@BOTH
def test_rules_of_reverse_mode(eqx):
    @eqx.filter_custom_vjp
    def split(x, y):
        return x * y, x + y

    def fwd(perturbed, x, y):
        assert perturbed is True
        return (x * y, x + y), y

    def bwd(residuals, gradients, perturbed, x, y):
        assert gradients[1] is None
        return 10 * residuals * gradients[0]

    assert split.def_fwd(fwd) is None and split.def_bwd(bwd) is None
    assert jax.grad(lambda x: split(x, jnp.array(3.0))[0])(jnp.array(2.0)) == 30.0


def test_a_rule_on_a_method():
    # (Equinox calls such a method without its object.)
    class Model(compat.Module):
        factor: jax.Array

        @compat.filter_custom_jvp
        def times(self, x):
            return self.factor * x

    def rule(primals, tangents):
        (model, x), (_, x_dot) = primals, tangents
        return model.factor * x, 7 * x_dot

    Model.times.def_jvp(rule)
    model = Model(jnp.array(2.0))
    assert model.times(jnp.array(3.0)) == 6.0
    assert jax.grad(model.times)(jnp.array(1.0)) == 7.0


@BOTH
def test_a_converted_closure_has_its_program_among_its_leaves(eqx):
    scale = jnp.array(2.0)
    converted = eqx.filter_closure_convert(lambda x: scale * x, jnp.ones(()))
    again = eqx.filter_closure_convert(lambda x: scale * x, jnp.ones(()))
    arrays = eqx.filter(converted, eqx.is_array)
    assert jax.tree.structure(converted) == jax.tree.structure(again)
    rest = eqx.filter(again, eqx.is_array, inverse=True)
    assert eqx.combine(arrays, rest)(jnp.array(3.0)) == 6.0
    assert converted.out_struct.shape == () and converted.in_struct[0][0].shape == ()
    assert eqx.filter_closure_convert(converted, jnp.ones(()))(jnp.array(3.0)) == 6.0

    def plain(x):
        return x

    assert eqx.filter_closure_convert(plain, 1.0)(1.0) == 1.0


@BOTH
def test_failed_checks_have_equinoxs_classes(eqx):
    check = eqx.filter_jit(lambda x: eqx.error_if(x, x < 0, "it is negative"))
    with pytest.raises(eqx.EquinoxRuntimeError, match="it is negative"):
        check(jnp.array(-1.0))
    with pytest.raises((eqx.EquinoxTracetimeError, RuntimeError), match="at once"):
        eqx.error_if(jnp.ones(()), True, "at once")


@BOTH
def test_loops_ignore_the_options_of_other_kinds(eqx):
    for kind in ("lax", "checkpointed", "bounded"):
        out = eqx.internal.while_loop(
            lambda x: x < 10,
            lambda x: 2 * x,
            jnp.array(1),
            kind=kind,
            max_steps=8,
            checkpoints=3,
            base=4,
        )
        assert out == 16
    for kind in ("lax", "checkpointed"):
        carry, _ = eqx.internal.scan(
            lambda c, x: (c + x, None), jnp.array(0), jnp.arange(4), kind=kind, checkpoints=2
        )
        assert carry == 6


@BOTH
def test_small_helpers(eqx):
    internal = eqx.internal
    first, second = internal.str2jax("sentinel"), internal.str2jax("sentinel")
    assert repr(first) == "sentinel" and jax.tree.leaves(first) == []
    assert jax.tree.structure(first) != jax.tree.structure(second)
    assert internal.doc_repr(3, "three") == 3 and internal.doc_remove_args("x")(len) is len
    out = internal.eval_zero(lambda x: (x[None], x > 0), jnp.ones(3))
    assert out[0].shape == (1, 3) and not out[1].any()
    assert internal.eval_empty(lambda x: x[None], jnp.ones(3)).shape == (1, 3)
    assert internal.left_broadcast_to(jnp.ones((2, 3)), (2, 3, 4)).shape == (2, 3, 4)
    shape = internal.cached_filter_eval_shape(lambda x: x + 1, jnp.ones(2))
    assert shape == jax.ShapeDtypeStruct((2,), jnp.float32)
    tree = {"a": jnp.ones(2), "b": 3, "c": None}
    leaves, static = internal.hashable_partition(tree, eqx.is_array)
    hash(static)
    assert equinox.tree_equal(internal.hashable_combine(leaves, static), tree)
    twice = [lambda x: x + 10, lambda x: x - 3]
    assert internal.scan_trick(lambda x: 2 * x + 1, twice, jnp.array(1.0)) == 49.0
    text = internal.TreeWLCustom(lambda x: False, True, False)(jnp.ones(2))
    assert "f32[2]" in str(text) and internal.TreeWLCustom(lambda x: False, True, False)(3) is None

    class Messages(metaclass=internal.ContainerMeta):
        fine = ""
        wrong = "it is wrong"

    assert Messages[Messages.wrong] == "it is wrong" and len(Messages) == 2


def test_a_source_of_keys_takes_its_seed_from_the_environment(monkeypatch):
    monkeypatch.setenv("EQX_GETKEY_SEED", "5")
    first, second = compat.internal.GetKey(), compat.internal.GetKey(7)
    assert (first.seed, second.seed) == (5, 7) and "seed=5" in repr(first)
    monkeypatch.delenv("EQX_GETKEY_SEED")
    assert compat.internal.GetKey().seed != compat.internal.GetKey().seed


def test_primitives_that_nobody_uses_do_what_they_say():
    (out,) = compat.internal.announce_jaxpr_p.bind(jnp.ones(2))
    assert (out == 1).all()

    def set_second(xs, x, pred):
        return compat.internal.maybe_set_p.bind(pred, xs, x, jnp.array(1))[0]

    xs, x = jnp.zeros(3), jnp.array(5.0)
    assert set_second(xs, x, True).tolist() == [0, 5, 0]
    assert set_second(xs, x, False).tolist() == [0, 0, 0]
    gradients = jax.grad(lambda xs, x: set_second(xs, x, True).sum(), (0, 1))(xs, x)
    assert gradients[0].tolist() == [1, 0, 1] and gradients[1] == 1.0
    identity = jax.grad(lambda x: compat.internal.announce_jaxpr_p.bind(x)[0])
    assert identity(jnp.array(2.0)) == 1.0


def test_onnx_is_refused():
    with pytest.raises(NotImplementedError, match="Vernal does not write ONNX"):
        compat.internal.to_onnx(jnp.sin)


def test_vernals_own_modules_are_modules_here_too():
    layer = vernal.nn.Conv2d(1, 1, 3, key=jax.random.key(0))
    assert isinstance(layer, compat.Module) and issubclass(vernal.nn.Linear, compat.Module)
    assert isinstance(layer, compat.nn.Conv)

    class Mine(compat.Module):
        pass

    assert not isinstance(layer, Mine) and isinstance(Mine(), vernal.Module)


@BOTH
@pytest.mark.parametrize(
    "value", [True, 3, 2.5, jnp.arange(2)], ids=["bool", "int", "float", "array"]
)
def test_a_forward_rule_may_say_that_there_is_no_tangent(eqx, value):
    """`jax.jvp` gives float0 for what has none. A rule may give zeros for Python floats, which have none in Equinox's
    gradients."""

    @eqx.filter_custom_jvp
    def f(x):
        return 2 * x, value

    @f.def_jvp
    def rule(primals, tangents):
        (x,), (dot,) = primals, tangents
        none = 0.0 if isinstance(value, float) else np.zeros(np.shape(value), jax.dtypes.float0)
        return (2 * x, value), (2 * dot, none)

    gradient = eqx.filter_grad(lambda x: f(x)[0])
    for get in (gradient, eqx.filter_jit(gradient)):
        assert get(jnp.array(1.0)) == 2.0


VALUES = [True, 3, 2.5, "a", len, jnp.arange(2), np.arange(2)]


@BOTH
@pytest.mark.parametrize("value", VALUES, ids=lambda x: type(x).__name__)
@pytest.mark.parametrize("given", [0.0, jnp.ones(()), np.zeros((), jax.dtypes.float0), None])
def test_a_backward_rule_may_give_gradients_to_what_has_none(eqx, value, given):
    @eqx.filter_custom_vjp
    def f(pair):
        return 2 * pair[0]

    @f.def_fwd
    def forward(perturbed, pair):
        return 2 * pair[0], None

    @f.def_bwd
    def backward(residuals, gradient, perturbed, pair):
        return 3 * gradient, given

    gradient = eqx.filter_grad(lambda x: f((x, value)))
    of_both = eqx.filter_grad(f)((jnp.array(1.0), value))
    assert gradient(jnp.array(1.0)) == eqx.filter_jit(gradient)(jnp.array(1.0)) == of_both[0] == 3
    assert of_both[1] is None


@BOTH
def test_keywords_may_have_any_name(eqx):
    names = ("rule", "residuals", "vjp_arg", "tangents")

    @eqx.filter_custom_vjp
    def f(x, **keywords):
        return x * sum(keywords.values())

    @f.def_fwd
    def forward(_perturbed, _x, **keywords):
        return f(_x, **keywords), None

    @f.def_bwd
    def backward(_residuals, _gradient, _perturbed, _x, **keywords):
        return sum(keywords.values()) * _gradient

    @eqx.filter_custom_jvp
    def g(x, **keywords):
        return x * sum(keywords.values())

    @g.def_jvp
    def rule(_primals, _tangents, **keywords):
        return g(*_primals, **keywords), sum(keywords.values()) * _tangents[0]

    # Equinox's `filter_custom_jvp` takes no keyword `self`.
    for h, taken in ((f, ("self", *names)), (g, names)):
        keywords = dict.fromkeys(taken, 2.0)
        gradient = eqx.filter_grad(lambda x, h=h, keywords=keywords: h(x, **keywords))
        found = gradient(jnp.array(1.0)), eqx.filter_jit(gradient)(jnp.array(1.0))
        assert found == (2 * len(taken),) * 2


def test_a_rule_that_does_not_fit_is_named():
    @compat.filter_custom_vjp
    def f(pair):
        return pair[0]

    f.def_fwd(lambda perturbed, pair: (pair[0], None))

    @f.def_bwd
    def backward(residuals, gradient, perturbed, pair):
        return gradient

    with pytest.raises(TypeError, match="of the rule `backward` does not have the structure of"):
        compat.filter_grad(f)((jnp.array(1.0), 2))

    @compat.filter_custom_jvp
    def g(x):
        return x

    @g.def_jvp
    def forward(primals, tangents):
        return primals[0]

    with pytest.raises(TypeError, match="the rule `forward` must return a pair"):
        compat.filter_grad(g)(jnp.array(1.0))
