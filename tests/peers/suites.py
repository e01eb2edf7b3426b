"""The suites: what of each is run, and which of its tests may differ on Vernal, for which reason."""

import dataclasses
from collections.abc import Mapping

# The only reasons there are.
TEXT = "the text of a message"
PRIVATE = "a private name of Equinox that nobody else uses"
FEWER_TRACES = "fewer traces"
ORDER = "the order of recomputation"

QUICKLY_COMPILED = (
    "--xla_backend_optimization_level=0 --xla_llvm_disable_expensive_passes=true"
    " --xla_cpu_parallel_codegen_split_count=1"
)
INTERPAX = "tests/test_interpolate.py"


@dataclasses.dataclass(frozen=True)
class Suite:
    """The tests of a library."""

    # The arguments of each process. One that compiles too many programs crashes.
    runs: tuple[tuple[str, ...], ...] = (("tests",),)
    # What `make test` runs of it: all parts together fit five minutes.
    part: tuple[str, ...] | None = None
    environment: Mapping[str, str] = dataclasses.field(default_factory=dict)
    # Tests that pass on Equinox and not on Vernal, and why.
    differs: Mapping[str, str] = dataclasses.field(default_factory=dict)


SUITES = {
    "dlux": Suite(),
    "flowjax": Suite(),
    # But for the two files that import chex.
    "haliax": Suite((("tests", "--ignore=tests/test_fp8.py", "--ignore=tests/test_int8.py"),)),
    # Compiling its programs takes ten times as long as running them, and with all of it a process crashes.
    # But for the test whose program crashes XLA's compiler, on both.
    "interpax": Suite(
        (
            (INTERPAX, "-k", "TestInterp1D or TestInterp2D"),
            (INTERPAX, "-k", "TestInterp3D"),
            (INTERPAX, "-k", "TestAD and not test_ad_interp3d"),
            (
                INTERPAX,
                "-k",
                "not TestInterp1D and not TestInterp2D and not TestInterp3D and not TestAD",
            ),
            ("tests", f"--ignore={INTERPAX}"),
        ),
        environment={"XLA_FLAGS": QUICKLY_COMPILED},
    ),
    "paramax": Suite(part=("tests",)),
    # But for the files whose helpers its source distribution lacks.
    "quadax": Suite(
        (("tests/test_acceleration.py", "tests/test_sampled.py", "tests/test_utils.py"),)
    ),
    "quax": Suite(
        (("tests/unit", "tests/usage"),),
        part=("tests/usage", "tests/unit/test_core.py", "tests/unit/test_fast_module.py"),
        # What its own configuration asks a plugin for.
        environment={"JAX_CHECK_TRACER_LEAKS": "1"},
    ),
    "tinygp": Suite(),
    "traceax": Suite(part=("tests",)),
    # Its source distribution lacks the fixtures of many of its tests, which fail on Equinox too.
    "zodiax": Suite(part=("tests",)),
}
