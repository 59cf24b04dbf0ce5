"""What every method of this folder answers with, and the card that describes it.

A method is one function `predict(arch, work, device, coefficients) -> MethodPrediction`: pure JAX,
differentiable in every leaf of its arguments, safe in float32. The one exception is WattGPU, whose
trees have no gradient (`Method.differentiable`).
"""

from __future__ import annotations

import dataclasses
from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp

from hymell_jax.types import Architecture, Device, Workload

QUANTITIES = (
    "prefill_time_s",
    "decode_time_per_token_s",
    "prefill_energy_j",
    "decode_energy_per_token_j",
)
"""What a method can give, in the order of `MethodPrediction.available`."""

TIMES = QUANTITIES[:2]


@jax.tree_util.register_dataclass
@dataclasses.dataclass(frozen=True, kw_only=True)
class MethodPrediction:
    """Four quantities of one workload. Leaves float32, shape () or [batch].

    A quantity that the method does not give is 0, never NaN, and its place in `available` is 0.
    Flags are numbers, so that predictions of all methods have one structure: they stack, batch and
    differentiate. `Method.gives` says the same before anything is computed.
    """

    prefill_time_s: jax.Array  # whole prefill of the batch
    decode_time_per_token_s: jax.Array  # average step; each sequence gains one token
    prefill_energy_j: jax.Array  # whole prefill of the batch, all GPUs
    decode_energy_per_token_j: jax.Array  # step energy over the sequences, all GPUs
    available: jax.Array  # [4], 1 where given, in the order of `QUANTITIES`


def prediction(work: Workload, **given: Any) -> MethodPrediction:
    """A `MethodPrediction` of the quantities given; those left out are 0 and not available.

    Raises:
        TypeError: a name that is not in `QUANTITIES`.
    """
    unknown = set(given) - set(QUANTITIES)
    if unknown:
        raise TypeError(f"Not a quantity of a prediction: {', '.join(sorted(unknown))}.")
    zero = 0.0 * work.batch_size
    values = {name: jnp.asarray(given.get(name, 0.0)) + zero for name in QUANTITIES}
    flags = jnp.asarray([float(name in given) for name in QUANTITIES], jnp.float32)
    return MethodPrediction(**values, available=flags)


def predict_from_passes(
    pass_time_s: Callable[..., jax.Array],
) -> Callable[[Architecture, Workload, Device, dict[str, Any]], MethodPrediction]:
    """The `predict` of a method that gives seconds of a pass and nothing else.

    Args:
        pass_time_s: pass_time_s(arch, work, device, coefficients, phase) with phase "prefill" or
            "decode" (the average step); all GPUs of a group run alike.
    """

    def predict(
        arch: Architecture, work: Workload, device: Device, coefficients: dict[str, Any]
    ) -> MethodPrediction:
        """Times of prefill and of the average decode step [s]."""
        return prediction(
            work,
            prefill_time_s=pass_time_s(arch, work, device, coefficients, "prefill"),
            decode_time_per_token_s=pass_time_s(arch, work, device, coefficients, "decode"),
        )

    return predict


@dataclasses.dataclass(frozen=True, kw_only=True)
class Method:
    """One published system: where it comes from, what it takes and leaves out, and its function.

    Plain Python. `forms` are variants of the system, by name: (predict, default_coefficients);
    `predict` and `default_coefficients` are those of the first form.
    """

    name: str
    title: str
    source: str
    inputs: tuple[str, ...]
    assumes: tuple[str, ...]
    leaves_out: tuple[str, ...]
    published_accuracy: str
    gives: tuple[str, ...]  # of `QUANTITIES`
    forms: dict[str, tuple[Callable[..., MethodPrediction], Callable[[], Any]]]
    differentiable: bool = True
    needs_fit: bool = False  # nothing can be predicted before a fit
    default_note: str = ""  # where default coefficients come from

    @property
    def predict(self) -> Callable[..., MethodPrediction]:
        """`predict(arch, work, device, coefficients)` of the first form."""
        return next(iter(self.forms.values()))[0]

    @property
    def default_coefficients(self) -> Callable[[], Any]:
        """Coefficients of the first form before any fit."""
        return next(iter(self.forms.values()))[1]

    @property
    def gives_time(self) -> bool:
        """Whether any time is given."""
        return any(name.endswith("_s") for name in self.gives)

    @property
    def gives_energy(self) -> bool:
        """Whether any energy is given."""
        return any(name.endswith("_j") for name in self.gives)

    def form(self, name: str) -> tuple[Callable[..., MethodPrediction], Callable[[], Any]]:
        """`predict` and `default_coefficients` of one form.

        Raises:
            ValueError: no such form.
        """
        if name not in self.forms:
            raise ValueError(f"{self.name} has the forms {', '.join(self.forms)}; got {name!r}.")
        return self.forms[name]


def exp(coefficients: dict[str, Any], name: str) -> jax.Array:
    """exp of a coefficient that is stored as a log, so that it stays positive in a fit."""
    return jnp.exp(jnp.asarray(coefficients[name], jnp.float32))
