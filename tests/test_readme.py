"""What the README shows runs, and what it claims of files is true."""

from __future__ import annotations

import json
import re
from pathlib import Path

import pytest
from click.testing import CliRunner

from hymell_jax.cli import main

ROOT = Path(__file__).parent.parent
README = (ROOT / "README.md").read_text()


def _blocks(language: str) -> list[str]:
    return re.findall(rf"```{language}\n(.*?)```", README, re.S)


# the tutorial of the search runs among the tests of searches
SNIPPETS = [snippet for snippet in _blocks("python") if "hj.search(" not in snippet]


@pytest.mark.parametrize("snippet", SNIPPETS, ids=lambda s: s.splitlines()[-1][:40])
def test_python_snippets_run(snippet, capsys):
    exec(compile(snippet, "README.md", "exec"), {})
    assert capsys.readouterr().out


def test_the_first_command_is_the_main_job():
    arguments = re.search(r"bin/hymell (predict [^\n]*)", README).group(1).split()
    assert CliRunner().invoke(main, arguments).exit_code == 0


def test_commands_it_names_exist():
    for name in re.findall(r"^hymell (\w+)", "\n".join(_blocks("sh")), re.M):
        assert name in main.commands, name


def test_links_lead_to_files():
    for target in re.findall(r"\]\((?!http)([^)#]+)\)", README):
        assert (ROOT / target).exists(), target


RESULTS = json.loads((ROOT / "experiments" / "operator_accuracy" / "results.json").read_text())


def _result(table: str, device: str, runtime: str, dtype: str = "bf16", **more) -> dict:
    wanted = dict(table=table, device=device, runtime=runtime, dtype=dtype) | more
    wanted = {"regime": "all", "target": "time"} | wanted
    return next(r for r in RESULTS if all(r[k] == v for k, v in wanted.items()))


def test_the_table_of_products_is_that_of_the_committed_results():
    rows = re.findall(
        r"^\| (\S+) \| (vllm-\S+) \| (\d+) \| (\S+) \| (\S+) \| (\S+) \|$", README, re.M
    )
    assert len(rows) == 7
    for device, runtime, *shown in rows:
        found = _result("gemm", device, runtime)
        numbers = [found[k] for k in ("mape", "published_form_mape", "black_box_mape")]
        assert shown == [str(found["n"]), *(f"{x:.2f}" for x in numbers)], device


def test_claims_in_words_are_those_of_the_committed_results():
    runtimes = {"h200-sxm-141gb": ("5.7", "107"), "b200-sxm-180gb": ("6.5", "40")}
    for device, said in runtimes.items():
        energy = [
            _result("gemm", device, "vllm-0.22.0", target="energy", regime=regime)["mape"]
            for regime in ("sound", "all")
        ]
        assert (f"{energy[0]:.1f}", f"{energy[1]:.0f}") == said
    fp8 = [r["mape"] for r in RESULTS if r["table"] == "gemm" and r["dtype"] == "fp8"
           and (r["regime"], r["target"]) == ("all", "time")]  # fmt: skip
    assert (f"{min(fp8):.0f}", f"{max(fp8):.1f}") == ("6", "15.5")
    softmax, norm = (
        _result(t, "a100-pcie-40gb", "pytorch-2.1.0", "float32")["mape"]
        for t in ("softmax", "layernorm")
    )
    assert (f"{softmax:.1f}", f"{norm:.1f}") == ("12.9", "12.3")
    for phrase in ("5.7 % on", "6.5 % on B200", "107 and 40 %", "6 to 15.5 %", "12.9\nand 12.3 %"):
        assert phrase in README, phrase


def test_commands_that_print_its_claims_exist():
    scripts = re.findall(r"`python (experiments/\S+\.py)", README)
    assert len(scripts) >= 7
    for script in scripts:
        assert (ROOT / script).is_file(), script
