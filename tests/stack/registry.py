"""The problems of the files beside this one, by name, and their answers as numbers."""

import functools

import jax

# Before the libraries: some of their defaults depend on it.
jax.config.update("jax_enable_x64", True)

import jax.numpy as jnp  # noqa: E402

PROBLEMS = {}


def problem(function):
    PROBLEMS[function.__name__] = function
    return function


def problems(**variants):
    """One problem for every variant: called with its value."""

    def decorate(function):
        for name, value in variants.items():
            PROBLEMS[f"{function.__name__}_{name}"] = functools.partial(function, value)
        return function

    return decorate


def answers(name):
    """The numbers of a problem, in the order of its tree."""
    return [jnp.asarray(x, float).tolist() for x in jax.tree.leaves(PROBLEMS[name]())]
