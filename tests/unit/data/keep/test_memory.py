"""Ranks share the tokens through the page cache: none holds them in memory of its own."""

import json
import random
import subprocess
import sys
import textwrap
from pydoc_data.topics import topics

import pytest

from tests.support.runs import TINY_TEACHER

MEGABYTES = 40
SCRIPT = textwrap.dedent("""
    import json, sys, threading, time
    from types import SimpleNamespace
    import numpy as np
    from disaggkd_cli.data import StreamOrder, load_splits, load_tokenizer

    def anonymous():
        for line in open("/proc/self/status"):
            if line.startswith("RssAnon:"):
                return int(line.split()[1]) / 1024

    text, cache, tokenizer = sys.argv[1:]
    tokenizer = load_tokenizer(tokenizer)
    tokenizer("warm up")
    config = SimpleNamespace(
        train=text, eval=0.01, format="auto", sequence_length=512, packing="auto", cache=cache, workers=2
    )
    before, peak, done = anonymous(), 0.0, threading.Event()

    def watch():
        global peak
        while not done.wait(0.02):
            peak = max(peak, anonymous())

    watcher = threading.Thread(target=watch)
    watcher.start()
    started = time.monotonic()
    train = load_splits(config, tokenizer, pack=True, seed=1).train
    seconds = time.monotonic() - started
    for index in StreamOrder(train, 1, 8).indices(0, len(train)):
        train.sequence(int(index)).input_ids.sum()
    done.set()
    watcher.join()
    print(json.dumps({
        "tokens": train.token_count, "seconds": seconds, "peak": peak - before, "held": anonymous() - before,
    }))
""")


@pytest.mark.slow
@pytest.mark.timeout(900)
def test_neither_who_builds_nor_who_maps_holds_the_tokens(tmp_path):
    draw = random.Random(1)
    texts = [topics[name] for name in sorted(topics)]
    with (tmp_path / "big.txt").open("w") as file:
        while file.tell() < MEGABYTES << 20:
            draw.shuffle(texts)
            file.write("\n\n".join(texts))

    def load():
        arguments = [str(tmp_path / "big.txt"), str(tmp_path / "cache"), str(TINY_TEACHER)]
        output = subprocess.run([sys.executable, "-c", SCRIPT, *arguments], capture_output=True, text=True, check=True)
        return json.loads(output.stdout.splitlines()[-1])

    built, mapped = load(), load()
    print(built, mapped)
    megabytes_of_tokens = built["tokens"] * 8 / (1 << 20)
    assert mapped["tokens"] == built["tokens"] > MEGABYTES << 18
    assert mapped["peak"] < 0.1 * megabytes_of_tokens
    # Text and tokens of a few batches on their way, and the index of rows.
    assert built["peak"] < 0.8 * megabytes_of_tokens
