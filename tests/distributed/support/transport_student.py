"""A student process of the transport's tests: transport_student.py RANK ENDPOINT [key=value ...].

Takes requests `start`..`stop`, checks every lease against the fake teacher's own formula when it takes it and before it
gives it back, and prints one JSON record with the sha256 of all that was delivered in order.
"""

from __future__ import annotations

import hashlib
import json
import sys
import time

import torch
from torch import Tensor
from transport_parts import WIDTH, fake_hidden, make_requests

from disaggkd_cli.errors import DisaggkdError
from disaggkd_cli.transport import HiddenStateRing, Identity, Lease, StopReason, TeacherPool, TeachersLost, open_store


def main(arguments: list[str]) -> None:
    rank, endpoint, *pairs = arguments
    options = dict(pair.split("=") for pair in pairs)
    width = int(options.get("width", WIDTH))
    sequence = int(options.get("sequence", 100))
    start, stop = int(options.get("start", 0)), int(options.get("stop", 30))
    dtype = options.get("dtype", "bfloat16")
    events = []

    def on_event(line):
        events.append(line)
        sys.stderr.write(f"{line}\n")

    store = open_store(endpoint, host_it=options.get("host") == "yes", timeout=20)
    pool = TeacherPool(
        store,
        Identity(f"student {rank}", options.get("fingerprint", "f"), "t", 1000, width, dtype, options.get("run", "r")),
        timeout=float(options.get("timeout", 5)),
        teacher_wait=float(options.get("teacher_wait", 20)),
        bind=options.get("bind", "loopback"),
        leader=rank == "0",
        on_event=on_event,
    )
    record = {"ids": [], "events": events, "error": None, "error_kind": None}
    digest, began = hashlib.sha256(), time.monotonic()
    ending = StopReason.FINISHED
    try:
        pool.wait_for_teacher()
        every_row = options.get("rows") == "all"
        requests = make_requests(start, stop, int(options.get("seed", 1)), sequence, every_row)
        ring = HiddenStateRing(requests, int(options.get("depth", 3)), 2 * sequence, width, dtype, pool)
        for lease in ring:
            if len(record["ids"]) == 5:
                began = time.monotonic()
            checked = options.get("check") != "no"
            if checked:
                expected = fake_hidden(lease.request, width).to(lease.hidden.dtype)
                assert_same(lease, expected, "when it is taken")
                digest.update(lease.request_id.to_bytes(8, "little"))
                digest.update(lease.hidden.contiguous().view(torch.uint8).numpy().tobytes())
            time.sleep(float(options.get("pause", 0)))
            if checked:
                assert_same(lease, expected, "before it is given back")
            record["ids"].append(lease.request_id)
            sys.stderr.write(f"step {lease.request_id}\n")  # one write: other threads write lines of their own
            lease.release()
        record["step_seconds"] = (time.monotonic() - began) / max(1, len(record["ids"]) - 5)
        record["stats"] = ring.stats()
        ring.close()
    except TeachersLost as error:
        record["error"], record["error_kind"] = str(error), "TeachersLost"
        ending = StopReason.STOPPED
    except DisaggkdError as error:
        record["error"], record["error_kind"] = str(error), type(error).__name__
    record["sha256"] = digest.hexdigest()
    record["teachers"] = pool.stats()
    pool.close(ending)
    print(json.dumps(record), flush=True)


def assert_same(lease: Lease, expected: Tensor, when: str) -> None:
    if not torch.equal(lease.hidden, expected):
        raise AssertionError(f"lease {lease.request_id} holds other hidden states than the teacher's {when}")


if __name__ == "__main__":
    main(sys.argv[1:])
