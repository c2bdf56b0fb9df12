"""Print, as JSON, what machine this is and what the fused loss finds out about its GPU. A step of gpu_checks."""

from __future__ import annotations

import json
import os
import platform
import shutil
import sys

import torch

from disaggkd_cli.losses import matmul


def main() -> None:
    """Exit with a message where a GPU is wanted and torch sees none."""
    wanted = sys.argv[1]
    found = {
        "python": platform.python_version(),
        "torch": torch.__version__,
        "cuda": torch.version.cuda,
        "cores": os.cpu_count(),
        "compiler": shutil.which(os.environ.get("CC", "gcc")) or shutil.which("clang"),
        "gpus": [torch.cuda.get_device_name(index) for index in range(torch.cuda.device_count())],
    }
    if wanted == "cuda" and not torch.cuda.is_available():
        sys.exit("torch sees no GPU here; --device cpu rehearses on the CPU")
    device = torch.device("cuda", 0) if torch.cuda.is_available() else torch.device("cpu")
    if device.type == "cuda":
        properties = torch.cuda.get_device_properties(device)
        found["capability"] = f"{properties.major}.{properties.minor}"
        found["memory_gib"] = round(properties.total_memory / 2**30, 1)
        found["processors"] = properties.multi_processor_count
        found["nccl"] = ".".join(map(str, torch.cuda.nccl.version()))
    hidden = torch.zeros(1, 1, device=device, dtype=torch.bfloat16)
    precision = matmul.choose_precision(hidden, hidden, torch.float32)
    found["loss"] = {
        "cost_model": matmul.cost_model(device),
        "bf16_logits_product": str(precision.operand),
        "bf16_gradient_product": str(precision.gradient),
        "adds_through_a_buffer": matmul.needs_sum_buffer(device, precision),
    }
    print(json.dumps(found))


if __name__ == "__main__":
    main()
