"""Progress meters: what they draw, how often the host is called, and under which transformations."""

import io
import re
import sys
import threading
import types
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest

import vernal
import vernal.loops
from vernal.modules import Module
from vernal.runtime import (
    AbstractProgressMeter,
    NoProgressMeter,
    RichProgressMeter,
    TextProgressMeter,
    TqdmProgressMeter,
)
from vernal.runtime import _progress as progress_file

METER = TextProgressMeter(minimum_increase=0.25)


class Counted:
    """The host's functions, counted."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch):
        self.calls: list[str] = []
        # What was compiled before calls the functions of before.
        jax.clear_caches()
        host = progress_file._host
        for name in ("open", "move", "close"):
            monkeypatch.setattr(host, name, self.wrap(name, getattr(host, name)))

    def moves(self) -> int:
        # Closing a bar moves it first.
        return self.calls.count("move") - self.calls.count("close")

    def wrap(self, name: str, fn: Any) -> Any:
        def call(*args: Any) -> Any:
            self.calls.append(name)
            return fn(*args)

        return call


def printed_lines(capsys: Any) -> list[str]:
    jax.effects_barrier()
    return capsys.readouterr().out.splitlines()


def power(x: Any, steps: Any = 8, meter: Any = METER) -> Any:
    """`x ** steps`, with a meter in a scan."""

    def body(carry: Any, i: Any) -> Any:
        y, state = carry
        # The progress depends on what is differentiated, as the time of a solver may.
        return (y * x, meter.step(state, (i + 1) / steps + 0 * y)), None

    one = jnp.ones_like(x)
    (y, state), _ = jax.lax.scan(body, (one, meter.init()), jnp.arange(steps, dtype=x.dtype))
    meter.close(state)
    return y


def counting_loop(meter: Any, steps: int, x: Any = None) -> Any:
    def body(carry: Any) -> Any:
        i, state = carry
        return i + 1, meter.step(state, (i + 1) / steps)

    zero = jnp.zeros(()) if x is None else jnp.zeros_like(x)
    _, state = jax.lax.while_loop(lambda c: c[0] < steps, body, (zero, meter.init()))
    meter.close(state)
    return jnp.ones(())


QUARTERS = ["0.00%", "25.00%", "50.00%", "75.00%", "100.00%"]
TWO = jnp.array(2.0)

RUNS = {
    "eager": lambda: power(TWO),
    "jit": lambda: jax.jit(power)(TWO),
    "grad": lambda: jax.grad(power)(TWO),
    "jit_grad": lambda: jax.jit(jax.grad(power))(TWO),
    "jvp": lambda: jax.jit(lambda x: jax.jvp(power, (x,), (x,)))(TWO),
    "hessian": lambda: jax.jit(jax.hessian(power))(TWO),
    "vmap": lambda: jax.jit(jax.vmap(power))(jnp.stack([TWO, TWO])),
    "vmap_of_grad": lambda: jax.jit(jax.vmap(jax.grad(power)))(jnp.stack([TWO, TWO])),
    "grad_of_vmap": lambda: jax.jit(jax.grad(lambda x: jax.vmap(power)(x).sum()))(
        jnp.stack([TWO, TWO])
    ),
    "twice_vmap": lambda: jax.vmap(jax.vmap(power))(jnp.full((2, 2), 2.0)),
    "filter_jit": lambda: vernal.filter_jit(power)(TWO, meter=METER),
}


@pytest.mark.parametrize("run", RUNS)
def test_one_bar_is_drawn_under_every_transformation(run, capsys):
    RUNS[run]()
    assert printed_lines(capsys) == QUARTERS


def test_the_meter_changes_no_value_and_no_derivative(capsys):
    def value_and_derivatives(meter):
        def f(x):
            return power(x, 5, meter)

        return f(TWO), jax.grad(f)(TWO), jax.hessian(f)(TWO)

    assert value_and_derivatives(METER) == value_and_derivatives(NoProgressMeter()) == (32, 80, 160)


def test_a_meter_that_shows_nothing_leaves_nothing_in_the_program(capsys):
    jaxpr = str(jax.make_jaxpr(lambda x: power(x, 5, NoProgressMeter()))(TWO))
    assert "callback" not in jaxpr
    assert NoProgressMeter().init() is None
    assert printed_lines(capsys) == []


@pytest.mark.parametrize("steps", [10_000, 333, 7])
def test_the_host_is_called_at_most_once_for_every_percent(steps, monkeypatch, capsys):
    counted = Counted(monkeypatch)
    jax.jit(lambda: counting_loop(TextProgressMeter(minimum_increase=0.01), steps))()
    shown = [float(line.rstrip("%")) for line in printed_lines(capsys)]
    assert counted.calls.count("open") == counted.calls.count("close") == 1
    assert min(steps, 80) <= counted.moves() <= min(steps, 100)
    assert shown[0] == 0 and shown[-1] == 100
    assert all(b - a >= 0.99 for a, b in zip(shown[:-1], shown[1:-1], strict=False))


def test_a_program_that_runs_twice_draws_two_bars(capsys):
    run = jax.jit(lambda: counting_loop(METER, 4))
    run()
    run()
    assert printed_lines(capsys) == QUARTERS * 2


def test_the_slowest_element_of_a_batch_counts(capsys):
    def run(speed):
        meter = TextProgressMeter(minimum_increase=0.2)
        state = meter.init()
        for i in range(1, 6):
            state = meter.step(state, speed * i / 5)
        meter.close(state)

    jax.jit(jax.vmap(run))(jnp.array([1.0, 0.5, 2.0]))
    assert printed_lines(capsys) == ["0.00%", "20.00%", "40.00%", "50.00%"]


def test_elements_of_a_batch_may_finish_at_different_times(capsys):
    def run(speed):
        def body(carry):
            t, state = carry
            t = t + speed
            return t, METER.step(state, t)

        start = jnp.zeros_like(speed), METER.init()
        t, state = jax.lax.while_loop(lambda c: c[0] < 1, body, start)
        METER.close(state)
        return t

    out = jax.jit(jax.vmap(run))(jnp.array([0.5, 0.25, 0.125]))
    np.testing.assert_array_equal(out, [1, 1, 1])
    assert printed_lines(capsys) == QUARTERS


def test_a_loop_that_ends_early_leaves_the_bar_where_it_was(capsys):
    def run():
        state = METER.step(METER.step(METER.init(), 0.3), 0.45)
        METER.close(state)

    jax.jit(run)()
    assert printed_lines(capsys) == ["0.00%", "30.00%", "45.00%"]


def test_strange_progress_is_tamed(capsys):
    def run():
        state = METER.init()
        for progress in (-1.0, jnp.nan, 0.4, jnp.nan, 0.1, np.float16(0.75), 7):
            state = METER.step(state, progress)
        METER.close(state)

    jax.jit(run)()
    assert printed_lines(capsys) == ["0.00%", "40.00%", "75.00%", "100.00%"]


def test_steps_that_are_run_again_show_nothing(monkeypatch, capsys):
    counted = Counted(monkeypatch)

    def loop(x):
        state = METER.init()

        @jax.checkpoint
        def body(carry, i):
            y, state = carry
            return (jnp.sin(y * x), METER.step(state, (i + 1) / 4)), None

        (y, state), _ = jax.lax.scan(body, (x, state), jnp.arange(4.0))
        METER.close(state)
        return y

    jax.jit(jax.grad(loop))(TWO)
    assert printed_lines(capsys) == QUARTERS
    assert counted.calls.count("open") == 1
    # The number that the host returns is wanted by no derivative.
    assert counted.moves() == 4


@pytest.mark.parametrize("kind", ["lax", "checkpointed", "bounded"])
def test_our_loops_draw_one_bar_in_both_directions(kind, capsys):
    options = {} if kind == "lax" else {"max_steps": 8}
    if kind == "checkpointed":
        options["checkpoints"] = 2

    def run(x):
        def body(carry):
            i, y, state = carry
            return i + 1, jnp.sin(x * y), METER.step(state, (i + 1) / 4)

        start = jnp.zeros(()), x, METER.init()
        _, y, state = vernal.loops.while_loop(lambda c: c[0] < 4, body, start, kind=kind, **options)
        METER.close(state)
        return y

    y = TWO
    for _ in range(4):
        y = jnp.sin(TWO * y)
    np.testing.assert_allclose(jax.jit(run)(TWO), y, rtol=1e-6)
    assert printed_lines(capsys) == QUARTERS
    if kind != "lax":
        jax.jit(jax.grad(run))(TWO)
        assert printed_lines(capsys) == QUARTERS


def test_a_checkpoint_around_the_whole_loop_shows_both_runs(capsys):
    jax.grad(jax.checkpoint(power))(TWO)
    assert printed_lines(capsys) == QUARTERS * 2


def test_steps_of_a_closed_bar_show_nothing(capsys):
    state = METER.init()
    METER.close(METER.step(state, 0.5))
    METER.step(state, 0.75)
    METER.close(state)
    assert printed_lines(capsys) == ["0.00%", "50.00%"]


def test_several_bars_at_once_are_told_apart(capsys):
    @jax.jit
    def run():
        return METER.init(), METER.init()

    a, b = run()
    assert a.number != b.number
    a, b = METER.step(a, 0.5), METER.step(b, 1.0)
    METER.close(b)
    METER.close(METER.step(a, 1.0))
    # Only `a` and `b` together need names.
    assert printed_lines(capsys) == [
        "0.00%",
        "0.00%",
        f"[{a.number}] 50.00%",
        f"[{b.number}] 100.00%",
        "100.00%",
    ]


def test_bars_nest(capsys):
    def outer(state, i):
        counting_loop(METER, 2)
        return METER.step(state, (i + 1) / 2), None

    @jax.jit
    def run():
        METER.close(jax.lax.scan(outer, METER.init(), jnp.arange(2.0))[0])

    run()
    lines = [line.split()[-1] for line in printed_lines(capsys)]
    # The outer one, and twice the inner one.
    assert lines.count("50.00%") == lines.count("100.00%") == lines.count("0.00%") == 3


def test_eight_threads_have_eight_bars(capsys):
    run = jax.jit(lambda x: power(x))
    run(TWO)
    capsys.readouterr()
    numbers = []

    def work():
        run(TWO).block_until_ready()
        numbers.append(1)

    threads = [threading.Thread(target=work) for _ in range(8)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    lines = [line.split()[-1] for line in printed_lines(capsys)]
    assert len(numbers) == 8
    assert sorted(lines) == sorted(QUARTERS * 8)
    assert not progress_file._host.bars


def test_a_sharded_batch_has_one_bar_and_keeps_its_sharding(capsys):
    mesh = jax.make_mesh((8,), ("data",))
    with jax.set_mesh(mesh):
        x = jax.device_put(jnp.full(16, 2.0), jax.P("data"))
        out = jax.jit(jax.vmap(lambda x: power(x, 4)))(x)
        assert out.sharding.spec == jax.P("data")
    np.testing.assert_array_equal(out, np.full(16, 16.0))
    assert printed_lines(capsys) == QUARTERS


def test_the_state_is_three_scalars():
    state = jax.eval_shape(METER.init)
    assert [(x.shape, x.dtype) for x in jax.tree.leaves(state)] == [
        ((), jnp.int32),
        ((), jnp.float32),
        ((), jnp.float32),
    ]
    after = jax.eval_shape(METER.step, state, jax.ShapeDtypeStruct((), jnp.bfloat16))
    assert jax.tree.structure(after) == jax.tree.structure(state)


@pytest.mark.parametrize("progress", [jnp.zeros(2), jnp.array(1j)], ids=["vector", "complex"])
def test_progress_must_be_one_real_number(progress):
    with pytest.raises(ValueError, match="the progress of a loop must be one number"):
        jax.eval_shape(lambda: METER.step(METER.init(), progress))


@pytest.mark.parametrize("increase", [0.001, 0, 1.5, float("nan")])
def test_more_than_one_drawing_for_every_percent_is_refused(increase):
    with pytest.raises(ValueError, match="`minimum_increase` of a progress meter is out of range"):
        TextProgressMeter(minimum_increase=increase)


def test_a_computation_outlives_the_stream_of_its_bar(monkeypatch):
    stream = io.StringIO()
    stream.close()
    monkeypatch.setattr(sys, "stdout", stream)
    assert jax.jit(lambda x: power(x))(TWO) == 256
    jax.effects_barrier()
    assert not progress_file._host.bars


def test_a_meter_of_ones_own(capsys):
    class Dots(AbstractProgressMeter):
        every: float = 0.5

        def init(self):
            return jnp.zeros(())

        def step(self, state, progress):
            return jnp.maximum(state, progress)

        def close(self, state):
            jax.debug.print("reached {}", state)

    assert power(TWO, 4, Dots()) == 16
    jax.effects_barrier()
    assert capsys.readouterr().out == "reached 1.0\n"
    with pytest.raises(TypeError, match="abstract"):
        AbstractProgressMeter()


def test_meters_are_modules_without_arrays():
    assert isinstance(METER, Module)
    assert jax.tree.leaves(METER) == []
    assert METER == TextProgressMeter(minimum_increase=0.25) != TextProgressMeter()


# Rich.


def test_rich_bars_are_printed_where_there_is_no_terminal(capsys):
    jax.jit(lambda: power(TWO, 4, RichProgressMeter()))()
    jax.effects_barrier()
    out = capsys.readouterr().out
    assert "100%" in out and "\x1b" not in out


@pytest.fixture
def terminal(monkeypatch):
    """Makes rich believe that it writes to a terminal."""
    monkeypatch.setenv("FORCE_COLOR", "1")
    monkeypatch.setenv("TERM", "xterm")


def screen(capsys: Any) -> list[str]:
    """What a terminal shows in the end: the percentage of every bar, and other lines."""
    jax.effects_barrier()
    lines, at = [], 0
    for text in capsys.readouterr().out.splitlines():
        for up in re.findall(r"\x1b\[(\d+)A", text):
            at -= int(up)
        plain = re.sub(r"\x1b\[[\d;?]*[a-zA-Z]", "", text)
        found = re.search(r"\d+%", plain)
        lines[at:] = [found.group() if found else plain, *lines[at + 1 :]]
        at += 1
    return lines


def test_rich_bars_move_in_a_terminal(terminal, capsys):
    jax.jit(lambda: power(TWO, 4, RichProgressMeter()))()
    jax.effects_barrier()
    out = capsys.readouterr().out
    found = re.findall(r"(\d+)%", re.sub(r"\x1b\[[\d;?]*[a-zA-Z]", "", out))
    assert found == ["0", "25", "50", "75", "100"]
    # The cursor is never hidden, and moves up once for each but the first.
    assert "\x1b[?25" not in out and out.count("\x1b[1A") == 4


def test_rich_bars_are_drawn_below_each_other(terminal, capsys):
    meter = RichProgressMeter(minimum_increase=0.25)
    a, b = meter.init(), meter.init()
    a, b = meter.step(a, 0.25), meter.step(b, 0.5)
    meter.close(meter.step(b, 1.0))
    meter.close(a)
    # Both are opened; then both are drawn in the lines of the second.
    assert screen(capsys) == ["0%", "100%", "25%"]


def test_the_bar_of_a_failed_computation_is_left_where_it_is(terminal, capsys):
    meter = RichProgressMeter(minimum_increase=0.5)
    failed = meter.step(meter.init(), 0.5)
    print("Traceback")
    meter.close(meter.step(meter.init(), 1.0))
    print("more")
    # If it is alive after all, it is drawn again.
    meter.close(meter.step(failed, 1.0))
    assert screen(capsys) == ["50%", "Traceback", "100%", "more", "100%"]
    assert not progress_file._host.bars


def test_a_failure_leaves_later_lines_alone(capsys):
    def run(fail):
        state = METER.step(METER.init(), 0.5)
        x = vernal.runtime.error_if(jnp.ones(()), fail, "failed")
        METER.close(METER.step(state, x))
        return x

    with pytest.raises(vernal.runtime.RuntimeCheckError, match="failed"):
        vernal.filter_jit(run)(True)
    vernal.filter_jit(run)(False)
    assert printed_lines(capsys)[-3:] == ["0.00%", "50.00%", "100.00%"]
    progress_file._host.bars.clear()


# tqdm.


class FakeBar:
    made: list["FakeBar"] = []

    def __init__(self, total: int, bar_format: str):
        self.n = 0.0
        self.shown: list[float] = []
        self.closed = False
        assert total == 100 and "{bar}" in bar_format
        FakeBar.made.append(self)

    def refresh(self):
        self.shown.append(self.n)

    def close(self):
        self.closed = True


@pytest.fixture
def fake_tqdm(monkeypatch):
    module: Any = types.ModuleType("tqdm.auto")
    module.tqdm = FakeBar
    monkeypatch.setitem(sys.modules, "tqdm", types.ModuleType("tqdm"))
    monkeypatch.setitem(sys.modules, "tqdm.auto", module)
    FakeBar.made = []


def test_tqdm_bars_are_refreshed_and_closed(fake_tqdm):
    jax.jit(lambda: power(TWO, 4, TqdmProgressMeter()))()
    jax.effects_barrier()
    (bar,) = FakeBar.made
    assert bar.shown == [0, 25, 50, 75, 100] and bar.closed


def test_tqdm_bars_are_left_where_they_are(fake_tqdm):
    meter = TqdmProgressMeter()
    state = meter.init()
    meter.close(meter.init())
    meter.close(meter.step(state, 0.5))
    jax.effects_barrier()
    assert [(bar.shown, bar.closed) for bar in FakeBar.made] == [
        ([0], True),
        ([0], True),
        ([50], True),
    ]


def test_a_real_tqdm_bar_ends_at_100_percent(capsys):
    jax.jit(lambda: power(TWO, 4, TqdmProgressMeter()))()
    jax.effects_barrier()
    assert "100.00%" in capsys.readouterr().err


def test_a_missing_tqdm_is_told(monkeypatch):
    monkeypatch.setitem(sys.modules, "tqdm.auto", None)
    with pytest.raises(ImportError, match="tqdm, which is not installed"):
        TqdmProgressMeter()


def test_of_several_processes_one_draws(monkeypatch, capsys):
    # A process of its own would also have programs that are not those of the first one.
    monkeypatch.setattr(jax, "process_index", lambda: 1)

    @jax.jit
    def loop():
        METER.close(jax.lax.fori_loop(0, 4, lambda i, s: METER.step(s, (i + 1) / 4), METER.init()))

    loop()
    jax.effects_barrier()
    assert capsys.readouterr().out == "" and not progress_file._host.bars
