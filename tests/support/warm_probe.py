"""Says what a started process finds, for the test of how processes are started."""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
import time


def main(what: str, *rest: str) -> None:
    if what == "describe":
        print(json.dumps(describe()))
        print("an error", file=sys.stderr)
        sys.exit(3)
    if what == "raise":
        raise ValueError("a traceback")
    if what == "write":
        os.write(int(rest[0]), b"through a passed descriptor")
    if what == "wait":
        signal.signal(signal.SIGUSR1, lambda *_: sys.exit(11))
        signal.signal(signal.SIGINT, signal.default_int_handler)  # a shell's background jobs are told to ignore it
        os.write(1, b"waiting\n")  # in one piece, beside whoever else writes
        time.sleep(60)
    if what == "run":  # as a supervisor: starts a child that must not outlive it
        from disaggkd_cli.supervise import _die_with_parent

        command = [sys.executable, "-m", "tests.support.warm_probe", "wait", *rest]
        environment = {**os.environ, "DISAGGKD_ROLE": "student"}
        child = subprocess.Popen(command, env=environment, start_new_session=True, preexec_fn=_die_with_parent)
        os.write(1, f"{child.pid} {type(child).__name__}\n".encode())
        time.sleep(60)


def describe() -> dict:
    return {
        "arguments": sys.argv[1:],
        "cwd": os.getcwd(),
        "role": os.environ.get("DISAGGKD_ROLE"),
        "parent": os.getppid(),
        "pid": os.getpid(),
        "leads": os.getsid(0) == os.getpid(),
        "threads": len(os.listdir("/proc/self/task")),
        "read": sys.stdin.readline(),
        "open": [number for number in range(64) if os.path.exists(f"/proc/self/fd/{number}")],
        "main": sys.modules["__main__"].__spec__.name,
    }


if __name__ == "__main__":
    main(*sys.argv[1:])
