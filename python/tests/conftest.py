"""Runs a function of a test on several ranks, which are processes of this host."""

import os
import pickle
import tempfile
import traceback
from pathlib import Path

import pytest

import tessera


def _rank_main(folder, fn, args, transport):
    os.environ.setdefault("TESSERA_TIMEOUT", "60")
    if transport:
        os.environ["TESSERA_TRANSPORT"] = transport
    tessera.init()
    try:
        result = pickle.dumps((fn(*args), None))
    except BaseException:
        result = pickle.dumps((None, traceback.format_exc()))
    (folder / str(tessera.rank())).write_bytes(result)


def run_ranks(size, fn, *args, transport=""):
    """Returns the results of `fn(*args)` on each rank; fails with the tracebacks of those that raise."""
    with tempfile.TemporaryDirectory() as folder:
        tessera.spawn(_rank_main, size, (Path(folder), fn, args, transport), start_method="fork")
        results = [pickle.loads((Path(folder) / str(rank)).read_bytes()) for rank in range(size)]
    errors = "\n".join(f"rank {rank}:\n{error}" for rank, (_, error) in enumerate(results) if error)
    assert not errors, errors
    return [result for result, _ in results]


@pytest.fixture
def ranks():
    return run_ranks
