"""A teacher process of the transport's tests: transport_teacher.py ROLE ENDPOINT [key=value ...]."""

from __future__ import annotations

import json
import signal
import sys
import threading
import time

import torch
from transport_parts import WIDTH, fake_hidden

from disaggkd_cli.transport import Identity, open_store, serve


def main(arguments: list[str]) -> None:
    role, endpoint, *pairs = arguments
    options = dict(pair.split("=") for pair in pairs)
    width = int(options.get("width", WIDTH))
    pause = float(options.get("pause", 0))
    timeout = float(options.get("timeout", 5))
    stop = threading.Event()
    signal.signal(signal.SIGTERM, lambda *_: stop.set())

    ones = torch.ones(int(options.get("ones", 0)), width, dtype=torch.bfloat16)

    def forward(request):
        time.sleep(pause)
        if len(ones):
            return ones[: request.num_rows]
        return fake_hidden(request, width)

    served = serve(
        lambda: open_store(endpoint, host_it=False, timeout=timeout),
        Identity(role, options.get("fingerprint", "f"), "t", 1000, width, options.get("dtype", "bfloat16")),
        forward,
        timeout=timeout,
        bind=options.get("bind", "loopback"),
        student_wait=float(options.get("student_wait", 20)),
        stop=stop,
        on_event=lambda line: print(line, file=sys.stderr, flush=True),
    )
    print(json.dumps(served.__dict__), flush=True)


if __name__ == "__main__":
    main(sys.argv[1:])
