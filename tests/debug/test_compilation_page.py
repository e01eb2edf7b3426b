"""The page of a recording: complete in itself, correct, and alive in a browser."""

import html.parser
import re
import shutil
import subprocess

import jax
import pytest

from vernal.debug import CompilationLog, record_compilations
from vernal.debug._compilation_page import _ticks

COMPILE = "/jax/core/compile/backend_compile_duration"
TRACE = "/jax/core/compile/jaxpr_trace_duration"
# Whatever a name or a reason holds is text.
WILD = '<script>alert("{{rows}}")</script>'


class Page(html.parser.HTMLParser):
    """The elements of a page, and the text in its cells."""

    def __init__(self, text):
        super().__init__()
        self.open, self.elements, self.rows = [], [], []
        self.feed(text)
        self.close()

    def handle_starttag(self, tag, attrs):
        self.elements.append((tag, dict(attrs)))
        if tag not in ("meta", "link", "input"):
            self.open.append(tag)
        if tag == "tr":
            self.rows.append([])
        elif tag in ("td", "th"):
            self.rows[-1].append("")

    def handle_endtag(self, tag):
        assert self.open.pop() == tag

    def handle_data(self, data):
        if "tr" in self.open and {"td", "th"} & set(self.open):
            self.rows[-1][-1] += data

    def of(self, tag):
        return [attrs for name, attrs in self.elements if name == tag]


@pytest.fixture
def log() -> CompilationLog:
    events = [
        (COMPILE, "jit(pear)", 1, 3),
        (COMPILE, "jit(fig)", 4, 5),
        # Around the one before.
        (TRACE, "plum", 3.5, 6),
        (COMPILE, "jit(plum)", 6, 7),
        (COMPILE, "jit(pear)", 7, 7.25),
        (COMPILE, f"jit({WILD})", 8, 8.25),
    ]
    with record_compilations() as log:
        began = log._began
        for event, name, start, stop in events:
            jax.monitoring.record_event_time_span(event, began + start, began + stop, fun_name=name)
    log._ended = began + 10
    for compilation in log.compilations:
        compilation.place = f"{compilation.function}.py:1"
        compilation.reason = f"because of {compilation.function} & others"
    return log


def test_the_page_has_the_rows_of_the_table_slowest_first(log):
    page = Page(log.page("Compilations of train.py"))
    head, *rows, foot = page.rows
    assert head[:4] == ["function", "place", "times", "trace s"]
    assert [row[0] for row in rows] == ["plum", "pear", "fig", WILD]
    assert rows[0][2:7] == ["1", "1.500", "0.000", "1.000", "2.500"]
    assert rows[1][2:] == ["2", "0.000", "0.000", "2.250", "2.250", "because of pear & others"]
    assert foot == ["sum", "5", "1.500", "0.000", "4.500", "6.000", ""]


def test_text_is_text(log):
    text = log.page(WILD)
    assert "<script>alert" not in text
    # One that we have written.
    assert len(Page(text).of("script")) == 1
    assert text.count("&lt;script&gt;") > 2


def test_the_page_loads_nothing(log):
    text = log.page()
    page = Page(text)
    assert not re.search(r"https?:|@import|url\(|fetch\(|XMLHttp|import\(", text)
    for tag, attributes in page.elements:
        assert "src" not in attributes, tag
        assert attributes.get("href", "data:,") == "data:,", tag
    policies = [x["content"] for x in page.of("meta") if "http-equiv" in x]
    assert policies[0].startswith("default-src 'none'")


def test_the_page_can_be_read_without_eyes(log):
    page = Page(log.page())
    assert page.of("html") == [{"lang": "en"}]
    assert all(cell["scope"] in ("col", "row") for cell in page.of("th"))
    assert any(x.get("role") == "img" and x["aria-label"] for x in page.of("div"))
    # Each input stands inside of its label.
    assert len(page.of("label")) == len(page.of("input")) == 2
    assert "prefers-color-scheme: dark" in log.page()


def test_the_timeline_puts_bars_where_they_belong(log):
    bars = Page(log.page()).of("i")
    found = {(bar["class"], bar["data-row"]): bar["style"] for bar in bars}
    assert len(bars) == 6
    assert found["trace", "0"] == "left:35.0000%;width:25.0000%;--depth:0"
    # It happened while another function was traced.
    assert found["compile", "2"] == "left:40.0000%;width:10.0000%;--depth:1"
    assert found["compile", "0"] == "left:60.0000%;width:10.0000%;--depth:0"
    assert bars[0]["title"].splitlines() == [
        "pear: compile, 2.000 s",
        "pear.py:1",
        "because of pear & others",
    ]


@pytest.mark.parametrize(
    ("seconds", "count", "last"), [(10.0, 11, "10 s"), (0.03, 7, "0.03 s"), (4321.0, 9, "4000 s")]
)
def test_ticks_are_at_round_seconds(seconds, count, last):
    ticks = list(_ticks(seconds))
    assert len(ticks) == count
    assert ticks[0].endswith(">0 s</span>") and ticks[-1].endswith(f">{last}</span>")


def test_a_recording_of_nothing_is_a_page_too():
    with record_compilations() as log:
        pass
    text = log.page()
    assert "nothing was compiled" in text
    assert len(Page(text).rows) == 2


def in_browser(tmp_path, text, address=""):
    """The page as it is after its script has run, in a new headless Chromium."""
    browser = shutil.which("chromium") or shutil.which("chromium-browser")
    assert browser, "install Chromium: apt-get install chromium"
    file = tmp_path / "page.html"
    file.write_text(text, encoding="utf-8")
    switches = (
        "headless no-sandbox disable-gpu disable-quic no-first-run disable-background-networking "
        "disable-component-update disable-sync disable-dev-shm-usage"
    )
    done = subprocess.run(
        [
            browser,
            *(f"--{switch}" for switch in switches.split()),
            f"--user-data-dir={tmp_path / 'profile'}",
            "--dump-dom",
            f"file://{file}{address}",
        ],
        capture_output=True,
        text=True,
        timeout=200,
        check=False,
    )
    assert done.returncode == 0, done.stderr
    return done.stdout


@pytest.mark.slow
def test_a_browser_sorts_and_filters_as_the_address_says(log, tmp_path):
    text = log.page()
    plain = Page(in_browser(tmp_path, text))
    assert [row[0] for row in plain.rows[1:-1]] == ["plum", "pear", "fig", WILD]
    # The script has made the headings buttons, and shows what needs it.
    assert len(plain.of("button")) == 8
    assert not [x for x in plain.of("label") if "hidden" in x]

    page = Page(in_browser(tmp_path, text, "#sort=function&order=descending&filter=p"))
    assert [row[0] for row in page.rows[1:-1]] == ["plum", "pear", "fig", WILD]
    shown = [row for row in page.of("tr") if "data-row" in row]
    # "p" is in the names of all files (`.py`): nothing is hidden.
    assert ["hidden" in row for row in shown] == [False] * 4
    (column,) = (x for x in page.of("th") if "aria-sort" in x)
    assert (column["id"], column["aria-sort"]) == ("function", "descending")

    page = Page(in_browser(tmp_path, text, "#sort=times&filter=PEAR"))
    assert [row[0] for row in page.rows[1:-1]][0] == "pear"
    shown = [row for row in page.of("tr") if "data-row" in row]
    assert ["hidden" in row for row in shown] == [False, True, True, True]
    assert sum("faint" in bar["class"] for bar in page.of("i")) == 4
