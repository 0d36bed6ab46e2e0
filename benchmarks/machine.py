"""What a measurement was taken on, and the memory of a process (Linux)."""

import os
import platform
from dataclasses import dataclass
from datetime import UTC, datetime
from importlib.metadata import version
from pathlib import Path

import torch

_BYTES_PER_KIB = 1024


@dataclass(frozen=True, slots=True)
class MachineFacts:
    """The machine and the libraries.

    Attributes:
        date: When the run began, ISO 8601, UTC.
        cpu_model: Name the processor gives itself.
        num_cores: Cores this process may run on.
        cpu_capability: Vector instructions that PyTorch uses.
        num_threads: Threads that PyTorch computes with.
        memory_bytes: Main memory.
        load_average: Processes that wanted to run in the minute before; above 0.3 or so, somebody
            else was at work and the times are not worth much.
        gpu: Name of the first CUDA device, or None.
        system: Operating system and architecture.
        python: Version of Python.
        torch: Version of PyTorch.
        transformers: Version of transformers.
    """

    date: str
    cpu_model: str
    num_cores: int
    cpu_capability: str
    num_threads: int
    memory_bytes: int
    load_average: float
    gpu: str | None
    system: str
    python: str
    torch: str
    transformers: str


def machine_facts() -> MachineFacts:
    """Describe this machine."""
    return MachineFacts(
        date=datetime.now(UTC).isoformat(timespec="seconds"),
        cpu_model=_cpu_model(),
        num_cores=len(os.sched_getaffinity(0)),
        cpu_capability=torch.backends.cpu.get_cpu_capability(),
        num_threads=torch.get_num_threads(),
        memory_bytes=os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES"),
        load_average=os.getloadavg()[0],
        gpu=torch.cuda.get_device_name(0) if torch.cuda.is_available() else None,
        system=f"{platform.system()} {platform.machine()}",
        python=platform.python_version(),
        torch=torch.__version__,
        transformers=version("transformers"),
    )


def resident_bytes(pid: int) -> int:
    """Return the memory that a process holds now."""
    return _status_bytes(pid, "VmRSS")


def peak_resident_bytes(pid: int) -> int:
    """Return the most memory that a process has held since it began or its peak was forgotten."""
    return _status_bytes(pid, "VmHWM")


def forget_peak(pid: int) -> None:
    """Let the peak of a process begin at what it holds now."""
    Path(f"/proc/{pid}/clear_refs").write_text("5", encoding="ascii")


def wait_for(device: torch.device) -> None:
    """Return when a device has done what it was given; a CPU always has."""
    if device.type == "cuda":
        torch.cuda.synchronize(device)


def _status_bytes(pid: int, field: str) -> int:
    for line in Path(f"/proc/{pid}/status").read_text(encoding="utf-8").splitlines():
        name, _, value = line.partition(":")
        if name == field:
            return int(value.split()[0]) * _BYTES_PER_KIB
    raise ProcessLookupError(f"process {pid} has ended")


def _cpu_model() -> str:
    for line in Path("/proc/cpuinfo").read_text(encoding="utf-8").splitlines():
        name, _, value = line.partition(":")
        if name.strip() == "model name":
            return value.strip()
    return platform.processor() or "unknown"
