"""What `disaggkd env` prints: versions, machine and devices, for reports of faults. No secrets, no paths of a home."""

from __future__ import annotations

import os
import platform
import shutil
import sys
from importlib.metadata import PackageNotFoundError, version

from disaggkd_cli import __version__

_PACKAGES = (
    "torch", "transformers", "datasets", "safetensors", "omegaconf", "typer", "rich", "peft", "gguf", "torchao",
    "flash-linear-attention", "causal-conv1d", "flash-attn", "tensorboard", "wandb", "mlflow", "trackio",
)  # fmt: skip
_VARIABLES = ("CUDA_VISIBLE_DEVICES", "OMP_NUM_THREADS", "HF_HUB_OFFLINE", "SLURM_JOB_ID")
_PREFIXES = ("NCCL_", "TORCH_NCCL_", "GLOO_", "PYTORCH_")


def describe() -> dict[str, str]:
    """Return what a maintainer asks for first, in the order in which it is printed."""
    found = {
        "disaggkd": __version__,
        "python": sys.version.split()[0],
        "platform": platform.platform(),
        "cores": f"{len(os.sched_getaffinity(0))} of {os.cpu_count()} usable",
        "memory": _memory(),
        "free disk here": f"{shutil.disk_usage('.').free / 2**30:.1f} GiB",
    }
    found |= {name: _version(name) for name in _PACKAGES}
    found |= _devices()
    names = sorted(name for name in os.environ if name in _VARIABLES or name.startswith(_PREFIXES))
    return found | {name: os.environ[name] for name in names}


def _version(name: str) -> str:
    try:
        return version(name)
    except PackageNotFoundError:
        return "not installed"


def _memory() -> str:
    import psutil

    memory = psutil.virtual_memory()
    return f"{memory.available / 2**30:.1f} of {memory.total / 2**30:.1f} GiB available"


def _devices() -> dict[str, str]:
    import torch
    import torch.distributed as dist

    backends = [name for name in ("gloo", "nccl", "mpi") if getattr(dist, f"is_{name}_available")()]
    found = {"backends of torch.distributed": ", ".join(backends), "CUDA of torch": torch.version.cuda or "none"}
    if torch.cuda.is_available():
        found["NCCL"] = ".".join(map(str, torch.cuda.nccl.version()))
        for index in range(torch.cuda.device_count()):
            properties = torch.cuda.get_device_properties(index)
            found[f"GPU {index}"] = f"{properties.name}, {properties.total_memory / 2**30:.1f} GiB"
    else:
        found["GPU"] = "none that torch can use"
    return found
