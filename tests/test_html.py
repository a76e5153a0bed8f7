"""The report's page: as text (self-contained, escaped, complete) and in a real browser (phone, desktop, dark, keys)."""

from __future__ import annotations

import dataclasses
import html as markup
import importlib.util
import itertools
import json
import re
import shutil
import subprocess
import sys
from html.parser import HTMLParser
from pathlib import Path

import pytest
import sessions
from sessions import MIB

from pytest_sglmem import report

if not all(map(importlib.util.find_spec, ("jinja2", "pygal"))):
    pytest.skip("the page needs the extra html", allow_module_level=True)

from pytest_sglmem import charts, html

LIMIT = 3_000_000
VOID = {"meta", "br", "link", "img", "input", "hr"}


class Page(HTMLParser):
    """The page's elements in order, as (tag, attributes); raises where tags do not close what they opened."""

    def __init__(self, text):
        super().__init__()
        self.elements, self._open = [], []
        self.feed(text)
        assert self._open == []

    def handle_starttag(self, tag, attrs):
        self.elements.append((tag, dict(attrs)))
        if tag not in VOID:
            self._open.append(tag)

    def handle_startendtag(self, tag, attrs):
        self.elements.append((tag, dict(attrs)))

    def handle_endtag(self, tag):
        assert self._open.pop() == tag, self.getpos()

    def all(self, tag):
        return [attributes for name, attributes in self.elements if name == tag]


@pytest.fixture(scope="module")
def rich():
    return html.page(sessions.rich())


class TestPage:
    def test_is_well_formed_and_ids_are_unique(self, rich):
        ids = [attributes["id"] for _, attributes in Page(rich).elements if "id" in attributes]
        assert len(ids) == len(set(ids))
        targets = {link["href"].removeprefix("#") for link in Page(rich).all("a")}
        assert targets <= set(ids)

    def test_a_leak_in_a_test_that_passed_is_not_open_and_says_so(self):
        for outcome, word in (("passed", "leak (expected)"), ("failed", "leak")):
            entry = sessions.entry("t.py::a", sessions.verdict("leak", size=2), outcome=outcome)
            page = html.page(sessions.document(entry))
            assert page.count(f">{word}</span>") == 2
            assert ("open" in Page(page).all("details")[0]) is (outcome == "failed")

    def test_nothing_comes_from_elsewhere(self, rich):
        page = Page(rich)
        assert not {"script", "link", "img", "iframe", "object", "embed"} & {tag for tag, _ in page.elements}
        assert not any({"src", "srcset", "xlink:href"} & set(attributes) for _, attributes in page.elements)
        assert all(link["href"].startswith("#") for link in page.all("a"))
        assert re.findall(r"https?:|//\w|url\(|@import", rich) == []
        policies = [meta["content"] for meta in page.all("meta") if "http-equiv" in meta]
        assert policies == ["default-src 'none'; style-src 'unsafe-inline'"]

    def test_text_of_the_report_is_escaped(self):
        evil = "<script>alert(1)</script>&\"'"
        made = sessions.verdict("leak", size=2)
        site = dataclasses.replace(made.sites[0], site=evil, stack=(evil,), held_by=(evil,))
        fault = dataclasses.replace(made.ipc.faults[0], site=evil, stack=(evil,), open_sites=(evil,), advice=evil)
        made = dataclasses.replace(
            made,
            sites=(site,),
            ipc=dataclasses.replace(made.ipc, faults=(fault,), note=evil),
            geometries=(evil,) * 14,
            note=evil,
        )
        grown = dataclasses.replace(sessions.growth(), by_type={evil: 1.0}, held_by=(evil,), note=evil)
        proof = {
            "score": 1.0,
            "faults": [{"fault": evil, "fired_in": [evil], "caught_by": [evil], "verdict": "caught"}],
        }
        entry = sessions.entry(evil, made, grown, faults=[{"fault": evil, "fired": [1, 0]}], size=2)
        text = html.page(sessions.document(entry, proof=proof))
        assert "<script" not in text
        assert text.count("&lt;script&gt;") >= 15
        Page(text)

    def test_alarms_are_open_and_first_clean_ones_are_folded(self, rich):
        folds = [attributes for attributes in Page(rich).all("details") if attributes.get("class") == "test"]
        assert len(folds) == 20
        assert ["open" in fold for fold in folds] == [True] * 4 + [False] * 16

    def test_a_test_that_failed_otherwise_is_not_shown_as_clean(self):
        entries = [
            sessions.entry("t.py::clean", sessions.verdict(size=2), size=2),
            sessions.entry("t.py::wrong", sessions.verdict(size=2), size=2, outcome="failed"),
            report.entry("t.py::crashed", "failed", 0.1),
            sessions.entry("t.py::leaks", sessions.verdict("leak", size=2), size=2, outcome="failed"),
        ]
        shown = re.findall(r"<summary>\n(.*?)</summary>", html.page(sessions.document(*entries)), re.S)
        said = [" ".join(re.sub(r"<[^>]+>", " ", one).split()) for one in shown if "t.py" in one]
        assert [one.partition("t.py::")[2] for one in said] == ["leaks", "wrong", "crashed", "clean"]
        assert ["failed" in one for one in said] == [False, True, True, False]

    def test_a_leak_shows_all_that_the_report_has(self):
        text = html.page(sessions.document(sessions.entry("t.py::a", sessions.verdict("leak"), outcome="failed")))
        said = re.sub(r"\s+", " ", markup.unescape(re.sub(r"<[^>]+>", " ", text)))
        for piece in (
            *sessions.STACK,
            "engine.POOL -> .staging -> [(torch.bfloat16, 8)] -> Tensor",
            "ipc-over-released",
            "+64 MiB",
            "over-released ranks 0-7 ranks 0-7 448 7 -6 2 GiB",
            "opened at peers.py:12 in open",
            "Export one handle for each peer",
            "rank 2 56 (2 open)",
            "settled at the end of cycle 1 2 3 4",
            "Slowest step: 1.250 s, rank 7, step 2",
            "1x14336x24x128",
        ):
            assert piece in said
        assert f'title="{349 * MIB} bytes"' in text

    def test_proof_is_a_matrix(self, rich):
        rows = re.findall(r"<tr><th scope=\"row\"><code>([^<]+)</code></th>(.*?)</tr>", rich, re.S)
        marks = {fault: "".join(re.findall(r"role=\"img\">(.)<", cells)) for fault, cells in rows if "mark" in cells}
        assert marks == {
            "ipc.export=one-handle": "✓✓✓✓✓✗··",
            "step=retain(65536)": "✓✓✓✓✓✓✓✓",
            "ipc.collect=skip": "✗✗✗·····",
            "file.fsync=raise(OSError)": "········",
            "dist.barrier@nth=3=hang": "··✗·····",
            "pickle.dumps=corrupt": "···✗····",
        }

    def test_objects_and_pauses(self):
        text = html.page(sessions.document(sessions.entry("t.py::a", sessions.growth())))
        assert [int(width) for width in re.findall(r"width: (\d+)%\"", text)] == [100, 50, 25, 25, 11, 100]
        assert "388.9 ms" in text
        assert "server.HISTORY -&gt; deque" in text

    @pytest.mark.parametrize(
        "entries",
        [
            [],
            [report.entry("t.py::a", "skipped", 0.0)],
            [sessions.entry("t.py::a", sessions.verdict(cycles=1, warmup=0, steps=1, size=1), size=1)],
            [sessions.entry("t.py::a", dataclasses.replace(sessions.verdict(), series=(), settled=()))],
            [sessions.entry("t.py::a", sessions.verdict(cycles=40, size=2), size=2)],
            [sessions.entry("t.py::a", dataclasses.replace(sessions.growth(), by_type={"dict": -1.0}, pause_ms={}))],
        ],
        ids=["nothing", "no check", "one step", "no series", "many cycles", "shrank"],
    )
    def test_odd_sessions_still_make_a_page(self, entries):
        Page(html.page(sessions.document(*entries)))

    def test_eight_ranks_and_a_thousand_steps_stay_small(self):
        document = sessions.rich(steps=250, cycles=3)
        assert len(document["tests"][0]["live_bytes"][0]["series"][7]) == 1000
        assert len(html.page(document).encode()) < LIMIT

    def test_write_makes_it(self, tmp_path):
        report.write(sessions.rich(), tmp_path / "r.html")
        assert (tmp_path / "r.html").read_text(encoding="utf-8").startswith("<!doctype html>")

    @pytest.mark.parametrize("missing", ["jinja2", "pygal"])
    def test_missing_package_names_the_extra(self, missing, monkeypatch, tmp_path):
        real = html.importlib.util.find_spec
        monkeypatch.setattr(html.importlib.util, "find_spec", lambda name: None if name == missing else real(name))
        with pytest.raises(ValueError, match=rf"r\.html' needs {missing}: pip install 'pytest-sglmem\[html\]'"):
            report.check_path(tmp_path / "r.html")
        report.check_path(tmp_path / "r.json")


def test_making_a_page_leaves_imports_and_metadata_as_they_were(pytester):
    pytester.makepyfile(
        probe="""
        import sys, warnings
        from importlib.metadata import version
        warnings.simplefilter("error")
        from pytest_sglmem import html, report
        html.page(report.session([report.entry("a", "passed", 0)], versions={"pytest_sglmem": "0"}, machine={}))
        from pytest_sglmem import charts
        assert "pygal" in sys.modules
        assert version("pluggy") and version("pytest")
        try:
            import no_such_module
        except ModuleNotFoundError:
            sys.exit(0)
        """
    )
    assert pytester.run(sys.executable, "probe.py").ret == 0


class TestCharts:
    def test_ranks_alike_are_one_line(self):
        made = sessions.verdict("flat", size=3)
        made = dataclasses.replace(
            made, series=(made.series[0], made.series[1], made.series[0]), settled=(made.settled[0],) * 3
        )
        (check,) = sessions.entry("t.py::a", made, size=3)["live_bytes"]
        assert [line.name for line in charts.lines(check)] == ["ranks 0, 2", "rank 1"]

    def test_growth_is_one_line_for_ranks_that_grew_alike(self):
        (check,) = sessions.entry("t.py::a", sessions.verdict("leak", guilty=(1, 2, 3)))["live_bytes"]
        drawn = charts.growth(charts.lines(check))
        assert drawn.count('class="line" /></g>') == 2
        assert "ranks 1-3: 192 MiB since cycle 1" in drawn
        assert "ranks 0, 4-7: 0 B since cycle 1" in drawn

    @pytest.mark.parametrize("steps", [1, 2, 239, 240, 241, 479, 480, 481, 482, 1000, 100_000])
    def test_thinned_keeps_peaks_ends_and_order(self, steps):
        series = [step % 7 for step in range(steps)]
        series[steps // 2], series[steps // 3] = 10**9, -1 if steps > 3 else 10**9
        points = charts.thinned(series)
        assert len(points) <= max(charts.POINTS, 1)
        assert [step for step, _ in points] == sorted({step for step, _ in points})
        assert all(series[step - 1] == value for step, value in points)
        assert {value for _, value in points} >= {max(series), min(series)}

    def test_short_series_is_drawn_whole(self):
        series = list(range(charts.POINTS))
        assert charts.thinned(series) == [(step + 1, value) for step, value in enumerate(series)]

    @pytest.mark.parametrize(
        ("low", "high"), [(0, 0), (0, 1), (7, 7), (10**11, 10**11 + 1), (0, 10**12), (-5, 5), (511, 513), (0, 512)]
    )
    def test_scale_holds_the_values_with_few_marks(self, low, high):
        marks = charts.scale(low, high)
        assert marks[0] <= low <= high <= marks[-1]
        assert 2 <= len(marks) <= 6
        assert marks[-1] - marks[0] >= 512
        assert len({b - a for a, b in itertools.pairwise(marks)}) == 1

    @pytest.mark.parametrize(
        ("low", "high", "names"),
        [
            (0, 1, ["0 B", "128 B", "256 B", "384 B", "512 B"]),
            (0, 3 * MIB, ["0 B", "1 MiB", "2 MiB", "3 MiB"]),
            (0, 4 * 2**30, ["0 B", "1 GiB", "2 GiB", "3 GiB", "4 GiB"]),
            (97 * 2**30, 97 * 2**30 + 2 * MIB, ["97 GiB", "+512 KiB", "+1 MiB", "+1.5 MiB", "+2 MiB"]),
        ],
    )
    def test_marks_are_named_exactly(self, low, high, names):
        assert charts.mark_names(charts.scale(low, high)) == names

    @pytest.mark.parametrize(
        ("judged", "most", "warmup", "names"),
        [
            (3, 10, 1, ["w", "1", "2", "3"]),
            (4, 2, 0, ["", "2", "", "4"]),
            (5, 3, 2, ["w", "", "", "2", "", "", "5"]),
            (0, 3, 0, []),
        ],
    )
    def test_cycle_names(self, judged, most, warmup, names):
        assert charts.cycle_names(judged, most, warmup) == names

    def test_guides_stand_where_cycles_end(self):
        (check,) = sessions.entry("t.py::a", sessions.verdict(size=1, cycles=3, warmup=1, steps=5), size=1)[
            "live_bytes"
        ]
        drawn = charts.live_bytes(charts.lines(check), 1)
        guides = [float(x) for x in re.findall(r'<text x="([\d.]+)" y="2[\d.]+">', drawn.split('class="axis x"')[1])]
        dots = [float(x) for x in re.findall(r'<circle cx="([\d.]+)"', drawn)]
        line = re.findall(r"M([\d.]+) [\d.]+ L([^\"]+)\"", drawn)
        (path,) = [rest for _, rest in line]
        ends = [float(x) for x in path.split(" ")[::2]][3::5]
        assert guides == pytest.approx(ends, abs=0.2)
        assert dots == pytest.approx(guides[1:], abs=0.2)


BROWSER = next(filter(None, map(shutil.which, ("chromium", "chromium-browser", "google-chrome"))), None)

# Runs in the browser around the page: what a reader's eyes and keys would find out.
PROBE = """
<!doctype html><meta name="color-scheme" content="light dark"><style>:root{color-scheme:light dark}</style>
<iframe id="page" style="width:%(width)dpx;height:900px;border:0" srcdoc="%(page)s"></iframe>
<pre id="out"></pre>
<script>
function rgb(text) { return text.match(/[\\d.]+/g).map(Number); }
function luminance(c) {
  const [r, g, b] = c.slice(0, 3).map(v => { v /= 255; return v <= .03928 ? v / 12.92 : ((v + .055) / 1.055) ** 2.4; });
  return .2126 * r + .7152 * g + .0722 * b;
}
function background(el, view) {
  for (; el; el = el.parentElement) {
    const c = rgb(view.getComputedStyle(el).backgroundColor);
    if (c.length < 4 || c[3] > 0) return c;
  }
}
function contrast(el, view) {
  const style = view.getComputedStyle(el);
  const a = luminance(rgb(el.ownerSVGElement ? style.fill : style.color)), b = luminance(background(el, view));
  return (Math.max(a, b) + .05) / (Math.min(a, b) + .05);
}
window.onload = () => {
  const frame = document.getElementById("page"), view = frame.contentWindow, page = frame.contentDocument;
  const out = {};
  for (const fold of page.querySelectorAll("details")) fold.open = true;
  out.sideways = page.documentElement.scrollWidth - page.documentElement.clientWidth;
  out.background = view.getComputedStyle(page.body).backgroundColor;
  const keys = [...page.querySelectorAll("summary, a, [tabindex='0']")];
  out.keys = keys.length;
  out.deaf = keys.filter(el => { el.focus(); return page.activeElement !== el; }).map(el => el.outerHTML.slice(0, 80));
  out.unreachable = [...page.querySelectorAll("*")].filter(el => el.scrollWidth > el.clientWidth + 1
    && view.getComputedStyle(el).overflowX === "auto" && el.tabIndex < 0).length;
  out.drawings = [...page.querySelectorAll("svg")].map(el => Math.round(el.getBoundingClientRect().width));
  out.cut = [...page.querySelectorAll("svg text")].filter(el => {
    const text = el.getBoundingClientRect(), svg = el.ownerSVGElement.getBoundingClientRect();
    return text.width && (text.left < svg.left - 1 || text.right > svg.right + 1);
  }).map(el => el.textContent);
  out.small = [...page.querySelectorAll("svg text")].filter(el => el.textContent).map(el =>
    parseFloat(view.getComputedStyle(el).fontSize) * el.ownerSVGElement.getBoundingClientRect().width
    / el.ownerSVGElement.viewBox.baseVal.width).reduce((a, b) => Math.min(a, b), 99);
  const texts = "td, th, dt, dd, small, .word, .name, .amount, .number, figcaption, p, a, svg text";
  const seen = [...page.querySelectorAll(texts)];
  out.faint = seen.map(el => [contrast(el, view), el.textContent.slice(0, 40)]).filter(([c]) => c < 4.5);
  out.seen = seen.length;
  document.getElementById("out").textContent = JSON.stringify(out);
};
</script>
"""


@pytest.mark.skipif(BROWSER is None, reason="no chromium here: apt-get install chromium")
class TestInABrowser:
    @pytest.mark.parametrize("dark", [False, True], ids=["light", "dark"])
    @pytest.mark.parametrize("width", [360, 390, 768, 1280])
    def test_reads_well(self, tmp_path, rich, width, dark):
        found = _probe(tmp_path, rich, width, dark)
        assert found["sideways"] == 0
        assert (
            sum(map(int, re.findall(r"\d+", found["background"])[:3])) < 150 if dark else "251" in found["background"]
        )
        assert found["keys"] > 60
        assert found["deaf"] == []
        assert found["unreachable"] == 0
        assert len(found["drawings"]) == 2 * 18
        assert min(found["drawings"]) > 200
        assert found["cut"] == []
        assert found["small"] >= 9
        assert found["seen"] > 500
        assert found["faint"] == []

    def test_the_probe_sees_what_is_wrong(self, tmp_path, rich):
        broken = rich.replace(
            "</style>", ".wide { overflow: visible !important } .name { color: #ddd !important }</style>"
        )
        broken = broken.replace('class="skip" href="#tests"', 'class="skip"')
        found = _probe(tmp_path, broken, 390, dark=False)
        assert found["sideways"] > 0
        assert len(found["faint"]) >= 20
        assert len(found["deaf"]) == 1


def _probe(tmp_path: Path, page: str, width: int, dark: bool) -> dict[str, object]:
    probe = tmp_path / "probe.html"
    probe.write_text(PROBE % {"width": width, "page": markup.escape(page)}, encoding="utf-8")
    command = [
        *(BROWSER, "--headless", "--no-sandbox", "--disable-gpu", "--disable-quic", "--no-first-run"),
        *("--disable-background-networking", "--disable-component-update", "--disable-sync", "--disable-extensions"),
        *(f"--user-data-dir={tmp_path / 'profile'}", "--window-size=1400,1000", "--virtual-time-budget=20000"),
        *(["--blink-settings=preferredColorScheme=0"] if dark else []),
        *("--dump-dom", probe.as_uri()),
    ]
    done = subprocess.run(command, capture_output=True, text=True, timeout=120, check=True)
    written = re.search(r'<pre id="out">(.+?)</pre>', done.stdout, re.S)
    assert written, done.stderr[-2000:]
    return json.loads(markup.unescape(written[1]))
