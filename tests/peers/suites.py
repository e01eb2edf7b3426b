"""The suites: what of each is run, and which of its tests may differ on Vernal, for which reason."""

import dataclasses
from collections.abc import Mapping

# The only reasons there are.
TEXT = "the text of a message"
PRIVATE = "a private name of Equinox that nobody else uses"
FEWER_TRACES = "fewer traces"
ORDER = "the order of recomputation"

QUAX_FAST = "tests.unit.test_fast_module::"


@dataclasses.dataclass(frozen=True)
class Suite:
    """The tests of a library."""

    # What fits five minutes together with the parts of all others.
    part: tuple[str, ...]
    tests: tuple[str, ...] = ("tests",)
    environment: Mapping[str, str] = dataclasses.field(default_factory=dict)
    # Tests that pass on Equinox and not on Vernal, and why.
    differs: Mapping[str, str] = dataclasses.field(default_factory=dict)


SUITES = {
    "flowjax": Suite(("tests/test_flows.py", "tests/test_bijections/test_chain.py")),
    "haliax": Suite(("tests/test_nn.py", "tests/test_scan.py", "tests/test_state_dict.py")),
    "interpax": Suite(("tests", "-k", "interp1d or spline")),
    "paramax": Suite(("tests",)),
    "quax": Suite(
        ("tests/usage", "tests/unit/test_core.py", "tests/unit/test_fast_module.py"),
        ("tests/unit", "tests/usage"),
        # What its own configuration asks a plugin for.
        {"JAX_CHECK_TRACER_LEAKS": "1"},
        {
            QUAX_FAST + "test_fast_path_available": PRIVATE,
            QUAX_FAST + "test_fast_path_actually_bypasses_equinox_slow_call": PRIVATE,
            QUAX_FAST + "test_fast_spec_precomputed": PRIVATE,
            QUAX_FAST + "test_missing_field_raises": TEXT,
            QUAX_FAST + "test_missing_fields_reported_in_field_order": TEXT,
        },
    ),
    "tinygp": Suite(("tests/test_gp.py", "tests/test_transforms.py")),
    "traceax": Suite(("tests", "-k", "Hutchinson")),
    # Its source distribution lacks the fixtures of the others.
    "zodiax": Suite(("tests",), ("tests",)),
}
