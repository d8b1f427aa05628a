# SPDX-License-Identifier: Apache-2.0
"""File descriptors passed between ranks of one host, over Unix datagram sockets (``SCM_RIGHTS``).

Sockets have names in the abstract namespace, from the operating system's random numbers: engines seed Python's
``random`` alike on every rank, and nothing is left in a file system. Descriptors that arrive are close-on-exec.
"""

from __future__ import annotations

import array
import contextlib
import os
import secrets
import socket
from typing import Any, Callable, Iterable, Optional, Sequence

from .memory.transaction import Transaction

__all__ = ["FdExchange", "broadcast_fd", "exchange_fds", "recv_fd_dgram", "send_fd_dgram"]


def _fd_ancillary(fd: int) -> tuple[tuple[int, int, array.array[int]]]:
    """Return the ancillary data of a message that carries a descriptor."""
    return ((socket.SOL_SOCKET, socket.SCM_RIGHTS, array.array("i", [fd])),)


def _extract_fd(ancdata: Iterable[tuple[int, int, bytes]]) -> Optional[int]:
    """Return the descriptor of received ancillary data, or None if it has none; close those beyond the first."""
    found: list[int] = []
    for level, kind, data in ancdata:
        if level == socket.SOL_SOCKET and kind == socket.SCM_RIGHTS:
            numbers: array.array[int] = array.array("i")
            numbers.frombytes(data[: len(data) - len(data) % numbers.itemsize])
            found += numbers
    for fd in found[1:]:
        os.close(fd)
    return found[0] if found else None


def send_fd_dgram(sock: socket.socket, fd: int, dest_path: Any) -> None:
    """Send a descriptor to the socket bound to ``dest_path``."""
    sock.sendmsg([b"\0"], _fd_ancillary(fd), 0, dest_path)


def recv_fd_dgram(sock: socket.socket) -> int:
    """Receive a descriptor. The caller closes it."""
    size = socket.CMSG_SPACE(array.array("i").itemsize)
    _, ancdata, flags, _ = sock.recvmsg(64, size, getattr(socket, "MSG_CMSG_CLOEXEC", 0))
    fd = _extract_fd(ancdata)
    if fd is None:
        raise RuntimeError(
            f"recv_fd_dgram: the message must carry a descriptor, got no file descriptor (flags {flags}); the limit of "
            "open files of this process may be reached"
        )
    return fd


class FdExchange:
    """One exchange of descriptors: bind on all ranks, then send on all ranks, then receive.

    There is a socket per sender, and each gets one message: nobody waits, whatever the size of the group.
    """

    def __init__(self, rank: int, size: int) -> None:
        self.rank = rank
        self._sockets: dict[int, socket.socket] = {}
        for peer in range(size):
            if peer != rank:
                self._sockets[peer] = socket.socket(socket.AF_UNIX, socket.SOCK_DGRAM | socket.SOCK_CLOEXEC)

    def close(self) -> None:
        for one in self._sockets.values():
            one.close()

    def bind(self) -> str:
        """Bind the sockets and return the name of this rank, to which the other ranks send."""
        name = f"flashinfer-{secrets.token_hex(16)}"
        for peer, one in self._sockets.items():
            one.bind(_address(name, peer))
            one.setblocking(False)
        return name

    def send(self, names: Sequence[str], outgoing: dict[int, int]) -> None:
        """Send a descriptor to each rank of ``outgoing``; ``names`` are those of all ranks."""
        for peer, fd in outgoing.items():
            send_fd_dgram(self._sockets[peer], fd, _address(names[peer], self.rank))

    def receive(self, source: int) -> int:
        """Return the descriptor that a rank has sent."""
        return recv_fd_dgram(self._sockets[source])


def _address(name: str, sender: int) -> str:
    return f"\0{name}-{sender}"  # a leading zero: the abstract namespace


def _run(comm: Any, op: str, outgoing: Callable[[], dict[int, int]], incoming: Iterable[int]) -> dict[int, int]:
    """Exchange descriptors in a transaction of their own."""
    with Transaction(comm, op) as transaction, contextlib.ExitStack() as sockets:
        exchange = FdExchange(transaction.rank, transaction.size)
        sockets.callback(exchange.close)
        to_send: dict[int, int] = {}
        received: dict[int, int] = {}

        def bind() -> str:
            to_send.update(outgoing())
            for fd in set(to_send.values()):
                os.fstat(fd)
            return exchange.bind()

        def receive() -> None:
            for source in incoming:
                received[source] = exchange.receive(source)
                transaction.on_failure(os.close, received[source])

        names = transaction.stage("bind sockets", bind)
        transaction.stage("send descriptors", lambda: exchange.send(names, to_send))
        transaction.stage("receive descriptors", receive)
        transaction.commit()
        return received


def exchange_fds(comm: Any, local_fd: int) -> list[int]:
    """Return the descriptors that all ranks passed, in rank order; this rank's own is ``local_fd`` itself.

    Every rank of ``comm`` calls it, all on one host. The function closes no descriptor; the caller closes each once.
    """
    size, own = int(comm.Get_size()), int(comm.Get_rank())
    others = [rank for rank in range(size) if rank != own]
    received = _run(comm, "exchange_fds", lambda: dict.fromkeys(others, local_fd), others)
    return [received.get(rank, local_fd) for rank in range(size)]


def broadcast_fd(comm: Any, local_fd: Optional[int], root: int) -> int:
    """Return the descriptor of rank ``root``: there ``local_fd`` itself, elsewhere a copy that the caller closes."""
    size, own = int(comm.Get_size()), int(comm.Get_rank())
    if not 0 <= root < size:
        raise ValueError(f"broadcast_fd: root must be a rank below {size}, got {root}")
    if size == 1 and local_fd is not None:
        return local_fd

    def outgoing() -> dict[int, int]:
        if own != root:
            return {}
        if local_fd is None:
            raise ValueError("broadcast_fd: local_fd must be a descriptor on rank root, got None")
        return {peer: local_fd for peer in range(size) if peer != root}

    received = _run(comm, "broadcast_fd", outgoing, [] if own == root else [root])
    return received[root] if own != root else int(local_fd)  # type: ignore[arg-type]
