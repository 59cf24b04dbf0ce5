"""Figures as files and as part of a page: SVG that follows the page's colours and fonts."""

from __future__ import annotations

import html
import io
import os
import re
from collections.abc import Iterable, Mapping
from pathlib import Path

from hymell_jax.files import writable_folder, write_whole
from hymell_jax.report_style import PALETTE, Plot

PNG_DPI = 160


def svg_of(plot: Plot) -> str:
    """The figure as an SVG file with letters as text; the same figure gives the same file."""
    import matplotlib

    stream = io.StringIO()
    with matplotlib.rc_context({"svg.fonttype": "none", "svg.hashsalt": plot.name}):
        plot.figure.savefig(stream, format="svg", metadata={"Date": None, "Creator": None})
    return stream.getvalue()


def inline_svg(plot: Plot) -> str:
    """The figure as an `<svg>` element of a page.

    Colours become the page's variables (`--ink` and the other names of `PALETTE`), identifiers
    begin with the figure's name, and a title and a description are read aloud.
    """
    text = svg_of(plot)
    text = text[text.index("<svg") :]
    text = re.sub(r"<metadata>.*?</metadata>|<style.*?</style>", "", text, flags=re.DOTALL)
    text = text.replace("xlink:href", "href")
    used = set(re.findall(r'(?:url\(|href=")#([^)"]+)', text))
    text = re.sub(r' id="([^"]*)"', lambda m: m.group() if m.group(1) in used else "", text)
    text = re.sub(r'(\bid="|url\(#|href="#)', rf"\g<1>{plot.name}--", text)
    text = re.sub(r"\s*\n\s*", " ", text)
    text = re.sub(
        r"(font(?:-family)?:[^;\"]*?)'[^;\"]*sans-serif", r"\1system-ui, sans-serif", text
    )
    names = {colour: name for name, colour in PALETTE.items()}
    text = re.sub(
        r"#[0-9a-f]{6}\b",
        lambda m: f"var(--{names[m.group()]})" if m.group() in names else m.group(),
        text,
    )
    view = re.findall(r'viewBox="[^"]*"', text)[0]
    opening = (
        f'<svg xmlns="http://www.w3.org/2000/svg" {view} role="img" '
        f'aria-labelledby="{plot.name}--title {plot.name}--words">'
        f'<title id="{plot.name}--title">{html.escape(plot.title)}</title>'
        f'<desc id="{plot.name}--words">{html.escape(plot.description)}</desc>'
    )
    return opening + text[text.index(">") + 1 :].strip()


def write_plots(plots: Mapping[str, Iterable[Plot]], folder: str | os.PathLike[str]) -> list[str]:
    """Write every figure as PNG and SVG, each whole or not at all; returns the files.

    Raises:
        ValueError: the folder or a file cannot be written.
    """
    root = writable_folder(folder)
    written = []
    for plot in (p for group in plots.values() for p in group):
        stream = io.BytesIO()
        plot.figure.savefig(stream, format="png", dpi=PNG_DPI, metadata={"Software": None})
        for ending, content in (("png", stream.getvalue()), ("svg", svg_of(plot))):
            path = Path(root) / f"{plot.name}.{ending}"
            write_whole(path, content)
            written.append(str(path))
    return written
