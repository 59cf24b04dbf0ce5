"""Level 1: matrix products, norms, softmax and elementwise operators as transformers calls them."""

from __future__ import annotations

from typing import Any

from hymell_jax.profiler.bench import Bench
from hymell_jax.profiler.cases import Case
from hymell_jax.profiler.clocks import Call

ROPE_HEAD = 64  # width of a head in the rope cases


def prepare(bench: Bench, case: Case) -> Call:
    """The work of an operator case, on inputs already in place.

    Raises:
        RuntimeError, MemoryError: the inputs do not fit.
    """
    table = case.table.partition("/")[2]
    if table == "elementwise":
        return _elementwise(bench, case.sizes)
    return {"gemm": _gemm, "rmsnorm": _rmsnorm, "softmax": _softmax, "layernorm": _layernorm}[
        table
    ](bench, case.sizes)


def in_turn(function: Any, sets: list[tuple[Any, ...]]) -> Call:
    """Calls `function` on one set of inputs after another; `count` says how many there are."""
    count = len(sets)

    def call(index: int) -> Any:
        return function(*sets[index % count])

    counted: Any = call
    counted.count = count
    return counted


def _gemm(bench: Bench, s: Any) -> Call:
    sets = bench.rotate((s["m"], s["k"]), weights=[(s["n"], s["k"])])
    return in_turn(bench.torch.nn.functional.linear, sets)


def _rmsnorm(bench: Bench, s: Any) -> Call:
    rows, width = s["num_tokens"], s["d_model"]
    sets = bench.rotate((rows, width))
    if s["kernel"] == "fused":
        weight, norm = bench.weights.view((width,)), bench.torch.nn.functional.rms_norm
        return in_turn(lambda x: norm(x, (width,), weight, 1e-6), sets)
    from transformers.models.llama.modeling_llama import LlamaRMSNorm

    with bench.torch.device("meta"):
        module = LlamaRMSNorm(width)
    bench.fill(module)
    return in_turn(module, sets)


def _softmax(bench: Bench, s: Any) -> Call:
    softmax = bench.torch.nn.functional.softmax
    return in_turn(lambda x: softmax(x, dim=-1), bench.rotate((s["rows"], s["cols"])))


def _layernorm(bench: Bench, s: Any) -> Call:
    width = s["cols"]
    weight, bias = bench.weights.view((width,)), bench.weights.view((width,))
    norm = bench.torch.nn.functional.layer_norm
    return in_turn(lambda x: norm(x, (width,), weight, bias), bench.rotate((s["rows"], width)))


def _elementwise(bench: Bench, s: Any) -> Call:
    shape, kernel = (s["num_tokens"], s["width"]), s["kernel"]
    functional = bench.torch.nn.functional
    if kernel == "rope":
        return _rope(bench, *shape)
    if kernel == "gelu":
        return in_turn(functional.gelu, bench.rotate(shape))
    if kernel == "copy":
        return in_turn(lambda x, y: y.copy_(x), bench.rotate(shape, shape))
    if kernel == "add":
        return in_turn(bench.torch.add, bench.rotate(shape, shape))
    if kernel == "silu_mul":
        silu = functional.silu
        return in_turn(lambda gate, up: silu(gate) * up, bench.rotate(shape, shape))
    raise ValueError(f"no elementwise operator {kernel!r}")


def _rope(bench: Bench, rows: int, width: int) -> Call:
    """Heads of 64, a fifth of them keys."""
    from transformers.models.llama.modeling_llama import apply_rotary_pos_emb

    heads = width // ROPE_HEAD
    keys = max(1, heads // 5)
    angles = (bench.activations.view((1, rows, ROPE_HEAD)) for _ in range(2))
    cos, sin = angles
    shapes = [(1, count, rows, ROPE_HEAD) for count in (heads - keys, keys)]
    return in_turn(lambda q, k: apply_rotary_pos_emb(q, k, cos, sin), bench.rotate(*shapes))
