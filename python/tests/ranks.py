"""Runs a function of a test on several ranks, which are processes of this host."""

import functools
import gc
import os
import pickle
import tempfile
import traceback
from pathlib import Path

import pytest
import torch
import torch._dynamo  # noqa: F401  Optimizers import it at their first step: so it is done once, and not on each rank.
import torch.distributed as dist

import tessera

torch.set_num_threads(1)  # ranks are forked, and would wait for threads of operators that only their parent has


def _rank_main(folder, fn, args, transport, joins):
    os.environ.setdefault("TESSERA_TIMEOUT", "60")
    if transport:
        os.environ["TESSERA_TRANSPORT"] = transport
    rank = os.environ["RANK"]
    try:
        if joins:
            tessera.init()
        result = pickle.dumps((fn(*args), None))
    except BaseException:
        result = pickle.dumps((None, traceback.format_exc()))
    (folder / rank).write_bytes(result)


def run_ranks(size, fn, *args, transport="", joins=True):
    """Returns the results of `fn(*args)` on each rank; fails with the tracebacks of those that raise. `joins`: the ranks
    have called `tessera.init()` before."""
    with tempfile.TemporaryDirectory() as folder:
        tessera.spawn(_rank_main, size, (Path(folder), fn, args, transport, joins), start_method="fork")
        results = [pickle.loads((Path(folder) / str(rank)).read_bytes()) for rank in range(size)]
    errors = "\n".join(f"rank {rank}:\n{error}" for rank, (_, error) in enumerate(results) if error)
    assert not errors, errors
    return [result for result, _ in results]


def in_process_group(function):
    """A function of a rank, run between `init_process_group()` and `destroy_process_group()`."""
    @functools.wraps(function)
    def call(*args):
        dist.init_process_group("gloo")
        try:
            return function(*args)
        finally:
            gc.collect()  # DDP waits for ever if it is freed after the group that it holds
            dist.destroy_process_group()

    return call


@pytest.fixture
def ranks():
    return run_ranks
