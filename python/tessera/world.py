"""Joining a job, and its process groups."""

from __future__ import annotations

import atexit
import os
import signal
import socket
import sys
import threading
import weakref
from collections.abc import Callable, Sequence

import torch
import torch.distributed as dist

from . import _C

ProcessGroup = _C.ProcessGroup

_world: _C.World | None = None
_joined: weakref.ref | None = None  # the default group of torch.distributed whose ranks the world has
_groups: dict[tuple[int, ...], ProcessGroup | None] = {}
_beside: "weakref.WeakKeyDictionary[dist.ProcessGroup, _C.World]" = weakref.WeakKeyDictionary()
_lock = threading.Lock()


def init(*, timeout: float | None = None, backend: str = "", transport: str = "auto") -> None:
    """Joins the job of this process's launcher, and makes it the default of the process.

    Where `torch.distributed` is initialized, the ranks are those of its default process group. Otherwise they are those
    of the environment (torchrun, `tessera run`, mpirun, srun), and a world of one without any; `init_process_group()` may
    come later.

    Collective. `timeout`: seconds that any wait may take; None: `TESSERA_TIMEOUT`, or 600. `backend`: a backend for
    tensors on devices, such as "nccl"; "": none. `transport`: "auto", "arena" (memory that the ranks of one host share)
    or "gloo" (messages), for tensors in host memory.

    Does nothing if the process has joined already, unless the default process group of `torch.distributed` has been made
    anew since.
    """
    global _world, _joined
    _end_waits_at_interrupts()
    with _lock:
        if _world is not None and not _is_outdated():
            return
        _groups.clear()
        _world = _joined = None
        if dist.is_available() and dist.is_initialized():
            store = dist.PrefixStore("tessera", dist.distributed_c10d._get_default_store())
            _world = _C.join_store(store, dist.get_rank(), dist.get_world_size(), timeout, backend, transport)
            _joined = weakref.ref(dist.group.WORLD)
        else:
            _world = _C.join(timeout, backend, transport)


def _end_waits_at_interrupts() -> None:
    # Another handler may return, and the wait could not go on.
    if signal.getsignal(signal.SIGINT) is signal.default_int_handler:
        _C.end_waits_at_interrupts()


def _is_outdated() -> bool:
    return _joined is not None and dist.is_initialized() and dist.group.WORLD is not _joined()


def is_initialized() -> bool:
    """True between `init()` and `shutdown()`."""
    return _world is not None


def shutdown() -> None:
    """Closes the connections; afterwards, models that use them throw. Called when the interpreter ends."""
    global _world, _joined
    with _lock:
        _groups.clear()
        _beside.clear()
        _world = _joined = None


def _forget_in_child() -> None:
    """A child has none of its parent's connections, nor the threads that would close them."""
    global _world, _joined
    for world in [_world, *_beside.values()]:
        if world is not None:
            world.abandon()
    _groups.clear()
    _beside.clear()
    _world = _joined = None


atexit.register(shutdown)
os.register_at_fork(after_in_child=_forget_in_child)


def rank() -> int:
    """This process's number among those of the job; 0 before `init()`."""
    return _world.rank if _world else 0


def size() -> int:
    """The number of processes of the job; 1 before `init()`."""
    return _world.size if _world else 1


def current_world(caller: str) -> _C.World:
    """Returns the world of this process. Raises `RuntimeError` before `init()`."""
    if _world is None:
        raise RuntimeError(f"[{caller}] call tessera.init() first")
    return _world


def default_group() -> ProcessGroup:
    """The process group of all ranks; that of this process alone before `init()`."""
    return _world.group if _world else _C.single_group()


def new_group(ranks: Sequence[int]) -> ProcessGroup | None:
    """Makes a process group of some ranks of the job, in this order.

    Collective over `ranks` alone; None on other ranks. A second call with the same ranks returns the first's group.
    """
    world = current_world("new_group")
    key = tuple(int(number) for number in ranks)
    if key not in _groups:
        _groups[key] = world.new_group(list(key))
    return _groups[key]


def resolve_group(group) -> ProcessGroup:
    """Returns the group for an argument: None stands for all ranks, and a group of `torch.distributed` for its ranks."""
    if group is None:
        _end_waits_at_interrupts()
        if dist.is_available() and dist.is_initialized():
            init()
        return default_group()
    if isinstance(group, ProcessGroup):
        return group
    if isinstance(group, dist.ProcessGroup):
        ranks = dist.get_process_group_ranks(group)
        if len(ranks) == dist.get_world_size():
            init()
            if (rank(), size()) == (dist.get_rank(), dist.get_world_size()):
                return default_group()
        return _group_beside(group, ranks)
    raise TypeError(f"a process group must be one of Tessera's or of torch.distributed; got {type(group).__name__}")


def _group_beside(group: dist.ProcessGroup, ranks: Sequence[int]) -> ProcessGroup:
    # The other ranks make no call: so its ranks join a world of their own.
    with _lock:
        if group not in _beside:
            store = dist.PrefixStore(f"tessera/{group.group_name}", dist.distributed_c10d._get_default_store())
            _beside[group] = _C.join_store(store, dist.get_rank(group), len(ranks), None, "", "auto")
        return _beside[group].group


def _free_port() -> int:
    with socket.socket() as listener:
        listener.bind(("127.0.0.1", 0))
        return listener.getsockname()[1]


def _run_rank(number: int, fn: Callable, args: tuple, count: int, port: int, threads: int) -> None:
    os.environ.update(RANK=str(number), WORLD_SIZE=str(count), LOCAL_RANK=str(number), LOCAL_WORLD_SIZE=str(count),
                      MASTER_ADDR="127.0.0.1", MASTER_PORT=str(port))
    torch.set_num_threads(threads)
    # torch's start_processes() has asked for SIGINT when the parent ends. Shells start background jobs with it ignored.
    if signal.getsignal(signal.SIGINT) is signal.SIG_IGN:
        torch.multiprocessing._prctl_pr_set_pdeathsig(signal.SIGTERM)
    try:
        fn(*args)
    finally:
        shutdown()


def spawn(fn: Callable, nprocs: int, args: tuple = (), *, threads_per_rank: int = 0, start_method: str = "spawn") -> None:
    """Runs `fn(*args)` in `nprocs` processes of this host, each a rank of one job, which it joins by `init()`, and waits for
    them.

    `threads_per_rank`: threads for operators; 0: an equal share of this process's. `start_method`: of Python's
    `multiprocessing`. Raises `torch.multiprocessing.ProcessRaisedException` if one raises; the others are then ended.
    """
    if nprocs < 1:
        raise ValueError(f"[spawn] nprocs must be positive; got {nprocs}")
    if start_method != "fork" and fn.__module__ == "__main__" and not hasattr(sys.modules["__main__"], "__file__"):
        raise ValueError(f"[spawn] processes that are started by \"{start_method}\" can't find {fn!r}, as it was defined in an "
                         "interactive interpreter: pass start_method=\"fork\", or put it into a module")
    threads = threads_per_rank or max(1, torch.get_num_threads() // nprocs)
    torch.multiprocessing.start_processes(_run_rank, (fn, args, nprocs, _free_port(), threads), nprocs=nprocs,
                                          start_method=start_method)
