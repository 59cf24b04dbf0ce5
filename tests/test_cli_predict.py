"""`hymell predict` for people: units, intervals, warnings, comparisons; bars and completion."""

from __future__ import annotations

import dataclasses
import json
import os
import re
import subprocess
import sys
from pathlib import Path

import pytest
from click.shell_completion import BashComplete
from click.testing import CliRunner

from hymell_jax import cli_output, footprint
from hymell_jax.cli import main
from hymell_jax.cli_options import device_names, model_names, numbers, subjects

LLAMA = ("predict", "llama-3.1-8b", "--device", "h100-sxm-80gb", "--batch", "8")


def run(*arguments: str):
    result = CliRunner().invoke(main, list(arguments))
    assert result.exit_code == 0, result.output
    return result


@pytest.fixture(scope="module")
def answer() -> dict:
    return json.loads(run(*LLAMA, "--json").stdout)


def cells(text: str, what: str) -> str:
    """The rest of the line that begins with these words."""
    return next(line for line in text.splitlines() if line.startswith(what))[len(what) :].strip()


def test_the_table_says_what_the_json_says(answer):
    text = run(*LLAMA).stdout
    time_ms = 1e3 * answer["decode"]["time_per_token_s"]
    low, high = (1e3 * x for x in answer["interval"]["decode"]["time_per_token_s"])
    line = cells(text, "time per token (decode)")
    assert line.split() == [f"{time_ms:.4g}", "ms", f"{low:.4g}", "ms", "to", f"{high:.4g}", "ms"]
    total = answer["total"]
    tokens = 8 * 128
    assert cells(text, "output tokens/s, prefill included") == (
        f"{total['output_tokens_per_s']:.4g}"
    )
    joules = 1e3 * total["energy_j"] / tokens
    assert cells(text, "energy per 1k output tokens, prefill included") == f"{joules:.4g} J"
    wh = total["energy_j"] / 3600
    assert cells(text, "energy of the whole batch").endswith(f"{wh:.4g} Wh")
    assert "90 % interval" in text
    biggest = next(iter(answer["parts"]["decode"]))
    after = text.split("biggest parts of the decode", 1)[1]
    assert after.splitlines()[2].startswith(biggest)
    assert "memory traffic" in after
    assert "Range: inside what was measured" in text


def test_warnings_and_the_range_are_in_plain_words():
    result = run("predict", "qwen3-8b", "--device", "l40s-48gb", "--batch", "8")
    assert "Range: OUTSIDE what was measured (distance" in result.stdout
    assert "carried over from h100-sxm-80gb" in result.stderr
    assert "extrapolation" in result.stderr


def test_co2_and_money_follow_from_the_given_numbers(answer):
    options = ("--carbon-intensity", "400", "--price", "0.3", "--gpu-price", "2.5")
    found = json.loads(run(*LLAMA, *options, "--json").stdout)["footprint"]
    kwh = answer["total"]["energy_j"] / 3.6e6
    assert found["co2_g"] == pytest.approx(400 * kwh)
    cost = 0.3 * kwh + 2.5 * answer["total"]["time_s"] / 3600
    assert found["cost"] == pytest.approx(cost)
    assert found["cost_per_million_tokens"] == pytest.approx(cost / (8 * 128) * 1e6)
    assert answer["footprint"] is None
    text = run(*LLAMA, *options).stdout
    assert f"{found['co2_g']:.3g} g" in cells(text, "CO2 at 400 g/kWh")
    only_co2 = footprint.footprint(answer, carbon_intensity_g_per_kwh=0.0)
    assert (only_co2["co2_g"], only_co2["cost"]) == (0.0, None)
    two = json.loads(json.dumps(answer))
    two["workload"]["tensor_parallel"] = 2.0
    doubled = footprint.footprint(two, price_per_gpu_hour=1.0)["cost"]
    assert doubled == pytest.approx(2 * footprint.footprint(answer, price_per_gpu_hour=1.0)["cost"])
    for name in ("carbon_intensity_g_per_kwh", "price_per_kwh", "price_per_gpu_hour"):
        with pytest.raises(ValueError, match=name):
            footprint.footprint(answer, **{name: -1.0})


def test_several_models_and_devices_are_lined_up(answer):
    arguments = (*LLAMA, "--compare", "b200-sxm-180gb", "qwen3-8b", "--compare", "llama-3.1-70b")
    found = json.loads(run(*arguments, "--json").stdout)
    pairs = [(p["model"], p["device"]) for p in found["predictions"]]
    assert pairs[0] == ("llama-3.1-8b", "h100-sxm-80gb")
    assert set(pairs) == {
        (model, device)
        for model in ("llama-3.1-8b", "qwen3-8b")
        for device in ("h100-sxm-80gb", "b200-sxm-180gb")
    } | {("llama-3.1-70b", "b200-sxm-180gb")}
    assert found["predictions"][0] == answer
    (out,) = found["left_out"]
    assert out["device"] == "h100-sxm-80gb" and "does not fit" in out["reason"]
    result = run(*arguments)
    assert cells(result.stdout, "on").split()[:2] == ["h100-sxm-80gb", "b200-sxm-180gb"]
    assert cells(result.stdout, "measured range").split().count("OUTSIDE") == 2
    assert "does not fit" in result.stderr


def test_columns_that_do_not_fit_a_line_go_below(monkeypatch):
    monkeypatch.setattr("hymell_jax.cli_show.width", lambda: 70)
    monkeypatch.setattr("hymell_jax.cli_output.width", lambda: 70)
    text = run(*LLAMA, "--compare", "h200-sxm-141gb,b200-sxm-180gb,gh200-96gb").stdout
    lines = text.splitlines()
    assert max(map(len, lines)) <= 70
    assert sum(line.startswith("time per token") for line in lines) == 2
    assert "…" not in text


@pytest.mark.parametrize(
    ("arguments", "said"),
    [
        (("predict", "llama-3.1-8b"), "at least one device"),
        (("predict", "h100-sxm-80gb"), "at least one model"),
        (("predict", "--device", "h100-sxm-80gb"), "MODEL"),
        ((*LLAMA, "--compare", "no-such-thing"), "no-such-thing"),
        ((*LLAMA, "--device", "h1000"), "h1000"),
        ((*LLAMA, "--price", "-1"), "price_per_kwh"),
        ((*LLAMA, "--carbon-intensity", "nan"), "carbon_intensity"),
        (("predict", "llama-3.1-70b", "--device", "h100-sxm-80gb", "l40s-48gb"), "does not fit"),
        ((*LLAMA, "--checkpoints", ""), "empty path"),
    ],
)
def test_bad_requests_are_refused_in_one_sentence(arguments, said):
    result = CliRunner().invoke(main, list(arguments))
    assert (result.exit_code, result.stdout) == (2, "")
    assert said in result.stderr.strip().splitlines()[-1]


def test_a_limit_given_twice_is_refused():
    with pytest.raises(ValueError, match="--slo gives 'ttft_s' twice"):
        numbers(["ttft_s=1,tpot_s=2", "ttft_s=3"], "--slo")
    assert numbers(["ttft_s=1,tpot_s=2"], "--slo") == {"ttft_s": 1.0, "tpot_s": 2.0}


def test_a_device_without_bf16_units_answers_for_fp16_and_says_so():
    words = ("predict", "gpt2", "--json", "--device")
    old, new = (json.loads(run(*words, d).stdout)["warnings"] for d in ("t4-16gb", "l4-24gb"))
    assert any("no bf16 matrix units" in text for text in old)
    assert not any("bf16 matrix units" in text for text in new)


def test_a_context_beyond_learned_positions_is_said():
    words = ("predict", "gpt2", "--device", "h100-sxm-80gb", "--json", "--output", "16", "--prompt")
    short, long = (json.loads(run(*words, p).stdout)["warnings"] for p in ("512", "2000"))
    assert not any("positions" in text for text in short)
    assert any("1024 tokens and cannot run 2016" in text for text in long)


def test_words_are_devices_where_they_are_names_of_devices():
    assert subjects(["A.json", "h100-sxm-80gb", "x", "x"], ["d.json, l40s-48gb"]) == (
        ["A.json", "x"], ["d.json", "l40s-48gb", "h100-sxm-80gb"],
    )  # fmt: skip


def complete(line: str, incomplete: str) -> list[str]:
    shell = BashComplete(main, {}, "hymell", "_HYMELL_COMPLETE")
    return [item.value for item in shell.get_completions(line.split(), incomplete)]


def test_names_are_completed_by_the_shell():
    import hymell_jax as hj

    assert list(device_names()) == hj.device_names() and list(model_names()) == list(
        hj.model_names()
    )
    assert complete("predict", "llama-3.1-8") == ["llama-3.1-8b"]
    assert "h200-sxm-141gb" in complete("predict llama-3.1-8b --device", "h2")
    assert complete("rank llama-3.1-8b --devices", "l4") == [
        n for n in device_names() if n.startswith("l4")
    ]
    assert set(complete("", "re")) == {"report"}


def test_completion_does_not_wait_for_jax():
    code = (
        "import sys; from hymell_jax.cli import main;"
        "from click.shell_completion import BashComplete as B;"
        "found = B(main, {}, 'hymell', '_X').get_completions(['predict'], 'llama-3.1-8');"
        "print([f.value for f in found], 'jax' in sys.modules)"
    )
    done = subprocess.run(
        [sys.executable, "-c", code], capture_output=True, text=True, check=True,
        cwd=Path(__file__).parent.parent,
    )  # fmt: skip
    assert done.stdout.strip() == "['llama-3.1-8b'] False"


def test_bars_show_how_far_how_fast_and_how_long(monkeypatch):
    from rich.console import Console

    monkeypatch.setenv("TTY_COMPATIBLE", "1")
    monkeypatch.setenv("COLUMNS", "120")
    made: list[Console] = []

    class Terminal(Console):
        def __init__(self, **options):
            super().__init__(**options, force_terminal=True, width=120, record=True)
            made.append(self)

    monkeypatch.setattr("rich.console.Console", Terminal)
    with cli_output.progress() as report:
        for done in range(5):
            report("rows", done, 4)
    text = made[0].export_text()
    assert re.search(r"rows .*4/4.*/s.*0:00:0\d.*0:00:00", text)


@pytest.mark.parametrize(
    ("speed", "text"),
    [(None, ""), (0.0, ""), (2.0, "2/s"), (1234.6, "1235/s"), (0.25, "4 s each")],
)
def test_rates_are_a_second_or_seconds_each(speed, text):
    assert cli_output.rate(speed) == text


def test_no_colour_outside_a_terminal_and_where_it_is_not_wanted():
    def bytes_of(environment: dict[str, str], terminal: bool) -> bytes:
        """What a table and a bar write, to a file or to a terminal."""
        code = (
            "from hymell_jax.cli_output import table, progress\n"
            "with progress() as report: report('x', 1, 1)\n"
            "table('t', ['a', 'b'], [['1', '2']])\n"
        )
        kept = {k: v for k, v in os.environ.items() if k not in ("NO_COLOR", "FORCE_COLOR")}
        options = dict(
            cwd=Path(__file__).parent.parent, env=kept | {"TERM": "xterm-256color"} | environment
        )
        command = [sys.executable, "-c", code]
        if not terminal:
            done = subprocess.run(command, capture_output=True, check=True, **options)
            return done.stdout + done.stderr
        import pty

        parent, child = pty.openpty()
        subprocess.run(command, stdout=child, stderr=child, check=True, **options)
        os.close(child)
        found = b""
        try:
            while more := os.read(parent, 1 << 16):
                found += more
        except OSError:  # the other end is closed
            pass
        os.close(parent)
        return found

    colours = re.compile(rb"\x1b\[[0-9;]*(?:3[0-9]|9[0-7]|38;[0-9;]+)m")
    assert b"\x1b" not in bytes_of({}, terminal=False)
    assert colours.search(bytes_of({}, terminal=True))
    assert not colours.search(bytes_of({"NO_COLOR": "1"}, terminal=True))


def test_a_lower_level_says_which_size_left_level_3_and_what_is_missing():
    words = ("predict", "llama-3.2-3b", "--device", "h100-sxm-80gb", "--prompt")
    inside, outside = (json.loads(run(*words, p, "--json").stdout) for p in ("40000", "60000"))
    assert (inside["level"], outside["level"]) == (3, 2) and outside["interval"] is None

    def said(answer: dict) -> list[str]:
        return [text for text in answer["warnings"] if "Level 3 does not cover" in text]

    assert said(inside) == []
    (note,) = said(outside)
    assert "attention of the prefill takes" in note and "60000, largest measured 8256" in note
    assert "engine's own time and the intervals are missing" in note
    asked = json.loads(run(*words, "60000", "--level", "2", "--json").stdout)
    assert said(asked) == []
    assert note in run(*words, "60000").stderr


def test_the_title_names_both_runtimes_and_an_unmeasured_device_is_said():
    assert "(kernels of vllm-0.24.0, served by vllm-0.11.1, bf16), level 3" in run(*LLAMA).stdout
    low = run(*LLAMA, "--level", "2").stdout
    assert "(vllm-0.24.0, bf16), level 2" in low
    text = run(*LLAMA[:2], "--device", "gh200-96gb").stdout
    assert "shapes inside the measured range; device not measured" in text
    both = run(*LLAMA, "--compare", "gh200-96gb").stdout
    assert cells(both, "device").split("  ")[-1].strip() == "not measured"


def test_bytes_of_a_token_are_those_of_one_gpu(answer):
    two = run(*LLAMA, "--tensor-parallel", "2", "--json").stdout
    whole = answer["memory"]["kv_cache_bytes_per_token"]
    memory = json.loads(two)["memory"]
    assert memory["kv_cache_bytes_per_token"] == whole / 2
    assert memory["kv_cache_bytes"] == pytest.approx(8 * (1024 + 128) * whole / 2)
    text = run(*LLAMA, "--tensor-parallel", "2").stdout
    assert f"({whole / 2:.0f} bytes a token on each GPU)" in text


@pytest.mark.parametrize(
    ("changes", "gpus", "said"),
    [
        ({}, 3, "the 32 heads and the d_ff 14336"),
        ({"num_attention_heads": 24, "hidden_size": 3072}, 3, "the 8 KV heads"),
        ({"intermediate_size": 8706}, 4, "the d_ff 8706"),
        ({"num_attention_heads": 24, "hidden_size": 3072, "num_key_value_heads": 4,
          "intermediate_size": 3072}, 8, None),
        ({}, 16, None),
    ],
)  # fmt: skip
def test_gpus_must_divide_what_they_share(changes, gpus, said):
    from hymell_jax import hf, models, summary, types

    config = {
        "model_type": "llama", "hidden_size": 4096, "intermediate_size": 14336,
        "num_attention_heads": 32, "num_key_value_heads": 8, "num_hidden_layers": 2,
        "vocab_size": 1000,
    }  # fmt: skip
    model = hf.read_hf(config | changes)
    work = types.workload(tensor_parallel=gpus)
    if said is None:
        summary.check_parallel(model, work)
    else:
        with pytest.raises(ValueError, match=re.escape(said)):
            summary.check_parallel(model, work)
    mixture = models.preset("qwen3-30b-a3b")  # experts 768 wide
    summary.check_parallel(mixture, types.workload(tensor_parallel=4))
    with pytest.raises(ValueError, match="expert"):
        wide = dataclasses.replace(
            mixture, architecture=dataclasses.replace(mixture.architecture, d_expert=770.0)
        )
        summary.check_parallel(wide, types.workload(tensor_parallel=4))
    summary.check_parallel(wide, types.workload(tensor_parallel=4, expert_parallel=4))
