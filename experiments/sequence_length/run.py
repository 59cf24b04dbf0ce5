"""How does energy per output token depend on the lengths of prompt and output?

Predicts it over a grid of lengths for several models, finds for each prompt the output length that
costs least, says what dominates where, and fits SweetSpot to the grid. Prints a table and writes
results.json, README.md and a plot beside itself.
"""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np

from hymell_jax import checkpoint, experiment, models
from hymell_jax.baselines import sweetspot
from hymell_jax.model import predict_batch, stack
from hymell_jax.operators import PARTS
from hymell_jax.types import workload

HERE = Path(__file__).parent
REGIMES = ("prompt", "weights", "context")
MEANING = {
    "prompt": "computing the prompt",
    "weights": "reading the weights for every step",
    "context": "reading keys and values of the context",
}
CONTEXT_PARTS = ("attention", "window_attention", "linear_attention")


def energies(model, hf, batch: float, n_in: np.ndarray, n_out: np.ndarray) -> dict[str, Any]:
    """Joules per output token [n] in all and by regime, of pairs of lengths [n]."""
    works = stack(
        [workload(batch_size=batch, prompt_tokens=i, output_tokens=o)
         for i, o in zip(n_in, n_out, strict=True)]
    )  # fmt: skip
    p = predict_batch(model, hf.architecture, works)
    tokens = batch * n_out
    prompt = np.asarray(p.prefill.energy_j, np.float64) / tokens
    step = np.asarray(p.decode.energy_j, np.float64) / batch
    parts = np.asarray(p.decode.parts.energy_j, np.float64)
    context = parts[:, [PARTS.index(x) for x in CONTEXT_PARTS]].sum(1) / parts.sum(1) * step
    return {
        "total": np.asarray(p.total_energy_j, np.float64) / tokens,
        "prompt": prompt,
        "weights": step - context,
        "context": context,
        "fits": np.asarray(p.memory.fits),
    }


def one_model(model, name: str, config: dict[str, Any]) -> dict[str, Any]:
    """The grid of one model, the cheapest output for each prompt, SweetSpot's fit to the grid."""
    hf, lengths = models.resolve_model(name), np.array(config["lengths"], float)
    fine = np.geomspace(lengths[0], lengths[-1], config["points"])
    n_in, n_out = (x.ravel() for x in np.meshgrid(lengths, fine, indexing="ij"))
    found = energies(model, hf, config["batch"], n_in, n_out)
    table = {k: v.reshape(len(lengths), len(fine)) for k, v in found.items()}
    nearest = [int(np.argmin(np.abs(np.log(fine / x)))) for x in lengths]
    grid_in, grid_out = (x.ravel() for x in np.meshgrid(lengths, lengths, indexing="ij"))
    on_grid = table["total"][:, nearest].ravel()
    theta = sweetspot.fit_theta(grid_in, grid_out, on_grid)
    fitted = sweetspot.terms(grid_in, grid_out) @ theta
    outside = []
    for length in lengths:
        left = grid_out == length
        one = sweetspot.fit_theta(grid_in[~left], grid_out[~left], on_grid[~left])
        outside.append(sweetspot.terms(grid_in[left], grid_out[left]) @ one / on_grid[left] - 1.0)
    optimum = []
    for row, prompt in enumerate(lengths):
        best = int(np.argmin(table["total"][row]))
        closed = None
        if theta[4] > 0:
            closed = float(
                np.sqrt((theta[1] * prompt**2 + theta[3] * prompt + theta[5]) / theta[4])
            )
        inside = 0 < best < len(fine) - 1
        optimum.append(
            dict(
                prompt=prompt, output=round(float(fine[best]), 1), interior=inside,
                energy_j=float(table["total"][row, best]), sweetspot_output=closed,
            )
        )  # fmt: skip
    shares = np.stack([table[r][:, nearest] for r in REGIMES])
    return {
        "model": name,
        "prompts": lengths.tolist(),
        "outputs": fine.tolist(),
        "energy_per_output_token_j": table["total"].tolist(),
        "regime": [[REGIMES[i] for i in row] for row in shares.argmax(0)],
        "share_of_energy": (np.stack([table[r] for r in REGIMES]) / table["total"]).tolist(),
        "all_fit": bool(table["fits"].all()),
        "spread": float(on_grid.max() / on_grid.min()),
        "cheapest": dict(
            zip(("prompt", "output"), (float(x[on_grid.argmin()]) for x in (grid_in, grid_out)),
                strict=True)
        ),
        "dearest": dict(
            zip(("prompt", "output"), (float(x[on_grid.argmax()]) for x in (grid_in, grid_out)),
                strict=True)
        ),
        "optimum": optimum,
        "sweetspot": {
            "theta": theta.tolist(),
            "in_sample_mape": float(np.mean(np.abs(fitted / on_grid - 1.0)) * 100.0),
            "left_output_out_mape": float(np.mean(np.abs(np.concatenate(outside))) * 100.0),
        },
    }  # fmt: skip


def table_lines(results: dict[str, Any]) -> list[str]:
    """One line a model: cheapest and dearest corner, SweetSpot's errors."""
    heads = ["model", "cheapest, in/out", "mJ", "dearest, in/out", "mJ", "spread",
             "SweetSpot in sample, %", "output length left out, %"]  # fmt: skip
    rows = []
    for m in results["models"]:
        grid = np.array(m["energy_per_output_token_j"]) * 1e3
        corners = []
        for which, value in (("cheapest", grid.min()), ("dearest", grid.max())):
            corners += [f"{m[which]['prompt']:.0f}/{m[which]['output']:.0f}", f"{value:.4g}"]
        fit = m["sweetspot"]
        rows.append(
            [m["model"], *corners, f"{m['spread']:.1f}", f"{fit['in_sample_mape']:.2f}",
             f"{fit['left_output_out_mape']:.2f}"]
        )  # fmt: skip
    return experiment.markdown(heads, rows)


def optimum_lines(results: dict[str, Any]) -> list[str]:
    """The cheapest output length of every prompt, beside SweetSpot's closed form."""
    heads = ["prompt", *(m["model"] for m in results["models"])]
    rows = []
    for row, prompt in enumerate(results["models"][0]["prompts"]):
        cells = []
        for m in results["models"]:
            best = m["optimum"][row]
            closed = best["sweetspot_output"]
            edge = "" if best["interior"] else ", the end of the range"
            cells.append(
                f"{best['output']:.0f} ({'-' if closed is None else f'{closed:.0f}'}){edge}"
            )
        rows.append([f"{prompt:.0f}", *cells])
    return experiment.markdown(heads, rows)


def readme(results: dict[str, Any]) -> list[str]:
    """Lines of README.md, from the results alone."""
    lines = [
        "# How does energy per output token depend on the lengths of prompt and output?",
        "",
        f"Predicted for batch {results['batch']:g} on {results['device']} in bf16, level",
        f"{results['level']}, energy of prompt and output together over the output tokens. Written",
        "by",
        "",
        "```sh",
        "python experiments/sequence_length/run.py",
        "```",
        "",
        "![energy per output token over prompt and output length](energy.png)",
        "",
        "A short output pays for its prompt alone; a long one reads an ever longer context.",
        "Between them lies the cheapest output length. Most of the cost there are the weights,",
        "which are read for every step whatever the lengths.",
        "",
        *table_lines(results),
        "",
        "`spread` is the dearest over the cheapest pair of lengths; the SweetSpot paper (ICPE'26)",
        "reports up to 33.41 on its own measurements, and 1.79 % as the mean error of its six",
        "coefficients on the lengths that they were fitted to. Here they are fitted to this grid",
        "by non-negative least squares, so that these errors say how well that form describes our",
        "predictions, not how true they are.",
        "",
        "## Cheapest output length",
        "",
        "By our predictions, and in brackets by the closed form of the SweetSpot fitted to them.",
        "",
        *optimum_lines(results),
        "",
        "## What dominates",
        "",
        "Largest share of the energy per output token: " + "; ".join(
            f"`{k[0]}` {v}" for k, v in MEANING.items()
        ) + ". Rows are prompts, columns outputs.",
        "",
    ]  # fmt: skip
    for m in results["models"]:
        heads = [m["model"], *(f"{x:.0f}" for x in m["prompts"])]
        rows = [
            [f"{prompt:.0f}", *(r[0] for r in row)]
            for prompt, row in zip(m["prompts"], m["regime"], strict=True)
        ]
        lines += [*experiment.markdown(heads, rows), ""]
    return lines


def _curves(axis, m: dict[str, Any]) -> None:
    """Energy of an output token over the output length for three prompts, the least marked."""
    outputs, grid = np.array(m["outputs"]), np.array(m["energy_per_output_token_j"]) * 1e3
    chosen = sorted({0, len(m["prompts"]) // 2, len(m["prompts"]) - 1})
    for colour, row in zip(("tab:green", "tab:blue", "tab:red"), chosen, strict=False):
        prompt, best = m["prompts"][row], m["optimum"][row]
        axis.plot(outputs, grid[row], color=colour, label=f"prompt of {prompt:.0f} tokens")
        fitted = sweetspot.terms(prompt, outputs) @ np.array(m["sweetspot"]["theta"]) * 1e3
        axis.plot(outputs, fitted, ":", color="black", linewidth=1.2)
        if best["interior"]:
            axis.plot(best["output"], best["energy_j"] * 1e3, "*", ms=15, color=colour)
    axis.set_yscale("log")
    values = [k * 10.0**x for x in range(6) for k in (1, 1.5, 2, 3, 5, 7)]
    values = [v for v in values if grid.min() * 0.9 < v < grid.max() * 1.1]
    axis.set_yticks(values, [f"{v:g}" for v in values])
    axis.set_ylabel("energy of one output token, mJ")
    axis.set_title(m["model"])
    axis.legend(fontsize=8, loc="upper right")


def _shares(axis, m: dict[str, Any], row: int) -> None:
    """What an output token's energy goes to, over the output length."""
    share = np.array(m["share_of_energy"])[:, row] * 100.0
    colours = ("tab:orange", "lightgrey", "tab:purple")
    labels = [MEANING[r] for r in REGIMES]
    axis.stackplot(m["outputs"], share, colors=colours, labels=labels, alpha=0.8)
    axis.set_ylim(0, 100)
    axis.set_ylabel("share of that energy, %")
    axis.set_title(f"{m['model']}, prompt of {m['prompts'][row]:.0f} tokens: where it goes")
    axis.legend(fontsize=8, loc="center")


def plot(results: dict[str, Any], out_dir: Path) -> None:
    """A panel of curves for each model, and one of shares."""
    count = len(results["models"]) + 1
    with experiment.figure(out_dir / "energy.png", (5, 4.6), count, 3) as (figure, axes):
        for axis, m in zip(axes, results["models"], strict=False):
            _curves(axis, m)
        last = results["models"][-1]
        _shares(axes[-1], last, len(last["prompts"]) - 2)
        for axis in axes:
            axis.set_xscale("log", base=2)
            axis.set_xticks(last["prompts"], [f"{x:.0f}" for x in last["prompts"]])
            axis.set_xlim(last["prompts"][0], last["prompts"][-1])
            axis.minorticks_off()
            axis.set_xlabel("tokens in the output")
            axis.grid(alpha=0.3)
        figure.suptitle(
            f"Energy per output token, prompt included, {results['batch']:g} sequences at once on "
            f"{results['device']}.  Star: the cheapest output length.  Dotted: SweetSpot's formula "
            "fitted to the same points."
        )


def main(config: dict[str, Any], out_dir: Path) -> dict[str, Any]:
    """Run the experiment; returns and writes its results."""
    model = checkpoint.load(config["device"])
    results = {
        "device": config["device"],
        "batch": config["batch"],
        "level": model.level,
        "models": [one_model(model, name, config) for name in config["models"]],
    }
    print("\n".join(table_lines(results)))
    print("\n".join(optimum_lines(results)))
    experiment.write_results(out_dir, results, readme(results))
    plot(results, out_dir)
    return results


if __name__ == "__main__":
    given = experiment.command(__doc__, HERE)
    main(given.config, given.out)
