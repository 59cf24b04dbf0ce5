"""Where the numbers of a model come from: sources, licences, recipe and errors of its files."""

from __future__ import annotations

from typing import Any

from hymell_jax import checkpoint, system_store
from hymell_jax.files import read_json
from hymell_jax.model import CostModel


def card_of(model: CostModel, level: int) -> dict[str, Any]:
    """The shipped checkpoint of a model, as far as a level rests on it.

    Args:
        model: from `checkpoint.load` without a folder of its own.
        level: that answers.

    Returns:
        `device`, `runtime`, `dtype`, `origins` (time, energy, serving: measured there, or carried
        over from where), `sources` with licences and rows, `recipe`, `split`, `libraries`, and
        errors on test rows in percent: `operator_errors`, `block_errors`, `system_errors`.

    Raises:
        ValueError: a damaged checkpoint.
    """
    card, root = model.card, checkpoint.shipped_folder()
    kept = card.provenance
    source = kept.get("transferred_from") or card.device
    path = root / checkpoint.file_name(source, card.runtime, card.dtype)
    content = read_json(path, "checkpoint")
    sources = list(content["sources"])
    found = {
        "device": card.device,
        "runtime": card.runtime,
        "dtype": card.dtype,
        "origins": {
            "time": _origin(kept.get("time"), source),
            "energy": _origin(kept.get("energy"), kept.get("energy_from") or source),
        },
        "recipe": content.get("recipe", {}),
        "split": content.get("split", ""),
        "libraries": content.get("libraries", {}),
        "operator_errors": [
            {key: e[key] for key in ("table", "target", "n", "mape", "mdape", "r2")}
            for e in content.get("errors", [])
            if e["split"] == "test" and e["regime"] == "all"
        ],
        "block_errors": [],
        "system_errors": [],
        "coverage": [],
    }
    if level >= 2:
        found["block_errors"] = [
            {"block": name, "n": e["n"], "mape": e["level2_mape"], "level1_mape": e["level1_mape"]}
            for name, block in content.get("blocks", {}).items()
            for e in block["errors"]
            if e["split"] == "test" and e["rows"] == "all"
        ]
    level3 = system_store.load(root) if level == 3 else None
    if level3 is not None:
        served = level3["card"]
        machine, engine = kept["engine_terms_from"], kept["engine"]
        sources += served["sources"]
        found["origins"]["serving"] = _origin(kept["engine_terms"], f"{engine} on {machine}")
        found["origins"]["energy"] = _origin(kept["engine_terms"], machine)
        found["serving_recipe"] = served["recipe"]
        found["serving_split"] = served["split"]
        found["system_errors"] = [
            e for e in served["errors"] if (e["engine"], e["device"]) == (engine, machine)
        ]
        found["coverage"] = [e for e in served["coverage"] if e["device"] == machine]
    return found | {"sources": sources}


def _origin(state: str | None, where: str) -> str:
    return f"carried over from {where}" if state == "transferred" else f"measured: {where}"
