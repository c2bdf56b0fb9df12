"""Run a function of a test on several ranks, each a forked process of its own."""

from __future__ import annotations

import pickle
import sys
import tempfile
import time
import traceback
from collections.abc import Callable
from pathlib import Path

from tests.support.warm import WarmPopen


def spawn(function: Callable[..., None], arguments: tuple, ranks: int) -> None:
    """Run `function(rank, *arguments)` on every rank to its end.

    Args:
        function: of a module that can be imported.

    Raises:
        AssertionError: a rank failed; its traceback is the message, and the others are ended.
    """
    with tempfile.TemporaryDirectory() as folder:
        order = Path(folder, "order")
        order.write_bytes(pickle.dumps((function, arguments)))
        command = [sys.executable, "-m", "tests.support.spawn", str(order)]
        running = {rank: WarmPopen([*command, str(rank)]) for rank in range(ranks)}
        try:
            while running:
                for rank, process in list(running.items()):
                    if process.poll() is not None:
                        del running[rank]
                        _assert_well(rank, process.returncode, Path(f"{order}.{rank}"))
                time.sleep(0.01)
        finally:
            for process in running.values():
                process.kill()
                process.wait()


def _assert_well(rank: int, code: int, failure: Path) -> None:
    said = failure.read_text() if failure.exists() else ""
    assert code == 0, f"rank {rank} ended with {code}\n{said}"


def main(order: str, rank: str) -> None:
    function, arguments = pickle.loads(Path(order).read_bytes())
    try:
        function(int(rank), *arguments)
    except BaseException:
        Path(f"{order}.{rank}").write_text(traceback.format_exc())
        raise


if __name__ == "__main__":
    main(*sys.argv[1:])
