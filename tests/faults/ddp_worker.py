"""The job of fault_worker.cpp with torch.distributed's DistributedDataParallel over Gloo, for launchers.py --ddp.

    ddp_worker.py FAULT CULPRIT STEP STEPS SCRATCH
"""

import datetime
import os
import signal
import sys
import time

import torch
import torch.distributed as dist


def announce(text: str) -> None:
    print(f"{text} {time.monotonic():.6f}", flush=True)


def start_child(program: bool) -> None:
    if os.fork() == 0:
        if program:
            os.execlp("sleep", "sleep", "60")
        time.sleep(60)
        os._exit(0)


def fail(*_) -> None:
    announce("fault now")
    raise RuntimeError("the sample is corrupt")


def main() -> int:
    fault, culprit, at, steps = sys.argv[1], int(sys.argv[2]), int(sys.argv[3]), int(sys.argv[4])
    dist.init_process_group("gloo", timeout=datetime.timedelta(seconds=int(os.environ["TESSERA_TIMEOUT"])))
    rank = dist.get_rank()
    torch.manual_seed(5)
    net = torch.nn.Sequential(torch.nn.Linear(64, 256), torch.nn.GELU(), torch.nn.Identity(), torch.nn.Linear(256, 256), torch.nn.GELU(),
                              torch.nn.Linear(256, 8))
    model = torch.nn.parallel.DistributedDataParallel(net)
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-3)
    try:
        for step in range(steps):
            mine = rank == culprit and step == at
            if mine and fault in ("program", "fork"):
                start_child(fault == "program")
            if mine and fault in ("program", "fork", "driven"):
                announce("ready")
            if mine and fault == "loader":
                fail()
            if mine and fault in ("early_return", "exit", "crash"):
                announce("fault now")
                if fault == "early_return":
                    break
                if fault == "exit":
                    os._exit(3)
                os.kill(os.getpid(), signal.SIGSEGV)
            if mine and fault == "forward":
                net[2].register_forward_pre_hook(fail)
            if mine and fault == "backward":
                net[2].register_full_backward_hook(fail)
            optimizer.zero_grad()
            model(torch.randn(16, 64)).square().mean().backward()
            optimizer.step()
    except Exception as error:  # as the last words of a rank
        print(f"rank {rank}: [{type(error).__name__}] {str(error).splitlines()[0]}", file=sys.stderr, flush=True)
        return 1
    return 0


if __name__ == "__main__":
    sys.exit(main())
