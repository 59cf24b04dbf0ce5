"""The search ends on whole, feasible architectures, and on the best ones there are."""

from __future__ import annotations

import copy
import json
import math
import re
from pathlib import Path

import numpy as np
import pytest
from click.testing import CliRunner
from json_outputs import check, conforming

import hymell_jax as hj
from hymell_jax import cli_search, optimise, pareto, quantities, space, space_points
from hymell_jax.cli import main

WORK = dict(batch_size=8, prompt_tokens=512, output_tokens=128)
KEYS = {"start", "relaxed", "concrete", "objective", "gap", "status", "trajectory"}
LEVELS = {
    "d_model": [2048, 2560, 3072, 3584, 4096, 5120, 6144],
    "n_layers": list(range(20, 50, 2)),
    "d_ff": list(range(8192, 20481, 1024)),
}


@pytest.fixture(scope="module")
def answer(h100) -> dict:
    return hj.search(
        "llama-3.1-8b", h100, levels=LEVELS, free=tuple(LEVELS), work=WORK,
        at_least={"parameters": 8e9}, at_most={"latency_per_token_s": 7.3e-3},
    )  # fmt: skip


def test_the_answer_is_the_best_of_all_points(h100, llama, answer):
    found = hj.make_space(llama, hj.workload(**WORK), levels=LEVELS, free=tuple(LEVELS))
    index = np.concatenate(list(space_points.all_points(found)))
    archs = space_points.concrete_architectures(found, index)
    names = ("energy_per_token_j", "parameters", "latency_per_token_s", "domain_distance")
    energy, parameters, latency, distance = quantities.measure(
        h100, archs, hj.workload(**WORK), names
    ).T
    start = answer["start"]["quantities"]["domain_distance"]
    feasible = (parameters >= 8e9) & (latency <= 7.3e-3) & (distance <= start + 1e-3)
    assert 5 < feasible.sum() < len(index)  # the limits cut
    best = energy[feasible].min()
    assert answer["status"] == "converged"
    assert answer["objective"] == pytest.approx(best, rel=1e-5)
    assert answer["objective"] < answer["start"]["objective"]


def test_the_answer_is_documented(answer):
    assert answer.keys() >= KEYS
    json.dumps(answer, allow_nan=False)
    concrete, relaxed = answer["concrete"], answer["relaxed"]
    assert concrete["feasible"]
    assert relaxed["feasible"]
    assert answer["gap"] == pytest.approx(concrete["objective"] / relaxed["objective"] - 1)
    assert answer["objective"] == concrete["objective"]
    hj.architecture(**concrete["architecture"])
    assert all(value % 1 == 0 for value in concrete["variables"].values())
    stages = [step["stage"] for step in answer["trajectory"]]
    assert stages == sorted(stages, reverse=True)  # relaxed, then concrete
    assert {"relaxed", "concrete"} == set(stages)
    limits = {b["quantity"]: b for b in concrete["constraints"]}
    assert set(limits) == {"parameters", "latency_per_token_s", "memory_share", "domain_distance"}
    assert all(b["met"] for b in limits.values())


def test_the_same_seed_gives_the_same_answer(h100, answer):
    again = hj.search(
        "llama-3.1-8b", h100, levels=LEVELS, free=tuple(LEVELS), work=WORK,
        at_least={"parameters": 8e9}, at_most={"latency_per_token_s": 7.3e-3},
    )  # fmt: skip
    assert again["concrete"] == answer["concrete"]
    assert again["time_s"] < 60  # compiled by now


def test_what_cannot_be_is_said_with_what_blocks(h100, capsys):
    found = hj.search(
        "llama-3.1-8b", h100, levels=LEVELS, free=tuple(LEVELS), work=WORK,
        at_least={"parameters": 8e9}, at_most={"latency_per_token_s": 1e-4},
    )  # fmt: skip
    assert found["status"] == "infeasible"
    assert not found["concrete"]["feasible"]
    blocking = found["blocking"][0]
    assert blocking["quantity"] == "latency_per_token_s"
    assert blocking["excess"] == pytest.approx(math.log(blocking["value"] / 1e-4), rel=1e-4)
    json.dumps(found, allow_nan=False)
    cli_search._show_search(found)
    lines = capsys.readouterr().out.splitlines()
    assert lines[0].startswith("NO DESIGN MEETS EVERY LIMIT")
    over = 100 * (blocking["value"] / 1e-4 - 1)
    assert "latency_per_token_s at most 0.0001" in lines[1] and f"{over:+.1f} %" in lines[1]
    assert not any("against the start" in line for line in lines)


def test_fields_that_follow_stand_in_the_table(answer, capsys):
    moved = copy.deepcopy(answer)
    moved["concrete"]["architecture"] |= {"d_model": 2048.0, "n_heads": 16.0}
    assert cli_search._followers(moved["start"], [moved["concrete"]]) == ["n_heads"]
    cli_search._show_search(moved)
    shown = capsys.readouterr().out
    assert re.search(r"n_heads \(follows\) +32 .* 16\n", shown)
    assert "against the start" in shown


def test_parameters_alone_do_not_hold_a_mixture(capsys):
    start = space.architecture_fields(hj.preset("mixtral-8x7b").architecture)
    thin = start | {"experts_per_token": 1.0, "n_experts": 8.0}
    before, after = (float(hj.active_parameters(hj.architecture(**a))) for a in (start, thin))

    def hint(*limits: str, found: dict) -> str:
        concrete = {"architecture": found, "constraints": [{"quantity": n} for n in limits]}
        content = {"start": {"architecture": start}, "concrete": concrete}
        cli_search._warn_of_active_parameters(content)
        return capsys.readouterr().err

    said = hint("parameters", "latency_s", found=thin)
    assert f"fell by {100 * (1 - after / before):.0f} %" in said
    assert f"--equal active_parameters={before:.4g}" in said
    assert hint("parameters", "active_parameters", found=thin) == ""
    assert hint("latency_s", found=thin) == ""
    assert hint("parameters", found=start) == ""


def test_equal_limits_and_proxies_hold(h100):
    found = hj.search(
        "llama-3.1-8b", h100.at_level(1), levels=LEVELS, free=tuple(LEVELS), work=WORK,
        equal={"parameters": 7e9}, at_least={"depth": 30.0},
        proxies={"depth": lambda arch: 1.0 * arch.n_layers}, tolerance=0.02,
    )  # fmt: skip
    assert found["status"] == "converged"
    concrete = found["concrete"]
    assert concrete["quantities"]["parameters"] == pytest.approx(7e9, rel=0.02)
    assert concrete["variables"]["n_layers"] >= 30


def test_a_front_cannot_be_beaten_by_its_own_points(h100):
    found = hj.front(
        "llama-3.1-8b", h100.at_level(1), against="parameters", points=4, levels=LEVELS,
        free=tuple(LEVELS), work=WORK, at_least={"parameters": 5e9},
    )  # fmt: skip
    rows = [
        (d["quantities"]["energy_per_token_j"], d["quantities"]["parameters"])
        for d in found["front"]
    ]
    check("front", found)
    assert len(found.to_frame()) == len(rows) + 1
    assert len(rows) >= 5
    assert rows == sorted(rows)
    assert [r[1] for r in rows] == sorted(r[1] for r in rows)  # more energy, more parameters
    assert all(d["feasible"] for d in found["front"])
    energies = np.array([r[0] for r in rows])
    assert energies[-1] / energies[0] > 1.3  # it spans


def test_non_dominated_rows_by_brute_force():
    costs = np.random.default_rng(0).integers(0, 30, (300, 2)).astype(float)
    costs[7] = np.nan
    kept = pareto.non_dominated(costs)
    beaten = [any((other <= row).all() and (other < row).any() for other in costs) for row in costs]
    expected = {tuple(costs[i]) for i in range(300) if not beaten[i] and i != 7}
    assert {tuple(costs[i]) for i in kept} == expected
    assert len(kept) == len(expected)


def test_chinchilla_loss_of_a_published_size(llama):
    # N = 6.98e9 without embeddings, D = 15e12: 1.69 + 406.4 N^-0.34 + 410.7 D^-0.28
    body = 32 * (4096 * (2 * 4096 + 2 * 1024) + 3 * 4096 * 14336 + 2 * 4096) + 4096
    expected = 1.69 + 406.4 * body**-0.34 + 410.7 * 15e12**-0.28
    assert float(quantities.chinchilla_loss(llama)) == pytest.approx(expected, rel=1e-5)


def run(*arguments: str):
    return CliRunner().invoke(main, ["search", *arguments])


def test_the_command_prints_the_documented_json(tmp_path):
    path = tmp_path / "space.json"
    levels = {name: {"values": values} for name, values in LEVELS.items()}
    path.write_text(json.dumps({"base": "llama-3.1-8b", "free": levels}))
    shared = ("--device", "h100-sxm-80gb", "--workload", "batch=8,prompt=512,output=128")
    limits = ("--at-least", "parameters=8e9", "--at-most", "latency_per_token_s=7.3e-3")
    result = run(str(path), *shared, *limits, "--json")
    assert result.exit_code == 0, result.output
    got = conforming("search", result.stdout)
    assert got.keys() >= KEYS
    assert got["concrete"]["feasible"]
    shown = run(str(path), *shared, *limits)
    assert shown.exit_code == 0, shown.output
    assert "converged" in shown.stdout
    assert "d_model" in shown.stdout


@pytest.mark.parametrize(
    ("arguments", "said"),
    [
        (("llama-3.1-8b", "--at-most", "latency"), "name=number"),
        (("llama-3.1-8b", "--at-most", "speed=3"), "no quantity 'speed'"),
        (("llama-3.1-8b", "--at-most", "latency_s=-1"), "latency_s"),
        (("llama-3.1-8b", "--minimise", "cost"), "no quantity 'cost'"),
        (("llama-3.1-8b", "--range", "d_model=5"), "least:greatest"),
        (("llama-3.1-8b", "--free", "width"), "cannot be free"),
        (("llama-3.1-8b", "--workload", "rows=3"), "no 'rows'"),
        (("no-such-model",), "no-such-model"),
        (("missing.json",), "missing.json"),
    ],
)
def test_bad_questions_are_refused_in_one_sentence(arguments, said):
    result = run(*arguments, "--device", "h100-sxm-80gb")
    assert result.exit_code == 2, result.output
    assert "Traceback" not in result.output
    assert result.stderr.startswith("Error: ") and said in result.stderr.splitlines()[0]


def test_fixed_fields_stay(h100, llama):
    asked = optimise.ask(llama, h100, fix=["n_kv_heads", "d_model"], work=WORK)
    assert asked.space.names == ("n_layers", "d_ff")
    with pytest.raises(ValueError, match="built-in"):
        optimise.ask(llama, h100, proxies={"loss": lambda a: a.d_ff})


def test_the_tutorial_of_the_readme_finds_a_cheaper_model(capsys):
    readme = (Path(__file__).parent.parent / "README.md").read_text()
    section = readme.split("## From a published model to a cheaper one")[1]
    code = re.search(r"```python\n(.*?)```", section, re.S).group(1)
    assert len([line for line in code.splitlines() if line]) <= 10
    names: dict = {}
    exec(compile(code, "README.md", "exec"), names)
    assert capsys.readouterr().out
    answer = names["answer"]
    start, found = answer["start"]["quantities"], answer["concrete"]["quantities"]
    assert answer["concrete"]["feasible"]
    assert found["energy_per_token_j"] < 0.99 * start["energy_per_token_j"]
    assert found["latency_per_token_s"] <= start["latency_per_token_s"] * 1.0001
    assert found["parameters"] == pytest.approx(start["parameters"], rel=0.0101)
