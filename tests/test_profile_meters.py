"""Clocks, energy meters and the machine, against fakes at their boundaries. No PyTorch."""

from __future__ import annotations

import contextlib
import math
import random
import sys
import types

import pytest

from hymell_jax.profiler import clocks, designs, devicefile, machine, meters, plans
from hymell_jax.profiler.cases import split_of


class FakeTime:
    """A clock that moves by what the work takes."""

    def __init__(self, *takes: float):
        self.now, self._takes, self.calls = 100.0, takes, []

    def __call__(self) -> float:
        return self.now

    def work(self, index: int) -> None:
        self.calls.append(index)
        self.now += self._takes[index % len(self._takes)]


def test_the_median_and_spread_of_a_call():
    fake = FakeTime(0.010, 0.010, 0.010, 0.030)
    timing = clocks.HostClock(fake, fake).time(fake.work, 2.0)
    assert timing.time_s == pytest.approx(0.010)
    assert timing.inner == 1 and timing.repeats >= 100 and 0 < timing.time_spread < 2.1
    assert timing.launch_included and timing.clock_gap_s == pytest.approx(0, abs=1e-6)


def test_short_calls_are_sampled_together_on_inputs_in_turn():
    fake = FakeTime(1e-5)
    timing = clocks.HostClock(fake, fake).time(fake.work, 0.05)
    assert timing.time_s == pytest.approx(1e-5) and timing.inner == 100
    assert fake.calls == sorted(set(fake.calls))  # never the same input twice in a row


def test_a_long_call_is_made_least_times_only():
    fake = FakeTime(3.0)
    assert clocks.HostClock(fake, fake).time(fake.work, 1.0, least=4).repeats == 4
    assert len(fake.calls) == 5  # one to warm up


def test_a_jump_of_the_wall_clock_shows_and_leaves_the_time_alone():
    fake = FakeTime(0.01)
    walls = iter([0.0, 3600.0 + 0.2])
    timing = clocks.HostClock(fake, lambda: next(walls)).time(fake.work, 0.2)
    assert timing.time_s == pytest.approx(0.01) and timing.clock_gap_s > 3599


def test_a_clock_that_stands_still_is_an_error():
    with pytest.raises(RuntimeError, match="did not advance"):
        clocks.HostClock(lambda: 1.0, lambda: 1.0).time(lambda index: None, 0.1)


class FakeGpu:
    """Time, power and the two libraries' views of one GPU whose counter ticks every 0.1 s."""

    NVML_CLOCK_SM, NVML_CLOCK_MEM, NVML_TEMPERATURE_GPU = 1, 2, 0

    def __init__(self, watts: float, shown: float | None = None):
        self.now, self.watts, self.shown = 0.0, watts, watts if shown is None else shown

    def clock(self) -> float:
        return self.now

    def work(self, index: int) -> None:
        self.now += 0.002

    def _joules(self) -> float:
        return math.floor(self.now * 10) / 10 * self.watts

    def get_total_energy_consumption(self, index):
        return round(self._joules() * 1e3)

    def get_instant_power_usage(self, index):
        return self.shown * 1e3

    def get_gpu_temperature(self, index):
        return 60

    def get_power_management_limit(self, index):
        return 700_000

    def nvmlDeviceGetHandleByIndex(self, index):
        return f"gpu {index}"

    def nvmlDeviceGetHandleByUUID(self, uuid):
        assert uuid == "GPU-1"
        return "gpu 0"

    def nvmlDeviceGetTotalEnergyConsumption(self, gpu):
        return round(self._joules() * 1e3)

    def nvmlDeviceGetPowerUsage(self, gpu):
        return self.shown * 1e3

    def nvmlDeviceGetClockInfo(self, gpu, kind):
        return {1: 1980, 2: 3201}[kind]

    def nvmlDeviceGetTemperature(self, gpu, kind):
        return 61

    def nvmlDeviceGetEnforcedPowerLimit(self, gpu):
        return 700_000

    def nvmlDeviceGetCurrentClocksThrottleReasons(self, gpu):
        return 4


@pytest.mark.parametrize("kind", [meters.ZeusMeter, meters.NvmlMeter])
def test_a_window_of_five_seconds_from_tick_to_tick(kind):
    gpu = FakeGpu(500.0)
    found = meters.metered(kind(gpu, 0), gpu.work, 0.002, lambda: None, gpu.clock)
    assert found.energy_j == pytest.approx(500 * 0.002, rel=0.01)
    assert found.power_w == pytest.approx(500, rel=0.01)
    assert found.window_s >= 4.9 or found.ticks >= meters.LEAST_TICKS
    assert found.integrated_j == pytest.approx(found.energy_j, rel=0.02) and found.note == ""


def test_counter_and_power_that_disagree_are_noted():
    gpu = FakeGpu(500.0, shown=380.0)
    found = meters.metered(meters.NvmlMeter(gpu, 0), gpu.work, 0.002, lambda: None, gpu.clock)
    assert "differ by 24%" in found.note and found.energy_j == pytest.approx(1.0, rel=0.01)


def test_a_counter_that_does_not_move_gives_no_energy():
    gpu = FakeGpu(0.0)
    with pytest.raises(RuntimeError, match="counter did not move"):
        meters.metered(meters.NvmlMeter(gpu, 0), gpu.work, 0.002, lambda: None, gpu.clock)


def test_what_a_gpu_tells_beside_energy():
    assert meters.NvmlMeter(FakeGpu(1.0), 0).state() == {
        "sm_mhz": 1980, "memory_mhz": 3201, "temperature_c": 61, "power_limit_w": 700.0,
        "throttle_reasons": 4,
    }  # fmt: skip
    assert meters.ZeusMeter(FakeGpu(1.0), 0).state()["power_limit_w"] == 700.0


def test_the_meter_is_zeus_then_nvml_then_none(monkeypatch):
    gpu = FakeGpu(300.0)
    gpu.now = 1.0
    monkeypatch.setitem(sys.modules, "zeus", None)
    monkeypatch.setitem(sys.modules, "zeus.device", None)
    gpu.nvmlInit = lambda: None
    monkeypatch.setitem(sys.modules, "pynvml", gpu)
    assert meters.find_meter("cuda", 0, "GPU-1").source.startswith("nvml")
    gpu.supports_get_total_energy_consumption = lambda index: True
    monkeypatch.setitem(sys.modules, "zeus.device", types.SimpleNamespace(get_gpus=lambda: gpu))
    monkeypatch.setitem(sys.modules, "zeus", types.ModuleType("zeus"))
    meter = meters.find_meter("cuda")
    assert meter.source.startswith("zeus") and meter.state()["throttle_reasons"] == 4
    gpu.supports_get_total_energy_consumption = lambda index: False
    monkeypatch.setitem(sys.modules, "pynvml", None)
    assert meters.find_meter("cuda") is None


def test_rapl_counts_packages_and_wraps(tmp_path):
    def zone(number: int, name: str, micro: int) -> None:
        folder = tmp_path / f"intel-rapl:{number}"
        folder.mkdir(exist_ok=True)
        (folder / "name").write_text(f"{name}\n")
        (folder / "energy_uj").write_text(f"{micro}\n")
        (folder / "max_energy_range_uj").write_text("999999\n")

    assert meters.find_meter("cpu", root=str(tmp_path)) is None
    zone(0, "package-0", 900_000)
    zone(1, "psys", 5)
    meter = meters.find_meter("cpu", root=str(tmp_path))
    assert meter.energy_j() == 0.0 and meter.source.startswith("rapl")
    zone(0, "package-0", 100_000)
    assert meter.energy_j() == pytest.approx(0.2)
    assert meter.power_w() is None


def test_idle_power():
    gpu = FakeGpu(70.0)

    def sleep(seconds: float) -> None:
        gpu.now += seconds

    assert meters.idle_power_w(meters.NvmlMeter(gpu, 0), 2.0, sleep, gpu.clock) == 70.0


class FakeCuda:
    """Events and graphs of a GPU on which a call takes 30 us, and 50 us to launch."""

    def __init__(self, capturable: bool = True):
        self.now, self.recording, self.capturable = 0.0, None, capturable

    def call(self, index: int) -> None:
        if self.recording is None:
            self.now += 80e-6
        else:
            self.recording.calls.append(index)

    def synchronize(self, device) -> None:
        pass

    def Event(self, enable_timing):
        owner = self

        class Event:
            def record(self):
                self.at = owner.now

            def synchronize(self):
                pass

            def elapsed_time(self, other):
                return (other.at - self.at) * 1e3

        return Event()

    def CUDAGraph(self):
        owner = self

        class Graph:
            calls: list[int] = []

            def replay(self):
                owner.now += 30e-6 * len(self.calls)

        graph = Graph()
        graph.calls = []
        return graph

    @contextlib.contextmanager
    def graph(self, graph):
        if not self.capturable:
            raise RuntimeError("operation not permitted when stream is capturing")
        self.recording = graph
        yield
        self.recording = None


def test_a_gpu_replays_a_graph_over_all_inputs_and_keeps_launches_apart():
    fake = FakeCuda()
    clock = clocks.CudaClock(types.SimpleNamespace(cuda=fake), "cuda:0")
    fake.call.__func__.count = 40
    timing = clock.time(fake.call, 0.01)
    del fake.call.__func__.count
    assert timing.time_s == pytest.approx(30e-6) and timing.inner == 40
    assert not timing.launch_included and timing.launch_s > 0
    whole = clock.time(fake.call, 0.01, whole=True)
    assert whole.time_s == pytest.approx(80e-6) and whole.launch_included


def test_work_that_cannot_be_captured_runs_eagerly():
    fake = FakeCuda(capturable=False)
    timing = clocks.CudaClock(types.SimpleNamespace(cuda=fake), "cuda:0").time(fake.call, 0.01)
    assert timing.time_s == pytest.approx(80e-6) and timing.launch_included


def test_load_of_others(tmp_path, monkeypatch):
    stat = tmp_path / "stat"
    moments, used = iter([10.0, 20.0]), iter([(1.0, 0.0), (9.0, 0.5)])
    monkeypatch.setattr(machine.time, "monotonic", lambda: next(moments))
    monkeypatch.setattr(
        machine.os, "times", lambda: types.SimpleNamespace(**dict(zip(("user", "system"),
                                                                      next(used), strict=True)))
    )  # fmt: skip
    monkeypatch.setattr(machine.os, "sysconf", lambda _: 100)
    load = machine.Load([0, 1], str(stat))
    stat.write_text("cpu 9 9 9 9\ncpu0 100 0 0 0 0 0 0 0 0 0\ncpu1 0 0 0 0 0 0 0 0 0 0\n"
                    "cpu2 0 0 0 0 0 0 0 0 0 0\n")  # fmt: skip
    load.start()
    stat.write_text("cpu0 900 0 0 0 0 0 0 150 0 0\ncpu1 302 0 0 9 0 0 0 0 0 0\n"
                    "cpu2 999 0 0 0 0 0 0 0 0 0\n")  # fmt: skip
    assert load.stop() == pytest.approx((8.0 + 1.5 + 3.02 - 8.5 - 0.02) / 20)
    missing = machine.Load([0], str(tmp_path / "none"))
    missing.start()
    assert missing.stop() is None


def test_the_last_cache_of_a_machine(tmp_path):
    for index, size in enumerate(("32K", "1024K", "32M")):
        folder = tmp_path / "cpu0/cache" / f"index{index}"
        folder.mkdir(parents=True)
        (folder / "size").write_text(size + "\n")
    assert machine.last_cache_bytes(str(tmp_path)) == 32 * 2**20
    assert machine.last_cache_bytes(str(tmp_path / "none")) == 32 * 2**20


@pytest.mark.parametrize("kind", ["cpu", "cuda"])
@pytest.mark.parametrize("name", ["quick", "paper"])
def test_plans_are_repeatable_and_hold_out_whole_groups(name, kind):
    plan = plans.make_plan(name, kind)
    keys = [case.key for case in plan.cases]
    assert keys == [case.key for case in plans.make_plan(name, kind).cases]
    assert len(set(keys)) == len(keys)
    groups: dict = {}
    for case in plan.cases:
        s = case.sizes
        if case.table == "operators/gemm":
            groups.setdefault((s["n"], s["k"]), set()).add(case.split)
        elif case.table.startswith("blocks/attention"):
            head = s["n_heads"], s["n_kv_heads"], s["head_dim"]
            groups.setdefault(head, set()).add(case.split)
        elif case.level == 3:
            groups.setdefault(s["model"], set()).add(case.split)
    assert all(len(splits) == 1 for splits in groups.values())
    for level in (1, 2, 3):
        share = [case.split == "test" for case in plan.cases if case.level == level]
        assert 0.1 < sum(share) / len(share) < 0.4


def test_the_quick_plan_covers_what_a_fit_needs():
    plan = plans.make_plan("quick", "cpu")
    products = [case.sizes for case in plan.cases if case.table == "operators/gemm"]
    assert {1} < {s["m"] for s in products} and max(s["m"] for s in products) > 1024
    assert min(s["n"] for s in products) < 128 and max(s["k"] for s in products) > 4096
    models = {case.sizes["model"]: case.sizes for case in plan.cases if case.level == 3}
    assert len(models) >= 10 and {s["family"] for s in models.values()} >= {
        "gpt2", "opt", "gpt_neox", "llama", "qwen2", "qwen3", "mistral", "mixtral", "gemma3_text",
    }  # fmt: skip
    assert all(4e7 < s["n_parameters"] < 1.2e9 for s in models.values())
    for model in models:
        phases = [c.sizes["phase"] for c in plan.cases if c.sizes.get("model") == model]
        assert phases.count("prefill") >= 4 and phases.count("decode") >= 4
    assert plan.hours <= 1 / 3 and math.isclose(sum(plan.shares), 1)


def test_token_counts_cover_the_logarithm():
    found = [designs.tokens(random.Random(seed), 6, 2048) for seed in range(50)]
    assert all(counts[0] == 1 and counts[-1] > 500 and counts[-1] <= 2048 for counts in found)
    assert any(17 in counts for counts in found) and len({c[-1] for c in found}) > 10
    shares = [split_of("gemm", n, n) for n in range(2000)]
    assert 0.22 < shares.count("test") / 2000 < 0.28


def test_plans_that_do_not_exist():
    with pytest.raises(ValueError, match="quick, paper, full"):
        plans.make_plan("huge", "cpu")
    with pytest.raises(ValueError, match="Levels are"):
        plans.make_plan("quick", "cpu", (4,))


def _described(*records):
    bench = types.SimpleNamespace(
        kind="cpu", own=[0, 1], value_bytes=4, past_bytes=1e8,
        memory_bytes=lambda: 8e9, cache_bytes=lambda: 3e7,
    )  # fmt: skip
    anchor = {"kind": "anchor", "compute_flops": 1e9, "compute_s": 1e-2}
    anchor |= {"memory_bytes": 1e8, "memory_s": 1e-2}
    found = devicefile.device_description(bench, "mine", [anchor, *records])
    return {key: found["fields"][key] for key in ("power_limit_w", "idle_power_w")}


def test_a_metered_device_has_the_limit_of_its_driver_and_the_idle_power_that_was_metered():
    session, end = {"kind": "session", "idle_power_w": 74.0}, {"kind": "end", "idle_power_w": 71.5}
    row = {"kind": "row", "table": "operators/softmax", "meter_state": {"power_limit_w": 650.0}}
    found = _described(session, row, end)
    assert [field["value"] for field in found.values()] == [650.0, 71.5]
    assert "driver" in found["power_limit_w"]["source"]
    for records in ([session, end], [row], [session, row | {"meter_state": {}}], []):
        sources = [field["source"] for field in _described(*records).values()]
        assert sources == [devicefile.UNKNOWN] * 2
