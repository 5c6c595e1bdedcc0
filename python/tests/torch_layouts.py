"""Jobs of PyTorch's FSDP2, HSDP, tensor parallelism and DDP, which Tessera goes on with, and which go on with Tessera's.

    torch_layouts.py [--ranks N ...] [--systems NAME ...] [--optimizers NAME ...]     prints a line for each

Each job trains, saves with `torch.distributed.checkpoint` and goes on. Its directory is imported by `tessera.exchange`, and read
by `dcp.load` into a sharded module; both must have its values to the bit, as must an export for `load_safetensors()` by the
command that TESSERA_CLI names, and losses as its own. A DCP export of the imported checkpoint, and what a sharded module saves
with `dcp.save`, then go on as FSDP2 and as DDP.
"""

import argparse
import itertools
import json
import os
import subprocess
import sys
import tempfile
from pathlib import Path

import torch
import torch.distributed as dist
import torch.distributed.checkpoint as dcp
from torch import nn
from torch.distributed.checkpoint.state_dict import get_model_state_dict, get_state_dict, set_state_dict
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import fully_shard
from torch.distributed.tensor import DTensor
from torch.distributed.tensor.parallel import ColwiseParallel, RowwiseParallel, parallelize_module

import tessera
from ranks import in_process_group, run_ranks
from tessera.exchange import export_checkpoint, import_checkpoint

OPTIMIZERS = {
    "AdamW": lambda groups: torch.optim.AdamW(groups, lr=0.02, foreach=False),
    "SGD": lambda groups: torch.optim.SGD(groups, lr=0.1, foreach=False),
    "momentum": lambda groups: torch.optim.SGD(groups, lr=0.1, momentum=0.9, nesterov=True, foreach=False),
    "Adagrad": lambda groups: torch.optim.Adagrad(groups, lr=0.05, lr_decay=0.01, foreach=False),
    "NAdam": lambda groups: torch.optim.NAdam(groups, lr=0.02, foreach=False),
}
SYSTEMS = ("fsdp2", "hsdp", "tp", "ddp")
DTYPES = (torch.float32, torch.bfloat16)


class Net(nn.Module):
    """Rows that 2, 4 and 8 don't divide, fewer than ranks, a tied and a frozen parameter, a buffer."""

    def __init__(self, hidden):
        super().__init__()
        self.embedding = nn.Embedding(23, 19)
        self.up, self.down = nn.Linear(19, hidden), nn.Linear(hidden, 19)
        self.norm = nn.LayerNorm(19)
        self.head = nn.Linear(19, 23, bias=False)
        self.head.weight = self.embedding.weight
        self.scale = nn.Parameter(torch.full((1,), 0.5), requires_grad=False)
        self.register_buffer("calls", torch.full((3,), 7.0))

    def forward(self, tokens):
        x = self.embedding(tokens)
        return self.head(x + self.down(torch.tanh(self.up(self.norm(x)))) * self.scale)


def _tokens(step):
    return torch.randint(23, (16, 6), generator=torch.Generator().manual_seed(step))


def _make(system, kind, dtype, hidden):
    torch.manual_seed(5)
    net, ranks = Net(hidden).to(dtype), dist.get_world_size()
    model = net
    if system == "tp":
        parallelize_module(net, init_device_mesh("cpu", (ranks,)), {"up": ColwiseParallel(use_local_output=False), "down": RowwiseParallel()})
    elif system in ("fsdp2", "hsdp"):
        mesh = (ranks,) if system == "fsdp2" else (2, ranks // 2)
        fully_shard(net, mesh=init_device_mesh("cpu", mesh, mesh_dim_names=("replicas", "ranks")[-len(mesh):]))
    elif system == "ddp":
        model = nn.parallel.DistributedDataParallel(net)
    elif system == "tessera":
        model = tessera.fully_shard(net, unit_bytes=1000)
    params = [value for value in net.parameters() if value.requires_grad]
    decays = [[value for value in params if (value.dim() > 1) == decay] for decay in (True, False)]
    optimizer = OPTIMIZERS[kind]([{"params": decays[0], "weight_decay": 0.1}, {"params": decays[1], "weight_decay": 0.0}])
    return model, tessera.ShardedOptimizer(model, optimizer, fused=False) if system == "tessera" else optimizer


def _train(system, model, optimizer, steps, whole=False):
    losses = []
    for step in steps:
        optimizer.zero_grad()
        rows = _tokens(step)
        if system != "tp" and not whole:
            rows = rows.view(dist.get_world_size(), -1, 6)[dist.get_rank()]
        loss = nn.functional.cross_entropy(model(rows).flatten(0, 1).float(), rows.flatten())
        loss.backward()
        optimizer.step()
        losses.append(loss.item())
    return losses


def _whole(value):
    if isinstance(value, dict):
        return {name: _whole(item) for name, item in value.items()}
    return (value.full_tensor() if isinstance(value, DTensor) else value).clone() if isinstance(value, torch.Tensor) else value


def _values(model, optimizer):
    """All values, whole, as torch's own code gathers them."""
    state, optimizer_state = get_state_dict(model, optimizer)
    return _whole(state), _whole(optimizer_state["state"])


def _differing(one, other, dtype=None):
    """The names of the values of two jobs that are not equal, bit for bit. `dtype`: in which PyTorch's optimizers load numbers."""
    names = []
    if dtype is not None:
        for state in other[1].values():
            state.update({name: value.to(dtype) for name, value in state.items() if name == "mu_product"})
    for own, others in zip(one, other):
        flat, other_flat = ({f"{name} {key}": value for name, item in part.items()
                             for key, value in (item.items() if isinstance(item, dict) else [("", item)])} for part in (own, others))
        names += [name for name in flat.keys() | other_flat.keys() if name not in flat or name not in other_flat
                  or type(flat[name]) is not type(other_flat[name])
                  or isinstance(flat[name], torch.Tensor) and flat[name].dtype != other_flat[name].dtype
                  or not torch.equal(torch.as_tensor(flat[name]), torch.as_tensor(other_flat[name]))]
    return names


@in_process_group
def _begin(folder, system, jobs):
    """Trains and saves; returns the losses of what follows, and the values that were saved."""
    after = []
    for kind, dtype, hidden in jobs:
        model, optimizer = _make(system, kind, dtype, hidden)
        _train(system, model, optimizer, range(2))
        state, optimizer_state = get_state_dict(model, optimizer)
        dcp.save({"model": state, "optim": optimizer_state}, checkpoint_id=folder / f"{kind}-{dtype}")
        values = _values(model, optimizer)
        if not dist.get_rank():
            torch.save(values, folder / f"{kind}-{dtype}.pt")
        after.append(_train(system, model, optimizer, range(2, 4)))
    return after


@in_process_group
def _continue(folder, suffix, system, jobs, whole, native=False, save_as=""):
    """Loads and trains; returns the losses, and the names of values that differ from those saved."""
    results = []
    for kind, dtype, hidden in jobs:
        name = f"{kind}-{dtype}"
        model, optimizer = _make(system, kind, dtype, hidden)
        if native:
            tessera.load_safetensors(folder / f"{name}.safetensors", model)
            weights = _differing((_whole(get_model_state_dict(model)), {}), (torch.load(folder / f"{name}.pt")[0], {}))
            assert not weights, weights
            tessera.load_checkpoint(folder / (name + suffix), model, optimizer, allow_missing=True)
        else:
            state, optimizer_state = get_state_dict(model, optimizer)
            dcp.load({"model": state, "optim": optimizer_state}, checkpoint_id=folder / (name + suffix))
            set_state_dict(model, optimizer, model_state_dict=state, optim_state_dict=optimizer_state)
        if save_as:
            state, optimizer_state = get_state_dict(model, optimizer)
            dcp.save({"model": state, "optim": optimizer_state}, checkpoint_id=folder / (name + save_as))
        values = _values(model, optimizer)
        loads_in = None if system == "tessera" else dtype
        differing = _differing(values, torch.load(folder / f"{name}.pt"), loads_in) if not dist.get_rank() else []
        results.append((_train(system, model, optimizer, range(2, 4), whole), differing))
    return results


def go_on(folder, system, ranks, kinds=tuple(OPTIMIZERS), dtypes=DTYPES):
    """Yields, for each optimizer and dtype, the greatest difference of a loss from the job's own, relative to it, and the names
    of values that differ, both by the way that the values took."""
    # DTensor's in-place operators need as many rows as ranks.
    jobs = [(*job, 11 if system == "tp" and ranks > 5 else 5) for job in itertools.product(kinds, dtypes)]
    after = run_ranks(ranks, _begin, folder, system, jobs, joins=False)
    for kind, dtype, _ in jobs:
        name = f"{kind}-{dtype}"
        import_checkpoint(folder / name, folder / (name + ".ckpt"), optimizer_key="optim")
        export_checkpoint(folder / (name + ".ckpt"), folder / (name + ".back"), format="dcp", optimizer_key="optim")
        tool = [os.environ["TESSERA_CLI"], "ckpt", "export", "--quiet"]
        subprocess.run([*tool, folder / (name + ".ckpt"), folder / (name + ".safetensors")], check=True)
    whole = system == "tp"
    ways = {"imported": (".ckpt", "tessera", whole, True), "read": ("", "tessera", whole, False, ".own")}
    for other in ("fsdp2", "ddp"):
        ways[f"exported, {other}"] = ".back", other, whole
        ways[f"saved, {other}"] = ".own", other, whole
    results = {way: run_ranks(ranks, _continue, folder, how[0], how[1], jobs, *how[2:], joins=False) for way, how in ways.items()}
    for number, (kind, dtype, _) in enumerate(jobs):
        distances, differing = {}, {}
        for way, of_ranks in results.items():
            losses = [(own, theirs) for rank in range(ranks) for own, theirs in zip(of_ranks[rank][number][0], after[rank][number])]
            distances[way] = max(abs(own - theirs) / abs(theirs) for own, theirs in losses)
            differing[way] = of_ranks[0][number][1]
        yield kind, dtype, distances, differing


def main():
    parser = argparse.ArgumentParser()
    parser.add_argument("--ranks", type=int, nargs="*", default=[1, 2, 4, 8])
    parser.add_argument("--systems", nargs="*", default=SYSTEMS)
    parser.add_argument("--optimizers", nargs="*", default=tuple(OPTIMIZERS))
    options = parser.parse_args()
    wrong = 0  # bfloat16 has other sums: its losses are shown alone
    for ranks, system in itertools.product(options.ranks, options.systems):
        if ranks == 1 and system in ("hsdp", "tp"):
            continue
        with tempfile.TemporaryDirectory() as folder:
            for kind, dtype, distances, differing in go_on(Path(folder), system, ranks, options.optimizers):
                bad = {way: names for way, names in differing.items() if names}
                wrong += bool(bad) or dtype == torch.float32 and max(distances.values()) > 1e-5
                print(f"{system:6}{ranks:3} ranks {kind:9}{str(dtype)[6:]:9} loss "
                      + ", ".join(f"{way} {value:.1e}" if value else f"{way} equal" for way, value in distances.items())
                      + (f"; VALUES {json.dumps(bad)}" if bad else ""), flush=True)
    print(f"{wrong} with other values or losses")
    return bool(wrong)


if __name__ == "__main__":
    sys.exit(main())
