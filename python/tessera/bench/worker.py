"""One rank of a job that `tessera bench link --against` measures: reads `prepare STEPS` and `train STEPS` from stdin, and
answers each with a line of JSON."""

from __future__ import annotations

import argparse
import json
import sys
import time

import torch
import torch.distributed as dist

from .systems import SYSTEMS, make_system
from .workloads import make_batch, make_model


def main() -> None:
    parser = argparse.ArgumentParser(prog="python -m tessera.bench.worker", description=__doc__)
    parser.add_argument("--system", required=True, choices=[name for name in SYSTEMS if name != "tessera"])
    parser.add_argument("--size", required=True)
    parser.add_argument("--level", required=True)
    parser.add_argument("--optimizer", default="adamw", choices=["adamw", "muon"])
    options = parser.parse_args()
    torch.set_num_threads(1)
    dist.init_process_group("gloo")
    generator = torch.Generator().manual_seed(4321 + dist.get_rank())
    system = None
    for line in sys.stdin:
        verb, steps = line.split()
        if verb == "prepare":
            system = make_system(options.system, make_model(options.size), options.level, options.optimizer)
        batches = [make_batch(options.size, generator) for _ in range(int(steps))]
        times = []
        start = time.perf_counter()
        for batch in batches:
            system.step(*batch)
            end = time.perf_counter()
            times.append(end - start)
            start = end
        print(json.dumps({"seconds": times}), flush=True)
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
