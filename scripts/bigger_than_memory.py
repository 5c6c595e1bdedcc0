#!/usr/bin/env python3
"""Trains a model under a limit of memory that is too small for it: by LibTorch alone, then sharded.

    bigger_than_memory.py BUILD [--limit 650] [--ranks 2] [--out FILE] [--no-unlimited] [ARGS of the example]

Each process gets a cgroup whose memory is limited to LIMIT MB (10^6 bytes), page cache included; to make these takes root. The
kernel is to end the process that LibTorch trains in; the ranks of the sharded job, each under that limit, are to train to their
end, with the losses of a process without a limit. BUILD: the folder of a build that has tessera and the example. --out: also writes
the figures as JSON. Ranks talk over Gloo, each as on a machine of its own: in shared memory the ranks of a host keep one copy of the
parameters (TESSERA_TRANSPORT=arena), and the kernel counts it for one of them.
"""

import argparse
import json
import os
import pathlib
import re
import signal
import subprocess
import sys

ROOT = pathlib.Path(__file__).resolve().parent.parent


class Limited:
    """A cgroup with a limit of memory, in the first or the second version of cgroups."""

    def __init__(self, name, limit):
        top = pathlib.Path("/sys/fs/cgroup")
        self.is_first = (top / "memory").is_dir()
        self.folder = (top / "memory" if self.is_first else top) / f"tessera-{os.getpid()}-{name}"
        if not self.is_first:
            (top / "cgroup.subtree_control").write_text("+memory")
        self.folder.mkdir()
        self.write("memory.limit_in_bytes" if self.is_first else "memory.max", limit)
        # No swap: what does not fit is to end the process.
        swap = "memory.memsw.limit_in_bytes" if self.is_first else "memory.swap.max"
        if (self.folder / swap).exists():
            self.write(swap, limit if self.is_first else 0)

    def write(self, name, value):
        (self.folder / name).write_text(str(value))

    def command(self, words):
        """A shell that joins the cgroup and becomes `words`."""
        return ["/bin/sh", "-c", f'echo $$ > {self.folder}/cgroup.procs && exec "$@"', "sh", *words]

    def close(self):
        """Returns the peak in bytes, page cache included."""
        peak = self.folder / ("memory.max_usage_in_bytes" if self.is_first else "memory.peak")
        found = int(peak.read_text()) if peak.exists() else 0
        self.folder.rmdir()
        return found


def run(title, command):
    """Runs a job, prints what it prints, and returns its status and its losses."""
    print(f"--- {title}", flush=True)
    job = subprocess.Popen(command, stdout=subprocess.PIPE, text=True, env={"TESSERA_TRANSPORT": "gloo"} | os.environ)
    losses, last = [], ""
    for line in job.stdout:
        print(line, end="", flush=True)
        losses += re.findall(r"step \d+/\d+ +loss ([0-9.]+)", line)
        last = line.strip() or last
    return job.wait(), [float(loss) for loss in losses], last


def main():
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("build", type=pathlib.Path)
    parser.add_argument("--limit", type=int, default=650, help="MB of memory a process")
    parser.add_argument("--ranks", type=int, default=2)
    parser.add_argument("--out", type=pathlib.Path)
    parser.add_argument("--no-unlimited", action="store_true", help="do not train in one process without a limit, for the losses")
    options, rest = parser.parse_known_args()
    if os.geteuid() != 0:
        sys.exit("bigger_than_memory: cgroups are made by root; run it as root, or run examples/bigger_than_memory in scopes of "
                 "your own (systemd-run --user --scope -p MemoryMax=650M)")
    program = [str(options.build / "examples/bigger_than_memory"), *rest]
    limit = options.limit * 1_000_000

    try:
        alone, *ranks = [Limited(name, limit) for name in ["alone", *(f"rank{rank}" for rank in range(options.ranks))]]
    except OSError as error:
        sys.exit(f"bigger_than_memory: no cgroup can be made here: {error}")
    status, steps, _ = run(f"LibTorch alone, {options.limit} MB", alone.command([*program, "--plain"]))
    alone_peak = alone.close()
    was_killed = status == -signal.SIGKILL
    print("the kernel killed it: out of memory" if was_killed else f"it ended with status {status}: the limit does not show anything",
          flush=True)

    joins = f'echo $$ > {ranks[0].folder.parent}/tessera-{os.getpid()}-rank$RANK/cgroup.procs && exec "$@"'
    status, losses, last = run(f"sharded over {options.ranks} ranks, {options.limit} MB each",
                               [str(options.build / "bin/tessera"), "run", "-n", str(options.ranks), "--no-prefix", "/bin/sh", "-c", joins,
                                "sh", *program])
    peaks = [rank.close() for rank in ranks]

    expected = []
    if not options.no_unlimited:
        _, expected, _ = run("LibTorch alone, without a limit", [*program, "--plain"])
    difference = max((abs(a - b) for a, b in zip(losses, expected)), default=0.0)

    print(f"--- under {options.limit} MB a process")
    print(f"LibTorch alone: {'killed' if was_killed else 'not killed'} after {len(steps)} steps")
    print(f"sharded: {len(losses)} steps; highest use of each rank, page cache included: "
          + ", ".join(f"{peak / 1e6:.0f} MB" for peak in peaks))
    if expected:
        print(f"losses differ from those without a limit by at most {difference:.1e}")
    if options.out:
        figures = {"limit_bytes": limit, "killed": was_killed, "alone_peak_bytes": alone_peak, "rank_peak_bytes": peaks, "losses": losses,
                   "losses_alone": expected, "last": last}
        options.out.write_text(json.dumps(figures, indent=1) + "\n")
    return 0 if was_killed and status == 0 else 1


if __name__ == "__main__":
    sys.exit(main())
