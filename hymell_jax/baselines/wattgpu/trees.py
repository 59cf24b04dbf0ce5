"""WattGPU's boosted trees: features, settings, training, and what they predict."""

from __future__ import annotations

import dataclasses
from collections.abc import Sequence
from typing import TYPE_CHECKING, Any

import numpy as np

from hymell_jax import parameters
from hymell_jax.baselines.interface import MethodPrediction, prediction
from hymell_jax.baselines.tdp import SCENARIOS
from hymell_jax.baselines.wattgpu.runs import add_features, gpu_features
from hymell_jax.devices import DeviceSpec
from hymell_jax.types import Architecture, Workload

if TYPE_CHECKING:
    import pandas as pd

POWER_FEATURES = (
    "scenario", "log_total_b_params", "model_type", "num_key_value_heads", "num_layers",
    "memory_bandwidth_gb_s", "boost_percentage", "transistor_count_m", "base_clock_mhz",
    "release_year", "bandwidth_latency",
)  # fmt: skip
ITL_FEATURES = (
    "scenario", "model_type", "total_b_params", "hidden_size", "num_attention_heads",
    "num_key_value_heads", "num_layers", "memory_bandwidth_gb_s", "memory_size_gb", "memory_type",
    "tflops_16b", "release_year", "bandwidth_latency", "compute_latency_s",
)  # fmt: skip
CATEGORICAL = ("scenario", "model_type", "memory_type")

TARGETS = {  # target: (column, features, settings of the trees)
    "power": ("power_w", POWER_FEATURES, dict(max_depth=6, reg_lambda=150, n_estimators=200)),
    "itl": ("itl_s", ITL_FEATURES, dict(max_depth=5, reg_lambda=100, n_estimators=100)),
}


def checked_target(target: str) -> tuple[str, tuple[str, ...], dict[str, Any]]:
    """The entry of `TARGETS`; any other target is refused."""
    if target not in TARGETS:
        raise ValueError(f"target must be one of {', '.join(TARGETS)}; got {target!r}.")
    return TARGETS[target]


def make_pipeline(target: str, extra: Sequence[str] = ()) -> Any:
    """Imputation, scaling or ordinal codes, and the boosted trees of "power" or "itl".

    Numbers: mean imputed, standardised. Categories: most frequent, codes, -1 for unknown ones.
    `extra` names numbers beyond the published features.

    Raises:
        ValueError: another target, or the extra `baselines` is not installed.
    """
    _, features, settings = checked_target(target)
    try:
        from sklearn.compose import ColumnTransformer
        from sklearn.impute import SimpleImputer
        from sklearn.pipeline import Pipeline
        from sklearn.preprocessing import OrdinalEncoder, StandardScaler
        from xgboost import XGBRegressor
    except ImportError as error:
        raise ValueError(
            "WattGPU needs xgboost and scikit-learn: install the extra `baselines`."
        ) from error
    numbers = [name for name in (*features, *extra) if name not in CATEGORICAL]
    names = [name for name in features if name in CATEGORICAL]
    codes = OrdinalEncoder(handle_unknown="use_encoded_value", unknown_value=-1)
    fill = SimpleImputer(keep_empty_features=True)
    steps = [
        ("numbers", Pipeline([("fill", fill), ("scale", StandardScaler())]), numbers),
        (
            "names",
            Pipeline([("fill", SimpleImputer(strategy="most_frequent")), ("code", codes)]),
            names,
        ),
    ]
    return Pipeline(
        [("prepare", ColumnTransformer(steps)), ("trees", XGBRegressor(n_jobs=1, **settings))]
    )


def _inputs(table: pd.DataFrame, features) -> pd.DataFrame:
    frame = table[list(features)].copy()
    for name in CATEGORICAL:
        if name in frame:
            frame[name] = frame[name].astype(object)
    return frame


def usable_rows(table: pd.DataFrame, target: str, extra: Sequence[str] = ()) -> pd.DataFrame:
    """Rows with a target and, as published for ITL, with every feature."""
    column, features, _ = TARGETS[target]
    features = (*features, *extra)
    needed = [column, *features] if target == "itl" else [column]
    every = ("model", "gpu", "scenario", "tdp_w", column, *features)
    missing = [name for name in every if name not in table]
    if missing:
        raise ValueError(f"The table lacks the columns {', '.join(missing)}.")
    rows = table.dropna(subset=needed)
    if not (rows[column] > 0).all():
        raise ValueError(f"Column {column} must be positive.")
    return rows.reset_index(drop=True)


def train_trees(rows: pd.DataFrame, target: str, extra: Sequence[str] = ()) -> Any:
    """A pipeline trained on rows: of power over the TDP, of ln ITL."""
    column, features, _ = TARGETS[target]
    goal = np.log(rows[column]) if target == "itl" else rows[column] / rows["tdp_w"]
    inputs = _inputs(rows, (*features, *extra))
    return make_pipeline(target, extra).fit(inputs, goal.to_numpy(np.float64))


def predict_rows(
    pipeline: Any, rows: pd.DataFrame, target: str, extra: Sequence[str] = ()
) -> np.ndarray:
    """What a trained pipeline says of rows [n_rows], in W or s."""
    inputs = _inputs(rows, (*TARGETS[target][1], *extra))
    found = np.asarray(pipeline.predict(inputs), np.float64)
    return np.exp(found) if target == "itl" else found * rows["tdp_w"].to_numpy(np.float64)


@dataclasses.dataclass(frozen=True)
class WattModels:
    """Fitted trees and the setting to predict for; `dataclasses.replace` changes the setting."""

    power: Any
    itl: Any
    scenario: str = "offline"
    model_type: str = "llama"  # family as in config.json; unknown ones are allowed

    def __post_init__(self) -> None:
        if self.scenario not in SCENARIOS:
            raise ValueError(
                f"scenario must be one of {', '.join(SCENARIOS)}; got {self.scenario!r}."
            )


def fit_models(table: pd.DataFrame, scenario: str = "offline") -> WattModels:
    """Both models trained on all rows of a table of `build_table`.

    Raises:
        ValueError: missing columns or packages, or an unknown scenario.
    """
    trained = {target: train_trees(usable_rows(table, target), target) for target in TARGETS}
    return WattModels(**trained, scenario=scenario)


def architecture_features(arch: Architecture) -> dict[str, float]:
    """What the models need of an architecture, from one concrete architecture."""
    total, _ = parameters.exact_parameters(arch)
    return {
        "total_b_params": total / 1e9,
        "hidden_size": float(arch.d_model),
        "num_attention_heads": float(arch.n_heads),
        "num_key_value_heads": float(arch.n_kv_heads),
        "num_layers": float(arch.n_layers),
    }


def default_coefficients() -> None:
    """None: there is nothing before a fit."""
    return None


def predict(
    arch: Architecture, work: Workload, device: str | DeviceSpec, coefficients: WattModels | None
) -> MethodPrediction:
    """What the trees give for one concrete model on one GPU; the workload's lengths do not enter.

    Offline, ITL is seconds over tokens of the whole batch, so power x ITL is joules per generated
    token, prefill included, but no step time: energy alone is available. Of servers ITL is the
    time between two tokens of a request, while power is shared with the other requests: time
    alone is available.

    Args:
        device: a `DeviceSpec` or the name of a device, not a bare `Device`: clocks, transistors
            and the year are needed.
        coefficients: of `fit_models`.

    Raises:
        ValueError: no fitted models, a bare device, metadata missing, several GPUs, a mixture.
    """
    import pandas as pd

    if coefficients is None:
        raise ValueError(
            "WattGPU has no published trees: fit them with wattgpu.fit_models(table) first."
        )
    if not isinstance(device, str | DeviceSpec):
        raise ValueError(
            "WattGPU needs a DeviceSpec or a device name, not a bare Device: it uses clocks, "
            "transistor count and release year."
        )
    if float(work.tensor_parallel) != 1 or float(work.expert_parallel) != 1:
        raise ValueError("WattGPU covers a single GPU.")
    if float(arch.n_experts) > 0:
        raise ValueError("WattGPU covers dense models; this one has experts.")
    sheet = gpu_features(device)
    row = architecture_features(arch) | sheet
    row |= {"scenario": coefficients.scenario, "model_type": coefficients.model_type}
    frame = add_features(pd.DataFrame([row]))
    watts = float(predict_rows(coefficients.power, frame, "power")[0])
    itl_s = float(predict_rows(coefficients.itl, frame, "itl")[0])
    if coefficients.scenario == "offline":
        return prediction(work, decode_energy_per_token_j=np.float32(watts * itl_s))
    return prediction(work, decode_time_per_token_s=np.float32(itl_s))
