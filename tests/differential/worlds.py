"""Ranks that live long: processes of one job that run one function after another, and are replaced when one dies or hangs."""

from __future__ import annotations

import multiprocessing
import multiprocessing.connection
import os
import signal
import socket
import time
import traceback

import torch

import tessera

_context = multiprocessing.get_context("forkserver")
# Ranks are forked from a process that has loaded everything and computed nothing; backwards and optimizers load _dynamo.
_PRELOADED = ["tessera", "torch._dynamo"]
_context.set_forkserver_preload(_PRELOADED)


def preload(*modules: str) -> None:
    """Loads these as well, once for all ranks; to be called before the first `World`."""
    _context.set_forkserver_preload([*_PRELOADED, *modules])


_START = 300  # seconds that ranks may take to load everything, on a machine with much else to do


class Died(Exception):
    """A rank ended or was silent for too long; its text says which and how."""


def _ready() -> None:
    pass


def _serve(rank: int, size: int, port: int, transport: str, timeout: float, pipe) -> None:
    os.environ.update(RANK=str(rank), WORLD_SIZE=str(size), LOCAL_RANK=str(rank), LOCAL_WORLD_SIZE=str(size),
                      MASTER_ADDR="127.0.0.1", MASTER_PORT=str(port), TESSERA_CHECK_LAYOUTS="1")
    torch.set_num_threads(1)  # sums have one order
    tessera.init(transport=transport, timeout=timeout)
    while True:
        function, args = pipe.recv()
        try:
            pipe.send((function(*args), None))
        except Exception:
            pipe.send((None, traceback.format_exc()))


def _free_port() -> int:
    with socket.socket() as listener:
        listener.bind(("127.0.0.1", 0))
        return listener.getsockname()[1]


class World:
    """`size` ranks. `timeout`: seconds after which a rank's wait for others is an error; after twice as many for one call, the
    ranks hang."""

    def __init__(self, size: int, transport: str = "auto", timeout: float = 30):
        self._size, self._transport, self._timeout = size, transport, timeout
        self._ranks: list = []

    def __enter__(self) -> "World":
        return self

    def __exit__(self, *exception) -> None:
        self.close()

    def _start(self) -> None:
        port = _free_port()
        for rank in range(self._size):
            ours, theirs = _context.Pipe()
            process = _context.Process(
                target=_serve, args=(rank, self._size, port, self._transport, self._timeout, theirs), daemon=True)
            process.start()
            theirs.close()
            self._ranks.append((process, ours))

    def close(self) -> None:
        """Ends the ranks; the next `send()` starts others."""
        for process, pipe in self._ranks:
            process.kill()
            process.join()
            pipe.close()
        self._ranks = []

    def send(self, function, *args) -> None:
        """Lets every rank begin `function(*args)`."""
        if not self._ranks:
            self._start()
            self._tell(_ready, ())
            self.receive(_START)
        self._tell(function, args)

    def _tell(self, function, args) -> None:
        for _, pipe in self._ranks:
            try:
                pipe.send((function, args))
            except BrokenPipeError:
                pass  # receive() finds it dead

    def receive(self, seconds: float = 0) -> list:
        """Returns what each rank's function returned; raises `Died`, and `RuntimeError` with the traceback if one raised."""
        seconds = seconds or 2 * self._timeout
        end = time.monotonic() + seconds
        waiting = {pipe: rank for rank, (_, pipe) in enumerate(self._ranks)}
        answers = {}
        while waiting:
            ready = multiprocessing.connection.wait(waiting, max(0, end - time.monotonic()))
            if not ready:
                self._fail(f"rank {min(waiting.values())} hangs: no answer in {seconds:g} s")
            for pipe in ready:
                rank = waiting.pop(pipe)
                try:
                    answers[rank], error = pipe.recv()
                except (EOFError, ConnectionResetError):
                    self._fail(f"rank {rank} died of " + self._death(rank))
                if error:
                    self.close()
                    raise RuntimeError(f"rank {rank}: {error}")
        return [answers[rank] for rank in sorted(answers)]

    def run(self, function, *args) -> list:
        self.send(function, *args)
        return self.receive()

    def _death(self, rank: int) -> str:
        process = self._ranks[rank][0]
        process.join()
        return signal.Signals(-process.exitcode).name if process.exitcode < 0 else f"exit code {process.exitcode}"

    def _fail(self, text: str):
        self.close()
        raise Died(text)
