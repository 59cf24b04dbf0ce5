"""The documentation builds from its sources without a warning, and what it shows runs."""

from __future__ import annotations

import json
import re
import shlex
import subprocess
import sys
from pathlib import Path

import pytest
from click.testing import CliRunner

from hymell_jax import sweep
from hymell_jax.cli import main
from hymell_jax.quantities import QUANTITIES

ROOT = Path(__file__).parent.parent
DOCS = ROOT / "docs"
PAGES = sorted(DOCS.rglob("*.md"))


def _blocks(page: Path, language: str) -> list[str]:
    return re.findall(rf"```{language}\n(.*?)```", page.read_text(), re.S)


def _with(language: str, *patterns: str) -> list[Path]:
    return [p for p in PAGES if _blocks(p, language) and p.name not in patterns]


@pytest.mark.parametrize("page", _with("python"), ids=lambda p: p.stem)
def test_python_snippets_of_a_page_run_one_after_the_other(page, capsys, monkeypatch, tmp_path):
    monkeypatch.chdir(tmp_path)
    names: dict = {}
    for snippet in _blocks(page, "python"):
        exec(compile(snippet, page.name, "exec"), names)
    assert "nan" not in capsys.readouterr().out.split()


# those of the others take minutes, several machines, or a file of the page
@pytest.mark.parametrize(
    "page", _with("sh", "cluster.md", "profiling.md", "sweep.md"), ids=lambda p: p.stem
)
def test_commands_of_a_page_run(page, monkeypatch, tmp_path):
    monkeypatch.chdir(tmp_path)
    lines = [line for block in _blocks(page, "sh") for line in block.splitlines()]
    for line in (line for line in lines if line.startswith("hymell ")):
        result = CliRunner().invoke(main, shlex.split(line, comments=True)[1:])
        assert result.exit_code == 0, f"{line}: {result.output}"


def test_the_page_of_sweeps_tells_every_key_quantity_and_column(monkeypatch, tmp_path):
    pq = pytest.importorskip("pyarrow.parquet")
    page = DOCS / "sweep.md"
    rows = re.findall(r"^\| `(\w+)`( \*)? \|", page.read_text(), re.M)
    named = {name for name, _ in rows}
    assert named >= sweep._KEYS | set(QUANTITIES)
    assert {name for name, star in rows if star} == set(sweep.DEFAULT_QUANTITIES)
    monkeypatch.chdir(tmp_path)
    (text,), (command,) = _blocks(page, "json"), _blocks(page, "sh")
    Path("spec.json").write_text(text)
    result = CliRunner().invoke(main, shlex.split(command)[1:])
    assert result.exit_code == 0, result.output
    spec = json.loads(text)
    table = pq.read_table("results.parquet")
    columns = ["row", *spec["fields"], *spec["quantities"], "memory_share", "legal"]
    assert (table.column_names, table.num_rows) == (columns, 24)
    assert set(columns) - set(spec["fields"]) <= named
    front = pq.read_table("results.front.parquet")
    assert front.column_names == columns and 1 < front.num_rows < 24
    assert "24 rows in results.parquet, their front in results.front.parquet" in result.stdout
    assert "rows/s" not in result.stdout  # nothing steady in one part


def test_it_builds_without_a_warning_and_without_a_network(tmp_path):
    pytest.importorskip("sphinx", reason="the extra `docs` is not installed")
    options = ["-q", "-W", "--keep-going", "-b", "html", "-d", str(tmp_path / "trees")]
    command = [sys.executable, "-m", "sphinx", *options, str(DOCS), str(tmp_path / "html")]
    built = subprocess.run(command, cwd=ROOT, capture_output=True, text=True, check=False)
    assert built.returncode == 0, built.stderr
    pages = {
        name: re.sub("<[^>]+>", "", (tmp_path / "html" / f"{name}.html").read_text())
        for name in ("accuracy", "equations")
    }
    assert "h200-sxm-141gb" in pages["accuracy"] and "levels 1+2" in pages["accuracy"]
    assert "softmin over the kernels" in pages["equations"]


def test_every_page_is_reached():
    listed = _blocks(DOCS / "index.md", r"\{toctree\}")[0].split()
    pages = {p.relative_to(DOCS).with_suffix("").as_posix() for p in PAGES}
    outside = {page for page in pages if not page.startswith("methods/")}
    assert "methods/*" in listed
    assert outside - set(listed) - {"index", "accuracy"} == set()
