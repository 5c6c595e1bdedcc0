#!/usr/bin/env python3
"""Trains a model under a limit of memory that is too small for it: by LibTorch alone, then sharded.

    bigger_than_memory.py BUILD [--limit 650] [--ranks 2] [--no-unlimited] [ARGS of the example]

Each process gets a cgroup whose memory is limited to LIMIT MB (10^6 bytes), page cache included; to make these takes root. The
kernel is to end the process that LibTorch trains in; the ranks of the sharded job, each under that limit, are to train to their
end, with the losses of a process without a limit. BUILD: the folder of a build that has tessera and the example. Ranks
talk over Gloo, each as on a machine of its own: in shared memory the ranks of a host keep one copy of the
parameters (TESSERA_TRANSPORT=arena), and the kernel counts it for one of them.
"""

import argparse
import contextlib
import os
import pathlib
import re
import signal
import subprocess
import sys

TOP = pathlib.Path("/sys/fs/cgroup")
IS_FIRST = (TOP / "memory").is_dir()  # the first version of cgroups, not the second


def folder_of(name):
    return (TOP / "memory" if IS_FIRST else TOP) / f"tessera-{os.getpid()}-{name}"


@contextlib.contextmanager
def limited(name, limit):
    """A cgroup with a limit of memory and no swap: what does not fit is to end the process."""
    folder = folder_of(name)
    if not IS_FIRST:
        (TOP / "cgroup.subtree_control").write_text("+memory")
    folder.mkdir()
    try:
        first, second = {"memory.limit_in_bytes": limit, "memory.memsw.limit_in_bytes": limit}, {"memory.max": limit, "memory.swap.max": 0}
        for file, value in (first if IS_FIRST else second).items():
            if (folder / file).exists():
                (folder / file).write_text(str(value))
        yield
    finally:
        folder.rmdir()


def peak_of(name):
    """Returns the most bytes that the cgroup has used, page cache included."""
    peak = folder_of(name) / ("memory.max_usage_in_bytes" if IS_FIRST else "memory.peak")
    return int(peak.read_text()) if peak.exists() else 0


def inside(name, words):
    """A shell that joins the cgroup, whose name it may read from the environment, and becomes `words`."""
    return ["/bin/sh", "-c", f'echo $$ > "{folder_of(name)}/cgroup.procs" && exec "$@"', "sh", *words]


def run(title, command):
    """Runs a job, prints what it prints, and returns its status and its losses."""
    print(f"--- {title}", flush=True)
    job = subprocess.Popen(command, stdout=subprocess.PIPE, text=True, env={"TESSERA_TRANSPORT": "gloo"} | os.environ)
    losses = []
    for line in job.stdout:
        print(line, end="", flush=True)
        losses += re.findall(r"step \d+/\d+ +loss ([0-9.]+)", line)
    return job.wait(), [float(loss) for loss in losses]


def main():
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("build", type=pathlib.Path)
    parser.add_argument("--limit", type=int, default=650, help="MB of memory a process")
    parser.add_argument("--ranks", type=int, default=2)
    parser.add_argument("--no-unlimited", action="store_true", help="do not train in one process without a limit, for the losses")
    options, rest = parser.parse_known_args()
    if os.geteuid() != 0:
        sys.exit("bigger_than_memory: cgroups are made by root; run it as root, or run examples/bigger_than_memory in scopes of "
                 "your own (systemd-run --user --scope -p MemoryMax=650M)")
    program = [str(options.build / "examples/bigger_than_memory"), *rest]
    names = ["alone", *(f"rank{rank}" for rank in range(options.ranks))]
    with contextlib.ExitStack() as stack:
        try:
            for name in names:
                stack.enter_context(limited(name, options.limit * 1_000_000))
        except OSError as error:
            sys.exit(f"bigger_than_memory: no cgroup can be made here: {error}")
        status, steps = run(f"LibTorch alone, {options.limit} MB", inside("alone", [*program, "--plain"]))
        was_killed = status == -signal.SIGKILL
        print("the kernel killed it: out of memory" if was_killed else f"it ended with status {status}: the limit shows nothing",
              flush=True)
        launcher = [str(options.build / "bin/tessera"), "run", "-n", str(options.ranks), "--no-prefix"]
        status, losses = run(f"sharded over {options.ranks} ranks, {options.limit} MB each", [*launcher, *inside("rank$RANK", program)])
        peaks = [peak_of(name) for name in names[1:]]

    expected = []
    if not options.no_unlimited:
        _, expected = run("LibTorch alone, without a limit", [*program, "--plain"])
    difference = max((abs(a - b) for a, b in zip(losses, expected)), default=0.0)

    print(f"--- under {options.limit} MB a process")
    print(f"LibTorch alone: {'killed' if was_killed else 'not killed'} after {len(steps)} steps")
    print(f"sharded: {len(losses)} steps; highest use of each rank, page cache included: "
          + ", ".join(f"{peak / 1e6:.0f} MB" for peak in peaks))
    if expected:
        print(f"losses differ from those without a limit by at most {difference:.1e}")
    return 0 if was_killed and status == 0 else 1


if __name__ == "__main__":
    sys.exit(main())
