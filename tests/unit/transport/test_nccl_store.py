"""What a NCCL pair's watchdog writes reaches no other group, however deep it digs for the run's store."""

import threading
from datetime import timedelta

import torch
import torch.distributed as dist

from disaggkd_cli.transport import nccl_payloads
from disaggkd_cli.transport.nccl_payloads import form_nccl_payloads
from disaggkd_cli.transport.nccl_store import NcclPairStore
from disaggkd_cli.transport.pair import STUDENT, TEACHER
from tests.unit.transport.fake_cuda import FakeCuda, FakeNccl

DUMP_SIGNAL = "exception_dump"  # as torch 2.13's watchdog names it


def beneath(store):
    """The store that a group takes for that of the whole run: torch's own way down, past all prefixes."""
    return dist.PrefixStore("pair", store)._underlying_non_prefix_store


def test_two_sides_meet_and_part():
    run = dist.HashStore()
    run.set_timeout(timedelta(seconds=5))
    one, other = (NcclPairStore(dist.PrefixStore("link/7/nccl", run)) for _ in range(2))
    # Through C++, as a group calls it.
    here, there = dist.PrefixStore("0", one), dist.PrefixStore("0", other)
    here.set("id", b"\x00\xff")
    there.wait(["id"], timedelta(seconds=1))
    assert there.get("id") == b"\x00\xff" and there.check(["id"]) and not there.check(["no"])
    assert (here.add("count", 2), there.add("count", 3)) == (2, 5)
    assert there.compare_set("id", b"\x00\xff", b"new") == b"new" == here.get("id")
    assert here.num_keys() == 2 and there.delete_key("count") and here.num_keys() == 1
    assert run.num_keys() == 1 and run.get("link/7/nccl/0/id") == b"new"
    one.leave()
    here.set("late", b"1")
    assert here.check(["late"]) and not there.check(["late"]) and not here.check(["id"])
    assert run.num_keys() == 1


def test_a_dump_signal_of_a_pair_does_not_reach_the_runs_store(monkeypatch):
    run = dist.HashStore()
    stores, channels = [], []

    class Group(FakeNccl):
        def __init__(self, store, side, device):
            stores.append(store)
            beneath(store).set(DUMP_SIGNAL, b"1")  # while it forms, too: below the link's prefix only
            super().__init__(store, side, device)

    monkeypatch.setattr(nccl_payloads, "make_nccl_group", Group)

    def form(side):
        store = dist.PrefixStore("link/7/nccl", run)
        channels.append(form_nccl_payloads(store, side, FakeCuda(), name="link 7", timeout=5))

    threads = [threading.Thread(target=form, args=(side,)) for side in (STUDENT, TEACHER)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join(20)
    assert (len(stores), len(channels)) == (2, 2)
    keys = run.num_keys()
    for store in stores:
        beneath(store).set("late " + DUMP_SIGNAL, b"1")
    assert run.num_keys() == keys
    assert not run.check([DUMP_SIGNAL]) and not run.check(["late " + DUMP_SIGNAL])
    for channel in channels:
        assert channel._store in stores
        channel.close()


def test_a_group_of_torch_forms_over_it():
    run = dist.HashStore()
    run.set_timeout(timedelta(seconds=5))
    stores = [NcclPairStore(dist.PrefixStore("link/7/nccl", run)) for _ in range(2)]
    sums = {}

    def form(side):
        group = FakeNccl(stores[side], side, None).gloo
        stores[side].leave()
        tensor = torch.full((3,), 1.0 + side)
        group.allreduce([tensor]).wait()
        sums[side] = tensor.tolist()

    threads = [threading.Thread(target=form, args=(side,)) for side in (0, 1)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join(20)
    assert sums == {0: [3.0] * 3, 1: [3.0] * 3}
