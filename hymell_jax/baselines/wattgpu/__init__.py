"""WattGPU: mean power and inter-token latency of a serving GPU by gradient-boosted trees.

    power = W / TDP,  XGBoost(max_depth 6, reg_lambda 150, n_estimators 200)
    ln ITL,           XGBoost(max_depth 5, reg_lambda 100, n_estimators 100)

on features of the model, the GPU's data sheet and the scenario: offline, or a server at low (under
0.2 requests a second) or high load. Inter-token latency is seconds over generated tokens offline,
the mean over requests of (end to end - first token) / (tokens - 1) of servers.

Trees have no gradient, so this is the one method here that is not differentiable; it is also the
only one without numbers before a fit: neither trees nor the training runs come with it. `read_runs`
and `build_table` import the runs, `cross_validate` follows the published protocol, `fit_models`
makes what `predict` needs. Its parameter-free baselines are in `baseline`.

XGBoost and scikit-learn are the optional extra `baselines`.

Source: WattGPU, arXiv 2607.02391, and its public notebook (maufadel/wattgpu, Apache-2.0): features,
settings, protocol and metrics, written anew. Settings not listed are the libraries' defaults.
"""

from hymell_jax.baselines.interface import Method
from hymell_jax.baselines.wattgpu.protocol import (
    BASELINES,
    PROTOCOLS,
    PUBLISHED,
    baseline,
    cross_validate,
    evaluate,
    folds,
    grouped_tau,
    mdape,
    metrics,
    pearson,
)
from hymell_jax.baselines.wattgpu.runs import (
    GPU_FIELDS,
    GPUS,
    MODEL_COLUMNS,
    RUN_COLUMNS,
    add_features,
    build_table,
    gpu_features,
    read_models,
    read_runs,
    request_itl_s,
)
from hymell_jax.baselines.wattgpu.trees import (
    ITL_FEATURES,
    POWER_FEATURES,
    TARGETS,
    WattModels,
    architecture_features,
    default_coefficients,
    fit_models,
    make_pipeline,
    predict,
)

METHOD = Method(
    name="wattgpu",
    title="WattGPU",
    source="arXiv 2607.02391 (CEUR Vol-4275, paper 7), notebook maufadel/wattgpu",
    inputs=("model metadata", "GPU data sheet with clocks, transistors and year", "scenario"),
    assumes=("vLLM, one GPU, 16-bit dense models of 0.1B to 27B", "the benchmark's lengths"),
    leaves_out=("prompt and output lengths", "batch", "mixtures", "prefill", "gradients"),
    published_accuracy=(
        "median error on unseen GPUs: power 3.4 % offline, 13.5 % of servers; inter-token latency "
        "24.9 % offline, 8.5 % of servers"
    ),
    gives=("decode_time_per_token_s", "decode_energy_per_token_j"),
    forms={"default": (predict, default_coefficients)},
    differentiable=False,
    needs_fit=True,
    default_note="none: the trees must be fitted to measured runs",
)

__all__ = [
    "BASELINES", "GPUS", "GPU_FIELDS", "ITL_FEATURES", "METHOD", "MODEL_COLUMNS", "POWER_FEATURES",
    "PROTOCOLS", "PUBLISHED", "RUN_COLUMNS", "TARGETS", "WattModels", "add_features",
    "architecture_features", "baseline", "build_table", "cross_validate", "default_coefficients",
    "evaluate", "fit_models", "folds", "gpu_features", "grouped_tau", "make_pipeline", "mdape",
    "metrics", "pearson", "predict", "read_models", "read_runs", "request_itl_s",
]  # fmt: skip
