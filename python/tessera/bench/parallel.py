"""Counts what models of tensor parallelism send: DistTensors, PyTorch's DTensor with the same placements, and explicit
reductions.

    python -m tessera.bench.parallel [--ranks 2] [--shape 2] [--steps 0]

`--shape 2,2` cuts the batch along the first dim of the mesh and matrices along the second. Bytes are those of whole buffers
(of an all-to-all, of the rank's input), for each line of ranks; gradients of replicated parameters over a batch that is cut
are left out. `--steps` times as many steps, in turns, beside one process with as many threads as ranks.
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
from torch.distributed.tensor.experimental import implicit_replication
from torch.nn.attention import SDPBackend, sdpa_kernel
from torch.utils._python_dispatch import TorchDispatchMode

import tessera

from . import parallel_models
from .parallel_models import MODELS, dim_of


class _Counter(TorchDispatchMode):
    """Counts the collectives of DTensors, by bytes of whole buffers."""

    def __init__(self):
        super().__init__()
        self.calls, self.nbytes = 0, 0

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        if any(issubclass(type_, DTensor) for type_ in types):
            return NotImplemented  # its operators on local tensors come next
        name = func.name() if hasattr(func, "name") else ""
        result = func(*args, **(kwargs or {}))
        if name.startswith("_c10d_functional::") and "wait_tensor" not in name:
            whole = result if "all_gather" in name else args[0]
            if isinstance(whole, torch.Tensor):
                self.calls += 1
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

    def count(self, run):
        with tessera.CommDebug() as debug:
            result = run()
        return result, sum(entry[2] for entry in debug.entries), sum(entry[3] for entry in debug.entries)


class _DTensor:
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

    def count(self, run):
        # It has no strategy for the attention of CPUs.
        with _Counter() as counter, sdpa_kernel(SDPBackend.MATH):
            result = run()
        return result, counter.calls, counter.nbytes


def _cell(system, inputs, expected):
    try:
        loss, calls, nbytes = system.count(lambda: system.model(inputs))
        _, back_calls, back_bytes = system.count(lambda: loss.backward())
        whole = tessera.full_tensor(loss) if isinstance(system, _Ours) else loss.full_tensor()
        wrong = "" if torch.allclose(whole, expected, atol=1e-4) else " (wrong loss)"
        return f"{calls:>3} {nbytes / 1e3:8.1f} {back_calls:>4} {back_bytes / 1e3:8.1f}{wrong}"
    except Exception as error:  # noqa: BLE001: one of DTensor's is a result, too
        return f"{type(error).__name__}: {(str(error).splitlines() or [''])[0][:44]}"


def _plain(name):
    make, make_input, _, _ = MODELS[name]
    torch.manual_seed(0)
    model = make()
    torch.manual_seed(1)
    return model, make_input()


def _make(kind, name, shape):
    make, make_input, dims, formula = MODELS[name]
    torch.manual_seed(0)
    system = kind(make, dims, shape)
    torch.manual_seed(1)
    return system, system.input(make_input()), formula


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
        print(f"mesh {shape}; calls and kilobytes of forward and of backward\n{'':<24} {'ours':<26} {'DTensor':<46} explicit")
    for name in options.model.split(";") if options.model else MODELS:
        model, inputs = _plain(name)
        with torch.no_grad():
            expected, cells = model(inputs), []
        for kind in (_Ours, _DTensor):
            system, inputs, formula = _make(kind, name, shape)
            cells.append(_cell(system, inputs, expected))
        rows = shape[0] if len(shape) > 1 else 1
        explicit = " ".join(f"{4 * elements / rows / 1e3:8.1f}" for elements in formula())
        if rank == 0:
            print(f"{name:<24} {cells[0]:<26} {cells[1]:<46} {explicit}", flush=True)
        if options.steps:
            _time(name, shape, options.steps, rank, [_Ours] if "Error" in cells[1] else [_Ours, _DTensor])


def _seconds(model, inputs, steps) -> float:
    start = time.perf_counter()
    # DTensor has no strategy for the attention of CPUs.
    with sdpa_kernel(SDPBackend.MATH) if isinstance(inputs, DTensor) else contextlib.nullcontext():
        for _ in range(steps):
            model.zero_grad()
            model(inputs).backward()
    return (time.perf_counter() - start) / steps


def _time(name, shape, steps, rank, kinds) -> None:
    runs = {kind.__name__: _make(kind, name, shape)[:2] for kind in kinds}
    times = {name: [] for name in ["plain", *runs]}
    model, whole = _plain(name)
    for turn in range(8):
        dist.barrier()
        if rank == 0:
            torch.set_num_threads(dist.get_world_size())
            times["plain"].append(_seconds(model, whole, steps))
            torch.set_num_threads(1)
        dist.barrier()
        for kind, (system, inputs) in runs.items():
            times[kind].append(_seconds(system.model, inputs, steps))
            dist.barrier()
    if rank == 0:
        own = times["_Ours"][1:]
        text = f"{statistics.median(own) * 1e3:.2f} ms a step"
        for other, label in (("plain", "one process's"), ("_DTensor", "DTensor's")):
            if other not in times:
                continue
            ratios = sorted(theirs / ours for ours, theirs in zip(own, times[other][1:]))
            text += f"; {label} time over ours {statistics.median(ratios):.2f} [{ratios[0]:.2f}, {ratios[-1]:.2f}]"
        print(f"{'':<24} {text}", flush=True)


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
