"""What the operating system and nvidia-smi tell, and a GPU's id by its driver's name. Knows no torch."""

from __future__ import annotations

import os
import re
import shutil
import subprocess
import time
from collections.abc import Collection
from importlib.util import find_spec
from pathlib import Path

from calibrate.hardware import gpu_ids


def gpu_id(name: str, memory_bytes: float) -> str:
    """The catalogue's id for a driver's device name ("NVIDIA H100 80GB HBM3"); a word made of it for others."""
    plain = "-".join(re.findall(r"[a-z0-9]+", name.lower()))
    plain = re.sub(r"^(nvidia-geforce|nvidia|amd-instinct)-", "", plain)
    core = re.match(r"(?:rtx-(?=a\d))?(rtx-pro-\d+|rtx-\d+|[a-z]+\d+[a-z]?)(?=-|$)", plain)
    rest = plain[core.end() :] if core else ""
    if core is None or "laptop" in rest or "max-q" in rest:
        return plain
    form = "pcie" if "pcie" in rest else "nvl" if "nvl" in rest else "sxm"
    smaller = ["a100-sxm-40gb"] if core[1] == "a100" and form == "sxm" and memory_bytes < 50e9 else []
    known = gpu_ids()
    return next((word for word in (*smaller, f"{core[1]}-{form}", core[1]) if word in known), plain)


def processor_seconds(cores: Collection[int]) -> tuple[float, float, float] | None:
    """(wall, busy of `cores`, this process's) seconds so far; None where the system does not tell."""
    busy, seen = 0.0, 0
    for line in read_text("/proc/stat").splitlines():
        name, *ticks = line.split()
        if re.fullmatch(r"cpu\d+", name) and int(name[3:]) in cores and len(ticks) >= 8:
            user, nice, system, _, _, irq, softirq, steal = (float(tick) for tick in ticks[:8])
            busy += (user + nice + system + irq + softirq + steal) / os.sysconf("SC_CLK_TCK")
            seen += 1
    own = os.times()
    return (time.monotonic(), busy, own.user + own.system) if seen == len(cores) else None


def read_text(path: str) -> str:
    """What a file of the system says; nothing where there is none."""
    try:
        return Path(path).read_text("utf-8")
    except (OSError, UnicodeDecodeError):
        return ""


def nvidia_smi(fields: list[str], device: str, query: str = "--query-gpu=") -> list[str] | None:
    """nvidia-smi's answers, row by row in one list; None where it gives none."""
    if shutil.which("nvidia-smi") is None:
        return None
    command = ["nvidia-smi", f"--id={device}", query + ",".join(fields), "--format=csv,noheader,nounits"]
    try:
        told = subprocess.run(command, capture_output=True, text=True, timeout=10, check=True).stdout
    except (subprocess.SubprocessError, OSError):
        return None
    return [cell.strip() for line in told.splitlines() if line.strip() for cell in line.split(",")]


def installed(module: str) -> bool:
    """Whether a module could be imported."""
    return find_spec(module) is not None
