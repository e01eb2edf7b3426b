"""What is given to a layer as a random key and is none: one error for all layers.

In a process of its own, because the checks of annotations that the tests run under would answer first.
"""

import inspect
import subprocess
import sys

from tests.nn.test_table import public_layers

SCRIPT = r"""
import jax, jax.numpy as jnp, numpy as np
from vernal import nn

good = jax.random.key(0)
linear = nn.Linear(3, 3, key=good)
x = jnp.ones(3)
makes = {
    nn.Linear: lambda key: nn.Linear(3, 3, key=key),
    nn.MLP: lambda key: nn.MLP(3, 3, 4, 2, key=key),
    nn.Embedding: lambda key: nn.Embedding(3, 3, key=key),
    nn.MultiheadAttention: lambda key: nn.MultiheadAttention(2, 4, key=key),
    nn.SpectralNorm: lambda key: nn.SpectralNorm(linear, key=key),
    nn.Stack: lambda key: nn.Stack(lambda key: nn.Linear(3, 3, key=key), 2, key=key),
    nn.Conv: lambda key: nn.Conv(2, 1, 1, 3, key=key),
    nn.ConvTranspose: lambda key: nn.ConvTranspose(2, 1, 1, 3, key=key),
}
for d in (1, 2, 3):
    for name in (f"Conv{d}d", f"ConvTranspose{d}d"):
        makes[getattr(nn, name)] = lambda key, name=name: getattr(nn, name)(1, 1, 3, key=key)
for name in ("RNN", "GRU", "LSTM"):
    makes[getattr(nn, name)] = lambda key, name=name: getattr(nn, name)(3, 3, key=key)
    name += "Cell"
    makes[getattr(nn, name)] = lambda key, name=name: getattr(nn, name)(3, 3, key=key)
calls = {
    "Dropout": lambda key: nn.Dropout(0.5)(x, key=key),
    "DropPath": lambda key: nn.DropPath(0.5)(x, key=key),
    "Sequential": lambda key: nn.Sequential([linear])(x, key=key),
    "Stack ": lambda key: nn.Stack.of([linear, linear])(x, key=key),
    "LSTM ": lambda key: nn.LSTM(3, 3, 2, dropout_p=0.5, key=good)(jnp.ones((4, 3)), key=key),
    "keys": lambda key: nn.keys(nn.Dropout(0.5), key),
    "apply": lambda key: nn.apply(nn.Dropout(0.5), x, key=key),
    "initialise": lambda key: nn.initialise(linear, {"bias": jax.nn.initializers.zeros}, key),
    "this layer": lambda key: nn.use_key(key, None),
}
wrong = [0, 1.5, "a", [0, 1], (0, 1), np.array([0, 1]), jnp.ones(2), jax.random.split(good, 2)]
wrong.append(jnp.zeros(4, jnp.uint32))
for what, call in {**makes, **calls}.items():
    name = what.strip() if isinstance(what, str) else what.__name__
    for key in wrong:
        try:
            call(key)
        except TypeError as error:
            text = str(error)
            ours = text.startswith(f"`{name}` was not given a random key") and "jax.random.split(key, n)" in text
            assert ours, (name, key, text)
        else:
            raise AssertionError((name, key))
    call(good), call(jax.random.PRNGKey(0)), call(np.asarray(jax.random.PRNGKey(0)))
with jax.default_prng_impl("rbg"):
    nn.Linear(3, 3, key=jax.random.PRNGKey(0)), nn.Linear(3, 3, key=good)
print(*sorted(cls.__name__ for cls in makes))
"""


def test_every_layer_refuses_what_is_no_random_key():
    done = subprocess.run(
        [sys.executable, "-c", SCRIPT], capture_output=True, text=True, timeout=300
    )
    assert done.returncode == 0, done.stderr
    wanted = {
        cls.__name__
        for cls in public_layers()
        if "key" in inspect.signature(cls.__init__).parameters
    }
    assert set(done.stdout.split()) == wanted
