"""Which shapes to measure: strata over the regimes, their edges, shapes of published models.

A regime is where another term of the cost dominates (launch, memory, cache, compute), so sizes are
spread evenly over their logarithms, one draw a stratum, and half of the draws of token counts sit
at the edges where kernels change tiles: powers of two and one above. Every draw comes from a
generator that the plan's seed fixes, so that two runs of a plan measure the same cases.
"""

from __future__ import annotations

import dataclasses
import random
from collections.abc import Iterable, Sequence
from typing import Any

from hymell_jax.profiler import catalogue
from hymell_jax.profiler.cases import Case, split_of

EDGES = (1, 2, 3, 4, 8, 9, 16, 17, 32, 33, 64, 65, 128, 129, 256, 257, 512, 513, 1024, 2048, 4096)


@dataclasses.dataclass(frozen=True)
class Scale:
    """How much a plan measures. Limits are of one call."""

    models: Sequence[str]  # whole models, whose shapes the lower levels share
    shapes: int  # random shapes beside those of the models, a table
    draws: int  # token counts a shape
    most_tokens: int
    most_flops: float  # levels 1 and 2
    most_bytes: float  # memory moved, levels 1 and 2; KV cache, level 3
    pass_flops: float  # level 3
    passes: int  # of each phase, a model
    value_bytes: int  # 4 float32, 2 bfloat16
    metered: bool = False


def tokens(draw: random.Random, count: int, most: int) -> list[int]:
    """`count` token counts from 1 to `most`, one a stratum of the logarithm, 1 always."""
    found, low = {1}, 2.0
    ratio = (most / low) ** (1 / max(count - 1, 1))
    for _ in range(count - 1):
        edges = [e for e in EDGES if low <= e <= low * ratio]
        value = draw.choice(edges) if edges and draw.random() < 0.5 else round(
            low * ratio ** draw.random()
        )  # fmt: skip
        found.add(max(1, min(most, value)))
        low *= ratio
    return sorted(found)


def widths(draw: random.Random, count: int, least: int, most: int) -> list[int]:
    """`count` widths, one a stratum of the logarithm: multiples of 64, of 8, and odd ones."""
    ratio = (most / least) ** (1 / max(count, 1))
    found = []
    for index in range(count):
        raw = least * ratio ** (index + draw.random())
        step = (64, 8, 1)[index % 3] if raw >= 256 else 8
        found.append(max(8, min(most, round(raw / step) * step)))
    return found


class _Table:
    """Collects the cases of one table that keep within the limits of a scale."""

    def __init__(self, scale: Scale, table: str):
        self.scale, self.table = scale, table
        self.cases: dict[str, Any] = {}

    def add(self, sizes: dict, group: tuple, flops: float, values: float) -> None:
        """`group`: what is held out together. `values`: numbers that the call reads and writes."""
        moved = values * self.scale.value_bytes
        if flops > self.scale.most_flops or moved > self.scale.most_bytes:
            return
        case = Case(
            table=self.table, sizes=sizes, split=split_of(*group),
            flops=flops, bytes_moved=moved, bytes_held=2 * moved + 2e8, metered=self.scale.metered,
        )  # fmt: skip
        self.cases[case.key] = case

    def all(self) -> list[Case]:
        return list(self.cases.values())


def _model_widths(scale: Scale) -> list[int]:
    return sorted({catalogue.columns(name)["d_model"] for name in scale.models})


def gemm(scale: Scale, draw: random.Random) -> list[Case]:
    """(n, k) of the models and as many as `shapes` between 64 and 8192."""
    own = sorted(set().union(*(catalogue.products(name) for name in scale.models)))
    left, right = (widths(draw, scale.shapes, 64, 8192) for _ in range(2))
    draw.shuffle(right)
    table = _Table(scale, "operators/gemm")
    for n, k in own + list(zip(left, right, strict=True)):
        for m in tokens(draw, scale.draws, scale.most_tokens):
            values = m * k + n * k + m * n
            table.add({"m": m, "n": n, "k": k}, ("gemm", n, k), 2.0 * m * n * k, values)
    return table.all()


def rowwise(scale: Scale, draw: random.Random) -> list[Case]:
    """RMSNorm eager and fused, LayerNorm, softmax, and the elementwise operators."""
    tables = {
        name: _Table(scale, f"operators/{name}")
        for name in ("rmsnorm", "layernorm", "softmax", "elementwise")
    }
    count = scale.shapes // 4
    rows = 4 * scale.most_tokens
    for width in _model_widths(scale) + widths(draw, count, 64, 8192):
        for m in tokens(draw, scale.draws, rows):
            for kernel in ("eager", "fused"):
                sizes = {"kernel": kernel, "num_tokens": m, "d_model": width}
                tables["rmsnorm"].add(sizes, ("row", width), 4.0 * m * width, 2 * m * width)
        for m in tokens(draw, scale.draws, rows):
            sizes = {"rows": m, "cols": width}
            tables["layernorm"].add(sizes, ("row", width), 6.0 * m * width, 2 * m * width)
    for cols in [32, 64, 128, 256, 512, 1024, 2048] + widths(draw, scale.shapes // 3, 24, 8192):
        for m in tokens(draw, scale.draws, 16 * scale.most_tokens):
            tables["softmax"].add(
                {"rows": m, "cols": cols}, ("row", cols), 5.0 * m * cols, 2 * m * cols
            )
    for kernel, (read, written, work) in ELEMENTWISE.items():
        for width in widths(draw, 4 + count // 2, 64, 8192):
            width = max(64, width // 64 * 64) if kernel == "rope" else width
            for m in tokens(draw, scale.draws - 1, rows):
                sizes = {
                    "kernel": kernel, "num_tokens": m, "width": width, "tensors_read": read,
                    "tensors_written": written,
                }  # fmt: skip
                values = (read + written) * m * width
                tables["elementwise"].add(sizes, (kernel, width), work * m * width, values)
    return [case for table in tables.values() for case in table.all()]


ELEMENTWISE = {  # kernel: (arrays read, arrays written, operations an element)
    "copy": (1, 1, 0.0),
    "add": (2, 1, 1.0),
    "gelu": (1, 1, 10.0),
    "silu_mul": (2, 1, 6.0),
    "rope": (1, 1, 4.0),
}


def _layouts(scale: Scale) -> list[tuple[int, int, int]]:
    columns = [catalogue.columns(name) for name in scale.models]
    own = {(c["n_heads"], c["n_kv_heads"], c["head_dim"]) for c in columns}
    return sorted(own | {(8, 8, 32), (4, 4, 128), (16, 2, 128), (32, 8, 64), (12, 1, 64)})


def attention(scale: Scale, draw: random.Random) -> list[Case]:
    """The core in both phases, by both implementations; batch and length drawn apart."""
    prefill = _Table(scale, "blocks/attention_prefill")
    decode = _Table(scale, "blocks/attention_decode")
    kv_dtype = "float32" if scale.value_bytes == 4 else "bfloat16"
    for heads, kv_heads, head_dim in _layouts(scale):
        layout: dict[str, Any] = dict(
            n_heads=heads, n_kv_heads=kv_heads, head_dim=head_dim, window_size=0
        )
        group, queries, keys = (
            ("heads", heads, kv_heads, head_dim),
            heads * head_dim,
            kv_heads * head_dim,
        )
        for kernel in ("sdpa", "eager"):
            head: dict[str, Any] = {"kernel": kernel, "kv_dtype": kv_dtype}
            for length in tokens(draw, scale.draws, 2 * scale.most_tokens)[1:]:
                batch = draw.choice((1, 1, 2, 4, 8, 16))
                scores = heads * batch * length * length
                sizes = head | {"batch": batch, "seq_len": length} | layout
                values = 2 * batch * length * (queries + keys) + 4 * scores
                prefill.add(sizes, group, 4.0 * scores * head_dim, values)
            for length in tokens(draw, scale.draws, 2 * scale.most_tokens)[1:]:
                batch = draw.choice((1, 1, 2, 4, 8, 16, 32))
                sizes = head | {"batch": batch, "context_len": length} | layout
                values = batch * (2 * length * keys + 2 * queries)
                decode.add(sizes, group, 4.0 * batch * length * queries, values)
    return prefill.all() + decode.all()


def feed_forward(scale: Scale, draw: random.Random) -> list[Case]:
    """Gated and plain layers of the models and between them."""
    table = _Table(scale, "blocks/ffn")
    own = {
        (catalogue.columns(n)["d_model"], catalogue.columns(n)["d_ff"], 2 if plain else 3)
        for n in scale.models
        for plain in [catalogue.MODELS[n]["model_type"] in ("gpt2", "gpt_neox", "opt")]
    }
    for index, width in enumerate(widths(draw, scale.shapes // 4, 128, 4096)):
        width += width % 2  # the library builds no layer of an odd width
        d_ff = round(width * draw.choice((1.5, 2.0, 8 / 3, 3.5, 4.0)) / 8) * 8
        own.add((width, d_ff, 2 + index % 2))
    for width, d_ff, matrices in sorted(own):
        for m in tokens(draw, scale.draws, scale.most_tokens):
            sizes = {
                "activation": "silu" if matrices == 3 else "gelu", "num_tokens": m,
                "d_model": width, "d_ff": d_ff, "n_ff_matrices": matrices,
            }  # fmt: skip
            values = matrices * width * d_ff + m * (2 * width + matrices * d_ff)
            table.add(
                sizes, ("ffn", width, d_ff, matrices), 2.0 * m * matrices * width * d_ff, values
            )
    return table.all()


_EXPERTS = (  # d_model, d_expert, experts, top_k
    (512, 1024, 8, 2), (512, 384, 16, 4), (256, 512, 8, 2), (768, 512, 16, 2), (1024, 512, 32, 4),
    (1024, 1792, 8, 1), (2048, 768, 64, 8), (2048, 1024, 64, 8), (4096, 14336, 8, 2),
)  # fmt: skip


def experts(scale: Scale, draw: random.Random) -> list[Case]:
    """One mixture layer, router included; the last shapes only where memory allows."""
    table = _Table(scale, "blocks/moe")
    for width, d_expert, count, top_k in _EXPERTS:
        for m in tokens(draw, scale.draws, scale.most_tokens):
            sizes = {
                "kernel": "qwen3_moe", "distribution": "random", "num_tokens": m, "d_model": width,
                "d_expert": d_expert, "top_k": top_k, "n_experts": count, "moe_tp_size": 1,
                "moe_ep_size": 1,
            }  # fmt: skip
            visited = count * (1 - (1 - top_k / count) ** m)
            weights = 3 * width * d_expert
            values = visited * weights + m * top_k * (width + 3 * d_expert)
            if count * weights * scale.value_bytes > scale.most_bytes:
                continue
            group = ("experts", width, d_expert, count, top_k)
            table.add(sizes, group, 2.0 * m * top_k * weights, values)
    return table.all()


_LATENT = (  # heads, d_model, q rank, kv rank, unrotated head, rotated head, value head
    (8, 512, 256, 128, 64, 32, 64),
    (12, 768, 384, 256, 64, 32, 64),
    (16, 1024, 512, 256, 128, 64, 128),
    (16, 2048, 768, 512, 128, 64, 128),
    (128, 7168, 1536, 512, 128, 64, 128),
)


def latent(scale: Scale, draw: random.Random) -> list[Case]:
    """Whole latent-attention modules in both phases."""
    table = _Table(scale, "blocks/mla")
    kv_dtype = "float32" if scale.value_bytes == 4 else "bfloat16"
    for heads, width, q_rank, kv_rank, plain, rope, value in _LATENT:
        weights = (
            q_rank * (width + heads * (plain + rope)) + width * (kv_rank + rope)
            + heads * kv_rank * (plain + value) + heads * value * width
        )  # fmt: skip
        for phase in ("prefill", "decode"):
            for length in tokens(draw, scale.draws - 1, scale.most_tokens)[1:]:
                batch = draw.choice((1, 1, 2, 4, 8))
                rows = batch * (length if phase == "prefill" else 1)
                sizes = {
                    "phase": phase, "model": "deepseek_v3", "kv_dtype": kv_dtype, "batch": batch,
                    "seq_len": length if phase == "prefill" else 1, "context_len": length,
                    "n_heads": heads, "d_model": width, "q_lora_rank": q_rank,
                    "kv_lora_rank": kv_rank, "head_dim": plain + rope, "rope_head_dim": rope,
                    "value_head_dim": value,
                }  # fmt: skip
                scores = heads * rows * length
                up = batch * length * heads * kv_rank * (plain + value)
                flops = 2.0 * (rows * weights + up + scores * (plain + rope + value))
                values = weights + batch * length * heads * (plain + rope + value) * 2 + 2 * scores
                table.add(sizes, ("latent", heads, width), flops, values)
    return table.all()


_DELTA = (  # d_model, key heads, value heads, head dims
    (512, 4, 8, 64), (1024, 8, 16, 64), (1024, 8, 8, 128), (2048, 16, 32, 128),
)  # fmt: skip


def linear_attention(scale: Scale, draw: random.Random) -> list[Case]:
    """Whole gated-delta-net layers in both phases."""
    table = _Table(scale, "blocks/linear_attention")
    for width, k_heads, v_heads, dim in _DELTA:
        weights = width * dim * (2 * k_heads + 3 * v_heads)
        for phase in ("context", "generation"):
            for length in tokens(draw, scale.draws - 1, scale.most_tokens)[1:]:
                batch = draw.choice((1, 1, 2, 4, 8))
                length = length if phase == "context" else 1
                rows = batch * length
                sizes = {
                    "kernel": "layer", "phase": phase, "batch": batch, "seq_len": length,
                    "num_tokens": rows, "d_model": width, "d_conv": 4, "num_k_heads": k_heads,
                    "head_k_dim": dim, "num_v_heads": v_heads, "head_v_dim": dim,
                }  # fmt: skip
                state = v_heads * dim * dim
                flops = 2.0 * rows * (weights + 4 * state)
                values = weights + 2 * batch * state + 20 * rows * v_heads * dim
                table.add(sizes, ("delta", width, k_heads, v_heads, dim), flops, values)
    return table.all()


_PREFILL = ((1, 4), (1, 8), (1, 16), (1, 32), (1, 48), (1, 64), (1, 128), (1, 256), (1, 512),
            (1, 1024), (1, 2048), (1, 4096), (2, 8), (2, 24), (2, 48), (2, 256), (3, 12), (4, 32),
            (4, 128), (4, 512), (8, 16), (8, 96), (8, 256), (16, 64), (16, 512),
            (32, 128))  # fmt: skip
_DECODE = ((1, 32), (1, 256), (1, 1024), (1, 2000), (2, 128), (2, 768), (4, 64), (4, 512),
           (8, 128), (8, 1000), (16, 64), (16, 384), (32, 48), (32, 256), (64, 512), (1, 4096),
           (128, 256))  # fmt: skip


def whole_models(scale: Scale, draw: random.Random, attention: str = "sdpa") -> list[Case]:
    """Prefill and decode of each model: smallest and largest pass that fit, the rest drawn."""
    return [
        case
        for name in scale.models
        for phase, pairs in (("prefill", _PREFILL), ("decode", _DECODE))
        for case in _passes(scale, draw, name, phase, pairs, attention)
    ]


def _passes(
    scale: Scale, draw: random.Random, name: str, phase: str,
    pairs: Iterable[tuple[int, int]], attention: str,
) -> list[Case]:  # fmt: skip
    c, found = catalogue.columns(name), []
    for batch, length in pairs:
        rows = batch * (length if phase == "prefill" else 1)
        attended = length / 2 if phase == "prefill" else length
        core = 4.0 * rows * attended * c["n_heads"] * c["head_dim"] * c["n_layers"]
        head = c["vocab_size"] * c["d_model"]
        body = catalogue.active_parameters(name) - head
        flops = 2.0 * (rows * body + batch * head) + core
        cache = 2.0 * batch * length * c["n_kv_heads"] * c["head_dim"] * c["n_layers"]
        held = (1.1 * c["n_parameters"] + 3 * cache) * scale.value_bytes + 1e9
        too_large = flops > scale.pass_flops or cache * scale.value_bytes > scale.most_bytes
        if too_large or length >= catalogue.longest(name):
            continue
        sizes = dict(
            model=name, family=catalogue.MODELS[name]["model_type"], config=f"models/{name}.json",
            attention=attention, phase=phase, batch=batch,
            prompt_len=length if phase == "prefill" else None,
            context_len=length if phase == "decode" else None, **c,
        )  # fmt: skip
        split = "test" if name in catalogue.HELD_OUT else "train"
        moved = (c["n_parameters"] + cache) * scale.value_bytes
        found.append(Case("systems/transformers", sizes, split, flops, moved, held, scale.metered))
    found.sort(key=lambda case: case.flops)
    kept = {0, len(found) - 1} if found else set()
    others = [i for i in range(len(found)) if i not in kept]
    draw.shuffle(others)
    kept |= set(others[: max(0, scale.passes - len(kept))])
    return [found[i] for i in sorted(kept)]
