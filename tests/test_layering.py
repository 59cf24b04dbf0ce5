"""Imports run one way, and heavy libraries stay in their rooms."""

from __future__ import annotations

import ast
from pathlib import Path

import hymell_jax

PACKAGE = Path(hymell_jax.__file__).parent

ORDER = [  # a module may import those before it, never those after it
    "version", "compile_cache", "files", "readable", "output_schema", "types", "smooth",
    "parameters", "mlp",
    "robust_fit", "operators", "notebook", "gemm", "attention", "attention_fit",
    "attention_features", "rowwise",
    "collectives", "power", "moe", "linear", "latent", "ffn", "blocks",
    "analytical", "serving", "system_fit", "model",
    "hf_file", "hf_quantization", "hf_families", "hf", "models", "devices", "engines",
    "arrays", "block_store", "system_store", "coverage", "summary", "footprint", "data", "fit",
    "checkpoint", "evaluate", "block_recipes", "block_power", "block_evaluate", "recipes",
    "comparison", "ranking",
    "systems", "system_rows", "system_recipes", "system_tables", "system_job", "system_evaluate",
    "baseline_fits", "wattgpu_fits", "unseen",
    "profile_rows", "profile_roofline", "profile_device", "profile_level1", "profile_level2",
    "profile_level3", "profile_evaluate", "profile_fit",
    "quantities", "space", "space_points", "lagrangian", "refinement", "optimise", "pareto",
    "sensitivity", "sharded", "designs", "sweep", "frames", "experiment",
    "report_card", "report", "report_labels", "report_style", "report_curves",
    "report_pair_plots", "report_plots", "report_svg", "report_html", "report_page",
]  # fmt: skip
TOP = {"__init__", *(path.stem for path in PACKAGE.glob("cli*.py"))}
PANDAS = {
    "baseline_fits",
    "block_evaluate",
    "block_power",
    "block_recipes",
    "data",
    "evaluate",
    "frames",
    "notebook",
    "recipes",
    "systems",
    "system_rows",
    "system_recipes",
    "system_tables",
    "unseen",
    "wattgpu_fits",
    "profile_device",
    "profile_evaluate",
    "profile_level1",
    "profile_level2",
    "profile_level3",
    "profile_rows",
    "system_job",
}


def _imports(path: Path) -> set[str]:
    """Dotted names of everything that a file imports, wherever the import stands."""
    found = set()
    for node in ast.walk(ast.parse(path.read_text())):
        if isinstance(node, ast.Import):
            found |= {alias.name for alias in node.names}
        elif isinstance(node, ast.ImportFrom) and node.module:
            found |= {node.module} | {f"{node.module}.{alias.name}" for alias in node.names}
    return found


def _own(names: set[str]) -> set[str]:
    parts = (name.split(".") for name in names if name.startswith("hymell_jax."))
    return {part[1] for part in parts}


def test_every_module_has_its_place():
    modules = {path.stem for path in PACKAGE.glob("*.py")}
    assert modules - TOP - set(ORDER) == set()


def test_imports_run_one_way():
    for index, name in enumerate(ORDER):
        later = set(ORDER[index + 1 :]) | TOP
        assert not _own(_imports(PACKAGE / f"{name}.py")) & later, name


def test_pandas_stays_with_the_tables():
    for path in PACKAGE.glob("*.py"):
        if path.stem not in PANDAS | TOP:
            assert not any(name.split(".")[0] == "pandas" for name in _imports(path)), path.name


def test_the_command_line_imports_jax_and_pandas_only_inside_commands():
    for path in PACKAGE.glob("cli*.py"):
        top = {
            name
            for node in ast.parse(path.read_text()).body
            if isinstance(node, ast.Import | ast.ImportFrom)
            for name in ([node.module] if isinstance(node, ast.ImportFrom) else
                         [alias.name for alias in node.names])
        }  # fmt: skip
        heavy = ("jax", "pandas", "numpy", "rich")
        assert not any(name.split(".")[0] in heavy for name in top), path.name
