#!/usr/bin/env python3
"""Runs what shows whether Tessera works on this machine's GPU, in at most six minutes, and prints a table.

    gpu_check.py BUILD [--device cuda|sim] [--seconds 360] [--write-guide]

BUILD: the folder of a build with tests and examples, for CUDA against LibTorch's CUDA wheels (docs/guide/gpu.md has the
commands). Without a GPU, or with --device sim, tests run on the simulated accelerator and programs on the CPU: the same steps, for
which the table says what is missing. --write-guide: also puts the table into docs/guide/gpu.md.
"""

import argparse
import datetime
import os
import pathlib
import re
import shutil
import subprocess
import sys
import tempfile
import time

ROOT = pathlib.Path(__file__).resolve().parent.parent
GUIDE = ROOT / "docs/guide/gpu.md"
# A world of several ranks on a machine with fewer GPUs.
TOO_FEW = "each rank needs a device of its own"
SMALL = ["--layers", "2", "--width", "128", "--heads", "4", "--seq", "64", "--batch", "8"]
SIZES = {"small, 3.3 M": [], "medium, 25 M": ["--width", "512", "--layers", "8", "--heads", "8"]}


class Check:
    def __init__(self, options, scratch):
        self.build, self.scratch = options.build, pathlib.Path(scratch)
        self.end = time.monotonic() + options.seconds
        self.on_gpu = options.device == "cuda"
        self.rows = []
        self.bad = 0

    def run(self, command, limit, **environment):
        """Returns (status, output); a status of None means that there was no time for it, or that it took too long."""
        left = min(limit, self.end - time.monotonic())
        if left < 5:
            return None, "no time left"
        try:
            done = subprocess.run([str(word) for word in command], stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True,
                                  timeout=left, env=os.environ | environment)
            return done.returncode, done.stdout
        except subprocess.TimeoutExpired as late:
            return None, f"{(late.stdout or b'').decode(errors='replace')}\nnot done after {left:.0f} s"

    def row(self, name, result, is_bad=False):
        self.bad += is_bad
        self.rows.append((name, result))
        print(f"{'FAILED' if is_bad else 'ok':7}{name}: {result}", flush=True)

    def tests(self, layer, limit):
        """The tests of a folder that are neither slow nor nightly, as many as there is time for."""
        program = self.build / f"tests/{layer}_tests"
        name = f"tests of `{layer}`"
        if not program.exists():
            return self.row(name, "the build has none (TESSERA_BUILD_TESTS)", is_bad=True)
        status, out = self.run([program, "--gtest_filter=-*Slow*:*Nightly*"], limit, TESSERA_TEST_DEVICE="cuda" if self.on_gpu else "sim",
                               OMP_NUM_THREADS="1")
        parts = dict(re.findall(r"\[ RUN      \] (\S+)\n(.*?)(?=\[ RUN      \]|\[----------\]|\Z)", out, re.S))
        passed = sum("[       OK ]" in text for text in parts.values())
        failed = [test for test, text in parts.items() if "[  FAILED  ]" in text]
        lacking = [test for test in failed if TOO_FEW in parts[test]]
        real = [test for test in failed if test not in lacking]
        text = f"{passed} passed" + (f", {len(lacking)} need more GPUs" if lacking else "")
        if real:
            text += f", failed: {', '.join(real[:5])}{' ...' if len(real) > 5 else ''}"
        if status is None or status < 0:
            how = out.splitlines()[-1] if status is None else f"ended by signal {-status}"
            text += f"; {how}, in {list(parts)[-1] if parts else 'none'}"
        self.row(name, text, is_bad=bool(real) or not passed and not lacking or (status or 0) < 0)

    def trained(self, arguments):
        """Trains a small GPT alone; returns its losses, or what went wrong."""
        losses = self.scratch / "losses"
        losses.unlink(missing_ok=True)
        status, out = self.run([self.build / "examples/train_gpt", "--data", self.scratch / "text", "--steps", 20 if self.on_gpu else 5,
                                "--sample", 0, "--losses", losses, *SMALL, *arguments], 40)
        if status != 0:
            return out.strip().splitlines()[-1] if out.strip() else f"status {status}, and nothing was printed"
        return [float(line) for line in losses.read_text().split()]

    def training(self, name, arguments, like, tolerance):
        """`like`: the losses of the same training in float on the CPU, to compare with."""
        got = self.trained(arguments)
        if isinstance(got, str) or isinstance(like, str):
            return self.row(name, got if isinstance(got, str) else f"nothing to compare with: {like}", is_bad=True)
        off = max(abs(a / b - 1) for a, b in zip(got, like))
        self.row(name, f"losses differ from those in float on the CPU by at most {off:.1e} (allowed: {tolerance:g})",
                 is_bad=not off <= tolerance)

    def speed(self, name, arguments, device):
        """A world of one beside plain LibTorch."""
        own = f"--data {self.scratch}/text --device {device} " + " ".join(arguments)
        status, out = self.run([sys.executable, ROOT / "scripts/compare_speed.py", "--rounds", 3, "--steps", 20 if self.on_gpu else 2,
                                "--threads", os.cpu_count(), "--sharded",
                                f"{self.build}/examples/train_gpt --sample 0 --batch 8 {own}",
                                "--plain", f"{self.build}/examples/plain_gpt --batch 8 {own}"], 75)
        found = re.search(r"a sharded step takes ([\d.]+) \(([\d.]+) to ([\d.]+)\)", out)
        text = f"{found[1]} [{found[2]}, {found[3]}]" if found else out.strip().splitlines()[-1] if out.strip() else f"status {status}"
        self.row(f"a step of a world of one by plain LibTorch's: {name}", text, is_bad=not found and status is not None)


def machine():
    lines = []
    if shutil.which("nvidia-smi"):
        lines = subprocess.run(["nvidia-smi", "--query-gpu=name,driver_version", "--format=csv,noheader"], capture_output=True,
                               text=True).stdout.strip().splitlines()
    return lines


def main():
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("build", type=pathlib.Path)
    parser.add_argument("--device", choices=("cuda", "sim"))
    parser.add_argument("--seconds", type=float, default=360)
    parser.add_argument("--write-guide", action="store_true")
    options = parser.parse_args()
    gpus = machine()
    options.device = options.device or ("cuda" if gpus else "sim")
    with tempfile.TemporaryDirectory() as scratch:
        check = Check(options, scratch)
        (check.scratch / "text").write_text("".join(f"line {i * i} of a text\n" for i in range(500)))
        device = "cuda" if check.on_gpu else "cpu"
        status, out = check.run([options.build / "bin/tessera", "--version"], 20)
        check.row("machine", f"{', '.join(gpus) or 'no GPU: nvidia-smi shows none'}; {' '.join(out.split())}", is_bad=status != 0)

        # Numbers: bits differ from the CPU's where kernels sum in another order.
        reference = check.trained(["--device", "cpu"])
        on = ["--device", device]
        check.training("float, everything sharded", on, reference, 1e-3)
        check.training("master weights: bfloat16", [*on, "--dtype", "bfloat16"], reference, 0.05)
        check.training("scaler: half", [*on, "--dtype", "half", "--scaler"], reference, 0.05)
        check.training("`CPUAdam`, state in files", [*on, "--state", "float", "--offload", check.scratch / "state"], reference, 1e-3)
        if check.on_gpu:
            check.training("NCCL, a world of one", [*on, "--backend", "nccl"], reference, 1e-3)
        else:
            check.row("NCCL, a world of one", "needs a GPU")

        for name, arguments in SIZES.items():
            check.speed(name, arguments, device)
        if not check.on_gpu:
            check.row("speed on a GPU", "needs a GPU: the ratios above are the CPU's")
        layers = ["optim", "grad", "unit", "model", "access", "init", "tensor", "checkpoint"]
        for i, layer in enumerate(layers):
            check.tests(layer, (check.end - time.monotonic()) / (len(layers) - i))

    date = datetime.date.today().isoformat()
    page = "\n".join([f"{date}, `scripts/gpu_check.py`, tests on `{options.device}`, programs on `{device}`:", "", "| step | result |",
                      "| --- | --- |", *(f"| {name} | {result} |" for name, result in check.rows)])
    print(f"\n{page}\n\n{check.bad} of {len(check.rows)} failed")
    if options.write_guide:
        text = GUIDE.read_text()
        begin, end = "<!-- gpu_check -->\n", "<!-- end of gpu_check -->"
        GUIDE.write_text(text[:text.index(begin) + len(begin)] + page + "\n" + text[text.index(end):])
    return 1 if check.bad else 0


if __name__ == "__main__":
    sys.exit(main())
