"""Here `equinox` is Vernal. These tests are a pass of their own (`make test-stack`): the others import the real one."""

import jax

import vernal.compat

# What the libraries built on Equinox are written for.
jax.config.update("jax_numpy_dtype_promotion", "standard")
jax.config.update("jax_numpy_rank_promotion", "allow")
jax.config.update("jax_enable_x64", True)

vernal.compat.install()
