# SPDX-License-Identifier: Apache-2.0
"""File descriptors passed between ranks."""

from __future__ import annotations

import array
import os
import socket

import pytest

from flashinfer.comm.fd_exchange import (
    _extract_fd,
    _fd_ancillary,
    broadcast_fd,
    exchange_fds,
    recv_fd_dgram,
    send_fd_dgram,
)

from .foreign import EngineBackend


def open_files():
    """Return the number of descriptors of this process."""
    return len(os.listdir("/proc/self/fd"))


def memory_file(text):
    fd = os.memfd_create("test")
    os.write(fd, text.encode())
    return fd


def read(fd):
    return os.pread(fd, 64, 0).decode()


def exchange(comm, times):
    seen = []
    for _ in range(times):
        before = open_files()
        own = memory_file(f"of {comm.Get_rank()}")
        found = exchange_fds(EngineBackend(comm), own)
        seen.append([read(fd) for fd in found])
        assert found[comm.Get_rank()] == own and not any(os.get_inheritable(fd) for fd in found)
        for fd in found:
            os.close(fd)
        assert open_files() == before
    return seen


@pytest.mark.parametrize("size", [2, 4])
def test_exchange(ranks, size):
    assert ranks(size).run(exchange, 3) == [[[f"of {rank}" for rank in range(size)]] * 3] * size


def broadcast(comm, root):
    before = open_files()
    own = memory_file("of root") if comm.Get_rank() == root else None
    fd = broadcast_fd(comm, own, root)
    text = read(fd)
    os.close(fd)
    return text, open_files() - before


def test_broadcast(ranks):
    assert ranks(4).run(broadcast, 2) == [("of root", 0)] * 4


def broadcast_nothing(comm):
    broadcast_fd(comm, None, 0)


def test_broadcast_of_nothing_fails_on_all_ranks(ranks):
    for failure in ranks(2).fail(broadcast_nothing):
        assert failure.classes[0] == "ValueError" and "rank 0 failed to bind sockets" in failure.text


def close_own(comm, culprit):
    before = open_files()
    own = memory_file("x")
    passed = own
    if comm.Get_rank() == culprit:
        os.close(own)
        passed = 9999
    try:
        exchange_fds(comm, passed)
    except Exception as error:
        if passed == own:
            os.close(own)
        return type(error).__name__, str(error), open_files() - before


def test_descriptor_that_is_not_open_fails_on_all_ranks(ranks):
    outcomes = ranks(2).run(close_own, 0)
    assert outcomes[0] == outcomes[1] and outcomes[0][2] == 0
    assert "rank 0 failed to bind sockets" in outcomes[0][1] and "Bad file descriptor" in outcomes[0][1]


def test_one_rank_asks_nobody():
    class Alone:
        def Get_rank(self):
            return 0

        def Get_size(self):
            return 1

    fd = memory_file("x")
    try:
        assert broadcast_fd(Alone(), fd, 0) == fd
    finally:
        os.close(fd)


def test_messages(tmp_path):
    ours = socket.socket(socket.AF_UNIX, socket.SOCK_DGRAM)
    theirs = socket.socket(socket.AF_UNIX, socket.SOCK_DGRAM)
    fd = memory_file("hello")
    try:
        theirs.bind(str(tmp_path / "socket"))
        send_fd_dgram(ours, fd, str(tmp_path / "socket"))
        copy = recv_fd_dgram(theirs)
        assert copy != fd and read(copy) == "hello"
        os.close(copy)
        ours.sendto(b"\0", str(tmp_path / "socket"))
        with pytest.raises(RuntimeError, match="no file descriptor"):
            recv_fd_dgram(theirs)
    finally:
        ours.close()
        theirs.close()
        os.close(fd)


def test_ancillary_data():
    assert _fd_ancillary(7) == ((socket.SOL_SOCKET, socket.SCM_RIGHTS, array.array("i", [7])),)
    assert isinstance(_fd_ancillary.__annotations__["return"], str)
    assert _extract_fd([]) is None
