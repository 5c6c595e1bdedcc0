"""Sharded models in worker processes, in interactive interpreters, at interrupts and exits, and dropped by the hundred."""

import contextlib
import gc
import os
import signal
import subprocess
import sys
import threading
import time
import weakref

import pytest
import torch
import torch.distributed as dist
from torch import nn
from torch.utils.data import DataLoader, Dataset

import tessera
from models import LEVELS, batch, loss_of, make_net, my_rows


class Embedded(Dataset):
    """Uses a module in the workers."""

    def __init__(self, module):
        self.module = module

    def __len__(self):
        return 3

    def __getitem__(self, index):
        with torch.no_grad():
            return self.module(torch.ones(5) * index)


def _workers():
    for level in LEVELS:
        torch.manual_seed(0)
        module = nn.Sequential(nn.Linear(5, 7), nn.Linear(7, 3))
        sharded = tessera.fully_shard(module, level=level)
        with torch.no_grad():
            expected = torch.stack([sharded(torch.ones(5) * i) for i in range(3)])
        values = torch.cat(list(DataLoader(Embedded(module), num_workers=1, multiprocessing_context="fork")))
        assert torch.equal(values, expected), level
        for method in ("spawn", "forkserver"):
            with pytest.raises(RuntimeError, match="can't be pickled.*state_dict"):
                list(DataLoader(Embedded(module), num_workers=1, multiprocessing_context=method))
        sharded(torch.ones(5)).sum().backward()


def test_loader_workers_read_parameters_if_forked(ranks):
    ranks(2, _workers, transport="arena")


def _other_shape():
    net = nn.Linear(5, 7 + tessera.rank())
    with pytest.raises(ValueError, match=r"same on all ranks; rank 0 has 'weight' .*\[7, 5\].* rank 1 has 'weight' .*\[8, 5\]"):
        tessera.fully_shard(net)
    tessera.fully_shard(nn.Linear(5, 7))(torch.ones(5)).sum().backward()


def test_another_ranks_shape(ranks):
    ranks(2, _other_shape)


def _open_files_and_threads():
    gc.collect()
    return len(os.listdir("/proc/self/fd")), len(os.listdir("/proc/self/task"))


def _wraps_and_drops(count):
    alive = []
    for i in range(count):
        net = make_net()
        sharded = tessera.fully_shard(net, level=LEVELS[i % len(LEVELS)])
        optimizer = tessera.ShardedOptimizer(sharded, torch.optim.AdamW(net.parameters()))
        loss_of(sharded, my_rows(batch(0))).backward()
        optimizer.step()
        alive += [weakref.ref(it) for it in (net, sharded, optimizer, optimizer.optimizer, *net.parameters())]
        if i % 8 == 7:
            optimizer.unwrap()
            sharded.unwrap()
        del net, sharded, optimizer
        if i == 20:
            before = _open_files_and_threads()
    after = _open_files_and_threads()
    assert all(now <= then for now, then in zip(after, before)), f"{after} open files and threads, {before} before"
    assert not any(ref() is not None for ref in alive)


def test_dropped_models_leave_nothing(ranks):
    ranks(2, _wraps_and_drops, 300)


PROGRAM = """
import signal, sys, torch, tessera
signal.signal(signal.SIGINT, signal.default_int_handler)  # ignored where a shell runs the tests in the background
from torch.utils.data import DataLoader
tessera.init()
net = torch.nn.Sequential(*[torch.nn.Linear(100, 100) for _ in range(6)])
sharded = tessera.fully_shard(net)
optimizer = tessera.ShardedOptimizer(sharded, torch.optim.AdamW(net.parameters()))
def step():
    optimizer.zero_grad()
    sharded(torch.ones(8, 100)).sum().backward()
    optimizer.step()
step()
print("ready", flush=True)
while sys.argv[1] == "loop":
    step()
loss = sharded(torch.ones(8, 100)).sum()
grads = [parameter.grad for parameter in net.parameters()]
whole = sharded.keep_unsharded()
whole.__enter__()
loader = iter(DataLoader(range(8), num_workers=1))
next(loader)
"""


def _start(*arguments):
    port = tessera.world._free_port()
    environments = [{**os.environ, "RANK": str(rank), "WORLD_SIZE": "2", "LOCAL_RANK": str(rank), "LOCAL_WORLD_SIZE": "2",
                     "MASTER_ADDR": "127.0.0.1", "MASTER_PORT": str(port), "TESSERA_TIMEOUT": "60"} for rank in range(2)]
    return [subprocess.Popen([sys.executable, "-c", PROGRAM, *arguments], env=environment, stdout=subprocess.PIPE,
                             stderr=subprocess.PIPE, text=True) for environment in environments]


def test_exit_with_live_objects():
    for process in _start("once"):
        output, errors = process.communicate(timeout=60)
        assert process.returncode == 0 and output == "ready\n" and "Error" not in errors, errors


@pytest.mark.parametrize("interrupted", [[0, 1], [1]])
def test_interrupts_end_all_ranks(interrupted):
    processes = _start("loop")
    try:
        for process in processes:
            assert process.stdout.readline() == "ready\n"
        time.sleep(0.2)
        for rank in interrupted:
            processes[rank].send_signal(signal.SIGINT)
        for process in processes:
            _, errors = process.communicate(timeout=30)
            assert process.returncode not in (0, -signal.SIGSEGV, -signal.SIGABRT), errors
    finally:
        for process in processes:
            process.kill()


ORPHANS = """
import os, sys, time, tessera

def rank_main(folder):
    tessera.init()
    open(f"{folder}/{os.getpid()}", "w").close()
    time.sleep(120)

if __name__ == "__main__":
    tessera.spawn(rank_main, 2, (sys.argv[1],), start_method="fork")
"""


@pytest.mark.parametrize("disposition", [signal.SIG_DFL, signal.SIG_IGN])
def test_ranks_end_with_a_parent_that_is_killed(disposition, tmp_path):
    """A background job of a shell has SIGINT ignored."""
    parent = subprocess.Popen([sys.executable, "-c", ORPHANS, str(tmp_path)], start_new_session=True,
                              preexec_fn=lambda: signal.signal(signal.SIGINT, disposition))
    try:
        while parent.poll() is None and len(os.listdir(tmp_path)) < 2:
            time.sleep(0.05)
        ranks = [int(name) for name in os.listdir(tmp_path)]
        parent.kill()
        parent.wait()
        until = time.monotonic() + 20
        while any(os.path.exists(f"/proc/{rank}") and open(f"/proc/{rank}/stat").read().split()[2] != "Z" for rank in ranks):
            assert time.monotonic() < until, "a rank goes on without its parent"
            time.sleep(0.1)
    finally:
        with contextlib.suppress(ProcessLookupError):
            os.killpg(parent.pid, signal.SIGKILL)


WAITS = ("init", "forward", "backward", "step", "clip", "full_state", "save", "all_reduce")


def _interrupt_soon():
    threading.Timer(0.5, os.kill, (os.getpid(), signal.SIGINT)).start()


def _waits_for_rank_0(where, folder):
    signal.signal(signal.SIGINT, signal.default_int_handler)
    rank = int(os.environ["RANK"])
    if where == "init":
        if rank == 1:
            _interrupt_soon()
            with pytest.raises(KeyboardInterrupt):
                tessera.init()
        return
    tessera.init()
    net = make_net()
    sharded = tessera.fully_shard(net)
    clips = 1.0 if where == "step" else 0.0
    optimizer = tessera.ShardedOptimizer(sharded, torch.optim.AdamW(net.parameters()), max_grad_norm=clips)
    if where not in ("full_state", "all_reduce"):
        loss = loss_of(sharded, my_rows(batch(0)))
        if where != "backward":
            loss.backward()
    # A forward needs the values of rank 0's step; with shared memory, the step waits for it already.
    calls = {"forward": lambda: (optimizer.step(), loss_of(sharded, my_rows(batch(0)))), "backward": lambda: loss.backward(),
             "step": optimizer.step, "clip": lambda: sharded.clip_grad_norm_(1.0), "full_state": sharded.full_state,
             "save": lambda: tessera.save_checkpoint(folder / "checkpoint", sharded, optimizer),
             "all_reduce": lambda: tessera.world.default_group().all_reduce(torch.ones(3))}
    if rank == 0:
        while not all((folder / name).exists() for name in "12"):
            time.sleep(0.05)
        return
    if rank == 1:
        _interrupt_soon()
    with pytest.raises(BaseException) as raised:
        calls[where]()
    if rank == 1:
        assert raised.type is KeyboardInterrupt
    else:
        assert raised.type is dist.DistBackendError and "rank 1: it was interrupted" in str(raised.value)
    (folder / str(rank)).touch()


@pytest.mark.parametrize("transport", ["arena", "gloo"])
@pytest.mark.parametrize("where", WAITS)
def test_an_interrupt_ends_a_wait(ranks, where, transport, tmp_path):
    ranks(2 if where == "init" else 3, _waits_for_rank_0, where, tmp_path, transport=transport, joins=False)


def _has_a_handler():
    heard = []
    signal.signal(signal.SIGINT, lambda *_: heard.append(True))
    tessera.init()
    total = torch.ones(3)
    if tessera.rank() == 1:
        _interrupt_soon()
    else:
        time.sleep(1.5)
    tessera.world.default_group().all_reduce(total)
    assert torch.equal(total, torch.full((3,), 2.0)) and len(heard) == tessera.rank()


def test_a_wait_goes_on_for_a_programs_own_handler(ranks):
    ranks(2, _has_a_handler, joins=False)


INTERACTIVE = """import os, tessera
def work(value):
    tessera.init()
    os.write(1, b"rank %d of %d has %d\\n" % (tessera.rank(), tessera.size(), value))

tessera.spawn(work, 2, (7,))
tessera.spawn(work, 2, (7,), start_method="fork")
"""


def test_spawn_in_an_interactive_interpreter():
    run = subprocess.run([sys.executable, "-i"], input=INTERACTIVE, capture_output=True, text=True, timeout=60)
    assert "interactive interpreter: pass start_method=\"fork\"" in run.stderr, run.stderr
    assert sorted(run.stdout.split("\n"))[-2:] == ["rank 0 of 2 has 7", "rank 1 of 2 has 7"], run.stdout
