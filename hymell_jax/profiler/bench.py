"""The place where cases run: a device, its format, and random numbers rotated past its caches."""

from __future__ import annotations

import dataclasses
import importlib
import math
from collections.abc import Callable, Sequence
from typing import Any

from hymell_jax.profiler import machine
from hymell_jax.profiler.clocks import Clock, CudaClock, HostClock

Shape = tuple[int, ...]
ROTATIONS = 3  # times the last cache that the inputs of a case fill together
MOST_SETS = 512
MOST_COPIES = 64
WEIGHT_SPREAD = 0.02
TILE = 1 << 22  # random numbers drawn; longer pools repeat them at other addresses
INSTALL = "install the extra `profile`"


def load(name: str) -> Any:
    """PyTorch or transformers.

    Raises:
        ValueError: it is not installed, or cannot be loaded.
    """
    try:
        return importlib.import_module(name)
    except ImportError as error:
        raise ValueError(f"Profiling needs {name} ({error}): {INSTALL}.") from None


@dataclasses.dataclass
class Pool:
    """Random numbers in one block of memory, handed out as views at ever new addresses."""

    torch: Any
    device: Any
    dtype: Any
    spread: float
    values: Any = None
    place: int = 0

    def ensure(self, count: int) -> None:
        """Have at least `count` numbers."""
        if self.values is not None and self.values.numel() >= count:
            return
        self.values = None
        count = math.ceil(count / TILE) * TILE
        maker = self.torch.Generator(device=self.device).manual_seed(20)
        tile = self.torch.randn(TILE, device=self.device, dtype=self.dtype, generator=maker).mul_(
            self.spread
        )
        self.values = tile.repeat(count // TILE) if count > TILE else tile

    def view(self, shape: Shape) -> Any:
        """The next numbers, at a multiple of 64 bytes."""
        count = math.prod(shape)
        self.ensure(count)
        if self.place + count > self.values.numel():
            self.place = 0
        found = self.values[self.place : self.place + count].view(shape)
        self.place += math.ceil(count / 32) * 32
        return found


class Bench:
    """A device to measure on. Everything that touches PyTorch starts here.

    Args:
        device: "cpu", "cuda" or "cuda:<index>".
        own: the processors whose threads PyTorch may use.

    Raises:
        ValueError: PyTorch or transformers is missing, or the device is.
    """

    def __init__(self, device: str, own: Sequence[int]):
        self.torch = load("torch")
        self.transformers = load("transformers")
        self.transformers.logging.set_verbosity_error()
        self.device = self._device(device)
        self.kind = self.device.type
        self.dtype = self.torch.float32 if self.kind == "cpu" else self.torch.bfloat16
        self.dtype_name = str(self.dtype).removeprefix("torch.")
        self.value_bytes = self.dtype.itemsize
        self.own = list(own)
        self.torch.set_num_threads(len(self.own))
        self.past_bytes = ROTATIONS * self.cache_bytes()
        self.clock: Clock = (
            HostClock() if self.kind == "cpu" else CudaClock(self.torch, self.device)
        )
        self.activations = self._pool(1.0)
        self.weights = self._pool(WEIGHT_SPREAD)

    def _device(self, text: str) -> Any:
        try:
            device = self.torch.device(text)
        except RuntimeError:
            device = None
        if device is None or device.type not in ("cpu", "cuda"):
            raise ValueError(f"Unknown device {text!r}: give cpu, cuda, or cuda:1 and so on.")
        if device.type == "cuda":
            count = self.torch.cuda.device_count() if self.torch.cuda.is_available() else 0
            if (device.index or 0) >= count:
                raise ValueError(
                    f"There is no GPU {text!r} that PyTorch {self.torch.__version__} can use "
                    f"({count} found). Profile `--device cpu`, or install a build of PyTorch "
                    "for the GPU and its driver."
                )
        return device

    def _pool(self, spread: float) -> Pool:
        return Pool(self.torch, self.device, self.dtype, spread)

    def cache_bytes(self) -> float:
        """Of the last cache."""
        if self.kind == "cpu":
            return machine.last_cache_bytes()
        return float(self.torch.cuda.get_device_properties(self.device).L2_cache_size)

    def uuid(self) -> str | None:
        """Of the GPU, as its driver names it; None for a CPU, or where PyTorch does not say."""
        if self.kind == "cpu":
            return None
        found = getattr(self.torch.cuda.get_device_properties(self.device), "uuid", None)
        return f"GPU-{found}" if found else None

    def memory_bytes(self) -> float:
        """Of the device in all."""
        if self.kind == "cpu":
            return machine.total_bytes()
        return float(self.torch.cuda.get_device_properties(self.device).total_memory)

    def available_bytes(self) -> float:
        """Memory of the device that is free."""
        if self.kind == "cpu":
            return machine.available_bytes()
        return float(self.torch.cuda.mem_get_info(self.device)[0])

    def synchronise(self) -> None:
        """Wait for the device."""
        if self.kind == "cuda":
            self.torch.cuda.synchronize(self.device)

    def release(self) -> None:
        """Give memory back after a failure."""
        if self.kind == "cuda":
            self.torch.cuda.empty_cache()

    def rotate(self, *shapes: Shape, weights: Sequence[Shape] = ()) -> list[tuple[Any, ...]]:
        """Sets of tensors, activations then weights, that together exceed the last cache."""
        count = self.sets(sum(map(math.prod, (*shapes, *weights))), MOST_SETS)
        for pool, wanted in ((self.activations, shapes), (self.weights, weights)):
            if wanted:
                pool.ensure(count * sum(math.prod(s) + 32 for s in wanted))
        return [
            tuple(self.activations.view(s) for s in shapes)
            + tuple(self.weights.view(s) for s in weights)
            for _ in range(count)
        ]

    def sets(self, values: int, most: int) -> int:
        """How many sets of `values` numbers it takes to pass the last cache."""
        return max(1, min(most, math.ceil(self.past_bytes / (values * self.value_bytes))))

    def copies(self, build: Callable[[], Any], inputs: int) -> list[Any]:
        """Modules of the same shape with weights of their own, enough to exceed the last cache.

        Args:
            build: makes the module, without data (under torch.device("meta")).
            inputs: numbers that one call reads beside the weights.
        """
        with self.torch.device("meta"):
            first = build()
        size = sum(p.numel() for p in first.parameters())
        count = self.sets(size + inputs, MOST_COPIES)
        self.weights.ensure(count * (size + 32 * sum(1 for _ in first.parameters())))
        modules = [first]
        with self.torch.device("meta"):
            modules += [build() for _ in range(count - 1)]
        for module in modules:
            self.fill(module)
        return modules

    def fill(self, module: Any) -> None:
        """Replace every parameter of a module without data by random numbers."""
        parameter = self.torch.nn.Parameter
        for part in module.modules():
            for name, held in part.named_parameters(recurse=False):
                view = self.weights.view(tuple(held.shape))
                part._parameters[name] = parameter(view, requires_grad=False)
        module.eval()
