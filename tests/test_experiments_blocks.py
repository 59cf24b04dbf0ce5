"""The experiments on blocks run from their commands, on a few rows made by the equations."""

from __future__ import annotations

import json
import runpy
from pathlib import Path

import numpy as np
import pandas as pd
import pytest

from hymell_jax import block_recipes, blocks, checkpoint, fit

EXPERIMENTS = Path(__file__).parent.parent / "experiments"
ENTRY = ("h100-sxm-80gb", "vllm-0.24.0", "bf16")
H100 = checkpoint.load(*ENTRY)


@pytest.fixture
def checkpoints(tmp_path):
    """A folder with the checkpoint of the H100 alone."""
    content = checkpoint.read(*ENTRY)
    return str(checkpoint.save(content, tmp_path / "checkpoints").parent.parent)


def _write(root: Path, table: str, frame: pd.DataFrame) -> None:
    path = root / f"{table}.parquet"
    path.parent.mkdir(parents=True, exist_ok=True)
    frame.to_parquet(path)


def _split(n: int) -> np.ndarray:
    return np.where(np.arange(n) % 3 == 0, "test", "train")


def _decode_rows(device: str, runtime: str, factor: float, n: int = 90) -> pd.DataFrame:
    """Decode attention that takes `factor` times what level 1 says on the H100."""
    rng = np.random.default_rng(0)
    frame = pd.DataFrame({
        "device": device, "runtime": runtime, "dtype": "bfloat16", "kv_dtype": "bfloat16",
        "batch": rng.integers(1, 65, n), "context_len": rng.integers(128, 8192, n),
        "n_heads": 32, "n_kv_heads": 8, "head_dim": 128, "window_size": 0, "split": _split(n),
    })  # fmt: skip
    renamed = frame.rename(columns={"context_len": "tokens"}).assign(
        value_head_dim=128, window_tokens=0, kv_bytes=2.0
    )
    log_time, _ = block_recipes.level1(
        "attention_decode", H100.coefficients["attention"], H100.device, renamed
    )
    return frame.assign(time_s=factor * np.exp(log_time), power_w=np.nan, energy_j=np.nan)


def test_block_accuracy_shows_both_levels_and_the_published_network(tmp_path, capsys, checkpoints):
    _write(tmp_path, "blocks/attention_decode", _decode_rows(*ENTRY[:2], 1.0))
    changes = {"hidden": [6, 6], "steps": 250, "batch": 64}
    config = {
        "split": "test", "devices": None, "checkpoints": checkpoints, "energy": [], "ffn": [],
        "published": [{"block": "attention_decode", "device": ENTRY[0], "runtime": ENTRY[1],
                       "changes": changes}],
    }  # fmt: skip
    module = runpy.run_path(str(EXPERIMENTS / "block_accuracy" / "run.py"))
    found = module["main"](config, tmp_path, tmp_path / "out")
    assert json.loads((tmp_path / "out" / "results.json").read_text()) == found
    assert (tmp_path / "out" / "block_time.png").stat().st_size > 3000
    whole = {r["regime"]: r for r in found["errors"]}["bf16 full"]
    assert whole["n"] == 30 and whole["level1_mape"] < 0.1 < whole["mape"]  # rows are level 1
    assert whole["paper_mape"] == 0.441
    network = found["published_network"][0]
    assert network["published_parameters"] < network["ours_parameters"]
    assert network["ours_mape"] == pytest.approx(whole["mape"], abs=0.01)
    text = capsys.readouterr().out
    assert str(whole["mape"]) in text and str(network["published_mape"]) in text
    kept = module["main"](config, tmp_path, tmp_path / "out", parts=("power",))
    assert kept["errors"] == found["errors"] and kept["power"] == []


def test_block_accuracy_of_some_devices_replaces_only_their_rows():
    merged = runpy.run_path(str(EXPERIMENTS / "block_accuracy" / "run.py"))["merged"]
    old = [{"device": d, "regime": r, "mape": 1.0} for d in ("a", "b") for r in ("x", "y")]
    new = [{"device": "a", "regime": "z", "mape": 2.0}, {**old[0], "mape": 3.0}]
    assert merged(old, new, ["a"]) == [new[1], *old[2:], new[0]]
    assert merged(old, new, None) == new


def _linear_rows(n: int = 24) -> pd.DataFrame:
    rng = np.random.default_rng(0)
    names = {role: kernel for kernel, role in block_recipes.linear.KERNEL_NAMES.items()}
    found = []
    for name in blocks.LINEAR_BLOCKS:
        role = name.removeprefix("linear_")
        sizes = pd.DataFrame({
            "batch": rng.integers(1, 33, n), "k_heads": 16, "v_heads": 32, "k_dim": 128,
            "v_dim": 128, "seq_len": rng.integers(64, 4096, n) if "prefill" in role else 1,
        })  # fmt: skip
        block = H100.blocks[name]
        log_time, _ = block_recipes.level1(name, block.coefficients, H100.device, sizes)
        columns = {"k_heads": "num_k_heads", "v_heads": "num_v_heads", "k_dim": "head_k_dim",
                   "v_dim": "head_v_dim"}  # fmt: skip
        found.append(sizes.rename(columns=columns).assign(
            device=ENTRY[0], runtime=ENTRY[1], kernel=names[role], phase=role.partition("_")[2],
            time_s=np.exp(log_time), split=_split(n),
        ))  # fmt: skip
    return pd.concat(found, ignore_index=True)


def test_linear_attention_changes_nothing_else(tmp_path, capsys, checkpoints):
    _write(tmp_path, "blocks/linear_attention", _linear_rows())
    config = {
        "split": "test", "devices": None, "checkpoints": checkpoints, "refit": [],
        "hybrid": "qwen3-next-80b-a3b", "others": ["llama-3.1-8b"],
    }  # fmt: skip
    module = runpy.run_path(str(EXPERIMENTS / "linear_attention" / "run.py"))
    found = module["main"](config, tmp_path, tmp_path / "out")
    assert json.loads((tmp_path / "out" / "results.json").read_text()) == found
    assert (tmp_path / "out" / "linear_attention.png").stat().st_size > 3000
    (check,) = found["checks"]
    assert check["same_below"] and check["changed_parts"] == "linear_attention"
    assert {r["regime"] for r in found["errors"]} >= {"prefill", "decode", "rule_prefill", "all"}
    assert "linear_attention" in capsys.readouterr().out
    tampered = H100.at_level(2)
    tampered.coefficients["attention"]["prefill_log_launch_s"] += np.float32(0.1)
    with pytest.raises(AssertionError):
        module["check"](checkpoint.load(*ENTRY, checkpoints), tampered, "tampered", config)


def test_portability_needs_fewer_rows_where_it_starts_from_another_gpu(
    tmp_path, capsys, checkpoints
):
    target = ["a100-sxm-80gb", "vllm-0.14.0"]
    rng = np.random.default_rng(0)
    n = 300
    shape = {name: np.float32(2 ** rng.integers(6, 13, n)) for name in "mnk"}
    log_time = fit.gemm_log_time(H100.coefficients["gemm"], H100.device, *shape.values(), 2.0)
    gemm = pd.DataFrame({**shape, "device": target[0], "runtime": target[1], "dtype": "bfloat16",
                         "time_s": 3.0 * np.exp(np.asarray(log_time, np.float64)),
                         "split": _split(n)})  # fmt: skip
    _write(tmp_path, "operators/gemm", gemm)
    _write(tmp_path, "blocks/attention_decode", _decode_rows(*target, 2.0))
    config = {
        "source": list(ENTRY[:2]), "targets": [target], "tables": ["gemm", "attention_decode"],
        "rows": [0, 40], "test_rows": 100, "attention_steps": 250, "gemm_steps": 100,
        "members": 1, "checkpoints": checkpoints,
    }  # fmt: skip
    module = runpy.run_path(str(EXPERIMENTS / "portability" / "run.py"))
    rows = module["main"](config, tmp_path, tmp_path / "out")
    assert json.loads((tmp_path / "out" / "results.json").read_text()) == rows
    assert (tmp_path / "out" / "portability.png").stat().st_size > 5000
    by_key = {(r["table"], r["form"], r["n_train"]): r["mape"] for r in rows}
    assert by_key["gemm", "level 1", 40] < by_key["gemm", "level 1", 0]
    attention = {key[1:]: value for key, value in by_key.items() if key[0] == "attention_decode"}
    assert set(attention) == {
        ("level 1", 0), ("frozen", 0), ("level 1", 40), ("frozen", 40), ("tuned", 40),
        ("scratch", 40),
    }  # fmt: skip
    assert attention["level 1", 40] < attention["level 1", 0]
    assert "tuned" in capsys.readouterr().out
