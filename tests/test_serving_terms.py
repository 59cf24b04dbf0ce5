"""Terms of one served pass by hand, on a device with round numbers."""

from __future__ import annotations

import numpy as np
import pytest
from round_numbers import DEVICE

import hymell_jax as hj
from hymell_jax import serving

NOTHING = dict.fromkeys(serving.priors(), np.float32(-40)) | {
    **dict.fromkeys(serving.FLAGS, np.float32(0)),
    **{f"log_{kind}": np.float32(0) for kind in serving.KINDS}, "log_prefill": np.float32(0),
}  # fmt: skip
BLOCKS = serving.Blocks(  # 1 ms of matrix products
    time_s=np.float32([1e-3, 0, 0, 0, 0]), energy_j=np.float32(0), flops=np.float32(0),
    memory_bytes=np.float32(0), streamed_bytes=np.float32(0),
)  # fmt: skip
ARCH = hj.architecture(n_layers=10, d_model=512, n_heads=8, d_ff=2048, vocab_size=1000)


def served(**terms) -> serving.Pass:
    coefficients = NOTHING | {name: np.float32(np.log(value)) for name, value in terms.items()}
    return serving.serve_pass(
        coefficients, DEVICE, ARCH, hj.workload(batch_size=2), BLOCKS, prefill=False
    )


def test_the_board_draws_in_the_gaps_between_kernels():
    """A step of 5 ms with 1 ms of kernels: 4 ms of gaps at a quarter of the board's range."""
    found = served(log_step_s=4e-3, log_gap_share=0.25)
    assert float(found.time_s) == pytest.approx(5e-3, rel=1e-4)
    assert float(found.busy_s) == pytest.approx(1e-3, rel=1e-4)
    assert float(found.shares_s) == pytest.approx(1e-3, rel=1e-4)
    busy = served(log_step_s=4e-3, log_busy_share=0.5)
    assert float(busy.shares_s) == pytest.approx(0.5e-3, rel=1e-4)


def test_host_terms_are_added_and_launches_overlap():
    found = served(log_step_s=2e-3, log_request_s=1e-4)
    assert float(found.time_s) == pytest.approx(1e-3 + 2e-3 + 2 * 1e-4, rel=1e-4)
    hidden = served(log_launch_s=1e-6)  # 80 us of launches behind 1 ms of kernels
    assert float(hidden.time_s) == pytest.approx(1e-3, rel=1e-3)
    shown = served(log_launch_s=1e-4)  # 8 ms of launches
    assert float(shown.time_s) == pytest.approx(8e-3, rel=1e-3)


def test_energy_is_idle_power_and_the_used_share_of_the_range():
    watts = serving.energy_j(DEVICE, np.float32(2.0), np.float32(0.5)) / 2.0
    share = 0.25 / (1 + 0.25**8) ** 0.125
    assert float(watts) == pytest.approx(80 + 620 * share, rel=1e-5)
    assert float(serving.energy_j(DEVICE, 1.0, 1e3)) == pytest.approx(700, rel=1e-4)


def test_a_prefill_that_no_source_timed_is_that_of_the_blocks():
    """A factor of 0.8 on products, learned from decode, and one of 1.1 on prefill."""
    terms = {"log_matrix": np.log(0.8), "log_prefill": np.log(1.1)}
    work = hj.workload(batch_size=2)

    def kernels_s(prefill: bool, unseen: float) -> float:
        coefficients = NOTHING | {k: np.float32(v) for k, v in terms.items()}
        coefficients["unseen_prefill"] = np.float32(unseen)
        return float(
            serving.serve_pass(coefficients, DEVICE, ARCH, work, BLOCKS, prefill).kinds_s.sum()
        )

    assert kernels_s(False, 0.0) == pytest.approx(0.8e-3, rel=1e-5)
    assert kernels_s(False, 1.0) == pytest.approx(0.8e-3, rel=1e-5)
    assert kernels_s(True, 0.0) == pytest.approx(0.88e-3, rel=1e-5)
    assert kernels_s(True, 1.0) == pytest.approx(1.1e-3, rel=1e-5)
