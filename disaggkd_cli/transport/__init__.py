"""How hidden states travel: links between student ranks and teacher replicas, and the ring that prefetches over them.

Teacher side (one call per teacher rank; blocks until the student ends):

    from disaggkd_cli.transport import Identity, open_store, serve

    served = serve(
        lambda: open_store("127.0.0.1:29500", host_it=False, timeout=60),   # called again if the store vanishes
        Identity("teacher 1", teacher_fingerprint="...", tokenizer_fingerprint="...", vocabulary_size=49152,
                 hidden_size=576, wire_dtype="bfloat16", run_id=""),
        forward,                       # Request -> [R, H_t] hidden states; runs in the calling thread
        timeout=60, student_wait=300, device=device, backend="auto", stop=threading_event,
        on_event=print)
    served.reason                      # "finished" | "stopped" | "told to stop" | "student vanished"

Student side (per student rank):

    store = open_store("127.0.0.1:29500", host_it=rank == 0)               # port 0 is fine: store.port
    pool = TeacherPool(store, Identity("student 0", ...), timeout=60, teacher_wait=300, leader=rank == 0,
                       device=device, backend="auto", on_event=print)
    pool.wait_for_teacher()            # IncompatiblePeer (a UserError) or TeachersLost
    ring = HiddenStateRing(requests, depth=3, slot_rows=2048, width=576, dtype="bfloat16", pool=pool)
    lease = ring.take()                # in the iterator's order; TeachersLost -> save and exit 75
    lease.hidden                       # [R, H_t] in the wire dtype on the pool's device, a view of the slot
    lease.release()                    # the credit for the next request, once all that reads it is enqueued
    ring.stats()                       # ring_fill, stall_seconds, received_bytes, teachers
    ring.close(); pool.close(StopReason.FINISHED)      # or STOPPED (saved and resumable): both end the teachers

`requests` is pulled from the ring's own feeder thread, at most `depth` ahead. Several rings (training, evaluation) may
share a pool. Between two GPUs payloads go over NCCL (without checksums), else over gloo, from and to a GPU through
page-locked host memory; both sides agree in the handshake (`backends`). A supervisor may host the store instead of
student rank 0; teachers survive the student's restart either way.
"""

from disaggkd_cli.addresses import listen, resolve_bind, split_endpoint
from disaggkd_cli.transport.authentication import Secret
from disaggkd_cli.transport.errors import (
    ChannelWedged,
    CorruptPayload,
    ForwardFailed,
    IncompatiblePeer,
    LinkLost,
    ProtocolError,
    RequestsExhausted,
    TeachersLost,
)
from disaggkd_cli.transport.identity import Identity
from disaggkd_cli.transport.meter import name_bottleneck
from disaggkd_cli.transport.pool import TeacherPool
from disaggkd_cli.transport.protocol import Request, StopReason
from disaggkd_cli.transport.rendezvous import open_store
from disaggkd_cli.transport.ring import HiddenStateRing, Lease
from disaggkd_cli.transport.server import Served, serve

__all__ = [
    "ChannelWedged",
    "CorruptPayload",
    "ForwardFailed",
    "HiddenStateRing",
    "Identity",
    "IncompatiblePeer",
    "Lease",
    "LinkLost",
    "ProtocolError",
    "Request",
    "RequestsExhausted",
    "Secret",
    "Served",
    "StopReason",
    "TeacherPool",
    "TeachersLost",
    "listen",
    "name_bottleneck",
    "open_store",
    "resolve_bind",
    "serve",
    "split_endpoint",
]
