"""Trains the same model by several systems, whose rounds take turns in the same processes, and compares them.

Ratios are those of rounds next to each other: more than 1 means that Tessera is faster.
"""

from __future__ import annotations

import argparse
import gc
import statistics
import sys
import time

import torch
import torch.distributed as dist

import tessera

from .systems import SYSTEMS, make_system
from .workloads import NAMES, make_batch, make_model


def _parse() -> argparse.Namespace:
    parser = argparse.ArgumentParser(prog="python -m tessera.bench", description=__doc__)
    parser.add_argument("--against", default="fsdp2,ddp", help="systems, by commas: fsdp2, ddp, fairscale, deepspeed (default: the first two)")
    parser.add_argument("--size", default="mlp,small", help=f"workloads, by commas: {', '.join(NAMES)} (default: mlp,small)")
    parser.add_argument("--level", default="p_g_os", help="of Tessera: none, os, os_g, p_g_os; by commas")
    parser.add_argument("--optimizer", default="adamw", choices=["adamw", "muon"],
                        help="muon: torch.optim.Muon on whole matrices, AdamW for the other parameters (tessera, fsdp2, ddp)")
    parser.add_argument("--transport", default="arena", help="of Tessera: arena, gloo; by commas")
    parser.add_argument("--ranks", type=int, default=2)
    parser.add_argument("--rounds", type=int, default=9)
    parser.add_argument("--steps", type=int, default=0, help="steps of a round; 0: about half a second")
    parser.add_argument("--markdown", action="store_true", help="print rows of a Markdown table")
    parser.add_argument("--losses", type=int, default=0, metavar="STEPS",
                        help="train so many steps first, and compare the losses bit by bit")
    parser.add_argument("--wraps", type=int, default=0, metavar="TIMES",
                        help="do not train, but shard models and make their optimizers so many times")
    options = parser.parse_args()
    for name in options.against.split(","):
        if name not in SYSTEMS or name == "tessera":
            parser.error(f"--against must name fsdp2, ddp, fairscale or deepspeed; got '{name}'")
        if options.optimizer == "muon" and name not in ("fsdp2", "ddp"):
            parser.error(f"--optimizer muon goes with --against fsdp2 and ddp; got '{name}'")
    for name in options.size.split(","):
        if name not in NAMES:
            parser.error(f"--size must be of {', '.join(NAMES)}; got '{name}'")
    return options


def _losses(systems: dict, size: str, steps: int) -> dict[str, list[float]]:
    losses = {name: [] for name in systems}
    for name, system in systems.items():
        generator = torch.Generator().manual_seed(4321 + dist.get_rank())
        for _ in range(steps):
            losses[name].append(system.step(*make_batch(size, generator)))
    return losses


def _round(system, batches) -> float:
    dist.barrier()
    start = time.perf_counter()
    for batch in batches:
        system.step(*batch)
    dist.barrier()
    return (time.perf_counter() - start) / len(batches)


def _wrap(name: str, size: str, level: str, options: argparse.Namespace) -> float:
    model = make_model(size)
    gc.collect()  # of the system before
    dist.barrier()
    start = time.perf_counter()
    system = make_system(name, model, level, options.optimizer)
    dist.barrier()
    return time.perf_counter() - start


def _result(size: str, level: str, times: dict[str, list[float]]) -> dict:
    return {"size": size, "level": level,
            "milliseconds": {name: statistics.median(values) * 1e3 for name, values in times.items()},
            "ratios": {name: sorted(other / own for own, other in zip(times["tessera"], values))
                       for name, values in times.items() if name != "tessera"}}


def _measure_wraps(size: str, level: str, options: argparse.Namespace) -> dict:
    times: dict[str, list[float]] = {name: [] for name in ["tessera", *options.against.split(",")]}
    for round_ in range(options.wraps + 1):  # the first is not counted
        for name, values in times.items():
            seconds = _wrap(name, size, level, options)
            if round_:
                values.append(seconds)
    return _result(size, level, times)


def _measure(size: str, level: str, options: argparse.Namespace) -> dict:
    systems = {name: make_system(name, make_model(size), level, options.optimizer) for name in ["tessera", *options.against.split(",")]}
    losses = _losses(systems, size, options.losses) if options.losses else None
    generator = torch.Generator().manual_seed(dist.get_rank())
    warm = [make_batch(size, generator) for _ in range(3)]
    seconds = {name: _round(system, warm) for name, system in systems.items()}
    steps = torch.tensor([options.steps or max(1, int(0.5 / max(seconds.values())))])
    dist.broadcast(steps, 0)
    batches = [make_batch(size, generator) for _ in range(int(steps))]
    times, parts = {name: [] for name in systems}, {name: [] for name in systems}
    for _ in range(options.rounds):
        for name, system in systems.items():
            before = system.optimizer_seconds
            times[name].append(_round(system, batches))
            parts[name].append((system.optimizer_seconds - before) / len(batches) * 1e3)
    optimizer = {name: statistics.median(values) for name, values in parts.items()}
    kept = {name: system.kept_bytes() for name, system in systems.items()}
    return dict(_result(size, level, times), kept=kept, optimizer=optimizer, losses=losses)


def _rank(options: argparse.Namespace, transport: str) -> None:
    dist.init_process_group("gloo")
    tessera.init(transport=transport)
    for size in options.size.split(","):
        for level in options.level.split(","):
            result = (_measure_wraps if options.wraps else _measure)(size, level, options)
            results = [None] * dist.get_world_size()
            dist.all_gather_object(results, result.get("losses"))
            if dist.get_rank() == 0:
                (_print_row if options.markdown else _print)(dict(result, transport=transport, losses_of_ranks=results))
    tessera.shutdown()
    dist.barrier()  # rank 0 has the store
    dist.destroy_process_group()


def _figures(result: dict, name: str) -> str:
    kept = f" {result['kept'][name] / 2**20:8.1f} MiB" if "kept" in result else ""
    part = result.get("optimizer", {}).get(name, 0)  # 0: the system does not say
    return f"{result['milliseconds'][name]:8.1f} ms{f' (optimizer {part:.1f})' if part else ''}{kept}"


def _print(result: dict) -> None:
    print(f"{result['size']:<7} {result['level']:<7} {result['transport']:<6} tessera {_figures(result, 'tessera')}", end="")
    for name, ratios in result["ratios"].items():
        print(f" | {name} {_figures(result, name)}, ratio {statistics.median(ratios):.2f} [{ratios[0]:.2f}, {ratios[-1]:.2f}]",
              end="")
    for losses in filter(None, result["losses_of_ranks"][:1]):
        for name in result["ratios"]:
            equal = all(rank["tessera"] == rank[name] for rank in result["losses_of_ranks"])
            print(f" | {len(losses[name])} losses {'equal' if equal else 'differ from'} {name}'s", end="")
    print(flush=True)


def _print_row(result: dict) -> None:
    columns = [f"`{result['size']}`", f"`{result['level']}`", result["transport"]]
    for name, ratios in result["ratios"].items():
        columns.append(f"{statistics.median(ratios):.2f} [{ratios[0]:.2f}, {ratios[-1]:.2f}]")
    columns.append(", ".join(f"{nbytes / 2**20:.0f}" for nbytes in result.get("kept", {}).values()))
    print("| " + " | ".join(columns) + " |", flush=True)


def main() -> None:
    options = _parse()
    print(f"{options.ranks} ranks, {torch.get_num_threads() // options.ranks or 1} threads each, PyTorch {torch.__version__}; "
          f"median of {options.rounds} rounds [least, most]", file=sys.stderr)
    if options.markdown:
        systems = options.against.split(",")
        print("| " + " | ".join(["size", "level", "transport", *systems, "MiB kept: tessera, " + ", ".join(systems)]) + " |")
        print("| --- " * (len(systems) + 4) + "|", flush=True)
    for transport in options.transport.split(","):
        tessera.spawn(_rank, options.ranks, (options, transport))
