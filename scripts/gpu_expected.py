"""Print, as JSON, what the closed forms predict for the steps of gpu_checks. Needs no GPU.

python scripts/gpu_expected.py CONFIG GPU_AS_TORCH_NAMES_IT
"""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path

from disaggkd_cli.losses.device_costs import DEVICES, GpuModel, device_key
from disaggkd_cli.losses.tiling import LossShape, choose_tiling
from disaggkd_cli.planner.hardware import load_catalogue

OTHERWISE = "H100-SXM"
_VARIANTS = ("SXM", "PCIE", "40", "80", "96")
REFERENCE = {"rows": 8192, "shared": 248320, "student_width": 4096, "teacher_width": 2048}
LOSS_BUDGET = 4 * 2**30
CASES = {
    "disaggregated": ["mode=disaggregated"],
    "colocated": ["mode=colocated"],
    "sharded": ["mode=disaggregated", "student.ranks=4", "teacher.replicas=4"],
    "hsdp": ["mode=disaggregated", "student.ranks=4", "student.replicate=2", "teacher.replicas=4"],
}


def catalogue_name(torch_name: str) -> str:
    """Return the catalogue's name of a GPU, the longest that torch's name contains; `OTHERWISE` for one it lacks."""
    words = torch_name.upper().replace("-", " ").split()
    squeezed = "".join(words)

    def rank(name: str) -> tuple[bool, bool]:
        return ("PCIe" in name) != ("PCIE" in words), "-40" in name and "40GB" not in words

    bases = {
        name: "".join(one for one in name.upper().split("-") if one not in _VARIANTS) for name in load_catalogue().gpus
    }
    found = [name for name, base in bases.items() if base in squeezed]
    return min(found, key=lambda name: (-len(bases[name]), rank(name)), default=OTHERWISE)


def loss_seconds(torch_name: str) -> dict[str, float]:
    """Return seconds of the fused loss on the reference head by its own cost model, and of its products alone."""
    key = device_key(torch_name, (9, 0))
    if not isinstance(DEVICES.get(key), GpuModel):
        key = "H100"
    shape = LossShape(**REFERENCE, operand_bytes=2, gradient_copy_bytes=2, device=key)
    products = 2 * shape.rows * shape.shared * (3 * shape.student_width + shape.teacher_width)
    return {"fused": choose_tiling(shape, LOSS_BUDGET).seconds, "floor": products / DEVICES[key].flops}


def planned(config: Path, gpu: str, overrides: list[str]) -> dict[str, float]:
    """Return what `disaggkd plan` says of a run."""
    command = [sys.executable, "-m", "disaggkd_cli", "plan", str(config), "--json", f"hardware.gpu={gpu}", *overrides]
    answer = subprocess.run(command, capture_output=True, text=True, check=False)
    if answer.returncode not in (0, 3):
        raise SystemExit(f"plan failed: {answer.stderr.strip() or answer.stdout.strip()}")
    mode = "colocated_fused" if "mode=colocated" in overrides else "disaggregated_fused"
    found = json.loads(answer.stdout)["modes"][mode]
    return {
        "peak_bytes": found["ranks"]["colocated" if "mode=colocated" in overrides else "student"]["peak_bytes"],
        "tokens_per_second": found["tokens_per_second"],
        "bytes_per_token": found["traffic"].get("hidden_states_bytes_per_token", 0),
    }


def main() -> None:
    """Print everything."""
    config, torch_name = Path(sys.argv[1]), sys.argv[2]
    gpu = catalogue_name(torch_name)
    result = {"gpu": gpu, "loss": loss_seconds(torch_name)}
    print(json.dumps(result | {name: planned(config, gpu, overrides) for name, overrides in CASES.items()}))


if __name__ == "__main__":
    main()
