"""The progress meters that draw: lines of text, or bars of rich or tqdm."""

import importlib
from typing import Any

from ..modules import field
from ..show import message
from ._progress import Bar, DrawingMeter, several_moving


class _TextBar(Bar):
    def __init__(self, number: int):
        self.number = number

    def draw(self, progress: float) -> None:
        name = f"[{self.number}] " if several_moving() else ""
        print(f"{name}{progress:.2%}", flush=True)

    def finish(self) -> None:
        """Does nothing: lines stay printed."""

    def settle(self) -> None:
        """Does nothing: each line is printed below the last."""


class TextProgressMeter(DrawingMeter):
    """Prints the progress as lines of text: `0.00%`, `2.00%`, ..., `100.00%`.

    The first line is printed when the loop begins, the last when the meter is closed. While several
    bars are moving, each line begins with the number of its bar. Lines go to `sys.stdout`. If the
    computation fails, the lines printed so far remain.

    Args:
        minimum_increase: the least increase of the progress from one line to the next; from 0.01 to 1.

    Raises:
        ValueError: if `minimum_increase` is not in that range; in `step`, if the progress is not a
            real scalar.

    Example:
        >>> import jax
        >>> import vernal
        >>> meter = vernal.runtime.TextProgressMeter(minimum_increase=0.25)
        >>> @jax.jit
        ... def loop():
        ...     def body(i, state):
        ...         return meter.step(state, (i + 1) / 3)
        ...     meter.close(jax.lax.fori_loop(0, 3, body, meter.init()))
        >>> loop(); jax.effects_barrier()
        0.00%
        33.33%
        66.67%
        100.00%
    """

    minimum_increase: float = field(default=0.02, converter=float)

    def _bar(self, number: int) -> Bar:
        return _TextBar(number)


class _Screen:
    """The lines of the terminal in which rich bars are redrawn.

    After each drawing the cursor is below the bars, at the beginning of a line. So the terminal is in
    order wherever the program ends.
    """

    def __init__(self) -> None:
        self.progress: Any = None
        self.tasks: dict[int, Any] = {}
        self.open: set[int] = set()
        self.lines = 0

    def draw(self, number: int, progress: float) -> None:
        if self.progress is None:
            from rich.console import Console
            from rich.progress import Progress

            # Never started: `start` would hide the cursor, and show it again only at the end.
            self.progress = Progress(console=Console(), auto_refresh=False)
        if number not in self.tasks:
            self.tasks[number] = self.progress.add_task("", total=1.0)
            self.open.add(number)
        self.progress.update(self.tasks[number], completed=progress)
        if self.progress.console.is_terminal:
            self._print_all()

    def _print_all(self) -> None:
        from rich.control import Control

        console = self.progress.console
        if self.lines:
            console.control(Control.move(0, -self.lines))
        console.print(self.progress.make_tasks_table(self.progress.tasks))
        self.lines = len(self.tasks)

    def finish(self, number: int) -> None:
        if number not in self.open:
            return
        if not self.progress.console.is_terminal:
            task = next(t for t in self.progress.tasks if t.id == self.tasks[number])
            self.progress.console.print(self.progress.make_tasks_table([task]))
        self.open.remove(number)
        if not self.open:
            self.settle()

    def settle(self) -> None:
        """Starts new lines, below."""
        self.__init__()


_screen = _Screen()


class _RichBar(Bar):
    def __init__(self, number: int):
        self.number = number

    def draw(self, progress: float) -> None:
        _screen.draw(self.number, progress)

    def finish(self) -> None:
        _screen.finish(self.number)

    def settle(self) -> None:
        _screen.settle()


class RichProgressMeter(DrawingMeter):
    """Shows the progress as a bar of the `rich` package, with the remaining time.

    Several bars are drawn below each other. They go to `sys.stdout`; if that is not a terminal, each is
    printed once, when it is closed. The bar of a failed computation stays on the screen, and further
    output begins below it. If the program itself prints in the loop, use `TextProgressMeter`: its output
    would mix with the bars.

    Args:
        minimum_increase: the least increase of the progress from one drawing to the next; from 0.01
            to 1.

    Raises:
        ValueError: if `minimum_increase` is not in that range; in `step`, if the progress is not a
            real scalar.

    Example:
        >>> import jax
        >>> import vernal
        >>> meter = vernal.runtime.RichProgressMeter()
        >>> @jax.jit
        ... def loop():
        ...     def body(i, state):
        ...         return meter.step(state, (i + 1) / 100)
        ...     meter.close(jax.lax.fori_loop(0, 100, body, meter.init()))
    """

    def _bar(self, number: int) -> Bar:
        return _RichBar(number)


class _TqdmBar(Bar):
    def __init__(self) -> None:
        self.bar: Any = None

    def draw(self, progress: float) -> None:
        if self.bar is None:
            self.bar = importlib.import_module("tqdm.auto").tqdm(
                total=100, bar_format="{percentage:.2f}%|{bar}| [{elapsed}<{remaining}]"
            )
        self.bar.n = 100 * progress
        self.bar.refresh()

    def finish(self) -> None:
        self.settle()

    def settle(self) -> None:
        if self.bar is not None:
            self.bar.close()
        self.bar = None


class TqdmProgressMeter(DrawingMeter):
    """Shows the progress as a bar of the `tqdm` package, which must be installed.

    Bars go to `sys.stderr`, or into the notebook. The bar of a failed computation stays where it was.

    Args:
        minimum_increase: the least increase of the progress from one drawing to the next; from 0.01
            to 1.

    Raises:
        ImportError: if `tqdm` is not installed.
        ValueError: if `minimum_increase` is not in that range; in `step`, if the progress is not a
            real scalar.
    """

    def __check_init__(self) -> None:
        # By name, so that importing or type-checking this file does not need the package.
        try:
            importlib.import_module("tqdm.auto")
        except ImportError as error:
            raise ImportError(
                message(
                    "TqdmProgressMeter draws with the package tqdm, which is not installed",
                    where="TqdmProgressMeter()",
                    expected="tqdm",
                    got=str(error),
                    instead="pip install tqdm, or RichProgressMeter() or TextProgressMeter()",
                )
            ) from error

    def _bar(self, number: int) -> Bar:
        del number
        return _TqdmBar()
