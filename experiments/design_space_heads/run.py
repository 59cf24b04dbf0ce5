"""How many heads cost least energy? Counterpart of figure 3 of HYMELL (arXiv 2608.06723).

One attention layer (norm, projections, rotary positions, attention core) of width 4096 with as many
KV heads as heads and head_dim = 4096 / heads, prefill of one sequence of 1024 tokens. Published, on
an H100 NVL: 64 heads cost least energy, then 32; 16 and 128 are close; very many heads cost more.
"""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np

import hymell_jax as hj
from hymell_jax import experiment
from hymell_jax.analytical import BOUNDS
from hymell_jax.gemm import REGIMES
from hymell_jax.operators import PARTS

HERE = Path(__file__).parent
LAYER = ("qkv_projection", "out_projection", "rope", "kv_write", "attention")
PUBLISHED_ORDER = (64, 32, 16, 128)
HEADINGS = ("device", "heads", "head_dim", "energy mJ", "above least %", "rank", "published",
            "core bound")  # fmt: skip


def layer_costs(device: str, heads: int, config: dict[str, Any]) -> dict[str, Any]:
    """Joules and seconds of the attention layer, and of its core, with this many heads."""
    arch = hj.architecture(
        n_layers=1,
        d_model=config["d_model"],
        n_heads=heads,
        d_ff=config["d_model"],
        vocab_size=1000,
    )
    work = hj.workload(prompt_tokens=config["prompt_tokens"], output_tokens=1)
    phase = hj.predict(hj.load(device), arch, work).prefill.parts
    energy, seconds = (np.asarray(x, float) for x in (phase.energy_j, phase.time_s))
    index = [PARTS.index(part) for part in LAYER]
    core = PARTS.index("attention")
    norm = PARTS.index("norms")  # of three, one is the attention layer's
    bounds = np.asarray(phase.bounds)[core]
    return {
        "device": device,
        "heads": heads,
        "head_dim": config["d_model"] / heads,
        "energy_j": energy[index].sum() + energy[norm] / 3,
        "time_s": seconds[index].sum() + seconds[norm] / 3,
        "core_energy_j": energy[core],
        "core_time_s": seconds[core],
        "core_regime": REGIMES[int(np.asarray(phase.regimes)[core].argmax())],
        "core_bound": BOUNDS[int(bounds.argmax())],
    }


def main(config: dict[str, Any], out: Path) -> list[dict[str, Any]]:
    """Run, print and write results.json and a plot; returns the rows."""
    rows = []
    for device in config["devices"]:
        found = [layer_costs(device, heads, config) for heads in config["heads"]]
        least = min(row["energy_j"] for row in found)
        for rank, row in enumerate(sorted(found, key=lambda r: r["energy_j"]), 1):
            row |= {"rank": rank, "over_least": row["energy_j"] / least - 1.0}
        rows += found
    cells = []
    for r in rows:
        place = PUBLISHED_ORDER.index(r["heads"]) + 1 if r["heads"] in PUBLISHED_ORDER else "-"
        cells.append(
            [r["device"], r["heads"], f"{r['head_dim']:g}", f"{r['energy_j'] * 1e3:.3f}",
             f"{100 * r['over_least']:.1f}", r["rank"], place, r["core_bound"]]
        )  # fmt: skip
    print("\n".join(experiment.markdown(HEADINGS, cells)))
    experiment.write_results(out, rows, indent=1)
    plot(rows, out / "energy_against_heads.png")
    return rows


def plot(rows: list[dict[str, Any]], path: Path) -> None:
    """Energy of the layer against heads, a line for each device."""
    with experiment.figure(path, (6, 4), dpi=120) as (_, (axes,)):
        for device in dict.fromkeys(r["device"] for r in rows):
            own = [r for r in rows if r["device"] == device]
            energy_mj = [r["energy_j"] * 1e3 for r in own]
            axes.plot([r["heads"] for r in own], energy_mj, "o-", label=device)
        axes.set(xscale="log", yscale="log", xlabel="heads = KV heads", ylabel="energy [mJ]")
        axes.set_xticks([r["heads"] for r in rows], [str(r["heads"]) for r in rows], minor=False)
        axes.legend()


if __name__ == "__main__":
    given = experiment.command(__doc__, HERE)
    main(given.config, given.out)
