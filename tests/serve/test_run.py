"""The address that a server is to listen on: taken before anything is loaded, and by nobody else meanwhile."""

from __future__ import annotations

import errno
import re
import socket
from typing import Any

import pytest

from onela.config import ServerConfig
from onela.errors import ConfigError
from onela.serve import run
from onela.serve.run import bound, listen


def sharing() -> socket.socket:
    """As most servers make theirs."""
    sock = socket.socket()
    sock.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
    return sock


def test_a_taken_port_is_named_and_a_free_one_stays_free() -> None:
    with sharing() as taken:
        taken.bind(("127.0.0.1", 0))
        taken.listen()
        port = taken.getsockname()[1]
        with (
            pytest.raises(ConfigError, match=re.escape(f"port: cannot listen on {port} (")),
            bound(ServerConfig(port=port)),
        ):
            pytest.fail("the port is taken")
    for _ in range(2):
        with bound(ServerConfig(port=port)) as sockets:
            assert [sock.getsockname() for sock in sockets] == [("127.0.0.1", port)]


def test_nobody_gets_the_port_and_nobody_connects_before_it_is_listened_on() -> None:
    config = ServerConfig(port=0)
    with bound(config) as sockets:
        address = sockets[0].getsockname()
        for other in (socket.socket(), sharing()):
            with other, pytest.raises(OSError, match="in use"):
                other.bind(address)
        with (
            pytest.raises(ConfigError, match=f"port: cannot listen on {address[1]} "),
            bound(ServerConfig(port=address[1])),
        ):
            pytest.fail("the port is taken")
        with pytest.raises(ConnectionRefusedError):
            socket.create_connection(address)
        listen(sockets, config)
        socket.create_connection(address).close()


def test_a_server_may_start_again_where_one_has_just_ended() -> None:
    """Its connections, which it has closed first, hold the address for a minute."""
    with bound(ServerConfig(port=0)) as sockets:
        address = sockets[0].getsockname()
        listen(sockets, ServerConfig(port=address[1]))
        with socket.create_connection(address) as client:
            sockets[0].accept()[0].close()
            assert client.recv(1) == b""
    with socket.socket() as alone, pytest.raises(OSError, match="in use"):
        alone.bind(address)
    with bound(ServerConfig(port=address[1])) as sockets:
        with sharing() as other, pytest.raises(OSError, match="in use"):
            other.bind(address)
        listen(sockets, ServerConfig(port=address[1]))
        socket.create_connection(address).close()


def test_a_name_for_several_addresses_has_one_port() -> None:
    with bound(ServerConfig(host="localhost", port=0)) as sockets:
        assert len({sock.getsockname()[1] for sock in sockets}) == 1
        assert ("127.0.0.1", sockets[0].getsockname()[1]) in [sock.getsockname() for sock in sockets]


@pytest.mark.parametrize("reason", [errno.EAFNOSUPPORT, errno.EADDRNOTAVAIL])
def test_a_name_for_a_protocol_that_this_host_has_not(reason: int, monkeypatch: pytest.MonkeyPatch) -> None:
    """As localhost is where IPv6 is switched off; without any other there is nothing to listen on."""
    lacking = (socket.AF_INET6, socket.SOCK_STREAM, 6, "", ("::1", 0, 0, 0))
    found = [lacking, (socket.AF_INET, socket.SOCK_STREAM, 6, "", ("127.0.0.1", 0))]
    original = run._bind

    def bind(family: int, *rest: Any) -> socket.socket:
        if family == socket.AF_INET6:
            raise OSError(reason, "no such protocol")
        return original(family, *rest)

    monkeypatch.setattr(run, "_bind", bind)
    monkeypatch.setattr(socket, "getaddrinfo", lambda *_, **__: found)
    with bound(ServerConfig(host="localhost", port=0)) as sockets:
        assert [sock.family for sock in sockets] == [socket.AF_INET]
    del found[1]
    with (
        pytest.raises(ConfigError, match="host: cannot listen on 'localhost' "),
        bound(ServerConfig(host="localhost", port=0)),
    ):
        pytest.fail("there is no address")
