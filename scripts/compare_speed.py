#!/usr/bin/env python3
"""Compares the speed of two training programs that take turns.

    compare_speed.py --sharded COMMAND --plain COMMAND [--threads N] [--rounds N] [--steps N]

Each command is a program with its arguments, to which `--steps N` is added; it prints the seconds of its median step as
"median step: N s". A round runs both, in the opposite order of the round before. Prints their speed in each round,
and the median of the ratios with the interval in which it lies with a probability of 95 %.
"""
import argparse
import math
import os
import re
import shlex
import statistics
import subprocess
import sys


def seconds_per_step(command, environment):
    end = subprocess.run(command, env=environment, stdout=subprocess.PIPE, text=True)
    found = re.findall(r"([0-9.]+) bytes per second.*median step: ([0-9.]+) s", end.stdout)
    if end.returncode or not found:
        sys.exit(f"{shlex.join(command)} ended with status {end.returncode} and printed no speed:\n{end.stdout}")
    return float(found[-1][0]), float(found[-1][1])


def interval(values):
    """Returns the interval of the median: the number of values below it is distributed as the heads of coins. Of fewer than
    six, the least and the largest."""
    values = sorted(values)
    n, skipped = len(values), 0
    while sum(math.comb(n, k) for k in range(skipped + 2)) / 2**n <= 0.025:
        skipped += 1
    return values[skipped], values[n - 1 - skipped]


def main():
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--sharded", required=True, type=shlex.split, help="trains on several ranks")
    parser.add_argument("--plain", required=True, type=shlex.split, help="trains the same in one process")
    parser.add_argument("--threads", type=int, default=2, help="threads of the plain one")
    parser.add_argument("--rounds", type=int, default=5)
    parser.add_argument("--steps", type=int, default=25, help="steps of each in a round")
    options = parser.parse_args()
    if options.rounds < 1 or options.steps < 1:
        parser.error("--rounds and --steps must be positive")
    programs = {"sharded": (options.sharded, dict(os.environ)),
                "plain": (options.plain, os.environ | {"OMP_NUM_THREADS": str(options.threads)})}
    ratios = []
    for round in range(options.rounds):
        measured = {}
        for name in sorted(programs, reverse=round % 2 == 0):
            command, environment = programs[name]
            measured[name] = seconds_per_step(command + ["--steps", str(options.steps)], environment)
        ratios.append(measured["sharded"][1] / measured["plain"][1])
        print(f"round {round + 1} of {options.rounds}: sharded {measured['sharded'][0]:.0f} bytes per second, "
              f"plain LibTorch with {options.threads} threads {measured['plain'][0]:.0f}; steps {ratios[-1]:.3f}", flush=True)
    low, high = interval(ratios)
    print(f"a sharded step takes {statistics.median(ratios):.3f} ({low:.3f} to {high:.3f}) of a step of plain LibTorch")


if __name__ == "__main__":
    main()
