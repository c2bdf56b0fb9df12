"""Where listeners listen: on the asked address and nowhere else."""

import os
import socket

import psutil
import pytest

from disaggkd_cli.addresses import listen
from disaggkd_cli.errors import RunError, UserError
from disaggkd_cli.transport import open_store, resolve_bind, split_endpoint


def test_an_endpoint_is_host_and_port():
    assert split_endpoint("node7.cluster:29500") == ("node7.cluster", 29500)
    assert split_endpoint("[::1]:80") == ("::1", 80)
    for wrong in ("29500", "host:", ":1", "host:port", "host:70000"):
        with pytest.raises(UserError, match="launch.rendezvous"):
            split_endpoint(wrong)


def test_a_busy_port_is_a_message_that_names_it():
    with listen("127.0.0.1", 0) as taken:
        port = taken.getsockname()[1]
        with pytest.raises(UserError, match=f"cannot listen on 127.0.0.1:{port}"):
            open_store(f"127.0.0.1:{port}", host_it=True)


def test_an_address_of_another_machine_is_a_message_that_names_it():
    with pytest.raises(UserError, match="192.0.2.7:0"):
        listen("192.0.2.7", 0)


def test_the_store_listens_on_loopback_only():
    store = open_store("127.0.0.1:0", host_it=True)
    assert listening_addresses(store.port) == {"127.0.0.1"}
    assert open_store(f"127.0.0.1:{store.port}", host_it=False, timeout=5).add("x", 1) == 1


def test_the_store_takes_a_socket_that_already_listens():
    listener = listen("127.0.0.1", 0)
    store = open_store("127.0.0.1:0", host_it=True, listen_fd=listener.fileno())
    assert store.port == listener.getsockname()[1]
    listener.close()
    assert open_store(f"127.0.0.1:{store.port}", host_it=False, timeout=5).add("x", 1) == 1


def test_nobody_at_the_rendezvous_is_a_bounded_wait_that_names_it():
    with listen("127.0.0.1", 0) as probe:
        port = probe.getsockname()[1]
    with pytest.raises(RunError, match=f"127.0.0.1:{port} after 0.3 s"):
        open_store(f"127.0.0.1:{port}", host_it=False, timeout=0.3)


def test_links_bind_to_loopback_unless_told_otherwise(monkeypatch):
    monkeypatch.delenv("GLOO_SOCKET_IFNAME", raising=False)
    assert resolve_bind("loopback", "127.0.0.1:1") == "loopback"
    assert resolve_bind("auto", "localhost:1") == resolve_bind("all", "127.0.0.1:1") == "loopback"
    assert resolve_bind("10.0.0.5", "10.0.0.1:1") == "10.0.0.5"
    with pytest.raises(UserError, match="launch.bind=all"):
        resolve_bind("loopback", "10.0.0.1:29500")
    monkeypatch.setenv("GLOO_SOCKET_IFNAME", "eth7")
    assert resolve_bind("auto", "10.0.0.1:1") == "auto"


def listening_addresses(port):
    connections = psutil.Process(os.getpid()).net_connections(kind="inet")
    return {c.laddr.ip for c in connections if c.status == psutil.CONN_LISTEN and c.laddr.port == port}


def test_the_probe_of_this_test_sees_a_wildcard_listener():
    with socket.create_server(("", 0)) as everywhere:
        assert listening_addresses(everywhere.getsockname()[1]) == {"0.0.0.0"}
