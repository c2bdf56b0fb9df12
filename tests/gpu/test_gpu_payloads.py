"""Hidden states from GPU to GPU through the transport: staged through the host on one device, over NCCL between two."""

from __future__ import annotations

import threading

import pytest
import torch

from disaggkd_cli.transport import HiddenStateRing, Identity, Request, StopReason, TeacherPool, open_store, serve

ROWS, WIDTH, REQUESTS = 1024, 2048, 24


def request_of(number: int) -> Request:
    ids = torch.full((1, ROWS), number, dtype=torch.int32)
    return Request(number, ids, torch.tensor([ROWS], dtype=torch.int32), torch.arange(ROWS, dtype=torch.int32))


def states_of(request: Request, device: torch.device) -> torch.Tensor:
    """Return [R, WIDTH] bfloat16 that no other request has, after some work that keeps the device busy."""
    size = 1024 if device.type == "cuda" else 64
    noise = torch.randn(size, size, device=device)
    for _ in range(20):
        noise = noise @ noise / 32
    rows = torch.arange(ROWS, device=device)[:, None] % 127
    columns = torch.arange(WIDTH, device=device)[None] % 113
    return (rows - columns + request.request_id).to(torch.bfloat16) + 0 * noise[0, 0].nan_to_num(0, 0, 0).bfloat16()


def exchange(student: torch.device, teacher: torch.device, backend: str) -> list[str]:
    """Send requests from one device to the other, compare what arrives, and return how the payloads travelled."""
    store = open_store("127.0.0.1:0", host_it=True)
    identity = Identity("teacher 0", hidden_size=WIDTH)
    served: list[object] = []

    def teach() -> None:
        connect = lambda: open_store(f"127.0.0.1:{store.port}", host_it=False, timeout=60)  # noqa: E731
        forward = lambda request: states_of(request, teacher)  # noqa: E731
        served.append(serve(connect, identity, forward, student_wait=30, device=teacher, backend=backend))

    threading.Thread(target=teach, daemon=True).start()
    pool = TeacherPool(
        store, Identity("student 0", hidden_size=WIDTH), teacher_wait=90, leader=True, device=student, backend=backend
    )
    ring = HiddenStateRing(map(request_of, range(REQUESTS)), 3, ROWS, WIDTH, "bfloat16", pool)
    wrong = torch.zeros((), dtype=torch.int64, device=student)
    for lease in ring:
        assert lease.hidden.device == student
        wrong += (lease.hidden != states_of(lease.request, student)).sum()
        lease.release()
    travelled = [record["backend"] for record in pool.stats().values()]
    ring.close()
    pool.close(StopReason.FINISHED)
    assert int(wrong) == 0
    return travelled


@pytest.mark.timeout(240)
def test_two_processes_on_one_gpu_exchange_over_gloo(device):
    assert exchange(device, device, "auto") == ["gloo"]


@pytest.mark.timeout(240)
def test_two_gpus_exchange_over_nccl(device):
    if torch.cuda.device_count() < 2:
        pytest.skip("NCCL needs a second CUDA device")
    assert exchange(device, torch.device("cuda", 1), "nccl") == ["nccl"]
