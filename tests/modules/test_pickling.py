"""Pickles, copies, and the tools of `dataclasses`."""

import copy
import dataclasses
import gc
import pickle
import subprocess
import sys
import textwrap
import weakref
from typing import Any

import cloudpickle
import jax
import jax.numpy as jnp
import numpy as np
import pytest

from vernal import Module, Partial, field, filter_jit


class Linear(Module):
    w: jax.Array
    b: Any = None

    def __call__(self, x):
        return self.w * x

    def method(self, x):
        return self.w + x

    @filter_jit
    def jitted(self, x):
        return self.w - x


class Net(Module):
    layers: list
    act: Any = jax.nn.relu
    name: str = "net"
    size: int = field(static=True, default=3)
    extra: Any = field(default_factory=dict)


def net():
    return Net(
        [Linear(jnp.ones(2)), jax.nn.gelu, (jnp.ravel, 1.5), {"f": jnp.add, "w": np.zeros(2)}]
    )


@filter_jit
def compiled(x):
    return x + 1


COPIES = {
    "pickle": lambda x: pickle.loads(pickle.dumps(x)),
    "pickle 2": lambda x: pickle.loads(pickle.dumps(x, protocol=2)),
    "cloudpickle": lambda x: pickle.loads(cloudpickle.dumps(x)),
    "copy": copy.copy,
    "deepcopy": copy.deepcopy,
    "replace": dataclasses.replace,
    "map": lambda x: jax.tree.map(lambda y: y, x),
    **({"copy.replace": copy.replace} if hasattr(copy, "replace") else {}),
}


@pytest.mark.parametrize("again", COPIES.values(), ids=COPIES)
def test_a_copy_has_the_same_treedef_and_the_same_functions(again):
    m = net()
    new = again(m)
    assert (new is m) is (again is copy.copy)
    assert jax.tree.structure(new) == jax.tree.structure(m)
    assert new == m
    assert new.act is jax.nn.relu
    assert new.layers[1] is jax.nn.gelu
    assert new.layers[2] == (jnp.ravel, 1.5)
    assert new.layers[3]["f"] is jnp.add
    with pytest.raises(dataclasses.FrozenInstanceError, match="cannot assign"):
        new.act = 1


@pytest.mark.parametrize("again", COPIES.values(), ids=COPIES)
def test_a_copy_is_a_cache_hit(again):
    count = []
    f = jax.jit(lambda m: count.append(1))
    f(net())
    f(again(net()))
    assert len(count) == 1


def test_a_copy_and_a_deep_copy_own_what_they_should():
    m = net()
    assert copy.copy(m).layers is m.layers
    assert copy.deepcopy(m).layers is not m.layers
    shared = Net([m, m])
    deep = copy.deepcopy(shared)
    assert deep.layers[0] is deep.layers[1]


def test_a_flattened_module_pickles_like_a_fresh_one():
    m = net()
    jax.tree.leaves(m)
    assert len(pickle.dumps(m)) == len(pickle.dumps(net()))


@pytest.mark.parametrize(
    "again", [COPIES["pickle"], COPIES["deepcopy"], COPIES["copy"], COPIES["cloudpickle"]]
)
def test_methods_partials_treedefs_and_compiled_functions(again):
    m = Linear(jnp.ones(2))
    assert (again(m.method)(1.0) == 2).all()
    assert (again(m.jitted)(1.0) == 0).all()
    assert (again(Partial(jnp.add, jnp.ones(2)))(1.0) == 2).all()
    assert jax.tree.structure(again(jax.tree.structure(net()))) == jax.tree.structure(
        jax.tree.structure(net())
    )
    assert again(jax.tree.structure(net())) == jax.tree.structure(net())
    assert again(compiled) is compiled
    assert again(Linear.jitted) is Linear.jitted
    assert again(Net) is Net


def test_a_mask_pickles_with_its_sorting():
    mask = jax.tree.map(lambda _: True, net())
    again = pickle.loads(pickle.dumps(mask))
    assert jax.tree.structure(again) == jax.tree.structure(net())
    assert jax.tree.leaves(again) == [True, True]


def test_shapes_and_keys_survive():
    m = Linear(jax.ShapeDtypeStruct((2,), jnp.float32), np.float32(1))
    again = pickle.loads(pickle.dumps(m))
    assert again.w == m.w
    assert type(again.b) is np.float32


def test_a_class_made_in_a_function_pickles_by_value():
    def make(scale):
        class Local(Module):
            w: jax.Array
            act: Any = jnp.tanh
            n: int = field(static=True, default=2)

            def __call__(self, x):
                return self.act(self.w * x * scale)

            def method(self):
                return self.n

        return Local

    local = make(2.0)(jnp.ones(2))
    jax.tree.leaves(local)
    again = pickle.loads(cloudpickle.dumps(local))
    assert jnp.allclose(again(1.0), local(1.0))
    assert again.method() == 2
    assert jax.tree.structure(again) == jax.tree.structure(local)


def test_a_class_of_main_is_sent_to_another_process(tmp_path):
    """cloudpickle carries the class; the other process has never seen it."""
    send, receive, file = tmp_path / "send.py", tmp_path / "receive.py", tmp_path / "model.pkl"
    body = """
        import sys, cloudpickle, jax, jax.numpy as jnp, vernal
        from typing import Any

        @jax.jit
        def activation(x):
            return jnp.tanh(x)

        class Base(vernal.Module):
            scale: vernal.AbstractVar[float]

            def scaled(self, x):
                return super().__getattribute__("scale") * x

        class Model(Base):
            layers: list
            scale: float = 2.0
            name: str = vernal.field(static=True, default="main")
            act: Any = activation

            def __call__(self, x):
                return self.act(self.scaled(self.layers[0] * x))

            def __check_init__(self):
                assert self.name

        @vernal.filter_jit
        def compiled(x):
            return x + 1

        model = Model([jnp.ones(2), jnp.tanh])
        jax.tree.leaves(model)
        with open(sys.argv[1], "wb") as file:
            cloudpickle.dump((model, model.scaled, jax.tree.structure(model), compiled), file)
    """
    send.write_text(textwrap.dedent(body))
    body = """
        import sys, pickle, jax, jax.numpy as jnp
        with open(sys.argv[1], "rb") as file:
            model, method, treedef, compiled = pickle.load(file)
        assert jnp.allclose(jax.jit(model)(jnp.ones(2)), jnp.tanh(2.0))
        assert method(1.0) == 2
        assert compiled(jnp.ones(())) == 2
        assert jax.tree.structure(model) == treedef, (jax.tree.structure(model), treedef)
        other = type(model)([jnp.zeros(2), jnp.tanh])
        assert jax.tree.structure(other) == treedef
        try:
            other.name = 1
        except AttributeError as error:
            print(error)
        print(model.name)
    """
    receive.write_text(textwrap.dedent(body))
    subprocess.run([sys.executable, str(send), str(file)], check=True, timeout=120)
    done = subprocess.run(
        [sys.executable, str(receive), str(file)], timeout=120, capture_output=True, text=True
    )
    assert done.returncode == 0, done.stderr
    assert "cannot assign `name`" in done.stdout
    assert done.stdout.endswith("main\n")


def test_the_tools_of_dataclasses():
    m = net()
    assert [f.name for f in dataclasses.fields(m)] == ["layers", "act", "name", "size", "extra"]
    assert dataclasses.is_dataclass(m)
    as_dict = dataclasses.asdict(Linear(jnp.ones(2), Linear(jnp.zeros(1))))
    assert set(as_dict) == {"w", "b"}
    assert set(as_dict["b"]) == {"w", "b"}
    assert dataclasses.astuple(Linear(1, 2))[1] == 2
    assert Net.__match_args__ == ("layers", "act", "name", "size", "extra")
    match Linear(1, "b"):
        case Linear(_, b):
            assert b == "b"


def test_replace_runs_converters_and_checks_again():
    checks = []

    class M(Module):
        x: Any = field(converter=lambda x: x + 1)
        y: Any = 0

        def __check_init__(self):
            checks.append(self.x)

    m = M(1)
    assert dataclasses.replace(m, y=5).x == 3
    assert checks == [2, 3]
    with pytest.raises(TypeError, match="unexpected keyword argument 'z'|got an unexpected"):
        dataclasses.replace(m, z=1)


def test_modules_can_be_watched_weakly_and_die_when_they_should():
    m = net()
    ref = weakref.ref(m)
    jax.tree.leaves(m)
    hash(m)
    del m
    gc.collect()
    assert ref() is None


def test_a_class_and_its_static_values_die_when_they_should():
    class Big:
        pass

    big = Big()
    ref = weakref.ref(big)
    m = Linear(jnp.ones(1), big)
    jax.tree.leaves(m)
    del m, big
    gc.collect()
    assert ref() is None
