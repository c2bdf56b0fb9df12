"""The engines of a replica of several ranks, by `teacher.parallelism`: who loads what, and whose forward answers.

A new engine is a file with such a function, a line below, and its name, rule and servers in `layouts.rules`.
"""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from typing import Any

from disaggkd_cli.layouts import FSDP, PIPELINE, TENSOR
from disaggkd_cli.replica.run import run_replica
from disaggkd_cli.replica.run_stages import run_stages
from disaggkd_cli.replica.sharded import load_sharded_teacher
from disaggkd_cli.replica.tensor import load_tensor_parallel_teacher

Engine = Callable[..., Any]
"""`f(config, place, device, stop, loaded, teach)`: runs one rank to its end and returns what `teach` returned, or None
where this rank serves nobody. It calls `loaded()` once the teacher is there, then `teach(teacher, forward)`, or with a
third argument: how many threads may call `forward` at the same time. It ends soon after `stop` is set."""

ENGINES: dict[str, Engine] = {
    PIPELINE: run_stages,
    FSDP: partial(run_replica, load=load_sharded_teacher, shared=False),
    TENSOR: partial(run_replica, load=load_tensor_parallel_teacher, shared=True),
}
"""By `teacher.parallelism`; `auto` is settled before (`layout.settle_layout`)."""
