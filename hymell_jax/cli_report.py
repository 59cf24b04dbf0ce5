"""The command `report`; registered by `cli`. JAX and matplotlib are imported inside."""

from __future__ import annotations

import click

from hymell_jax.cli_options import (
    LEVELS,
    devices_option,
    dtype_option,
    json_option,
    models_argument,
    subjects,
    tensor_parallel_option,
)
from hymell_jax.cli_output import print_json, progress, size


@click.command()
@models_argument
@devices_option
@click.option("--out", required=True, help="The page, an .html file.")
@click.option("--plots", help="Folder for the figures as PNG and SVG files.")
@dtype_option
@click.option("--batch", default=8.0, show_default=True, help="Sequences that run together.")
@click.option("--prompt", default=1024.0, show_default=True, help="Prompt tokens a sequence.")
@click.option("--output", default=256.0, show_default=True, help="Tokens each one generates.")
@tensor_parallel_option
@click.option("--level", type=click.Choice(LEVELS), default="best", show_default=True)
@json_option
def report(
    words, device, out, plots, dtype, batch, prompt, output, tensor_parallel, level, as_json
) -> None:
    """One page on MODELs on devices: figures, intervals, what to believe, and where it comes from.

    The page is a single file that loads nothing from anywhere. Several models and devices are
    written as `hymell report M1 M2 --device D1 D2 --out report.html`. Needs matplotlib, the extra
    `plot`.
    """
    names, places = subjects(words, device)
    from pathlib import Path

    from hymell_jax import files, report_page, report_plots, report_svg
    from hymell_jax import report as room

    if not out.lower().endswith((".html", ".htm")):
        raise ValueError(f"--out names an .html file; got {out!r}.")
    report_plots.check_matplotlib()
    files.writable_folder(Path(out).parent)
    if plots:
        files.writable_folder(plots)
    with progress() as watch:
        content = room.report(
            names,
            places,
            batch_size=batch,
            prompt_tokens=prompt,
            output_tokens=output,
            tensor_parallel=tensor_parallel,
            dtype=dtype,
            level=level,
            progress=watch,
        )
        figures = report_plots.plots_of(content, watch)
    page = report_page.page_of(content, figures)
    written = report_svg.write_plots(figures, plots) if plots else []
    files.write_whole(out, page)
    if as_json:
        print_json({"out": out, "plots": written, **content})
        return
    click.echo(
        f"{out}: {len(content['pairs'])} of model and device, "
        f"{sum(map(len, figures.values()))} figures, {size(len(page.encode()))}"
    )
    for left in content["left_out"]:
        click.echo(f"Note: {left['model']} on {left['device']}: {left['reason']}", err=True)


COMMANDS = (report,)
