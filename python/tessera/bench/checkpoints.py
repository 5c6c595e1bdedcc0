"""Saves and loads a model with AdamW by Tessera, by FSDP2 with torch.distributed.checkpoint, and whole with safetensors, in turns.

    python -m tessera.bench.checkpoints FOLDER [--ranks 2] [--load-ranks 4] [--gigabytes 2] [--rounds 5]

FOLDER must be on the disk to measure. All saves return when files are on the disk; `async` is the time for which training
stands still. Loads are from the page cache. Ratios are a system's time over Tessera's in the same round: median, and the
range of all rounds. Memory: the most that a rank has beyond what it has between two calls.
"""

from __future__ import annotations

import argparse
import os
import shutil
import statistics
import time
from collections.abc import Callable
from pathlib import Path

import torch
import torch.distributed as dist
import torch.distributed.checkpoint as dcp
from torch import nn
from torch.distributed.checkpoint.state_dict import (StateDictOptions, get_model_state_dict, get_optimizer_state_dict,
                                                     get_state_dict, set_state_dict)
from torch.distributed.fsdp import fully_shard

import tessera


def _model(nbytes: float) -> nn.Module:
    """Of `nbytes` with two moments of each parameter."""
    width = 1024
    blocks = max(1, round(nbytes / 12 / (8 * width * width)))
    return nn.Sequential(*(nn.Sequential(nn.Linear(width, 4 * width), nn.GELU(), nn.Linear(4 * width, width))
                           for _ in range(blocks)))


def _whole(model, optimizer) -> tuple[dict, dict]:
    options = StateDictOptions(full_state_dict=True, cpu_offload=True)
    return get_model_state_dict(model, options=options), get_optimizer_state_dict(model, optimizer, options=options)


class _Tessera:
    def __init__(self, net: nn.Module):
        self.model = tessera.fully_shard(net)
        self.optimizer = tessera.ShardedOptimizer(self.model, torch.optim.AdamW(net.parameters()))
        self.writer = tessera.AsyncCheckpointer()

    def save(self, path: Path):
        tessera.save_checkpoint(path, self.model, self.optimizer)

    def begin(self, path: Path) -> Callable[[], None]:
        self.writer.save(path, self.model, self.optimizer)
        return self.writer.wait

    def load(self, path: Path):
        tessera.load_checkpoint(path, self.model, self.optimizer)


class _Dcp:
    def __init__(self, net: nn.Module):
        for block in net:
            fully_shard(block)
        self.model = fully_shard(net)
        self.optimizer = torch.optim.AdamW(net.parameters())

    def _state(self) -> dict:
        model, optimizer = get_state_dict(self.model, self.optimizer)
        return {"model": model, "optim": optimizer}

    def save(self, path: Path):
        dcp.save(self._state(), checkpoint_id=path)

    def begin(self, path: Path) -> Callable[[], None]:
        return dcp.async_save(self._state(), checkpoint_id=path).result

    def load(self, path: Path):
        state = self._state()
        dcp.load(state, checkpoint_id=path)
        set_state_dict(self.model, self.optimizer, model_state_dict=state["model"], optim_state_dict=state["optim"])


class _Safetensors(_Dcp):
    """Rank 0 writes all, and each rank takes its parts of all."""

    begin = None  # it has no other way

    def save(self, path: Path):
        from safetensors.torch import save_file

        model, optimizer = _whole(self.model, self.optimizer)
        if dist.get_rank() == 0:
            path.mkdir(exist_ok=True)
            moments = {f"{name} {key}": value for name, state in optimizer["state"].items() for key, value in state.items()}
            save_file({**model, **moments}, path / "all.safetensors")
            descriptor = os.open(path / "all.safetensors", os.O_RDONLY)
            os.fsync(descriptor)
            os.close(descriptor)
        dist.barrier()

    def load(self, path: Path):
        from safetensors import safe_open

        model, optimizer = get_state_dict(self.model, self.optimizer)
        rank, size = dist.get_rank(), dist.get_world_size()
        with safe_open(path / "all.safetensors", "pt") as file:
            def fill(name, value):
                local = value.to_local()
                begin = min(rank * -(-value.size(0) // size), value.size(0))
                local.copy_(file.get_slice(name)[begin:begin + local.size(0)])

            for name, value in model.items():
                fill(name, value)
                for key in ("exp_avg", "exp_avg_sq"):
                    fill(f"{name} {key}", optimizer["state"][name][key])
        set_state_dict(self.model, self.optimizer, model_state_dict=model, optim_state_dict=optimizer)


_SYSTEMS = {"tessera": _Tessera, "dcp": _Dcp, "safetensors": _Safetensors}


def _train_once(system, width: int = 1024):
    system.model(torch.ones(2, width)).square().mean().backward()
    system.optimizer.step()
    system.optimizer.zero_grad()


def _status(field: str) -> float:
    """A field of this process's status, in GB."""
    return int(Path("/proc/self/status").read_text().split(field + ":")[1].split()[0]) * 1024e-9


def _timed(call: Callable[[], object]) -> tuple[float, float, object]:
    """Returns the seconds on the slowest rank, and the most GB that a rank had beyond those before."""
    Path("/proc/self/clear_refs").write_text("5")
    before = _status("VmRSS")
    dist.barrier()
    begin = time.perf_counter()
    result = call()
    took = torch.tensor([time.perf_counter() - begin, _status("VmHWM") - before], dtype=torch.double)
    dist.all_reduce(took, dist.ReduceOp.MAX)
    return took[0].item(), took[1].item(), result


def _rank(folder: Path, options: argparse.Namespace, saves: bool):
    dist.init_process_group("gloo")
    tessera.init()
    torch.set_num_threads(1)
    systems = {name: make(_model(options.gigabytes * 1e9)) for name, make in _SYSTEMS.items()}
    for system in systems.values():
        _train_once(system)
    seconds: dict[str, dict[str, list[float]]] = {}
    most: dict[str, dict[str, float]] = {}

    def measure(what: str, name: str, call: Callable[[], object]) -> object:
        took, memory, result = _timed(call)
        seconds.setdefault(what, {}).setdefault(name, []).append(took)
        most.setdefault(what, {})[name] = max(most.get(what, {}).get(name, 0), memory)
        return result

    for number in range(options.rounds):
        for name in list(systems)[number % len(systems):] + list(systems)[:number % len(systems)]:
            system, path = systems[name], folder / name
            if saves:
                if dist.get_rank() == 0:
                    shutil.rmtree(path, ignore_errors=True)
                measure("save", name, lambda: system.save(path))
                if system.begin is not None:
                    wait = measure("async", name, lambda: system.begin(path.with_name(name + "-async")))
                    wait()
                    dist.barrier()
                    if dist.get_rank() == 0:
                        shutil.rmtree(path.with_name(name + "-async"), ignore_errors=True)
            measure("load", name, lambda: system.load(path))
    if dist.get_rank() == 0:
        for what, by_name in seconds.items():
            for name, own in by_name.items():
                ratios = [its / ours for its, ours in zip(own, by_name["tessera"])]
                print(f"{what:6}{dist.get_world_size():3} ranks  {name:12}{statistics.median(own):8.2f} s"
                      f"{statistics.median(ratios):7.2f} [{min(ratios):.2f}, {max(ratios):.2f}]   {most[what][name]:6.2f} GB", flush=True)
    dist.barrier()
    tessera.shutdown()
    dist.destroy_process_group()


def main():
    parser = argparse.ArgumentParser(prog="python -m tessera.bench.checkpoints", description=__doc__,
                                     formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("folder", type=Path)
    parser.add_argument("--ranks", type=int, default=2)
    parser.add_argument("--load-ranks", type=int, default=4, help="load on so many ranks, too")
    parser.add_argument("--gigabytes", type=float, default=2, help="of parameters and moments")
    parser.add_argument("--rounds", type=int, default=5)
    options = parser.parse_args()
    options.folder.mkdir(parents=True, exist_ok=True)
    print("what     on        system      median  over Tessera's         memory")
    for ranks, saves in ((options.ranks, True), (options.load_ranks, False)):
        tessera.spawn(_rank, ranks, (options.folder, options, saves))


if __name__ == "__main__":
    main()
