#!/usr/bin/env python3
"""Runs every operator of PyTorch's own tests on DistTensors, and compares its results and gradients with ordinary tensors'.

Prints a line for each operator with a case that is not right, and the counts. `--library dtensor` tries PyTorch's DTensor in the
same way."""

from __future__ import annotations

import argparse
import collections
import functools
import importlib.util
import itertools
import os
import random
import re
import sys
import time
import warnings
from typing import NamedTuple

import torch
from torch.utils._pytree import tree_flatten, tree_unflatten

import tessera
from bounds import Bounds, Unbounded
from dist_programs import differs
from programs import Value, values
from worlds import Died, World, preload

# Their results are not what their inputs say.
UNDEFINED = ("empty_like", "empty", "new_empty", "new_empty_strided", "empty_strided", "empty_permuted", "resize_", "resize_as_")


@functools.cache
def _operators() -> list:
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        from torch.testing._internal.common_methods_invocations import op_db
    return [op for op in op_db if op.name not in UNDEFINED]


def _name(op) -> str:
    return op.name + (f".{op.variant_test_name}" if op.variant_test_name else "")


class Case(NamedTuple):
    """The sample `index` of the first `most` of an operator; of all, if None."""
    number: int
    dtype: torch.dtype
    most: int | None
    index: int = 0

    def sample(self):
        return _samples(self.number, self.dtype, self.most)[self.index]


@functools.lru_cache(maxsize=2)
def _samples(number: int, dtype: torch.dtype, most: int | None) -> list:
    op = _operators()[number]
    torch.manual_seed(number)
    random.seed(number)
    backward = op.supports_autograd and dtype in op.supported_backward_dtypes("cpu")
    dense = lambda its: not isinstance(its, torch.Tensor) or its.layout == torch.strided and not its.is_nested
    all_dense = lambda its: all(map(dense, tree_flatten((its.input, its.args, its.kwargs))[0]))
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        return list(itertools.islice(filter(all_dense, op.sample_inputs("cpu", dtype, requires_grad=backward)), most))


class Ordinary:
    """Tensors stay as they are."""

    def place(self, tensor, rng):
        return tensor

    def whole(self, tensor):
        return tensor


class DistTensors:
    def __init__(self, shape):
        self.shape = shape
        self.mesh = _tessera_mesh(shape)

    def place(self, tensor, rng):
        return tessera.distribute(tensor, self.mesh, [self._placement(tensor, rng, tessera) for _ in self.shape])

    def whole(self, tensor):
        return tessera.full_tensor(tensor) if tessera.is_dist(tensor) else tensor

    @staticmethod
    def _placement(tensor, rng, of):
        kind = rng.random()
        if tensor.ndim and kind < 0.6:
            return of.Shard(rng.randrange(tensor.ndim))
        return of.Partial("sum") if kind > 0.9 and tensor.dtype.is_floating_point | tensor.is_complex() else of.Replicate()


class DTensors(DistTensors):
    def __init__(self, shape):
        import torch.distributed.tensor as dtensor
        self.shape, self.of = shape, dtensor
        self.mesh = _torch_mesh(shape)

    def place(self, tensor, rng):
        where = [self._placement(tensor, rng, self.of) for _ in self.shape]
        whole = self.of.distribute_tensor(tensor, self.mesh, [self.of.Replicate() if its.is_partial() else its for its in where])
        if not any(its.is_partial() for its in where):
            return whole
        part = whole.to_local()
        for its, coordinate in zip(where, self.mesh.get_coordinate()):
            part = torch.zeros_like(part) if its.is_partial() and coordinate else part
        return self.of.DTensor.from_local(part, self.mesh, where, shape=tensor.shape, stride=tensor.stride())

    def whole(self, tensor):
        return tensor.full_tensor() if isinstance(tensor, self.of.DTensor) else tensor


@functools.cache
def _tessera_mesh(shape):
    return tessera.DeviceMesh.over_world(shape)


@functools.cache
def _torch_mesh(shape):
    import torch.distributed as dist
    if not dist.is_initialized():
        at_rank_0 = dist.TCPStore("127.0.0.1", 0, is_master=True, wait_for_workers=False) if tessera.rank() == 0 else None
        port = torch.tensor(at_rank_0.port if at_rank_0 else 0)
        port = tessera.full_tensor(tessera.from_local(port, _tessera_mesh((tessera.size(),)), [tessera.Partial("sum")]))
        store = at_rank_0 or dist.TCPStore("127.0.0.1", int(port), is_master=False)
        dist.init_process_group("gloo", store=store, rank=tessera.rank(), world_size=tessera.size())
    return dist.init_device_mesh("cpu", shape)


def run_case(library, shape, case: Case) -> dict[str, Value] | str:
    """Returns results and gradients; or the error's text."""
    found = _run_case(library(shape) if shape else library(), case)
    if isinstance(found, str):
        return found
    return {name: Value.of(its if its.layout == torch.strided else its.to_dense()) for name, its in found.items()}


def _run_case(tensors, case: Case):
    op, sample, rng = _operators()[case.number], case.sample(), random.Random(case.number * 1000 + case.index)
    flat, spec = tree_flatten((sample.input, sample.args, sample.kwargs))
    leaves = {}
    for at, value in enumerate(flat):
        if isinstance(value, torch.Tensor):
            placed = tensors.place(value.detach().clone(), rng)
            leaves[at] = placed.detach().requires_grad_(value.requires_grad)
    flat = [leaves.get(at, value) for at, value in enumerate(flat)]
    input, args, kwargs = tree_unflatten(flat, spec)
    torch.manual_seed(case.index)
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        try:
            # A writing operator must not write to a leaf.
            results = [its for its in tree_flatten(op.get_op()(input, *args, **kwargs))[0] if isinstance(its, torch.Tensor)]
            roots = [its for its in results if its.requires_grad]
            found = {f"result {at}": tensors.whole(its.detach()) for at, its in enumerate(results)}
            if roots:
                cotangents = [tensors.place(values(its.shape, its.dtype, 2 * at), rng) for at, its in enumerate(roots)]
                torch.autograd.backward(roots, cotangents)
            found |= {f"gradient of {at}": tensors.whole(its.grad) for at, its in leaves.items() if its.grad is not None}
            return found
        except Exception as error:
            return f"{type(error).__name__}: {error}"


def _bounds(case: Case):
    with Bounds() as bounds:
        found = _run_case(Ordinary(), case)
    if isinstance(found, str):
        raise Unbounded(f"the case fails while its bounds are computed: {found}")
    return {name: bounds.of(tensor) for name, tensor in found.items()}


def judge(case: Case, plain, ranks) -> tuple[str, str]:
    errors = [its for its in ranks if isinstance(its, str)]
    if errors:
        return ("refused" if len(errors) == len(ranks) else "wrong"), errors[0]
    bounds = functools.cache(lambda: _bounds(case))
    for rank, found in enumerate(ranks):
        if found.keys() != plain.keys():
            return "wrong", f"on rank {rank} has {sorted(found)}, not {sorted(plain)}"
        for name, value in found.items():
            text = differs(plain[name], value, bounds, name)
            if text:
                return "wrong", f"{name} on rank {rank} {text}"
    return "right", ""


def sweep(options, dtype: torch.dtype, world: World) -> collections.Counter:
    counts: collections.Counter = collections.Counter()
    part, parts = (int(its) for its in options.part.split("/"))
    library = {"tessera": DistTensors, "dtensor": DTensors}[options.library]
    for number, op in enumerate(_operators()):
        if number % parts != part - 1 or not re.search(options.only, _name(op)) or dtype not in op.supported_dtypes("cpu"):
            continue
        kinds: dict = collections.defaultdict(list)
        for index in range(len(_samples(number, dtype, options.cases))):
            case = Case(number, dtype, options.cases, index)
            shape = (2, 2) if options.ranks == 4 and index % 2 else (options.ranks,)
            plain = run_case(Ordinary, (), case)
            if isinstance(plain, str):
                continue
            try:
                kind, text = judge(case, plain, world.run(run_case, library, shape, case))
            except (Died, RuntimeError) as death:
                kind, text = "crashed", str(death)
            if kind != "right":
                kinds[kind].append((index, text))
            if kind in ("wrong", "crashed"):
                world.close()
            counts[kind] += 1
            if len(kinds["crashed"]) == 2:
                break
        for kind, its in kinds.items():
            if its:
                print(f"{_name(op)} {dtype}: {len(its)} {kind}; case {its[0][0]}: {its[0][1][:300]}", flush=True)
    return counts


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--ranks", type=int, default=2)
    parser.add_argument("--dtypes", default="float32,complex64,bfloat16")
    parser.add_argument("--part", default="1/1", metavar="I/N", help="only every Nth operator, from the Ith")
    parser.add_argument("--only", default="", metavar="PATTERN", help="only operators whose name has this")
    parser.add_argument("--cases", type=int, help="at most so many for each operator")
    parser.add_argument("--timeout", type=float, default=30, help="seconds; ranks that are silent twice as long have crashed")
    parser.add_argument("--library", default="tessera", choices=["tessera", "dtensor"])
    options = parser.parse_args()
    if "PYTHONHASHSEED" not in os.environ:  # some samples are taken from sets of strings
        os.execve(sys.executable, sys.orig_argv, {**os.environ, "PYTHONHASHSEED": "0"})
    missing = [name for name in ("numpy", "expecttest") if importlib.util.find_spec(name) is None]
    if missing:
        print(f"PyTorch's operator tests need the packages {' and '.join(missing)}")
        return 77  # skipped, for ctest
    torch.set_num_threads(1)
    preload("torch.testing._internal.common_methods_invocations", "torch.distributed.tensor")
    bad = 0
    with World(options.ranks, timeout=options.timeout) as world:
        for name in options.dtypes.split(","):
            start = time.monotonic()
            counts = sweep(options, getattr(torch, name), world)
            print(f"{options.library}, {options.ranks} ranks, {name}: "
                  + ", ".join(f"{counts[kind]} {kind}" for kind in ("right", "wrong", "refused", "crashed"))
                  + f", in {time.monotonic() - start:.0f} s", flush=True)
            bad += counts["wrong"] + counts["crashed"]
    return 1 if bad else 0


if __name__ == "__main__":
    sys.exit(main())
