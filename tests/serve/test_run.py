"""The address that a server is to listen on, looked at before anything is loaded."""

from __future__ import annotations

import re
import socket

import pytest

from onela.config import ServerConfig
from onela.errors import ConfigError
from onela.serve.run import check_address


def test_a_taken_port_is_named_and_a_free_one_stays_free() -> None:
    with socket.socket() as taken:
        taken.bind(("127.0.0.1", 0))
        taken.listen()
        port = taken.getsockname()[1]
        with pytest.raises(ConfigError, match=re.escape(f"port: cannot listen on {port} (")):
            check_address(ServerConfig(port=port))
    for _ in range(2):
        check_address(ServerConfig(port=port))
