#!/usr/bin/env python3
"""Tries faults of ranks that a launcher has started, and prints a table of what the ranks and the launcher say.

    launchers.py --worker FAULT_WORKER --cli TESSERA [--trials 20] [--launchers run,mpirun,torchrun] [--faults killed,exits] [--ranks 4]
                 [--transport arena] [--ddp]

A survivor names the culprit if its own last words do, and blame no other rank before; one is silent if the launcher has ended it
before it knew. The launcher is right if its first line on the failure names the culprit (torchrun and mpirun name the rank that failed
first). The exit status is to be the culprit's; torchrun's is always 1. --ddp: the same job as
torch.distributed's DistributedDataParallel, for its first nine faults.
"""

from __future__ import annotations

import argparse
import os
import random
import re
import signal
import subprocess
import sys
import tempfile
import threading
import time
from pathlib import Path

# name: what the worker is to do, what the driver does, and the culprit's exit status; None: it depends.
FAULTS = {
    "killed": ("driven", signal.SIGKILL, 137), "killed_with_program": ("program", signal.SIGKILL, 137),
    "killed_with_fork": ("fork", signal.SIGKILL, 137), "throw_in_forward": ("forward", None, 1),
    "throw_in_backward": ("backward", None, 1), "throw_in_loader": ("loader", None, 1), "early_return": ("early_return", None, None),
    "exits": ("exit", None, 3), "crashes": ("crash", None, 139), "stopped": ("driven", signal.SIGSTOP, None),
    "lone_barrier": ("lone_barrier", None, None), "lone_save": ("lone_save", None, None), "lone_clip": ("lone_clip", None, None),
    "extra_backward": ("extra_backward", None, None), "missing_backward": ("missing_backward", None, None),
    "skipped_step": ("skipped_step", None, None), "skipped_batch": ("skipped_batch", None, None),
    "different_model": ("different_model", None, None), "different_size": ("different_size", None, None),
    "different_order": ("different_order", None, None),
}
# The faults that DistributedDataParallel's loop can commit, too.
OF_DDP = list(FAULTS)[:10]
DDP = Path(__file__).with_name("ddp_worker.py")
FAILED = re.compile(r"\brank (\d+)(?: \([^)]*\))?:? (?:has |its process has |an exception )?"
                    r"(?:failed|died|ended|left|closed|crashed|threw|is gone|was killed|is stuck)")


def ranks_in(text: str) -> set[int]:
    found: set[int] = set()
    for numbers in re.findall(r"\branks? (\d+(?:(?:, and |, | and | or |-)\d+)*)", text):
        found |= {int(n) for n in re.findall(r"\d+", numbers)}
    return found


# What each launcher says first of a failure.
VERDICTS = {"run": r"^tessera run: rank (\d+) (?:failed first|is the cause)", "mpirun": r"process rank (\d+) |Process name: \[\[\d+,1\],(\d+)\]",
            "torchrun": r"failed \(exitcode: .*local_rank: (\d+)"}


class Trial:
    def __init__(self, options, launcher: str, fault: str, number: int):
        self.options, self.launcher, self.fault = options, launcher, fault
        self.culprit = (number + 1) % options.ranks
        self.mark = f"{os.getpid()}-{random.randrange(1 << 30)}"
        self.lines: list[tuple[float, str]] = []
        self.scratch = tempfile.mkdtemp(prefix="launchers-")

    def command(self) -> list[str]:
        role, deed, _ = FAULTS[self.fault]
        worker = [self.options.worker] if not self.options.ddp else [sys.executable, str(DDP)]
        worker += [role, str(self.culprit), "20", str(1_000_000 if deed else 200), self.scratch + "/saved"]
        n = str(self.options.ranks)
        if self.launcher == "run":
            return [self.options.cli, "run", "-n", n, "--log-dir", self.scratch, *worker]
        if self.launcher == "mpirun":
            return ["mpirun", "--allow-run-as-root", "--oversubscribe", "--bind-to", "none", "-n", n, *worker]
        port = str(random.randrange(20000, 30000))
        program = ["--no-python"] if not self.options.ddp else []
        return [sys.executable, "-m", "torch.distributed.run", "--nproc-per-node", n, "--master-port", port, *program,
                *(worker if program else worker[1:])]

    def pid_of(self, rank: int) -> int:
        for entry in os.listdir("/proc"):
            if not entry.isdigit():
                continue
            try:
                text = Path(f"/proc/{entry}/environ").read_bytes().split(b"\0")
                name = Path(f"/proc/{entry}/comm").read_text().strip()
            except OSError:
                continue
            is_worker = name.startswith("fault_worker"[:15]) or (self.options.ddp and name.startswith(("python", "pt_")))
            variables = dict(v.split(b"=", 1) for v in text if b"=" in v)
            own = variables.get(b"OMPI_COMM_WORLD_RANK", variables.get(b"RANK"))
            if is_worker and variables.get(b"FAULT_TRIAL") == self.mark.encode() and own == str(rank).encode():
                return int(entry)
        raise RuntimeError(f"no process of rank {rank}")

    def read(self, stream) -> None:
        for line in stream:
            self.lines.append((time.monotonic(), line.rstrip("\n")))

    def wait_for(self, words: str, limit: float = 60) -> float:
        """Returns the time that the worker names, on the steady clock."""
        end = time.monotonic() + limit
        while time.monotonic() < end:
            for _, line in list(self.lines):
                if found := re.search(rf"\b{words} (\d+\.\d+)", line):
                    return float(found[1])
            if self.process.poll() is not None and words == "ready":
                break
            time.sleep(0.005)
        raise RuntimeError(f"nobody said '{words}':\n" + "\n".join(text for _, text in self.lines[-20:]))

    def run(self) -> dict:
        _, deed, _ = FAULTS[self.fault]
        stuck = self.fault == "stopped"
        env = dict(os.environ, FAULT_TRIAL=self.mark, OMP_NUM_THREADS="1", TESSERA_TIMEOUT="20" if stuck else "10",
                   TESSERA_TRANSPORT=self.options.transport, TMPDIR=self.scratch)
        self.process = subprocess.Popen(self.command(), env=env, stdin=subprocess.DEVNULL, stdout=subprocess.PIPE, stderr=subprocess.STDOUT,
                                        text=True, errors="replace")
        reader = threading.Thread(target=self.read, args=(self.process.stdout,), daemon=True)
        reader.start()
        try:
            if deed:
                self.wait_for("ready")
                time.sleep(random.random() * 0.03)
                at = time.monotonic()
                os.kill(self.pid_of(self.culprit), deed)
            else:
                at = self.wait_for("fault now")
            hangs = False
            try:
                self.process.wait(60)
            except subprocess.TimeoutExpired:
                hangs = True
        finally:
            left = self.leftovers()
        reader.join(5)
        return self.judged(at, hangs, left)

    def leftovers(self) -> int:
        """Kills what the trial has left, and returns its number."""
        time.sleep(0.2)
        count = 0
        for entry in os.listdir("/proc"):
            try:
                if entry.isdigit() and f"FAULT_TRIAL={self.mark}".encode() in Path(f"/proc/{entry}/environ").read_bytes():
                    is_child = b"sleep" in Path(f"/proc/{entry}/cmdline").read_bytes() or self.fault == "killed_with_fork"
                    os.kill(int(entry), signal.SIGKILL)
                    count += not is_child or self.launcher == "run"
            except OSError:
                pass
        return count

    def judged(self, at: float, hangs: bool, left: int) -> dict:
        named, others, silent, worst = set(), set(), self.options.ranks - 1, 0.0
        for rank in range(self.options.ranks):
            if rank == self.culprit:
                continue
            for when, line in self.lines:
                words = re.search(rf"(?:^|\] |\]:)rank {rank}: (\[.*)", line)
                report = re.search(r"\[tessera\] (.*); (ranks? [^;]*) waits? for ", line)
                if report and rank in ranks_in(report[2]):
                    words = report
                if not words:
                    continue
                silent -= 1
                blamed = [int(r) for r in FAILED.findall(words[1]) if int(r) != rank]
                if blamed and blamed[0] != self.culprit:
                    others.add(rank)
                elif self.culprit in ranks_in(words[1]):
                    named.add(rank)
                    worst = max(worst, when - at)
                elif ranks_in(words[1]) - {rank}:
                    others.add(rank)
                break
        verdicts = [found for _, text in self.lines if (found := re.search(VERDICTS[self.launcher], text))]
        right = bool(verdicts) and str(self.culprit) in verdicts[0].groups()
        _, _, status = FAULTS[self.fault]
        ended = status is None or self.launcher == "torchrun" or self.process.returncode == status
        return {"survivors": self.options.ranks - 1 - silent, "named": len(named - others), "others": len(others), "silent": silent,
                "verdict": right, "status": ended, "worst": worst, "bad": int(hangs) + left}


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--worker", default="")
    parser.add_argument("--cli", default="")
    parser.add_argument("--trials", type=int, default=20)
    parser.add_argument("--ranks", type=int, default=4)
    parser.add_argument("--transport", default="arena")
    parser.add_argument("--launchers", default="run,mpirun,torchrun")
    parser.add_argument("--faults", default="")
    parser.add_argument("--ddp", action="store_true")
    parser.add_argument("--verbose", action="store_true")
    options = parser.parse_args()
    print("| launcher | fault | trials | name the culprit | blame another | silent | launcher's line | exit status | worst s | hung or left |\n"
          "| --- | --- | ---: | ---: | ---: | ---: | ---: | ---: | ---: | ---: |", flush=True)
    faults = options.faults.split(",") if options.faults else OF_DDP if options.ddp else list(FAULTS)
    wrong = 0
    for launcher in options.launchers.split(","):
        for fault in faults:
            rows = []
            for number in range(options.trials):
                trial = Trial(options, launcher, fault, number)
                try:
                    rows.append(trial.run())
                except RuntimeError as error:
                    print(f"{launcher} {fault} {number}: {error}", file=sys.stderr)
                    continue
                good = rows[-1]["named"] == rows[-1]["survivors"] and not rows[-1]["bad"]
                if launcher == "run":
                    good &= rows[-1]["verdict"] and rows[-1]["status"] and not rows[-1]["silent"]
                wrong += not good
                if options.verbose and not good:
                    print(f"{launcher} {fault} {number}: culprit {trial.culprit}, {rows[-1]}, status {trial.process.returncode}\n  "
                          + "\n  ".join(text for _, text in trial.lines), file=sys.stderr)
            total = sum(r["survivors"] for r in rows) or 1
            share = lambda key: f"{100 * sum(r[key] for r in rows) / max(1, len(rows)):.0f} %"  # noqa: E731
            print(f"| {'DDP, ' if options.ddp else ''}{launcher} | {fault} | {len(rows)} | {100 * sum(r['named'] for r in rows) / total:.0f} % | "
                  f"{100 * sum(r['others'] for r in rows) / total:.0f} % | {sum(r['silent'] for r in rows)} | {share('verdict')} | {share('status')} | "
                  f"{max([r['worst'] for r in rows] or [0]):.2f} | {sum(r['bad'] for r in rows)} |", flush=True)
    return int(wrong > 0)


if __name__ == "__main__":
    sys.exit(main())
