"""How fast is the model? Compile time, steady rates, what its arithmetic would allow on this
machine, and ratios to aiconfigurator-core, in one run.

Every architecture is distinct; each is predicted in full: prefill and decode, all parts, time and
energy. Rates are the median of several timed calls after one that compiles. aiconfigurator-core
looks up measured tables: the same architectures, one static evaluation each by its compiled engine,
and its own sweep of contexts for one architecture.
"""

from __future__ import annotations

import dataclasses
import json
import os
import resource
import tempfile
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax.interpreters import partial_eval

import hymell_jax as hj
from hymell_jax import experiment, operators, quantities
from hymell_jax import model as cost_model

HERE = Path(__file__).parent
TOTALS = ("energy_per_token_j", "decode_energy_per_token_j", "prefill_energy_j", "latency_s",
          "latency_per_token_s", "prefill_time_s")  # fmt: skip
TRANSCENDENTAL = ("exp", "exp2", "log", "log1p", "expm1", "logistic", "tanh", "sin", "cos", "atan2",
                  "pow")  # fmt: skip
FREE = ("broadcast_in_dim", "reshape", "squeeze", "transpose", "concatenate", "slice", "iota",
        "dynamic_slice", "gather", "pad", "convert_element_type", "copy", "split", "stop_gradient",
        "rev", "select_n")  # fmt: skip
LOOP = 256  # products or exponentials in one call of what the machine can do
ROWS, WIDTH = quantities.CHUNK, 63  # of a layer of the networks


def architectures(count: int, seed: int = 0) -> hj.Architecture:
    """Distinct dense architectures [count] around an 8B model."""
    rng = np.random.default_rng(seed)
    base = hj.preset("llama-3.1-8b").architecture
    heads = rng.integers(8, 65, count)
    moving = {
        "n_layers": rng.integers(8, 81, count),
        "d_model": 128 * heads,
        "n_heads": heads,
        "n_kv_heads": np.where(heads % 8 == 0, 8, heads),
        "d_ff": 128 * rng.integers(16, 225, count),
        "vocab_size": 128 * rng.integers(250, 1500, count),
    }
    whole = {n: np.full(count, getattr(base, n), np.float32) for n in base.__dataclass_fields__}
    whole |= {name: value.astype(np.float32) for name, value in moving.items()}
    return hj.Architecture(**whole)


def timed(call: Callable[[], Any], repeats: int) -> tuple[float, float]:
    """(seconds of the first call, median seconds of the later ones)."""

    def once() -> float:
        begin = time.perf_counter()
        jax.block_until_ready(call())
        return time.perf_counter() - begin

    first = once()
    return first, float(np.median([once() for _ in range(repeats)]))


def gradient_program(structure: frozenset[str]) -> Callable:
    """ln energy and its slope in every field, of a chunk of architectures."""

    def one(model, arch, work):
        def log_energy(a, w):
            return jnp.log(cost_model._predict_one(model, a, w, structure).total_energy_j)

        return jax.value_and_grad(log_energy, argnums=(0, 1))(arch, work)

    return jax.jit(jax.vmap(one, in_axes=(None, 0, 0)))


def our_rates(count: int, repeats: int) -> dict[str, Any]:
    """Architectures a second: full predictions, totals only, and gradients."""
    model = hj.load("h100-sxm-80gb")
    archs = architectures(count)
    work = hj.workload(batch_size=8, prompt_tokens=1024, output_tokens=256)
    rates: dict[str, Any] = {}

    def note(name: str, seconds: tuple[float, float], rows: int) -> None:
        first, steady = seconds
        rates[name] = {"compile_s": max(first - steady, 0.0), "per_s": rows / steady}
        print(f"{name}: compile {first - steady:.1f} s, {rows / steady:,.0f} a second", flush=True)

    note("predict_batch, all parts", timed(lambda: hj.predict_batch(model, archs, work), repeats),
         count)  # fmt: skip
    note("totals", timed(lambda: quantities.measure(model, archs, work, TOTALS), repeats), count)
    size, rows = quantities.broadcast_rows(archs, work)
    program = gradient_program(operators.structure_of(*rows))
    bare, chunk = quantities.bare(model), quantities.CHUNK

    def gradient(start: int) -> Any:
        return jax.block_until_ready(program(bare, *quantities.padded(rows, start, chunk)))

    def gradients() -> list[Any]:
        return quantities.over_chunks(gradient, range(0, size, chunk))

    note("gradients of energy in every field", timed(gradients, repeats), count)
    return rates


def operations(jaxpr: Any) -> np.ndarray:
    """[FLOPs, transcendentals] of a program; an element of an elementwise operation is one FLOP."""
    total = np.zeros(2)
    for equation in jaxpr.eqns:
        inner = [getattr(p, "jaxpr", p) for p in equation.params.values()]
        inner = [p for p in inner if hasattr(p, "eqns")]
        size = sum(float(np.prod(v.aval.shape)) for v in equation.outvars)
        name = equation.primitive.name
        if inner:
            total += equation.params.get("length", 1) * operations(inner[0])
        elif name == "dot_general":
            (contracted, _), _ = equation.params["dimension_numbers"]
            shape = equation.invars[0].aval.shape
            total[0] += 2.0 * size * np.prod([shape[axis] for axis in contracted])
        elif name.startswith("reduce"):
            total[0] += float(np.prod(equation.invars[0].aval.shape))
        elif name not in FREE:
            total[int(name in TRANSCENDENTAL)] += size
    return total


def operations_of(model: hj.CostModel, count: int = 64) -> np.ndarray:
    """[FLOPs, transcendentals] of the totals of one architecture, without what they do not need."""
    work = hj.workload(batch_size=8, prompt_tokens=1024, output_tokens=256)
    size, rows = quantities.broadcast_rows(architectures(count), work)
    structure = operators.structure_of(*rows)

    traced = quantities._measure_chunk.trace(quantities.bare(model), *rows, TOTALS, structure, ())
    jaxpr = traced.jaxpr.jaxpr
    return operations(partial_eval.dce_jaxpr(jaxpr, [True])[0]) / size


def machine_rates(repeats: int) -> tuple[float, float]:
    """(FLOP/s of the networks' matrix products, exponentials a second), on all cores together."""

    @jax.jit
    def products(x, weights):
        return jax.lax.fori_loop(0, LOOP, lambda _, x: x @ weights, x)

    @jax.jit
    def exponentials(x):
        return jax.lax.fori_loop(0, LOOP, lambda _, x: jnp.exp(-x), x)

    x = jnp.ones((ROWS, WIDTH))
    weights = jnp.full((WIDTH, WIDTH), 1.0 / WIDTH)
    calls = range(4 * quantities.cores() + 1)

    def rate(run: Callable[[], Any], each: float) -> float:
        def all_cores() -> list[Any]:
            return quantities.over_chunks(lambda _: jax.block_until_ready(run()), calls)

        return len(calls) * LOOP * each / timed(all_cores, repeats)[1]

    return (
        rate(lambda: products(x, weights), 2.0 * ROWS * WIDTH * WIDTH),
        rate(lambda: exponentials(jnp.ravel(x)), float(ROWS * WIDTH)),
    )


def limits(count: int, repeats: int) -> dict[str, Any]:
    """What the model's arithmetic allows on this machine, beside what it does, by level.

    At most 1 / (FLOPs over their rate in matrix products + transcendentals over the rate of exp)
    architectures a second: all else would have to be as quick, and nothing in its way.
    """
    flops_per_s, exponentials_per_s = machine_rates(repeats)
    archs = architectures(count)
    work = hj.workload(batch_size=8, prompt_tokens=1024, output_tokens=256)
    found: dict[str, Any] = {"flops_per_s": flops_per_s, "exponentials_per_s": exponentials_per_s}
    for level in (1, 2, 3):
        model = hj.load("h100-sxm-80gb").at_level(level)
        flops, transcendentals = map(float, operations_of(model))
        least_s = flops / flops_per_s + transcendentals / exponentials_per_s
        _, steady = timed(lambda m=model: quantities.measure(m, archs, work, TOTALS), repeats)
        found[f"level {level}"] = {
            "flops": flops,
            "transcendentals": transcendentals,
            "most_per_s": 1.0 / least_s,
            "per_s": count / steady,
        }
        print(
            f"level {level}: {flops:,.0f} FLOPs and {transcendentals:,.0f} transcendentals an "
            f"architecture allow {1.0 / least_s:,.0f} a second; {count / steady:,.0f} measured",
            flush=True,
        )
    print(
        f"on these cores {flops_per_s:.3g} FLOP/s, {exponentials_per_s:.3g} exponentials a second"
    )
    return found


def engine(arch: dict[str, float], folder: Path) -> Any:
    """aiconfigurator-core's compiled engine of one dense architecture."""
    from aiconfigurator_core.sdk.engine import EngineHandle

    content = {
        "architectures": ["LlamaForCausalLM"],
        "model_type": "llama",
        "hidden_size": int(arch["d_model"]),
        "intermediate_size": int(arch["d_ff"]),
        "num_hidden_layers": int(arch["n_layers"]),
        "num_attention_heads": int(arch["n_heads"]),
        "num_key_value_heads": int(arch["n_kv_heads"]),
        "head_dim": int(arch["head_dim"]),
        "vocab_size": int(arch["vocab_size"]),
        "max_position_embeddings": 131072,
        "torch_dtype": "bfloat16",
    }
    (folder / "config.json").write_text(json.dumps(content))
    return EngineHandle.compile(str(folder), "h100_sxm", "vllm")


def their_rates(count: int, contexts: int) -> dict[str, Any]:
    """aiconfigurator-core on the first architectures, and over contexts of one of them."""
    archs = architectures(count)
    names = list(archs.__dataclass_fields__)
    rows = [{n: float(getattr(archs, n)[i]) for n in names} for i in range(count)]
    with tempfile.TemporaryDirectory() as folder:
        handle = engine(rows[0], Path(folder))  # reads its tables
        handle.predict_prefill_latency(8, 1024)
        begin, answered = time.perf_counter(), 0
        for row in rows:
            try:
                handle = engine(row, Path(folder))
                handle.predict_prefill_latency(8, 1024)
                handle.predict_decode_latency(8, 1024, 2)
                answered += 1
            except Exception:  # its tables have holes; any kind of error says so
                continue
        seconds = time.perf_counter() - begin
    with tempfile.TemporaryDirectory() as folder:
        base = hj.preset("llama-3.1-8b").architecture
        handle = engine({n: float(getattr(base, n)) for n in names}, Path(folder))
    begin = time.perf_counter()
    for context in range(contexts):
        handle.predict_decode_latency(8, 128 + context % 8192, 2)
    sweep = time.perf_counter() - begin
    found = {
        "architectures": count,
        "answered": answered,
        "distinct_per_s": count / seconds,
        "contexts_per_s": contexts / sweep,
    }
    print(
        f"aiconfigurator-core: {count / seconds:.1f} architectures a second ({answered} of {count} "
        f"answered); contexts of one architecture {contexts / sweep:,.0f} a second",
        flush=True,
    )
    return found


def our_contexts(count: int, repeats: int) -> float:
    """Decode steps a second over contexts of one architecture, all quantities."""
    model, arch = hj.load("h100-sxm-80gb"), hj.preset("llama-3.1-8b").architecture
    context = (128 + np.arange(count) % 8192).astype(np.float32)
    work = dataclasses.replace(
        hj.workload(batch_size=8), context_start_tokens=context, context_end_tokens=context
    )
    names = ("latency_per_token_s", "decode_energy_per_token_j")
    _, seconds = timed(lambda: quantities.measure(model, arch, work, names), repeats)
    return count / seconds


def main(config: dict[str, Any], out: Path) -> dict[str, Any]:
    """Run, print and write results.json."""
    content: dict[str, Any] = {"cores": os.cpu_count(), "load_before": os.getloadavg()[0]}
    content["ours"] = our_rates(config["architectures"], config["repeats"])
    content["limits"] = limits(config["architectures"], config["repeats"])
    content["our_contexts_per_s"] = our_contexts(config["architectures"], config["repeats"])
    theirs = their_rates(config["their_architectures"], config["their_contexts"])
    content["theirs"] = theirs
    content["ratios"] = {
        name: rate["per_s"] / theirs["distinct_per_s"] for name, rate in content["ours"].items()
    }
    for name, ratio in content["ratios"].items():
        print(f"{name}: {ratio:,.0f} times aiconfigurator-core on distinct architectures")
    print(
        f"contexts of one architecture: ours {content['our_contexts_per_s']:,.0f} a second with "
        f"energy; theirs {theirs['contexts_per_s']:,.0f}, time"
    )
    content["peak_memory_mb"] = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss / 1024
    content["load_after"] = os.getloadavg()[0]
    print(f"load {content['load_before']:.1f} before, {content['load_after']:.1f} after")
    experiment.write_results(out, content, indent=1)
    return content


if __name__ == "__main__":
    given = experiment.command(__doc__, HERE, architectures=dict(type=int, help="of our own rates"))
    given.config["architectures"] = given.architectures or given.config["architectures"]
    main(given.config, given.out)
