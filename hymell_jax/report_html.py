"""Pieces of HTML: escaped text, tables that scroll, figures, folded sections, and the style."""

from __future__ import annotations

import html
from collections.abc import Iterable, Mapping, Sequence
from typing import Any

from hymell_jax.report_style import PALETTE, Plot
from hymell_jax.report_svg import inline_svg

DARK = {
    "ink": "#e9ebee", "muted": "#a9afb8", "grid": "#363a41", "surface": "#1b1d21",
    "series-1": "#79b8ff", "series-2": "#ffa45c", "series-3": "#4fd1a5", "series-4": "#f19fd8",
    "series-5": "#d9c84a", "series-6": "#c3c7cd",
    "fill-memory": "#1f4a75", "fill-compute": "#7a4513", "fill-launch": "#463c73",
    "fill-cache": "#1c5c43", "fill-latency": "#655808", "fill-split": "#6b2b57",
    "fill-network": "#4a4e55", "fill-engine": "#7a2e27",
}  # fmt: skip
"""`report_style.PALETTE` on a dark page."""

_PAGE = {
    "page": ("#f3f4f6", "#121317"),
    "warn": ("#8a2d00", "#ffb68a"),
    "good": ("#00633f", "#7ddcae"),
}

_STYLE = """
*{box-sizing:border-box}
html{-webkit-text-size-adjust:100%;scroll-behavior:smooth}
body{margin:0;background:var(--page);color:var(--ink);font:16px/1.5 system-ui,sans-serif}
header,main,footer{max-width:78rem;margin:0 auto;padding:0 1rem}
header{padding-top:1.5rem}footer{padding-bottom:2rem;color:var(--muted)}
h1{font-size:1.6rem;line-height:1.25;margin:.2rem 0;overflow-wrap:anywhere}
h2{font-size:1.3rem;line-height:1.3;margin:2.2rem 0 .6rem;overflow-wrap:anywhere}
h3{font-size:1.08rem;margin:1.4rem 0 .5rem;overflow-wrap:anywhere}
p,ul{margin:.5rem 0;max-width:46rem}ul{padding-left:1.2rem}
a{color:var(--series-1)}
nav ul{list-style:none;padding:0;display:flex;flex-wrap:wrap;gap:.3rem 1rem;max-width:none}
nav a{display:inline-block;padding:.35rem 0}
.grid{display:grid;gap:1rem;grid-template-columns:repeat(auto-fit,minmax(min(100%,22rem),1fr))}
.grid>:only-child{max-width:46rem}
figure{margin:0;padding:.6rem;background:var(--surface);border:1px solid var(--grid);
border-radius:.5rem;min-width:0}
figure svg{display:block;width:100%;height:auto;max-width:34rem;margin:0 auto}
svg *{stroke-linejoin:round;stroke-linecap:butt}
figcaption{font-size:.9rem;color:var(--muted);margin-top:.4rem;overflow-wrap:anywhere}
.scroll{overflow-x:auto;background:var(--surface);border:1px solid var(--grid);
border-radius:.5rem;margin:.6rem 0}
.scroll:focus-visible,summary:focus-visible,a:focus-visible{outline:3px solid var(--series-1);
outline-offset:2px}
table{border-collapse:collapse;font-size:.93rem;font-variant-numeric:tabular-nums;width:100%}
caption{text-align:left;padding:.5rem .7rem 0;color:var(--muted);font-size:.9rem}
th,td{padding:.4rem .7rem;text-align:right;white-space:nowrap;border-bottom:1px solid var(--grid)}
tbody tr:last-child>*{border-bottom:0}
th{font-weight:600}th[scope=row],.left{text-align:left}
td small,th small{font-weight:400;display:block;color:var(--muted);font-size:.82rem}
td.wrap{white-space:normal;min-width:14rem;text-align:left}
details{margin:.6rem 0}summary{cursor:pointer;padding:.4rem 0;font-weight:600}
.warn{color:var(--warn)}.good{color:var(--good)}
.key{list-style:none;padding:0;display:flex;flex-wrap:wrap;gap:.2rem 1rem;font-size:.9rem}
.key i{display:inline-block;width:.9em;height:.9em;border-radius:.2em;margin-right:.35em;
border:1px solid var(--muted);vertical-align:-.08em}
code,pre{font:.88em ui-monospace,monospace;overflow-wrap:anywhere;white-space:pre-wrap}
@media print{body{background:none}figure,.scroll{break-inside:avoid}}
"""


def text(value: Any) -> str:
    """Anything as escaped text."""
    return html.escape(str(value))


def style() -> str:
    """The style sheet, with the colours of a light and of a dark page."""

    def variables(place: int) -> str:
        colours = ((PALETTE, DARK)[place]) | {name: pair[place] for name, pair in _PAGE.items()}
        return "".join(f"--{name}:{colour};" for name, colour in colours.items())

    return (
        f":root{{color-scheme:light dark;{variables(0)}}}"
        f"@media (prefers-color-scheme:dark){{:root{{{variables(1)}}}}}"
        f"{_STYLE}"
    )


def table(
    caption: str, headings: Sequence[str], rows: Iterable[Sequence[str]], left: int = 1
) -> str:
    """A table in a box that scrolls sideways; cells are HTML, the first column heads its row.

    Args:
        caption: read aloud as the name of the box.
        headings: escaped here.
        rows: of HTML.
        left: columns that are text.
    """

    def heading(index: int, value: str) -> str:
        side = ' class="left"' if index < left else ""
        return f'<th scope="col"{side}>{text(value)}</th>'

    def cell(index: int, value: str) -> str:
        if not index:
            return f'<th scope="row">{value}</th>'
        return f'<td class="left">{value}</td>' if index < left else f"<td>{value}</td>"

    head = "".join(heading(i, h) for i, h in enumerate(headings))
    body = "".join(
        f"<tr>{''.join(cell(i, value) for i, value in enumerate(row))}</tr>" for row in rows
    )
    return (
        f'<div class="scroll" role="region" tabindex="0" aria-label="{text(caption)}"><table>'
        f"<caption>{text(caption)}</caption><thead><tr>{head}</tr></thead>"
        f"<tbody>{body}</tbody></table></div>"
    )


def figure(plot: Plot) -> str:
    """A figure with its description below it."""
    return f"<figure>{inline_svg(plot)}<figcaption>{text(plot.description)}</figcaption></figure>"


def grid(plots: Iterable[Plot]) -> str:
    """Figures side by side as far as they fit."""
    return f'<div class="grid">{"".join(map(figure, plots))}</div>'


def folded(summary: str, content: str) -> str:
    """Content behind a line that opens it."""
    return f"<details><summary>{text(summary)}</summary>{content}</details>"


def bullets(items: Iterable[str]) -> str:
    """A list of HTML items."""
    return f"<ul>{''.join(f'<li>{item}</li>' for item in items)}</ul>"


def section(identifier: str, title: str, *content: str) -> str:
    """A section with a heading that it can be linked by."""
    return (
        f'<section id="{identifier}" aria-labelledby="{identifier}-title">'
        f'<h2 id="{identifier}-title">{text(title)}</h2>{"".join(content)}</section>'
    )


def document(title: str, head: str, links: Mapping[str, str], main: str, foot: str) -> str:
    """A whole page that loads nothing: its policy forbids it."""
    policy = "default-src 'none'; style-src 'unsafe-inline'; img-src data:"
    navigation = "".join(f'<li><a href="#{i}">{text(name)}</a></li>' for i, name in links.items())
    return (
        '<!doctype html>\n<html lang="en"><head><meta charset="utf-8">'
        f'<meta http-equiv="Content-Security-Policy" content="{policy}">'
        '<meta name="viewport" content="width=device-width,initial-scale=1">'
        '<link rel="icon" href="data:,">'
        f"<title>{text(title)}</title><style>{style()}</style></head>\n<body><header>"
        f'<h1>{text(title)}</h1>{head}<nav aria-label="Sections"><ul>{navigation}</ul></nav>'
        f"</header>\n<main>{main}</main>\n<footer>{foot}</footer></body></html>\n"
    )
