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
import math
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


# Their kernels read memory of a strided tensor that functions above them would have made contiguous.
READ_MEMORY = re.compile("(batch|group)_norm")


@functools.cache
def _operators() -> list:
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        from torch.testing._internal.common_methods_invocations import op_db
    return [op for op in op_db if op.name not in UNDEFINED]


def _name(op) -> str:
    return op.name + (f".{op.variant_test_name}" if op.variant_test_name else "")


class Placing(NamedTuple):
    """How a tensor lies: for each mesh dim the dim that it cuts, "whole", or "terms"; `strided`: in every second place of memory."""
    dims: tuple
    strided: bool = False


class Case(NamedTuple):
    """The sample `index` of the first `most` of an operator; of all, if None. `placings`: of its tensors, and of the cotangents."""
    number: int
    dtype: torch.dtype
    most: int | None
    index: int = 0
    placings: tuple[Placing, ...] = ()

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
    """Tensors stay as they are; `tensors` has all that would be placed."""

    def __init__(self, placings=()):
        self.placings = iter(placings)
        self.tensors: list[torch.Tensor] = []

    def place(self, tensor):
        self.tensors.append(tensor)
        its = next(self.placings, Placing(()))
        if its.strided:
            return self.placed(torch.stack([tensor, tensor], -1), its.dims).select(-1, 0)
        return self.placed(tensor, its.dims)

    def placed(self, tensor, dims):
        return tensor

    def value(self, tensor):
        return Value.of(tensor if tensor.layout == torch.strided else tensor.to_dense())


def _term(part, dims, coordinate, shape):
    """The term of a rank that has the part whole: terms are multiples whose sum is exact, also after a linear operator."""
    for its, at, size in zip(dims, coordinate, shape):
        if its == "terms":  # of 2 ranks 2 and -1, of 3 ranks 1, -1 and 1; numbers without such multiples are whole on the last
            factor = (2, *(-1, 1) * size)[at] if size % 2 == 0 else (1, -1)[at % 2]
            sized = part.abs() if not part.is_complex() else torch.view_as_real(part.resolve_conj()).abs().amax(-1)
            rest = part if at == size - 1 else torch.zeros_like(part)
            part = torch.where(sized < torch.finfo(part.dtype).max / 4, part * factor, rest)
    return part


class DistTensors(Ordinary):
    def __init__(self, mesh, placings):
        super().__init__(placings)
        self.mesh = _tessera_mesh(mesh)

    def placed(self, tensor, dims):
        where = [tessera.Replicate() if isinstance(its, str) else tessera.Shard(its) for its in dims]
        whole = tessera.distribute(tensor, self.mesh, where)
        if "terms" not in dims:
            return whole
        part = tessera.to_local(whole)
        if self.mesh.is_member():
            part = _term(part, dims, self.mesh.coordinate, self.mesh.shape)
        where = [tessera.Partial("sum") if dim == "terms" else its for its, dim in zip(where, dims)]
        return tessera.from_local(part, self.mesh, where, tensor.shape)


class DTensors(Ordinary):
    def __init__(self, mesh, placings):
        import torch.distributed.tensor as dtensor
        super().__init__(placings)
        self.of, self.mesh = dtensor, _torch_mesh(mesh)

    def placed(self, tensor, dims):
        where = [self.of.Replicate() if isinstance(its, str) else self.of.Shard(its) for its in dims]
        whole = self.of.distribute_tensor(tensor, self.mesh, where)
        if "terms" not in dims:
            return whole
        part = _term(whole.to_local(), dims, self.mesh.get_coordinate(), self.mesh.shape)
        where = [self.of.Partial() if dim == "terms" else its for its, dim in zip(where, dims)]
        return self.of.DTensor.from_local(part, self.mesh, where, shape=tensor.shape, stride=tensor.stride())

    def value(self, tensor):
        return super().value(tensor.full_tensor() if isinstance(tensor, self.of.DTensor) else tensor)


# The ranks of a mesh, in a world of so many. On the last one, a rank outside of the mesh runs all cases, too.
MESHES = {"2": ([0, 1], 2), "3": ([0, 1, 2], 3), "2x2": ([[0, 1], [2, 3]], 4), "2 of 3": ([2, 0], 3)}


@functools.cache
def _tessera_mesh(name):
    return tessera.DeviceMesh(MESHES[name][0])


@functools.cache
def _torch_mesh(name):
    import torch.distributed as dist
    if not dist.is_initialized():
        at_rank_0 = dist.TCPStore("127.0.0.1", 0, is_master=True, wait_for_workers=False) if tessera.rank() == 0 else None
        port = torch.tensor(at_rank_0.port if at_rank_0 else 0)
        port = tessera.full_tensor(tessera.from_local(port, tessera.DeviceMesh.over_world(), [tessera.Partial("sum")]))
        store = at_rank_0 or dist.TCPStore("127.0.0.1", int(port), is_master=False)
        dist.init_process_group("gloo", store=store, rank=tessera.rank(), world_size=tessera.size())
    return dist.DeviceMesh("cpu", MESHES[name][0])


def run_case(library, mesh, case: Case) -> dict[str, Value] | str:
    """Returns results and gradients; or the error's text."""
    return _run_case(library(mesh, case.placings), case)


def _run_case(tensors, case: Case):
    op, sample = _operators()[case.number], case.sample()
    flat, spec = tree_flatten((sample.input, sample.args, sample.kwargs))
    leaves = {}
    for at, value in enumerate(flat):
        if isinstance(value, torch.Tensor):
            placed = tensors.place(value.detach().clone())
            leaves[at] = placed.detach().requires_grad_(value.requires_grad)
    flat = [leaves.get(at, value) for at, value in enumerate(flat)]
    input, args, kwargs = tree_unflatten(flat, spec)
    torch.manual_seed(case.index)
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        try:
            # A writing operator must not write to a leaf.
            results = tree_flatten(op.get_op()(input, *args, **kwargs))[0]
            results = [torch.tensor(its) if isinstance(its, (bool, int, float, complex)) else its for its in results]
            results = [its for its in results if isinstance(its, torch.Tensor)]
            roots = [its for its in results if its.requires_grad]
            found = {f"result {at}": tensors.value(its.detach()) for at, its in enumerate(results)}
            if roots:
                cotangents = [tensors.place(values(its.shape, its.dtype, 2 * at)) for at, its in enumerate(roots)]
                torch.autograd.backward(roots, cotangents)
            found |= {f"gradient of {at}": tensors.value(its.grad) for at, its in leaves.items() if its.grad is not None}
            return found
        except Exception as error:
            return f"{type(error).__name__}: {error}"


class Bounded(Ordinary):
    """The same, where the value of a tensor is its bound."""

    def __init__(self, bounds, placings):
        super().__init__(placings)
        self.bounds = bounds

    def value(self, tensor):
        return self.bounds.of(tensor)


def _bounds(case: Case):
    with Bounds() as bounds:
        found = _run_case(Bounded(bounds, case.placings), case)
    if isinstance(found, str):
        raise Unbounded(f"the case fails while its bounds are computed: {found}")
    return found


def placings(tensors: list[torch.Tensor], mesh_dims: int, most: int, seed: int) -> list[tuple[Placing, ...]]:
    """Returns all ways to place these tensors, if there are no more than `most`; else so many that are drawn, in which the ways
    of each tensor take turns."""
    rng = random.Random(seed)

    def turns(its):
        while True:
            yield from rng.sample(its, len(its))

    ways = []
    for tensor in tensors:
        alone = [*range(tensor.ndim), "whole"] + ["terms"] * (tensor.dtype.is_floating_point or tensor.is_complex())
        ways.append(list(itertools.product(alone, repeat=mesh_dims)))
    if math.prod(map(len, ways)) <= most:
        drawn = itertools.product(*ways)
    else:
        drawn = itertools.islice(zip(*map(turns, ways)), most)
    return [tuple(Placing(dims, rng.random() < 0.25) for dims in its) for its in drawn]


# Ranks outside of a mesh know neither numbers, nor sizes that depend on values, nor what is written to ordinary tensors.
UNKNOWN = r"only ranks of the mesh"


def judge(case: Case, options, plain, ranks) -> tuple[str, str]:
    members = set(torch.tensor(MESHES[options.mesh][0]).flatten().tolist())
    errors = {rank: its for rank, its in enumerate(ranks) if isinstance(its, str)}
    if errors:
        outside = not members & errors.keys() and all(re.search(UNKNOWN, its) for its in errors.values())
        kind = "refused" if len(errors) == len(ranks) else "unknown outside" if outside else "wrong"
        if kind != "unknown outside":
            return kind, f"on {sorted(errors)} " * (kind == "wrong") + next(iter(errors.values()))
    bounds = functools.cache(lambda: _bounds(case))
    for rank, found in enumerate(ranks):
        if rank in errors:
            continue
        if found.keys() != plain.keys():
            return "wrong", f"on rank {rank} has {sorted(found)}, not {sorted(plain)}"
        for name, value in found.items():
            text = differs(plain[name], value, bounds, name, options.near)
            if text and rank not in members and (value.dtype, value.sizes) == (plain[name].dtype, plain[name].sizes):
                errors[rank] = f"{name} on rank {rank}, an ordinary tensor, {text}"
            elif text:
                return "wrong", f"{name} on rank {rank} {text}"
    return ("unknown outside", next(iter(errors.values()))) if errors else ("right", "")


KINDS = ("right", "wrong", "refused", "crashed", "unknown outside")


def cases(options, number: int, dtype: torch.dtype):
    """Yields the cases of an operator, and their outcomes on ordinary tensors."""
    for index in range(len(_samples(number, dtype, options.cases))):
        ordinary, case = Ordinary(), Case(number, dtype, options.cases, index)
        plain = _run_case(ordinary, case)
        if not isinstance(plain, str):
            dims = torch.tensor(MESHES[options.mesh][0]).ndim
            for its in placings(ordinary.tensors, dims, options.placings, 1000 * number + index + options.seed):
                if READ_MEMORY.search(_operators()[number].name):
                    its = tuple(placing._replace(strided=False) for placing in its)
                placed = case._replace(placings=its)
                strided = _run_case(Ordinary(its), placed) if any(tensor.strided for tensor in its) else plain
                if not isinstance(strided, str):
                    yield placed, strided


def sweep(options, dtype: torch.dtype, world: World) -> collections.Counter:
    counts: collections.Counter = collections.Counter()
    part, parts = (int(its) for its in options.part.split("/"))
    library = {"tessera": DistTensors, "dtensor": DTensors}[options.library]
    told = start = time.monotonic()
    for number, op in enumerate(_operators()):
        if time.monotonic() - told > 60:
            told = time.monotonic()
            print(f"at operator {number} of {len(_operators())}, {_name(op)}, in {told - start:.0f} s: {dict(counts)}",
                  file=sys.stderr, flush=True)
        if number % parts != part - 1 or not re.search(options.only, _name(op)) or dtype not in op.supported_dtypes("cpu"):
            continue
        kinds: dict = collections.defaultdict(list)
        for case, plain in cases(options, number, dtype):
            try:
                kind, text = judge(case, options, plain, world.run(run_case, library, options.mesh, case))
            except (Died, RuntimeError) as death:
                kind, text = "crashed", str(death)
            if kind != "right":
                kinds[kind].append((case, text))
            if kind in ("wrong", "crashed"):
                world.close()
            counts[kind] += 1
            if len(kinds.get("crashed", ())) == 2:
                break
        for kind, its in kinds.items():
            case, text = its[0]
            where = ", ".join(f"{'strided ' * placing.strided}{placing.dims}" for placing in case.placings)
            print(f"{_name(op)} {dtype}: {len(its)} {kind}; case {case.index}, {where}: {text[:400]}", flush=True)
        if kinds.keys() - {"unknown outside"}:
            counts["operators that are not all right"] += 1
        counts["operators"] += 1
    return counts


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--mesh", default="2", choices=MESHES)
    parser.add_argument("--dtypes", default="float32,complex64,bfloat16")
    parser.add_argument("--part", default="1/1", metavar="I/N", help="only every Nth operator, from the Ith")
    parser.add_argument("--only", default="", metavar="PATTERN", help="only operators whose name has this")
    parser.add_argument("--cases", type=int, help="at most so many samples of each operator")
    parser.add_argument("--placings", type=int, default=1, help="of a sample: all, or so many that are drawn if there are more")
    parser.add_argument("--seed", type=int, default=0, help="of the placings that are drawn")
    parser.add_argument("--near", type=float, default=0, metavar="N",
                        help="N roundings of a tensor's largest element are no difference; bounds are computed beyond them alone")
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
    with World(MESHES[options.mesh][1], timeout=options.timeout) as world:
        for name in options.dtypes.split(","):
            start = time.monotonic()
            counts = sweep(options, getattr(torch, name), world)
            print(f"{options.library}, mesh {options.mesh}, {name}: " + ", ".join(f"{counts[kind]} {kind}" for kind in KINDS)
                  + f"; {counts['operators that are not all right']} of {counts['operators']} operators are not all right"
                  + f", in {time.monotonic() - start:.0f} s", flush=True)
            bad += counts["wrong"] + counts["crashed"]
    return 1 if bad else 0


if __name__ == "__main__":
    sys.exit(main())
