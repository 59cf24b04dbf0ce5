"""The tables of a profile: the contract between what measures and what fits.

A profile is a folder::

    manifest.json             the machine, the software, the sessions, what failed
    device.json               the device as `devices.get_device` reads it
    journal.jsonl             every measurement as it was made; the tables are made from it
    models/<model>.json       the configuration of each whole model, as transformers writes it
    operators/gemm.parquet    ...rmsnorm, softmax, layernorm, elementwise
    blocks/attention_prefill.parquet  ...attention_decode, ffn, moe, mla, linear_attention
    systems/transformers.parquet      whole models

A table that has no rows is not written. One row is one case, SI units. Every table has `COMMON`
columns and its own (`TABLES`):

- `device`: name of the folder's device.json. `runtime`: "transformers-<version>" in every table,
  the library whose operators, blocks and models ran, eagerly; the manifest has PyTorch's version.
  `dtype`: "float32" on CPUs, "bfloat16" on GPUs; `kv_dtype` is the same.
- `time_s`: median seconds of one call over `repeats` samples, each the mean of `inner` calls;
  `time_spread`: interquartile range / median. Inputs and weights are rotated past the last cache.
- `launch_s`: seconds that the framework needs to issue the call, null where unknown. It is inside
  `time_s` where `launch_included` (CPUs, and whole models everywhere), and outside it where the
  call was replayed from a CUDA graph.
- `energy_j` (of one call), `power_w`: null where nothing metered the row; `energy_source` says how:
  "none: no meter", "zeus: ...", "nvml: ...", "rapl: ...".
- `disturbed`: something else ran, the samples spread, the anchor had drifted, or the clock jumped;
  `disturbed_by` names what, "" if nothing.
- `anchor_ratio`: seconds of the anchor product around the row over its median: how much slower the
  machine was then. `time_s` is as measured; null without anchors.
- `split`: "train" or "test"; whole groups are held out: (n, k) of a GEMM, the width of a row
  operator, the head layout of attention, (d_model, width, experts) of a feed-forward block, a
  model.
- `plan`; `order`: place in the measured sequence; `measured_at`: UTC, ISO 8601.

What the columns of a table mean beyond their names:

- gemm: `torch.nn.functional.linear` without bias, [m, k] x [n, k]^T.
- rmsnorm: `kernel` "eager" (the several kernels of transformers' LlamaRMSNorm) or "fused"
  (`torch.nn.functional.rms_norm`). softmax: over the last axis. layernorm: with weight and bias.
- elementwise: `kernel` "copy", "add", "gelu", "silu_mul" (activation of a gated layer, times the up
  branch), "rope" (cosine and sine applied to queries and keys) over num_tokens x width elements;
  `tensors_read` and `tensors_written` say how many such arrays the call must at least move.
- attention_*: the core only (scores, softmax, values), causal; `kernel` "sdpa" or "eager", called
  as transformers calls them, keys and values repeated for grouped queries where it does that.
  `window_size` is 0 (full). In decode `context_len` counts the keys attended to, the new one
  included.
- ffn: `n_ff_matrices` 3 gated, 2 plain. moe: router, dispatch and experts of one layer, random
  router (`distribution` "random"), tensor and expert parallel 1; `kernel` is transformers' name of
  the experts' implementation.
- mla: whole latent-attention module, projections and KV cache included (`phase` "prefill":
  context_len = seq_len; "decode": seq_len 1). linear_attention: whole gated-delta-net layer,
  `kernel` "layer", `phase` "context" or "generation" as in the public table.
- systems/transformers: one forward pass; `phase` "prefill": `batch` prompts of `prompt_len` tokens,
  with an empty KV cache to fill, logits of the last position; "decode": one step of `batch`
  sequences that attend to `context_len` tokens, the new one included; the length of the other phase
  is null. `attention` "sdpa" or "eager"; `config` the path of the configuration inside the folder.
"""

from __future__ import annotations

COMMON: dict[str, str] = {
    "device": "string",
    "runtime": "string",
    "dtype": "string",
    "time_s": "double",
    "time_spread": "double",
    "repeats": "int32",
    "inner": "int32",
    "launch_s": "double",
    "launch_included": "bool",
    "energy_j": "double",
    "power_w": "double",
    "energy_source": "string",
    "disturbed": "bool",
    "disturbed_by": "string",
    "anchor_ratio": "double",
    "split": "string",
    "plan": "string",
    "order": "int32",
    "measured_at": "string",
}
"""Column: Arrow type, in every table."""

_HEADS = dict.fromkeys(("n_heads", "n_kv_heads", "head_dim", "window_size"), "int32")

TABLES: dict[str, dict[str, str]] = {
    "operators/gemm": dict.fromkeys(("m", "n", "k"), "int32"),
    "operators/rmsnorm": {"kernel": "string", "num_tokens": "int32", "d_model": "int32"},
    "operators/softmax": {"rows": "int32", "cols": "int32"},
    "operators/layernorm": {"rows": "int32", "cols": "int32"},
    "operators/elementwise": {
        "kernel": "string",
        "num_tokens": "int32",
        "width": "int32",
        "tensors_read": "int32",
        "tensors_written": "int32",
    },
    "blocks/attention_prefill": {
        "kernel": "string", "kv_dtype": "string", "batch": "int32", "seq_len": "int32", **_HEADS,
    },
    "blocks/attention_decode": {
        "kernel": "string", "kv_dtype": "string", "batch": "int32", "context_len": "int32",
        **_HEADS,
    },
    "blocks/ffn": {
        "activation": "string",
        **dict.fromkeys(("num_tokens", "d_model", "d_ff", "n_ff_matrices"), "int32"),
    },
    "blocks/moe": {
        "kernel": "string", "distribution": "string",
        **dict.fromkeys(
            ("num_tokens", "d_model", "d_expert", "top_k", "n_experts", "moe_tp_size",
             "moe_ep_size"), "int32",
        ),
    },
    "blocks/mla": {
        "phase": "string", "model": "string", "kv_dtype": "string",
        **dict.fromkeys(
            ("batch", "seq_len", "context_len", "n_heads", "d_model", "q_lora_rank",
             "kv_lora_rank", "head_dim", "rope_head_dim", "value_head_dim"), "int32",
        ),
    },
    "blocks/linear_attention": {
        "kernel": "string", "phase": "string",
        **dict.fromkeys(
            ("batch", "seq_len", "num_tokens", "d_model", "d_conv", "num_k_heads", "head_k_dim",
             "num_v_heads", "head_v_dim"), "int32",
        ),
    },
    "systems/transformers": {
        "model": "string", "family": "string", "config": "string", "attention": "string",
        "phase": "string",
        **dict.fromkeys(
            ("batch", "prompt_len", "context_len", "n_parameters", "n_layers", "d_model", "n_heads",
             "n_kv_heads", "head_dim", "d_ff", "vocab_size", "n_experts", "top_k"), "int64",
        ),
    },
}  # fmt: skip
"""Table: its own columns and their Arrow types. Together they are the key of a case."""

LEVELS = {"operators": 1, "blocks": 2, "systems": 3}


def level_of(table: str) -> int:
    """1 for operators, 2 for blocks, 3 for whole models."""
    return LEVELS[table.partition("/")[0]]
