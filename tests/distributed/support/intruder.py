"""A process that has reached a run's rendezvous and knows no secret: intruder.py ENDPOINT WHAT SECONDS.

`impersonate` copies the identity of a teacher that announced itself, announces itself beside it, and answers what it is
asked with other hidden states. `garbage` writes nonsense over what is there. `delete` deletes it, again and again.
"""

from __future__ import annotations

import json
import os
import sys
import threading
import time
from dataclasses import replace

import torch
import torch.distributed as dist

from disaggkd_cli.transport import Identity, open_store, serve

SEAL = 32


def find(store, ending, deadline):
    """Return the first key that ends so, once there is one."""
    while time.monotonic() < deadline:
        for key in store.list_keys():
            if key.endswith(ending):
                return key
        time.sleep(0.02)
    raise SystemExit("nothing to intrude on")


def identity_in(entry: bytes) -> tuple[bytes, Identity]:
    for seal in (0, SEAL):
        try:
            json.loads(entry[seal:])
            return entry[:seal], Identity.decode(entry[seal:])
        except ValueError:
            continue
    raise SystemExit("no identity")


def impersonate(endpoint, deadline):
    store = open_store(endpoint, host_it=False, timeout=60)
    key = find(store, "teacher/0/identity", deadline)
    seal, identity = identity_in(store.get(key))
    root = key.partition("disaggkd/")[0].rstrip("/")

    class Copied(Identity):
        def encode(self):
            return seal + super().encode()

    def connect():
        ours = open_store(endpoint, host_it=False, timeout=60)
        return dist.PrefixStore(root, ours) if root else ours

    def forward(request):
        return torch.zeros(request.num_rows, identity.hidden_size)

    stop = threading.Event()
    threading.Timer(deadline - time.monotonic(), stop.set).start()
    copied = Copied(**vars(replace(identity, role="teacher 9")))
    served = serve(connect, copied, forward, timeout=10, student_wait=60, stop=stop, on_event=print)
    print(f"answered {served.requests} requests")


def overwrite(endpoint, deadline, what):
    store = open_store(endpoint, host_it=False, timeout=60)
    find(store, "/identity", deadline)
    while time.monotonic() < deadline:
        try:
            for key in store.list_keys():
                if "disaggkd/" not in key:
                    continue  # torch's own groups are torch's own
                if what == "delete":
                    store.delete_key(key)
                elif not key.endswith(("teachers", "changes", "alive", "invitations")):
                    store.set(key, os.urandom(100))
                else:
                    store.set(key, b"no number")
        except RuntimeError:
            pass  # the store ends connections; come again
        time.sleep(0.1)


if __name__ == "__main__":
    where, what, seconds = sys.argv[1:]
    until = time.monotonic() + float(seconds)
    impersonate(where, until) if what == "impersonate" else overwrite(where, until, what)
