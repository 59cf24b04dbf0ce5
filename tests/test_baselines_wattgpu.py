"""WattGPU: import, features, baselines, metrics and protocol on a small table worked by hand."""

import builtins
import dataclasses

import numpy as np
import pandas as pd
import pytest

from hymell_jax import get_device
from hymell_jax.baselines import METHODS, tdp, wattgpu
from hymell_jax.models import preset
from hymell_jax.types import workload

MODELS = {  # name: type, total, active, hidden, heads, kv heads, layers
    "a/small": ("llama", 1.0, 1.0, 2048, 16, 16, 16),
    "b/large": ("qwen2", 8.0, 8.0, 4096, 32, 8, 32),
    "c/mix": ("mixtral", 47.0, 13.0, 4096, 32, 8, 32),
}
LISTS = dict(e2e="[1.1, 2.0, 9.0]", ttft="[0.1, 1.0, 9.0]", tokens="[11, 5, 1]")


def run(model, gpu, rate, power, seconds=10.0, tokens=1000, **lists):
    lists = LISTS | lists
    return {
        "model": model,
        "gpu_type": gpu,
        "lambda_qps": rate,
        "measurement_duration": seconds,
        "generation_tokens_total": tokens,
        "gpu_0_power_draw_watts_mean": power,
        "time_to_first_token_seconds_events": lists["ttft"],
        "e2e_request_latency_seconds_events": lists["e2e"],
        "request_generation_tokens": lists["tokens"],
    }


RUNS = [
    run("a/small", "NVIDIA A30", None, 120.0),
    run("b/large", "NVIDIA A30", None, 150.0, seconds=40.0),
    run("a/small", "NVIDIA L4", 0.1, 30.0),
    run("b/large", "NVIDIA L4", 1.0, 60.0),
    run("a/small", "NVIDIA L4", 0.2, 30.0),  # no scenario
    run("a/small", "NVIDIA L4", 1.0, 60.0, tokens=0),  # no tokens
    run("c/mix", "NVIDIA A30", None, 150.0),  # mixture
]


@pytest.fixture
def files(tmp_path):
    runs, models = tmp_path / "runs.csv", tmp_path / "models.csv"
    pd.DataFrame(RUNS).to_csv(runs)
    rows = [(name, *values) for name, values in MODELS.items()]
    columns = ["model_name", "model_type", "total_b_params", "active_b_params", "hidden_size",
               "num_attention_heads", "num_key_value_heads", "num_layers"]  # fmt: skip
    pd.DataFrame(rows, columns=columns).to_csv(models, sep=";", index=False)
    return runs, models


@pytest.fixture
def table(files):
    runs, models = files
    return wattgpu.build_table(wattgpu.read_runs(runs), wattgpu.read_models(models))


def grid_table(seed=0):
    """3 models x 4 GPUs x 3 scenarios x 2 repeats, power and latency of a simple law."""
    rng = np.random.default_rng(seed)
    rows = []
    gpus = ("NVIDIA A30", "NVIDIA L4", "NVIDIA H100 NVL", "NVIDIA L40S")
    sizes = {"m/1": (1.0, 2048, 16, 16), "m/3": (3.0, 3072, 24, 28), "m/8": (8.0, 4096, 32, 32)}
    for model, (params, hidden, heads, layers) in sizes.items():
        for gpu in gpus:
            for scenario, rho in tdp.LOAD_FACTORS.items():
                for _ in range(2):
                    sheet = wattgpu.gpu_features(gpu)
                    rows.append(
                        {
                            "model": model,
                            "gpu": gpu,
                            "scenario": scenario,
                            "model_type": "llama",
                            "total_b_params": params,
                            "hidden_size": hidden,
                            "num_attention_heads": heads,
                            "num_key_value_heads": heads // 2,
                            "num_layers": layers,
                            "power_w": sheet["tdp_w"] * rho * np.exp(rng.normal(0, 0.02)),
                            "itl_s": 2.5 * params / sheet["memory_bandwidth_gb_s"]
                            * np.exp(rng.normal(0, 0.02)),
                            **sheet,
                        }
                    )  # fmt: skip
    return wattgpu.add_features(pd.DataFrame(rows))


def test_the_importer_keeps_dense_runs_with_tokens_and_a_scenario(table):
    assert list(table["scenario"]) == ["offline", "offline", "server_low", "server_high"]
    assert table.attrs["dropped"] == {"no tokens": 1, "mixture": 1, "no scenario": 1}
    # offline: 10 s / 1000 tokens and 40 / 1000; servers: mean of 1/10 and 1/4, one-token run out
    np.testing.assert_allclose(table["itl_s"], [0.01, 0.04, 0.175, 0.175])
    np.testing.assert_allclose(table["power_w"], [120, 150, 30, 60])
    np.testing.assert_allclose(table["tdp_w"], [165, 165, 72, 72])


def test_derived_features_by_hand(table):
    large = table.iloc[1]  # 8B on A30: 933.1 GB/s, 165 TFLOP/s, 24 GB, 930 to 1440 MHz
    assert large["boost_percentage"] == pytest.approx(1440 / 930)
    assert large["log_total_b_params"] == pytest.approx(np.log(8))
    assert large["bandwidth_latency"] == pytest.approx(16 / 933.1)
    assert large["compute_latency_s"] == pytest.approx(16e9 / 165e12)
    assert large["kv_cache_size_bytes"] == 2 * 8 * 128 * 2 * 32 * 640
    assert large["estimated_free_memory"] == pytest.approx(24 - 16)
    assert large["estimated_available_memory"] == pytest.approx(21.6 - 16)
    assert large["mb_per_token"] == 0.5  # 2 x 32 x 4096 x 2 / 2^20
    assert large["max_concurrent_requests"] == pytest.approx(5.6 * 1024 / 0.5 / 1256)
    for features in (wattgpu.POWER_FEATURES, wattgpu.ITL_FEATURES):
        assert set(features) <= set(table)


def test_the_importer_answers_bad_files_with_one_sentence(tmp_path, files):
    runs, models = files
    with pytest.raises(ValueError, match="cannot be read"):
        wattgpu.read_runs(tmp_path / "none.csv")
    frame = pd.DataFrame(RUNS)
    frame.drop(columns="lambda_qps").to_csv(runs)
    with pytest.raises(ValueError, match="lacks the columns lambda_qps"):
        wattgpu.read_runs(runs)
    frame.assign(gpu_0_power_draw_watts_mean="much").to_csv(runs)
    with pytest.raises(ValueError, match="must hold positive numbers; got 'much'"):
        wattgpu.read_runs(runs)
    frame.assign(request_generation_tokens="__import__('os')").to_csv(runs)
    with pytest.raises(ValueError, match="row 0: not a list of numbers"):
        wattgpu.read_runs(runs)
    pd.DataFrame([run("a/small", "Voodoo", None, 1.0)]).to_csv(runs)
    with pytest.raises(ValueError, match="No data sheet of Voodoo"):
        wattgpu.build_table(wattgpu.read_runs(runs), wattgpu.read_models(models))
    pd.DataFrame([run("x/none", "NVIDIA L4", None, 1.0)]).to_csv(runs)
    with pytest.raises(ValueError, match="lacks x/none"):
        wattgpu.build_table(wattgpu.read_runs(runs), wattgpu.read_models(models))
    with pytest.raises(ValueError, match="lists differ in length"):
        wattgpu.request_itl_s([1.0], [1.0, 2.0], [3])


def test_the_gpu_table_is_the_published_one():
    order = ("NVIDIA A30", "NVIDIA H200", "NVIDIA A100-SXM4-40GB", "NVIDIA L40S",
             "NVIDIA H100 NVL", "Tesla V100-SXM2-32GB", "NVIDIA L4", "Tesla T4")  # fmt: skip
    assert tuple(wattgpu.GPUS) == order
    assert [wattgpu.GPUS[g]["tdp_w"] for g in order] == [165, 700, 400, 350, 400, 300, 72, 70]
    assert [wattgpu.GPUS[g]["memory_bandwidth_gb_s"] for g in order] == [
        933.1, 4890, 1560, 864, 3940, 898, 300.1, 320,
    ]  # fmt: skip
    assert [wattgpu.GPUS[g]["tflops_16b"] for g in order] == [
        165, 835, 312, 362, 835, 125, 121, 65,
    ]  # fmt: skip


def test_features_of_a_device_come_from_the_table_or_its_own_extras():
    assert wattgpu.gpu_features("l4-24gb") == wattgpu.GPUS["NVIDIA L4"]
    own = wattgpu.gpu_features("a40-48gb")
    assert own["transistor_count_m"] == pytest.approx(28300)
    assert own["base_clock_mhz"] == pytest.approx(1305)
    assert own["release_year"] == 2020 and own["memory_type"] == "GDDR6"
    assert wattgpu.gpu_features("h100-pcie-80gb")["base_clock_mhz"] == 1095
    with pytest.raises(ValueError, match="base_clock_mhz of gh200-96gb"):
        wattgpu.gpu_features("gh200-96gb")


def test_baselines_by_hand(table):
    np.testing.assert_allclose(wattgpu.baseline(table, "tdp"), [165, 165, 72, 72])
    np.testing.assert_allclose(
        wattgpu.baseline(table, "load-scaled-tdp"), [148.5, 148.5, 14.4, 43.2]
    )
    np.testing.assert_allclose(
        wattgpu.baseline(table, "roofline"),
        [2 / 933.1 / 256, 16 / 933.1 / 256, 2 / 300.1, 16 / 300.1],
    )
    with pytest.raises(ValueError, match="got 'guess'"):
        wattgpu.baseline(table, "guess")
    with pytest.raises(ValueError, match="got 'batch'"):
        wattgpu.baseline(table.assign(scenario="batch"), "tdp")


def test_error_and_correlation_by_hand():
    assert wattgpu.mdape([100, 200, 400], [110, 200, 300]) == pytest.approx(10)
    assert wattgpu.mdape([100, 200], [110, 150]) == pytest.approx(17.5)
    # deviations (-1, 0, 1) and (-1/3, -4/3, 5/3): 2 / sqrt(2 x 14/3)
    assert wattgpu.pearson([1, 2, 3], [2, 1, 4]) == pytest.approx(2 / np.sqrt(2 * 14 / 3))
    assert np.isnan(wattgpu.pearson([1, 2, 3], [5, 5, 5]))


def test_kendall_tau_within_groups_by_hand():
    cells = [  # model, gpu, measured, predicted
        ("x", "p", 1.0, 1.0),
        ("x", "q", 2.0, 3.0),
        ("x", "r", 3.0, 2.0),  # x: pairs + + -: tau 1/3
        ("y", "p", 1.0, 5.0),
        ("y", "q", 2.0, 4.0),  # y: tau -1
        ("z", "p", 1.0, 7.0),  # alone
    ]
    frame = pd.DataFrame(cells, columns=["model", "gpu", "measured", "predicted"])
    frame = frame.assign(scenario="offline")
    tau = wattgpu.grouped_tau(frame, frame["measured"], frame["predicted"], "gpu")
    assert tau == pytest.approx((1 / 3 - 1) / 2)
    # repeats of a cell are averaged first: 0.5 and 1.5 make the same cell as 1
    twice = pd.concat([frame, frame.iloc[:1]], ignore_index=True)
    measured = twice["measured"].to_numpy(copy=True)
    measured[0], measured[-1] = 0.5, 1.5
    assert wattgpu.grouped_tau(twice, measured, twice["predicted"], "gpu") == pytest.approx(tau)
    # the measured value of a GPU does not depend on the model: nothing to rank models by
    assert np.isnan(wattgpu.grouped_tau(frame, frame["measured"], frame["predicted"], "model"))
    with pytest.raises(ValueError, match="gpu or model"):
        wattgpu.grouped_tau(frame, frame["measured"], frame["predicted"], "year")


def test_rated_power_ranks_gpus_but_never_models():
    table = grid_table()
    found = wattgpu.metrics(table, table["power_w"], wattgpu.baseline(table, "tdp"))
    assert set(found) == {"offline", "server"}
    assert found["offline"]["gpu_tau"] > 0.9
    assert np.isnan(found["offline"]["llm_tau"]) and np.isnan(found["server"]["llm_tau"])
    assert found["offline"]["n"] == 24 and found["server"]["n"] == 48
    assert found["offline"]["mdape"] == pytest.approx(100 * (1 / 0.9 - 1), rel=0.2)


@pytest.mark.parametrize("protocol,groups", [("cv", 5), ("logo", 4), ("lolo", 3)])
def test_folds_keep_groups_together_and_cover_every_row_once(protocol, groups):
    table = grid_table()
    seen = np.zeros(len(table), int)
    splits = list(wattgpu.folds(table, protocol))
    assert len(splits) == groups
    keys = {"cv": ["model", "gpu"], "logo": ["gpu"], "lolo": ["model"]}[protocol]
    for train, test in splits:
        seen[test] += 1
        left, right = (set(map(tuple, table.iloc[i][keys].to_numpy())) for i in (train, test))
        assert not left & right
        assert len(train) + len(test) == len(table)
    assert (seen == 1).all()


def test_folds_are_those_of_scikit_learn():
    selection = pytest.importorskip("sklearn.model_selection")
    table = grid_table()
    names = table["model"] + "|" + table["gpu"]
    ours = [set(test) for _, test in wattgpu.folds(table, "cv")]
    theirs = [set(t) for _, t in selection.GroupKFold(5).split(table, groups=names)]
    assert ours == theirs


def test_folds_refuse_what_cannot_be_split():
    table = grid_table()
    with pytest.raises(ValueError, match="cv, logo, lolo"):
        list(wattgpu.folds(table, "random"))
    with pytest.raises(ValueError, match="at least two groups"):
        list(wattgpu.folds(table[table["gpu"] == "NVIDIA L4"], "logo"))


def test_the_published_settings():
    pytest.importorskip("xgboost")
    pytest.importorskip("sklearn")
    power = wattgpu.make_pipeline("power").named_steps["trees"].get_params()
    itl = wattgpu.make_pipeline("itl").named_steps["trees"].get_params()
    names = ("max_depth", "reg_lambda", "n_estimators")
    assert [power[n] for n in names] == [6, 150, 200]
    assert [itl[n] for n in names] == [5, 100, 100]
    assert len(wattgpu.POWER_FEATURES) == 11 and len(wattgpu.ITL_FEATURES) == 14
    with pytest.raises(ValueError, match="power, itl"):
        wattgpu.make_pipeline("price")


def test_cross_validation_denormalises_and_beats_rated_power_under_load():
    pytest.importorskip("xgboost")
    pytest.importorskip("sklearn")
    table = grid_table()
    rows = {(row["method"], row["load"]): row for row in wattgpu.evaluate(table, "power")}
    assert set(rows) == {
        (name, load)
        for name in ("cv", "logo", "lolo", "tdp", "load-scaled-tdp")
        for load in ("offline", "server")
    }
    assert rows["load-scaled-tdp", "server"]["mdape"] < 3
    assert rows["cv", "server"]["mdape"] < rows["tdp", "server"]["mdape"]
    assert rows["logo", "server"]["published"] == (13.5, 0.965, 0.76, 0.72)


def test_latency_rows_with_gaps_are_dropped_and_scores_are_in_seconds():
    pytest.importorskip("xgboost")
    pytest.importorskip("sklearn")
    table = grid_table()
    table.loc[0, "itl_s"] = np.nan
    found = wattgpu.cross_validate(table, "itl", "lolo")
    assert len(found) == len(table) - 1
    assert (found["predicted"] > 0).all()
    with pytest.raises(ValueError, match="lacks the columns tdp_w"):
        wattgpu.cross_validate(table.drop(columns="tdp_w"), "power", "cv")


def test_a_missing_extra_is_named(monkeypatch):
    real = builtins.__import__

    def without(name, *args, **kwargs):
        if name.split(".")[0] in ("xgboost", "sklearn"):
            raise ImportError(name)
        return real(name, *args, **kwargs)

    monkeypatch.setattr(builtins, "__import__", without)
    with pytest.raises(ValueError, match="extra `baselines`"):
        wattgpu.make_pipeline("power")


def test_prediction_gives_energy_offline_and_time_of_servers():
    pytest.importorskip("xgboost")
    pytest.importorskip("sklearn")
    method = METHODS["wattgpu"]
    models = wattgpu.fit_models(grid_table())
    arch = preset("llama-3.1-8b").architecture
    offline = method.predict(arch, workload(), "l4-24gb", models)
    np.testing.assert_array_equal(offline.available, [0, 0, 0, 1])
    assert float(offline.decode_energy_per_token_j) > 0
    server = dataclasses.replace(models, scenario="server_low", model_type="unheard-of")
    served = method.predict(arch, workload(), get_device("h100-nvl-94gb"), server)
    np.testing.assert_array_equal(served.available, [0, 1, 0, 0])
    assert 0 < float(served.decode_time_per_token_s) < 1


def test_prediction_refuses_what_it_cannot_know():
    method = METHODS["wattgpu"]
    arch, device = preset("llama-3.1-8b").architecture, get_device("l4-24gb")
    assert method.needs_fit and method.default_coefficients() is None
    with pytest.raises(ValueError, match="fit them"):
        method.predict(arch, workload(), device, None)
    fake = wattgpu.WattModels(power=None, itl=None)
    with pytest.raises(ValueError, match="not a bare Device"):
        method.predict(arch, workload(), device.device, fake)
    with pytest.raises(ValueError, match="single GPU"):
        method.predict(arch, workload(tensor_parallel=2), device, fake)
    with pytest.raises(ValueError, match="dense models"):
        method.predict(preset("mixtral-8x7b").architecture, workload(), device, fake)
    with pytest.raises(ValueError, match="offline, server_low"):
        wattgpu.WattModels(power=None, itl=None, scenario="batch")
