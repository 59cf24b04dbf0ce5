"""Does a sweep's memory grow with its rows? Peak memory and rate of `hymell sweep`, by rows.

Every sweep is a process of its own, from the same specification but for the number of rows; its
peak is the greatest resident set that the system saw. Files go to a folder that is removed. Prints
the table and writes results.json and README.md.
"""

from __future__ import annotations

import json
import os
import subprocess
import sys
import tempfile
from pathlib import Path
from typing import Any

from hymell_jax import experiment

HERE = Path(__file__).parent
FLAT = 1.10  # greatest peak over the first one that counts as flat
KEYS = ("rows", "peak_mb", "over_first", "rows_per_s", "time_s", "file_mb")


def swept(spec: dict[str, Any], rows: int, folder: Path) -> dict[str, Any]:
    """One sweep in a process of its own."""
    path, out = folder / f"{rows}.json", folder / f"{rows}.parquet"
    path.write_text(json.dumps(spec | {"rows": rows}))
    words = [
        sys.executable,
        "-m",
        "hymell_jax.cli",
        "sweep",
        str(path),
        "--out",
        str(out),
        "--json",
    ]
    with (folder / f"{rows}.log").open("w+") as log:
        child = subprocess.Popen(words, stdout=log)
        _, status, usage = os.wait4(child.pid, 0)
        child.returncode = os.waitstatus_to_exitcode(status)
        if child.returncode:
            raise RuntimeError(f"the sweep of {rows} rows ended with {child.returncode}")
        log.seek(0)
        said = json.load(log)
    size = out.stat().st_size
    out.unlink()
    return {
        "rows": rows, "peak_mb": usage.ru_maxrss / 1024, "rows_per_s": said["rows_per_s"],
        "time_s": said["time_s"], "file_mb": size / 1e6,
    }  # fmt: skip


def readme(content: dict[str, Any]) -> list[str]:
    """Lines of README.md with the rows of the results."""
    spec = content["sweep"]
    what = (
        f"{spec['base']} on {spec['device']}, {spec['design'].replace('_', ' ')} over "
        f"{', '.join(spec['fields'])}, all default quantities, level 3, {content['cores']} cores."
    )
    verdict = "yes" if content["flat"] else "no"
    return [
        "# Does a sweep's memory grow with its rows?", "",
        "`python experiments/sweep_memory/run.py [--rows N ...]` runs `hymell sweep` in a process",
        "of its own for each number of rows, prints the table and writes it with `results.json`.",
        "", what, "",
        "`peak_mb` is the greatest resident set of the process, `over_first` that over the first",
        "row's. The rate leaves out the first part of 65,536 rows, which compiles.", "",
        *experiment.markdown(KEYS, experiment.values(content["sweeps"], KEYS), 2), "",
        f"Flat within {100 * (FLAT - 1):.0f} %: {verdict}.", "",
    ]  # fmt: skip


def main(config: dict[str, Any], out: Path) -> dict[str, Any]:
    """Run every sweep, print and write the results."""
    found: list[dict[str, Any]] = []
    with tempfile.TemporaryDirectory() as folder:
        for rows in config["rows"]:
            one = swept(config["sweep"], rows, Path(folder))
            found.append(one | {"over_first": one["peak_mb"] / (found or [one])[0]["peak_mb"]})
            print(
                "\n".join(experiment.aligned(KEYS, experiment.values(found[-1:], KEYS))), flush=True
            )
    content = {
        "cores": os.cpu_count(), "sweep": config["sweep"], "sweeps": found,
        "flat": all(one["over_first"] <= FLAT for one in found),
    }  # fmt: skip
    experiment.write_results(out, content, readme(content))
    return content


if __name__ == "__main__":
    given = experiment.command(__doc__, HERE, rows=dict(type=int, nargs="*", help="of each sweep"))
    given.config["rows"] = given.rows or given.config["rows"]
    main(given.config, given.out)
