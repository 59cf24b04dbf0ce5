"""The report: its numbers, its page in a real browser, its figures; and it is written whole."""

from __future__ import annotations

import dataclasses
import html.parser
import itertools
import re
import sys
from pathlib import Path

import chromium
import numpy as np
import pytest
from click.testing import CliRunner
from json_outputs import conforming

import hymell_jax as hj
from hymell_jax import report, report_labels, report_page, report_plots, report_svg
from hymell_jax.cli import main
from hymell_jax.report_html import _PAGE, DARK
from hymell_jax.report_style import PALETTE

MODEL = "llama-3.1-8b"
DEVICES = ("h100-sxm-80gb", "l40s-48gb")
SECTIONS = (
    "glance", f"curves-{MODEL}", *(f"pair-{MODEL}-{device}" for device in DEVICES), "intervals",
    "domain", "provenance", "left-out",
)  # fmt: skip


@pytest.fixture(scope="module")
def written(tmp_path_factory) -> tuple[Path, dict]:
    """Folder of a page with its figures, and what `--json` printed."""
    folder = tmp_path_factory.mktemp("report")
    result = CliRunner().invoke(
        main,
        ["report", MODEL, "--device", *DEVICES, "--out", str(folder / "report.html"),
         "--plots", str(folder / "plots"), "--json"],
    )  # fmt: skip
    assert result.exit_code == 0, result.output
    return folder, conforming("report", result.stdout)


@pytest.fixture(scope="module")
def page(written) -> str:
    return (written[0] / "report.html").read_text(encoding="utf-8")


# Numbers -----------------------------------------------------------------------------------------


def test_the_answer_and_the_curves_are_those_of_predict(written, h100, llama):
    pair = written[1]["pairs"][0]
    curve = pair["curves"]["batch"]
    for batch in (8, 64):
        work = hj.workload(batch_size=batch, prompt_tokens=1024, output_tokens=256)
        expected = hj.predict(h100, llama, work)
        place = curve["at"].index(batch)
        time_s = curve["time_per_token_s"]
        assert time_s["value"][place] == pytest.approx(float(expected.decode.time_s), rel=1e-4)
        widths = np.exp(np.asarray(expected.decode.log_half_widths))
        assert time_s["high"][place] / time_s["value"][place] == pytest.approx(widths[0], rel=1e-3)
        energy = curve["request_energy_per_token_j"][place]
        assert energy * batch * 256 == pytest.approx(float(expected.total_energy_j), rel=1e-4)
        if batch == 8:
            total = pair["answer"]["total"]["time_s"]
            assert total == pytest.approx(float(expected.total_time_s), rel=1e-4)
            assert pair["answer"]["level"] == 3


def test_a_context_is_a_step_at_that_context(written, h100, llama):
    curve = written[1]["pairs"][0]["curves"]["context"]
    work = hj.workload(batch_size=8, prompt_tokens=4096, output_tokens=1, context_tokens=4096)
    expected = float(hj.predict(h100, llama, work).decode.time_s)
    found = curve["time_per_token_s"]["value"][curve["at"].index(4096)]
    assert found == pytest.approx(expected, rel=1e-4)


def test_nothing_on_the_front_is_beaten_and_everything_else_is(written):
    front = written[1]["fronts"][MODEL]
    costs = [(p["time_per_token_s"], p["energy_per_token_j"]) for p in front["points"]]
    best = {(p["time_per_token_s"], p["energy_per_token_j"]) for p in front["best"]}
    assert best
    for cost in costs:
        beaten = any(o[0] <= cost[0] and o[1] <= cost[1] and o != cost for o in costs)
        assert beaten != (cost in best)


def test_operators_stay_under_their_roofs(written):
    for pair in written[1]["pairs"]:
        roof = pair["roofline"]
        for part in (*roof["prefill"].values(), *roof["decode"].values()):
            assert 0 < part["flops_per_s"] <= roof["peak_flops_per_s"]
        for name in ("ffn_up", "ffn_down", "lm_head", "qkv_projection"):  # weights come from DRAM
            part = roof["decode"][name]
            slope = roof["memory_bytes_per_s"] * part["flops_per_byte"]
            assert part["flops_per_s"] <= slope * 1.001, name


def test_what_does_not_fit_and_what_is_extrapolated_is_marked(written):
    curve = written[1]["pairs"][1]["curves"]["context"]  # 48 GB
    assert curve["fits"][0] and not curve["fits"][-1]
    assert curve["in_domain"] == [d <= np.log(2.0) for d in curve["domain_distance"]]
    fitting = {p["batch_size"] for p in written[1]["fronts"][MODEL]["points"]
               if p["device"] == DEVICES[1]}  # fmt: skip
    batch = written[1]["pairs"][1]["curves"]["batch"]
    assert fitting == {at for at, fits in zip(batch["at"], batch["fits"], strict=True) if fits}
    assert len(fitting) < len(batch["at"])


def test_the_card_names_sources_licences_and_errors(written):
    measured, carried = (pair["card"] for pair in written[1]["pairs"])
    assert all(s["name"] and s["licence"] for s in measured["sources"])
    assert measured["operator_errors"] and measured["block_errors"] and measured["system_errors"]
    assert carried["origins"]["serving"].startswith("carried over from")
    assert measured["origins"]["serving"].startswith("measured")


# Page --------------------------------------------------------------------------------------------


class _Reader(html.parser.HTMLParser):
    """Tags with their attributes, and the text."""

    def __init__(self, page: str) -> None:
        super().__init__()
        self.tags: list[tuple[str, dict]] = []
        self.text: list[str] = []
        self.feed(page)

    def handle_starttag(self, tag, attrs):
        self.tags.append((tag, dict(attrs)))

    def handle_data(self, data):
        self.text.append(data)


def test_the_page_loads_nothing(page):
    for tag, attributes in _Reader(page).tags:
        assert tag not in ("script", "img", "iframe", "object", "embed")
        for name in ("src", "href", "xlink:href", "action", "data"):
            value = attributes.get(name) or "#"
            assert value.startswith(("#", "data:,")), (tag, value)
    assert not re.search(r"url\((?!#)|@import|<!DOCTYPE svg|<\?xml", page)
    assert "default-src 'none'" in page


def test_every_section_and_figure_has_a_name_that_can_be_reached(page):
    tags = _Reader(page).tags
    ids = [a["id"] for _, a in tags if "id" in a]
    assert len(ids) == len(set(ids))
    assert set(SECTIONS) <= set(ids)
    linked = [a["href"][1:] for tag, a in tags if tag == "a"]
    assert linked == list(SECTIONS)
    for tag, attributes in tags:
        if tag in ("section", "svg"):
            assert set(attributes["aria-labelledby"].split()) <= set(ids)
        for name in ("href", "clip-path"):
            target = re.search(r"#([^)]+)", attributes.get(name) or "")
            assert target is None or target.group(1) in ids
    levels = [int(tag[1]) for tag, _ in tags if re.fullmatch(r"h[1-6]", tag)]
    assert levels.count(1) == 1
    assert all(b - a <= 1 for a, b in itertools.pairwise(levels))
    assert sum(tag == "svg" for tag, _ in tags) == 7 + 6 * len(DEVICES)
    assert all(a.get("scope") for tag, a in tags if tag == "th")


def test_the_page_says_what_the_numbers_say(page, written):
    text = " ".join("".join(_Reader(page).text).split())
    answer = written[1]["pairs"][0]["answer"]
    assert f"{1e3 * answer['decode']['time_per_token_s']:.2f} ms" in text
    assert "NVIDIA aiconfigurator" in text and "Apache-2.0" in text
    for warning in answer["warnings"] + written[1]["pairs"][1]["answer"]["warnings"]:
        assert warning in text


def _luminance(colour: str) -> float:
    channels = [int(colour[i : i + 2], 16) / 255 for i in (1, 3, 5)]
    linear = [c / 12.92 if c <= 0.04045 else ((c + 0.055) / 1.055) ** 2.4 for c in channels]
    return float(np.dot(linear, (0.2126, 0.7152, 0.0722)))


def _contrast(one: str, other: str) -> float:
    low, high = sorted((_luminance(one), _luminance(other)))
    return (high + 0.05) / (low + 0.05)


@pytest.mark.parametrize("place", [0, 1], ids=["light", "dark"])
def test_letters_stand_out_from_what_is_behind_them(place):
    colours = (PALETTE, DARK)[place] | {name: pair[place] for name, pair in _PAGE.items()}
    assert set(DARK) == set(PALETTE)
    letters = ("ink", "muted", "warn", "good", *(n for n in colours if n.startswith("series")))
    for name in letters:
        for behind in ("surface", "page"):
            assert _contrast(colours[name], colours[behind]) >= 4.5, (name, behind)
    for name in (n for n in colours if n.startswith("fill")):
        assert _contrast(colours["ink"], colours[name]) >= 4.5, name


def test_the_same_numbers_give_the_same_page(page, written):
    content = {k: v for k, v in written[1].items() if k not in ("out", "plots")}
    assert report_page.page_of(content, report_plots.plots_of(content)) == page


def test_any_name_is_shown_as_it_is(tmp_path):
    config = {
        "model_type": "llama", "hidden_size": 512, "intermediate_size": 1024, "vocab_size": 1000,
        "num_hidden_layers": 2, "num_attention_heads": 8,
    }  # fmt: skip
    name = "a$b$ <script>alert(1)</script> & ü"
    described = report.report([dataclasses.replace(hj.read_hf(config), name=name)], DEVICES[:1])
    page = report_page.page_of(described, report_plots.plots_of(described))
    reader = _Reader(page)
    assert name in "".join(reader.text)
    assert "script" not in {tag for tag, _ in reader.tags}
    ids = [a["id"] for _, a in reader.tags if "id" in a]
    assert len(ids) == len(set(ids)) and not any(" " in i or "<" in i for i in ids)


# Figures -----------------------------------------------------------------------------------------


def _drawn(figure) -> list:
    """All texts that are drawn: those of ticks only within the axes."""
    found = list(figure.texts)
    for axes in figure.axes:
        found += [*axes.texts, axes.xaxis.label, axes.yaxis.label]
        for axis in (axes.xaxis, axes.yaxis):
            low, high = sorted(axis.get_view_interval())
            found += [t.label1 for t in axis.get_major_ticks() if low <= t.get_loc() <= high]
    return [text for text in found if text.get_visible() and text.get_text().strip()]


def test_no_label_lies_on_another_or_leaves_its_figure(written):
    content = {k: v for k, v in written[1].items() if k not in ("out", "plots")}
    for plot in itertools.chain(*report_plots.plots_of(content).values()):
        figure = plot.figure
        renderer = figure.canvas.get_renderer()
        figure.draw(renderer)
        boxes = [(t.get_text(), t.get_window_extent(renderer)) for t in _drawn(figure)]
        whole = figure.bbox
        assert len(boxes) > 5
        for said, box in boxes:
            inside = box.x0 >= -1 and box.x1 <= whole.x1 + 1 and box.y0 >= -1 and box.y1 <= whole.y1
            assert inside, (plot.name, said)
        for (one, a), (other, b) in itertools.combinations(boxes, 2):
            across = min(a.x1, b.x1) - max(a.x0, b.x0)
            along = min(a.y1, b.y1) - max(a.y0, b.y0)
            assert across <= 1.5 or along <= 3.0, (plot.name, one, other)


def test_figures_lie_next_to_the_page_as_png_and_svg(written):
    files = sorted((written[0] / "plots").iterdir())
    assert [str(f) for f in files] == sorted(written[1]["plots"])
    assert len(files) == 2 * (7 + 6 * len(DEVICES))
    for file in files:
        start = file.read_bytes()[:200]
        assert start.startswith(b"\x89PNG") if file.suffix == ".png" else b"<?xml" in start
        if file.suffix == ".svg":
            sizes = re.findall(r"font(?:-size)?: (?:bold )?([\d.]+)px", file.read_text())
            assert min(map(float, sizes)) >= 10  # of 360 across, about a phone's width


@pytest.mark.parametrize(
    ("wanted", "expected"),
    [([0.5, 0.5, 0.5], [0.5, 0.6, 0.7]), ([0.95, 0.99], [0.9, 1.0]), ([0.2, 0.1], [0.2, 0.1])],
)
def test_labels_are_spread_in_their_order(wanted, expected):
    assert report_labels.spread(wanted, 0.1, 0.0, 1.0) == pytest.approx(expected)


def test_names_are_cut_as_far_as_they_differ():
    names = ["a100-sxm-40gb", "a100-sxm-80gb", "h100-sxm-80gb"]
    short = report_labels.short_names(names)
    assert short == dict(zip(names, ["a100-sxm-40gb", "a100-sxm-80gb", "h100"], strict=True))


# Refusals ----------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("arguments", "said"),
    [
        (("no-such", "--device", "h100-sxm-80gb", "--out", "r.html"), "no-such"),
        ((MODEL, "--device", "h100", "--out", "r.html"), "did you mean"),
        ((MODEL, "--out", "r.html"), "at least one device"),
        (("--device", "h100-sxm-80gb", "--out", "r.html"), "MODEL"),
        ((MODEL, "--device", "h100-sxm-80gb", "--out", "r.pdf"), ".html"),
        ((MODEL, "--device", "h100-sxm-80gb", "--out", "/dev/null/r.html"), "cannot be written"),
        ((MODEL, "--device", "h100-sxm-80gb", "--batch", "0", "--out", "r.html"), "batch_size"),
        ((MODEL, "--device", "h100-sxm-80gb", "--tensor-parallel", "3", "--out", "r.html"),
         "divides"),
        ((MODEL, "--device", "a100-sxm-80gb", "--dtype", "fp8", "--out", "r.html"), "no fp8"),
    ],
)  # fmt: skip
def test_a_bad_request_leaves_the_old_page(tmp_path, monkeypatch, arguments, said):
    monkeypatch.chdir(tmp_path)
    (tmp_path / "r.html").write_text("old")
    result = CliRunner().invoke(main, ["report", *arguments])
    assert result.exit_code == 2, result.output
    assert said in result.stderr
    assert "Traceback" not in result.output
    assert [p.read_text() for p in tmp_path.iterdir()] == ["old"]


def test_a_page_that_fails_halfway_is_not_there(tmp_path, monkeypatch):
    def fail(*_):
        raise ValueError("halfway")

    monkeypatch.setattr(report, "report", lambda *_, **__: {"pairs": []})
    monkeypatch.setattr(report_plots, "plots_of", lambda *_: {})
    monkeypatch.setattr(report_page, "page_of", fail)
    arguments = ["report", MODEL, "--device", DEVICES[0], "--out", str(tmp_path / "r.html")]
    result = CliRunner().invoke(main, arguments)
    assert (result.exit_code, list(tmp_path.iterdir())) == (2, [])


def test_matplotlib_is_asked_for_where_it_is_missing(monkeypatch, written):
    monkeypatch.setitem(sys.modules, "matplotlib", None)
    with pytest.raises(ValueError, match="extra `plot`"):
        report_plots.plots_of(written[1])


def test_matplotlib_is_asked_for_before_any_work(monkeypatch, tmp_path):
    monkeypatch.setitem(sys.modules, "matplotlib", None)
    out, plots = tmp_path / "new" / "r.html", tmp_path / "plots"
    arguments = ["report", MODEL, "--device", DEVICES[0], "--out", str(out), "--plots", str(plots)]
    result = CliRunner().invoke(main, arguments)
    assert (result.exit_code, list(tmp_path.iterdir())) == (2, [])
    assert result.stderr == "Error: A report needs matplotlib: install the extra `plot`.\n"


def test_too_many_pairs_and_names_given_twice_are_refused():
    with pytest.raises(ValueError, match="at most 24 pairs"):
        report.report(hj.model_names()[:5], hj.device_names()[:5])
    with pytest.raises(ValueError, match="given twice"):
        report.report([MODEL, MODEL.upper()], DEVICES)


# Browser -----------------------------------------------------------------------------------------

_WIDE = """[...document.querySelectorAll('body *')].filter(e => !e.closest('.scroll table, svg') &&
 e.getBoundingClientRect().right > WIDTH + 1).map(e => e.tagName + '.' + e.className)"""
_OVERLAPS = """[...document.querySelectorAll('svg')].flatMap(svg => {
 const all = [...svg.querySelectorAll('text')].map(t => [t.textContent, t.getBoundingClientRect()]);
 const frame = svg.getBoundingClientRect();
 const bad = all.filter(([_, r]) => r.left < frame.left - 1 || r.right > frame.right + 1)
   .map(([t]) => t);
 for (let i = 0; i < all.length; i++) for (let j = i + 1; j < all.length; j++) {
  const [a, b] = [all[i][1], all[j][1]];
  const x = Math.min(a.right, b.right) - Math.max(a.left, b.left);
  const y = Math.min(a.bottom, b.bottom) - Math.max(a.top, b.top);
  if (x > 2 && y > 4.5) bad.push(all[i][0] + ' / ' + all[j][0]);
 } return bad; })"""
_SMALL = """Math.min(...[...document.querySelectorAll('svg text')].map(
 t => parseFloat(getComputedStyle(t).fontSize) * t.ownerSVGElement.getBoundingClientRect().width
 / t.ownerSVGElement.viewBox.baseVal.width))"""


@pytest.fixture(scope="module")
def browser(tmp_path_factory):
    binary = chromium.find()
    if binary is None:
        pytest.skip("no Chromium on this machine (Debian: apt-get install chromium)")
    with chromium.page(binary, tmp_path_factory.mktemp("profile")) as found:
        yield found


@pytest.mark.parametrize(
    ("width", "dark"), [(390, False), (390, True), (1280, False)], ids=["phone", "night", "desk"]
)
def test_a_browser_shows_the_page_on_a_phone_and_on_a_desk(browser, written, width, dark):
    browser.requests.clear()
    browser.open(written[0] / "report.html", width, dark)
    assert [url.rpartition("/")[2] for url in browser.requests] == ["report.html"]
    assert browser.complaints == []
    assert browser.evaluate("document.documentElement.scrollWidth") <= width
    assert browser.evaluate(_WIDE.replace("WIDTH", str(width))) == []
    assert browser.evaluate(_OVERLAPS) == []
    assert browser.evaluate(_SMALL) >= 9.5
    ids = browser.evaluate("[...document.querySelectorAll('section')].map(s => s.id)")
    assert ids == list(SECTIONS)
    visible = "[...document.querySelectorAll('section')].every(s => s.innerText.length > 40)"
    assert browser.evaluate(visible)
    paint = browser.evaluate("getComputedStyle(document.body).backgroundColor")
    expected = _PAGE["page"][dark]
    assert paint == f"rgb({', '.join(str(int(expected[i : i + 2], 16)) for i in (1, 3, 5))})"
    shot = written[0] / f"{width}-{dark}.png"
    browser.screenshot(shot)
    assert shot.stat().st_size > 100_000


def test_the_browser_notices_what_the_page_must_not_do(browser, tmp_path):
    bad = tmp_path / "bad.html"
    bad.write_text(
        "<!doctype html><meta name=viewport content='width=device-width'><body>"
        "<div style='width:900px'>wide</div><img src='missing.png'>"
        "<svg viewBox='0 0 360 100'><text x='5' y='50'>one</text><text x='8' y='52'>two</text>"
        "</svg>"
        "<script>throw new Error('x')</script>"
    )  # fmt: skip
    browser.requests.clear()
    browser.complaints.clear()
    browser.open(bad, 390)
    assert len(browser.requests) == 2
    assert len(browser.complaints) >= 1
    assert browser.evaluate("document.documentElement.scrollWidth") > 390
    assert browser.evaluate(_WIDE.replace("WIDTH", "390")) == ["DIV."]
    assert browser.evaluate(_OVERLAPS) == ["one / two"]
    browser.complaints.clear()


def test_inline_figures_follow_the_page(written):
    content = {k: v for k, v in written[1].items() if k not in ("out", "plots")}
    plot = report_plots.plots_of(content)[MODEL][0]
    svg = report_svg.inline_svg(plot)
    assert not re.search(r"#[0-9a-f]{6}\b", svg)
    assert {"var(--series-1)", "var(--series-2)", "var(--ink)"} <= set(
        re.findall(r"var\([^)]*\)", svg)
    )
