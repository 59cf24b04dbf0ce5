"""The ends of the ranges: one token, ten million of context, ten trillion parameters, a million
sequences, one head, one layer. One compiled program answers for every kind of model at once.
"""

from __future__ import annotations

import dataclasses
import itertools

import jax
import numpy as np
import pytest
from grown import grown

import hymell_jax as hj

TINY = dict(n_layers=1, d_model=64, n_heads=1, head_dim=64, d_ff=64, vocab_size=256)
DENSE = dict(n_layers=32, d_model=4096, n_heads=32, n_kv_heads=8, d_ff=14336, vocab_size=128256)
HUGE = dict(  # 1e13 parameters
    n_layers=400, d_model=45056, n_heads=352, n_kv_heads=352, head_dim=128, d_ff=122880,
    vocab_size=300000,
)  # fmt: skip
MIXTURE = dict(n_experts=256, experts_per_token=8, d_expert=2048)
LATENT = dict(latent_attention=1, kv_lora_rank=512, q_lora_rank=1536, rope_head_dim=64,
              head_dim=192, value_head_dim=128, n_kv_heads=32)  # fmt: skip
LINEAR = dict(linear_fraction=0.75, linear_k_heads=16, linear_v_heads=32, linear_head_dim=128,
              linear_conv_width=4)  # fmt: skip
WINDOW = dict(window_fraction=0.5, window_tokens=1024)
ARCHITECTURES = {
    "one head and one layer": TINY,
    "eight billion": DENSE,
    "ten trillion": HUGE,
    "one head of many layers": TINY | dict(n_layers=1000),
    "one layer of many heads": DENSE | dict(n_layers=1, n_heads=1024, n_kv_heads=1, head_dim=128),
    "experts": DENSE | MIXTURE,
    "ten trillion in experts": DENSE | dict(
        n_layers=120, d_model=16384, n_experts=1024, experts_per_token=8, d_expert=1664,
        head_dim=512,
    ),
    "one expert": TINY | dict(n_experts=1, experts_per_token=1, d_expert=1, d_ff=1),
    "latent": DENSE | MIXTURE | LATENT,
    "linear": DENSE | LINEAR,
    "window": DENSE | WINDOW,
    "window of one": TINY | dict(window_fraction=1, window_tokens=1),
}  # fmt: skip
BATCHES = (1.0, 1e6)
PROMPTS = (1.0, 1e7)
OUTPUTS = (1.0, 1e5)
NAMES = [*itertools.product(ARCHITECTURES, BATCHES, PROMPTS, OUTPUTS)]
DEVICES = ("h100-sxm-80gb", "t4-16gb", "h100-pcie-80gb")  # measured, and two carried over
SHARED = {"d_ff", "n_layers", "batch_size", "prompt_tokens", "output_tokens"}


def rows() -> tuple[hj.Architecture, hj.Workload]:
    archs = {name: hj.architecture(**fields) for name, fields in ARCHITECTURES.items()}
    works = [hj.workload(batch_size=b, prompt_tokens=p, output_tokens=o) for _, b, p, o in NAMES]
    archs, works = hj.stack([archs[name] for name, *_ in NAMES]), hj.stack(works)
    gpus = np.where(np.arange(len(NAMES)) % 8 == 7, 8.0, 1.0).astype(np.float32)
    heads = np.asarray(archs.n_heads)
    gpus = np.where(heads % 8 == 0, gpus, 1.0).astype(np.float32)
    return archs, dataclasses.replace(works, tensor_parallel=gpus)


ARCHS, WORKS = rows()


def answers(model: hj.CostModel, archs=ARCHS, works=WORKS) -> hj.Prediction:
    return jax.tree.map(np.asarray, hj.predict_batch(model, archs, works, once=True))


@pytest.fixture(scope="module")
def answer():
    return {name: answers(hj.load(name)) for name in DEVICES}


def costs(p: hj.Prediction) -> dict[str, np.ndarray]:
    return {
        "prefill s": p.prefill.time_s, "step s": p.decode.time_s, "prefill J": p.prefill.energy_j,
        "step J": p.decode.energy_j, "steady s": p.steady_time_per_token_s,
    }  # fmt: skip


def test_the_largest_have_ten_trillion_parameters():
    for name in ("ten trillion", "ten trillion in experts"):
        total = float(hj.total_parameters(hj.architecture(**ARCHITECTURES[name])))
        assert 0.9e13 < total < 1.2e13


@pytest.mark.parametrize("device", DEVICES)
def test_every_number_is_finite_and_costs_are_positive(answer, device):
    p = answer[device]
    for path, leaf in jax.tree_util.tree_leaves_with_path(p):
        bad = ~np.isfinite(leaf).reshape(len(NAMES), -1).all(-1)
        assert not bad.any(), (path, [NAMES[i] for i in np.flatnonzero(bad)[:3]])
    for name, value in {**costs(p), "tokens/s": p.output_tokens_per_s}.items():
        assert (value > 0).all(), (name, [NAMES[i] for i in np.flatnonzero(value <= 0)[:3]])
    assert (p.memory.weights_bytes > 0).all() and (p.memory.kv_cache_bytes > 0).all()


@pytest.mark.parametrize("device", DEVICES)
def test_power_stays_within_the_boards(answer, device):
    spec = hj.get_device(device).device
    for phase in (answer[device].prefill, answer[device].decode):
        watts = phase.energy_j / phase.time_s / np.asarray(WORKS.tensor_parallel)
        assert (watts >= float(spec.idle_power_w) * 0.999).all()
        assert (watts <= float(spec.power_limit_w) * 1.001).all()


@pytest.mark.parametrize("field", sorted(SHARED))
def test_costs_never_fall_as_a_size_grows(answer, field):
    """The network of the experts promises it in tokens alone: their widths stay as they are."""
    kept = np.asarray(ARCHS.n_experts) == 0 if field == "d_ff" else np.ones(len(NAMES), bool)
    for device in DEVICES[:2]:
        for factor in (1.001, 1.5):
            grown_rows = grown(ARCHS, WORKS, field, factor)
            after = costs(answers(hj.load(device), *grown_rows))
            for name, before in costs(answer[device]).items():
                if field == "output_tokens" and name == "steady s":
                    continue  # longer answers bring fewer newcomers to a step
                fell = kept & (after[name] < before * (1 - 2e-5))
                assert not fell.any(), (device, name, [NAMES[i] for i in np.flatnonzero(fell)[:3]])


def test_a_longer_context_costs_more_and_a_window_ends_that(answer):
    p = answer["h100-sxm-80gb"]
    step = {key: p.decode.time_s[i] for i, key in enumerate(NAMES)}
    for name in ("eight billion", "ten trillion", "experts", "latent"):
        assert step[name, 1.0, 1e7, 1.0] > 2 * step[name, 1.0, 1.0, 1.0]
    flat = step["window of one", 1.0, 1e7, 1.0] / step["window of one", 1.0, 1.0, 1.0]
    assert flat == pytest.approx(1.0, rel=0.3)


def test_key_value_heads_change_costs_without_a_jump(h100, llama):
    """From one head to as many as query heads, the last included, and between whole numbers."""
    count = len(NAMES) // 2  # the other rows keep the program the same
    heads = np.linspace(1.0, 32.0, count).astype(np.float32)
    first = (
        dataclasses.replace(llama, n_kv_heads=heads),
        hj.workload(batch_size=16, prompt_tokens=2048),
    )
    archs, works = jax.tree.map(
        lambda new, old: np.concatenate([np.broadcast_to(new, count), old[count:]]),
        first,
        (ARCHS, WORKS),
    )
    found = jax.tree.map(lambda leaf: leaf[:count], answers(h100, archs, works))
    for value in (found.decode.time_s, found.decode.energy_j, found.prefill.time_s):
        assert (np.abs(np.diff(np.log(value))) < np.diff(np.log(heads))).all()
    assert found.decode.time_s[-1] > 1.2 * found.decode.time_s[0]
