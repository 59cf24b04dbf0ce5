"""Level 2: attention cores, feed-forward layers, experts, latent and linear attention.

The functions and modules are those of the transformers library.
"""

from __future__ import annotations

import inspect
import types
from typing import Any

from hymell_jax.profiler.bench import Bench
from hymell_jax.profiler.cases import Case
from hymell_jax.profiler.clocks import Call
from hymell_jax.profiler.operators import in_turn


def prepare(bench: Bench, case: Case) -> Call:
    """The work of a block case, on inputs already in place.

    Raises:
        ImportError, AttributeError: this version of transformers lacks the block.
        RuntimeError, MemoryError: the inputs do not fit.
    """
    table = case.table.partition("/")[2]
    return {
        "attention_prefill": _attention, "attention_decode": _attention, "ffn": _ffn,
        "moe": _moe, "mla": _mla, "linear_attention": _linear_attention,
    }[table](bench, case.sizes)  # fmt: skip


def _attention(bench: Bench, s: Any) -> Call:
    """Queries come transposed from their projection, keys and values contiguous from the cache."""
    batch, heads, kv_heads, dim = s["batch"], s["n_heads"], s["n_kv_heads"], s["head_dim"]
    keys = s.get("seq_len") or s["context_len"]
    queries = s.get("seq_len") or 1
    kv = (batch, kv_heads, keys, dim)
    sets = [
        (q.transpose(1, 2), k, v) for q, k, v in bench.rotate((batch, queries, heads, dim), kv, kv)
    ]
    module = types.SimpleNamespace(
        num_key_value_groups=heads // kv_heads, is_causal=True, training=False
    )
    scaling = dim**-0.5
    if s["kernel"] == "sdpa":
        from transformers.integrations.sdpa_attention import sdpa_attention_forward as run

        mask = None
    else:
        from transformers.models.llama.modeling_llama import eager_attention_forward as run

        mask = _causal_mask(bench, batch, queries, keys)
    return in_turn(lambda q, k, v: run(module, q, k, v, mask, scaling=scaling), sets)


def _causal_mask(bench: Bench, batch: int, queries: int, keys: int) -> Any:
    full = bench.torch.full(
        (queries, keys), float("-inf"), dtype=bench.dtype, device=bench.device
    ).triu(1 + keys - queries)
    return full.expand(batch, 1, queries, keys).contiguous()


def _ffn(bench: Bench, s: Any) -> Call:
    width, d_ff = s["d_model"], s["d_ff"]
    if s["n_ff_matrices"] == 3:
        from transformers import LlamaConfig
        from transformers.models.llama.modeling_llama import LlamaMLP as Layer

        config = LlamaConfig(hidden_size=width, intermediate_size=d_ff, num_attention_heads=1)
    else:
        from transformers import GPTNeoXConfig
        from transformers.models.gpt_neox.modeling_gpt_neox import GPTNeoXMLP as Layer

        config = GPTNeoXConfig(hidden_size=width, intermediate_size=d_ff, num_attention_heads=1)
    shape = (1, s["num_tokens"], width)
    return _modules(bench, lambda: Layer(config), shape)


def _modules(bench: Bench, build: Any, shape: tuple[int, ...], **more: Any) -> Call:
    """Copies of a module in turn, each on inputs of its own."""
    rows = shape[0] * shape[1] * shape[2]
    modules = bench.copies(build, rows)
    inputs = [bench.activations.view(shape) for _ in modules]
    return in_turn(lambda module, x: module(x, **more), list(zip(modules, inputs, strict=True)))


def _moe(bench: Bench, s: Any) -> Call:
    from transformers import Qwen3MoeConfig
    from transformers.models.qwen3_moe.modeling_qwen3_moe import Qwen3MoeSparseMoeBlock

    config = Qwen3MoeConfig(
        hidden_size=s["d_model"], moe_intermediate_size=s["d_expert"], num_experts=s["n_experts"],
        num_experts_per_tok=s["top_k"], norm_topk_prob=True,
    )  # fmt: skip
    config._experts_implementation = experts_implementation(bench)
    shape = (1, s["num_tokens"], s["d_model"])
    return _modules(bench, lambda: Qwen3MoeSparseMoeBlock(config), shape)


def experts_implementation(bench: Bench) -> str | None:
    """What the library picks for a whole model; None where a version has no choice."""
    from transformers import AutoModelForCausalLM, Qwen3MoeConfig

    tiny = Qwen3MoeConfig(
        hidden_size=8, moe_intermediate_size=8, intermediate_size=8, num_experts=2,
        num_experts_per_tok=1, num_hidden_layers=1, num_attention_heads=1, num_key_value_heads=1,
        head_dim=8, vocab_size=8,
    )  # fmt: skip
    with bench.torch.device("meta"):
        model = AutoModelForCausalLM.from_config(tiny)
    return getattr(model.config, "_experts_implementation", None)


def cache_argument(forward: Any) -> str:
    """The name of a forward pass's KV cache, which changed between versions."""
    names = inspect.signature(forward).parameters
    found = (name for name in ("cache", "past_key_values", "cache_params") if name in names)
    return next(found, "past_key_values")


class Rewind:
    """A KV cache that can be put back, so that every step attends to the same length."""

    def __init__(self, cache: Any):
        self.cache = cache
        self._saved = [(layer, dict(vars(layer))) for layer in cache.layers]

    def __call__(self) -> Any:
        """The cache as it was."""
        for layer, state in self._saved:
            vars(layer).update(state)
        return self.cache


def _mla(bench: Bench, s: Any) -> Call:
    from transformers import DeepseekV3Config, DynamicCache
    from transformers.models.deepseek_v3.modeling_deepseek_v3 import DeepseekV3Attention

    rope, plain = s["rope_head_dim"], s["head_dim"] - s["rope_head_dim"]
    config = DeepseekV3Config(
        hidden_size=s["d_model"], num_attention_heads=s["n_heads"],
        num_key_value_heads=s["n_heads"], q_lora_rank=s["q_lora_rank"],
        kv_lora_rank=s["kv_lora_rank"], qk_rope_head_dim=rope, qk_nope_head_dim=plain,
        v_head_dim=s["value_head_dim"], num_hidden_layers=1, attn_implementation="sdpa",
    )  # fmt: skip
    batch, rows, past = s["batch"], s["seq_len"], s["context_len"] - s["seq_len"]
    shape = (batch, rows, s["d_model"])
    modules = bench.copies(lambda: DeepseekV3Attention(config, 0), batch * rows * s["d_model"])
    angles = tuple(bench.activations.view((1, rows, rope)) for _ in range(2))
    name = cache_argument(DeepseekV3Attention.forward)

    def fresh() -> Any:
        return DynamicCache(config=config)

    def job(module: Any) -> tuple[Any, ...]:
        if not past:
            return module, bench.activations.view(shape), fresh
        cache = fresh()
        before = bench.activations.view((batch, past, s["d_model"]))
        old = tuple(bench.activations.view((1, past, rope)) for _ in range(2))
        module(before, position_embeddings=old, attention_mask=None, **{name: cache})
        return module, bench.activations.view(shape), Rewind(cache)

    def run(module: Any, x: Any, cache: Any) -> Any:
        return module(x, position_embeddings=angles, attention_mask=None, **{name: cache()})

    with bench.torch.inference_mode():
        return in_turn(run, [job(module) for module in modules])


def _linear_attention(bench: Bench, s: Any) -> Call:
    from transformers import DynamicCache, Qwen3NextConfig
    from transformers.models.qwen3_next.modeling_qwen3_next import Qwen3NextGatedDeltaNet

    config = Qwen3NextConfig(
        hidden_size=s["d_model"], linear_num_key_heads=s["num_k_heads"],
        linear_num_value_heads=s["num_v_heads"], linear_key_head_dim=s["head_k_dim"],
        linear_value_head_dim=s["head_v_dim"], linear_conv_kernel_dim=s["d_conv"],
        num_hidden_layers=1, layer_types=["linear_attention"],
    )  # fmt: skip
    shape = (s["batch"], s["seq_len"], s["d_model"])
    rows = s["num_tokens"] * s["d_model"]
    modules = bench.copies(lambda: Qwen3NextGatedDeltaNet(config, 0), rows)
    name = cache_argument(Qwen3NextGatedDeltaNet.forward)

    def job(module: Any) -> tuple[Any, ...]:
        if s["phase"] == "context":
            return module, bench.activations.view(shape), lambda: DynamicCache(config=config)
        cache = DynamicCache(config=config)
        module(bench.activations.view((s["batch"], 4, s["d_model"])), **{name: cache})
        return module, bench.activations.view(shape), lambda: cache

    with bench.torch.inference_mode():
        jobs = [job(module) for module in modules]
    return in_turn(lambda module, x, cache: module(x, **{name: cache()}), jobs)
