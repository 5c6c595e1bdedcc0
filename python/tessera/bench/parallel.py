"""Counts what models of tensor parallelism send: DistTensors, PyTorch's DTensor with the same placements and by
`parallelize_module`, and explicit reductions.

    python -m tessera.bench.parallel [--shape 2] [--model NAMES] [--width 64] [--steps 0]

`--shape 2,2` cuts the batch along the first dim of the mesh and matrices along the second. Bytes are those of whole buffers
(of an all-to-all, of the rank's input), for each line of ranks. Where the batch is cut, backward of DistTensors and of DTensor
includes the sums of the parameters' gradients, and the explicit one does not. `--steps` times as many steps, in turns, beside one process with as many threads as ranks.
"""

from __future__ import annotations

import argparse
import contextlib
import statistics
import time
import warnings

import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.tensor import DTensor, Replicate, Shard, distribute_tensor
from torch.distributed.tensor.debug import CommDebugMode
from torch.distributed.tensor.experimental import implicit_replication
from torch.distributed.tensor.parallel import (ColwiseParallel, PrepareModuleInput, RowwiseParallel, loss_parallel,
                                               parallelize_module)
from torch.nn.attention import SDPBackend, sdpa_kernel

import tessera

from . import parallel_models
from .parallel_models import MODELS, dim_of


class _Counter(CommDebugMode):
    """Also has the bytes of whole buffers of the collectives that PyTorch's own mode counts."""

    def __init__(self):
        super().__init__()
        self.nbytes = 0

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        calls = self.get_total_counts()
        result = super().__torch_dispatch__(func, types, args, kwargs)
        if self.get_total_counts() > calls:
            whole = result if "all_gather" in func.name() else args[0]
            self.nbytes += whole.numel() * whole.element_size()
        return result


class _Ours:
    def __init__(self, make, dims, shape):
        self.mesh = tessera.DeviceMesh.over_world(list(shape))
        self.model = make()

        def place(name, module, mesh):
            for key, param in module.named_parameters(recurse=False):
                cut = dim_of(dims, f"{name}.{key}".lstrip("."))
                if cut is not None:
                    shard = tessera.Shard(cut) if isinstance(cut, int) else tessera.Shard(*cut)
                    tessera.distribute_(param, mesh, [tessera.Replicate()] * (mesh.ndim - 1) + [shard])

        tessera.distribute_module(self.model, self.mesh, place)
        self.whole = [tessera.Shard(0)] * (len(shape) - 1) + [tessera.Replicate()]

    def input(self, x):
        return tessera.distribute(x, self.mesh, self.whole)

    def context(self):
        return contextlib.nullcontext()

    def count(self, run):
        with tessera.CommDebug() as debug:
            result = run()
        return result, sum(entry[2] for entry in debug.entries), sum(entry[3] for entry in debug.entries)


class _DTensor:
    """DTensors with the placements of ours, in the same model."""

    def __init__(self, make, dims, shape):
        self.mesh = init_device_mesh("cpu", tuple(shape))
        self.model = make()
        placed = {}
        for name, module in self.model.named_modules():
            for key, param in list(module.named_parameters(recurse=False)):
                cut = dim_of(dims, f"{name}.{key}".lstrip("."))
                # It has no split factors: a fused matrix is cut by rows.
                shard = Replicate() if cut is None else Shard(cut if isinstance(cut, int) else cut[0])
                if param not in placed:
                    placements = [Replicate()] * (len(shape) - 1) + [shard]
                    placed[param] = nn.Parameter(distribute_tensor(param.detach(), self.mesh, placements))
                module.register_parameter(key, placed[param])
        self.whole = [Shard(0)] * (len(shape) - 1) + [Replicate()]

    def input(self, x):
        return distribute_tensor(x, self.mesh, self.whole)

    def context(self):
        return sdpa_kernel(SDPBackend.MATH)  # it has no strategy for the attention of CPUs

    def count(self, run):
        with _Counter() as counter, self.context():
            result = run()
        return result, counter.get_total_counts(), counter.nbytes


class _Parallelized(_DTensor):
    """DTensors as their users write them: a style for each layer, and local tensors between the layers. `prepared`: the inputs
    of attention and feed-forward are DTensors, so that their gradients are summed before they are reduced."""

    prepared = False

    def __init__(self, make, dims, shape):
        self.model = make()
        self.context = contextlib.nullcontext
        cuts = {name: (module, dim_of(dims, f"{name}.weight")) for name, module in self.model.named_modules()}
        styles = {name: self.style(name, module, cut) for name, (module, cut) in cuts.items() if cut is not None}
        if len(shape) > 1 or None in styles.values():
            raise NotImplementedError("there is no style for it")
        columns = {name.rpartition(".")[0] for name, style in styles.items() if isinstance(style, ColwiseParallel)} - {""}
        if self.prepared:
            whole = PrepareModuleInput(input_layouts=(Replicate(),), desired_input_layouts=(Replicate(),))
            styles.update(dict.fromkeys(columns, whole))
        parallelize_module(self.model, init_device_mesh("cpu", tuple(shape)), styles)

    def style(self, name, module, cut):
        if isinstance(module, nn.Embedding) and cut == 0:
            return RowwiseParallel(input_layouts=Replicate())
        if isinstance(module, nn.Linear) and cut == 0 and name == "output":
            self.context = loss_parallel
            return ColwiseParallel(use_local_output=False)
        return {0: ColwiseParallel, 1: RowwiseParallel}[cut]() if isinstance(module, nn.Linear) and cut in (0, 1) else None

    def input(self, x):
        return x


class _Prepared(_Parallelized):
    prepared = True


SYSTEMS = {"DistTensor": _Ours, "DTensor": _DTensor, "parallelize_module": _Parallelized, "and PrepareModuleInput": _Prepared}


def _cell(system, inputs, expected):
    try:
        loss, calls, nbytes = system.count(lambda: system.model(inputs))
        _, back_calls, back_bytes = system.count(lambda: loss.backward())
        whole = loss.full_tensor() if isinstance(loss, DTensor) else tessera.full_tensor(loss) if tessera.is_dist(loss) else loss
        wrong = "" if torch.allclose(whole, expected, atol=1e-4) else " (wrong loss)"
        return f"{calls:>3} {nbytes / 1e3:8.1f} {back_calls:>4} {back_bytes / 1e3:8.1f}{wrong}"
    except Exception as error:  # noqa: BLE001: one of DTensor's is a result, too
        return f"{type(error).__name__}: {(str(error).splitlines() or [''])[0][:70]}"


def _plain(name):
    make, make_input, _, _ = MODELS[name]
    torch.manual_seed(0)
    model = make()
    torch.manual_seed(1)
    return model, make_input()


def _make(kind, name, shape):
    make, make_input, dims, _ = MODELS[name]
    torch.manual_seed(0)
    system = kind(make, dims, shape)
    torch.manual_seed(1)
    return system, system.input(make_input())


def _rank(options) -> None:
    dist.init_process_group("gloo")
    tessera.init()
    torch.set_num_threads(1)
    warnings.filterwarnings("ignore")
    scale = options.width // parallel_models.WIDTH
    parallel_models.WIDTH *= scale
    parallel_models.HIDDEN *= scale
    parallel_models.LENGTH *= scale
    shape = [int(part) for part in options.shape.split(",")]
    rank = dist.get_rank()
    with implicit_replication():  # as ours do, DTensor's operators then take ordinary tensors as replicated
        _compare(options, shape, rank)
    tessera.shutdown()
    dist.barrier()
    dist.destroy_process_group()


def _compare(options, shape, rank) -> None:
    if rank == 0:
        print(f"mesh {shape}; calls and kilobytes of forward and of backward")
    for name in options.model.split(";") if options.model else MODELS:
        model, inputs = _plain(name)
        with torch.no_grad():
            expected = model(inputs)
        cells = {}
        for label, kind in SYSTEMS.items():
            try:
                system, inputs = _make(kind, name, shape)
                cells[label] = _cell(system, inputs, expected)
            except NotImplementedError:
                continue
        rows = shape[0] if len(shape) > 1 else 1
        elements = MODELS[name][3]()
        cells["explicit"] = f"{4 * elements[0] / rows / 1e3:12.1f} {4 * elements[1] / rows / 1e3:13.1f}"
        if rank == 0:
            for label, cell in cells.items():
                print(f"{name:<24} {label:<23} {cell}", flush=True)
        if options.steps:
            _time(name, shape, options.steps, rank, [label for label in SYSTEMS if "Error" not in cells.get(label, "Error")])


def _seconds(system, inputs, steps) -> float:
    start = time.perf_counter()
    with system.context():
        for _ in range(steps):
            system.model.zero_grad()
            system.model(inputs).backward()
    return (time.perf_counter() - start) / steps


class _Plain:
    context = contextlib.nullcontext

    def __init__(self, model):
        self.model = model


def _time(name, shape, steps, rank, labels) -> None:
    runs = {label: _make(SYSTEMS[label], name, shape) for label in labels}
    times = {label: [] for label in ["one process", *runs]}
    model, whole = _plain(name)
    for turn in range(8):
        dist.barrier()
        if rank == 0:
            torch.set_num_threads(dist.get_world_size())
            times["one process"].append(_seconds(_Plain(model), whole, steps))
            torch.set_num_threads(1)
        dist.barrier()
        for label, (system, inputs) in runs.items():
            times[label].append(_seconds(system, inputs, steps))
            dist.barrier()
    if rank == 0:
        own = times.pop("DistTensor")[1:]
        print(f"{name:<24} {statistics.median(own) * 1e3:.2f} ms a step of DistTensors; times over it:", flush=True)
        for label, others in times.items():
            ratios = sorted(theirs / ours for ours, theirs in zip(own, others[1:]))
            print(f"{name:<24} {label:<23} {statistics.median(ratios):.2f} [{ratios[0]:.2f}, {ratios[-1]:.2f}]", flush=True)


def main() -> None:
    parser = argparse.ArgumentParser(prog="python -m tessera.bench.parallel", description=__doc__,
                                     formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--shape", default="2", help="of the mesh, such as 2 or 2,2")
    parser.add_argument("--model", default="", help="names, separated by semicolons; all")
    parser.add_argument("--width", type=int, default=parallel_models.WIDTH, help="of Llama and ViT; others follow")
    parser.add_argument("--steps", type=int, default=0, help="steps of a round to time; 0: none")
    options = parser.parse_args()
    ranks = 1
    for part in options.shape.split(","):
        ranks *= int(part)
    tessera.spawn(_rank, ranks, (options,))


if __name__ == "__main__":
    main()
