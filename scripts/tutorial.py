#!/usr/bin/env python3
"""Measures what docs/guide/zero.md shows, and writes that page with the figures of this machine.

    tutorial.py BUILD [--out runs/tutorial] [--write-guide] [--rounds 3]

BUILD: the folder of a build that has tessera, tessera-bench and train_gpt. --write-guide: also puts the figures into the guide.
"""

import argparse
import json
import os
import pathlib
import re
import subprocess
import sys

ROOT = pathlib.Path(__file__).resolve().parent.parent
GUIDE = ROOT / "docs/guide/zero.md"
LEVELS = ("none", "os", "os_g", "p_g_os")


def measured(build, level, ranks, rounds):
    print(f"tutorial: a step at {level} on {ranks} ranks", file=sys.stderr, flush=True)
    command = [build / "bin/tessera", "bench", "step", "--size", "small", "--level", level, "--ranks", str(ranks),
               "--transport", "gloo", "--rounds", str(rounds), "--steps", "4", "--json"]
    done = subprocess.run(command, stdout=subprocess.PIPE, stderr=subprocess.DEVNULL, text=True, check=True)
    return json.loads(done.stdout.splitlines()[-1])


def table(head, rows):
    lines = [head, ["---"] + ["---:"] * (len(head) - 1), *rows]
    return "\n".join("| " + " | ".join(line) + " |" for line in lines)


def megabytes(count):
    return f"{count / 1e6:.1f}"


def tables(results):
    """Returns the page's tables by name. `results`: by level and number of ranks."""
    def row(level, ranks, cells):
        return [f"`{level}`", str(ranks), *cells]
    kinds = ("parameters", "gradients", "optimizer_state", "total")
    kept = [row(level, ranks, [megabytes(r["kept_bytes"]["sharded"][kind]) for kind in kinds]) for (level, ranks), r in results.items()]
    alone = results["none", 2]["kept_bytes"]["local"]
    kept.append(["one process", "1", *(megabytes(alone[kind]) for kind in kinds)])
    factor = {level: 3 if level == "p_g_os" else 2 for level in LEVELS}
    sent = [row(level, ranks, [megabytes(factor[level] * 4 * r["parameters"] * (ranks - 1) / ranks), megabytes(r["bytes_sent_per_step"]),
                               megabytes(r["peak_unsharded_bytes"])])
            for (level, ranks), r in results.items()]
    spent = [row(level, ranks, [f"{r['ratio']:.2f}", f"{min(r['ratio_of_rounds']):.2f} to {max(r['ratio_of_rounds']):.2f}",
                                f"{r['final_loss']['sharded']:.6f}"])
             for (level, ranks), r in results.items()]
    return {"kept": table(["level", "ranks", "parameters", "gradients", "optimizer state", "sum"], kept),
            "sent": table(["level", "ranks", "sent, expected (MB)", "sent, measured", "gathered at most (MB)"], sent),
            "time": table(["level", "ranks", "step, by one process's", "rounds", "last loss"], spent)}


def filled(page, figures):
    for name, text in figures.items():
        page, count = re.subn(rf"(<!-- figures: {name} -->\n).*?(<!-- end -->)", rf"\g<1>\n{text}\n\n\g<2>", page, flags=re.S)
        assert count == 1, name
    return page


def draw_memory(build, out):
    """Draws rank 0's memory in a step at two levels. Tells whether their losses are equal."""
    losses = []
    for level in ("none", "p_g_os"):
        print(f"tutorial: the memory of a step at {level}", file=sys.stderr, flush=True)
        command = [build / "bin/tessera", "run", "-n", "2", build / "examples/train_gpt", "--level", level, "--steps", "12", "--sample", "0",
                   "--data", ROOT / "data/corpus.txt", "--memory", out / f"{level}.svg", "--losses", out / f"{level}.losses"]
        subprocess.run(command, check=True, stdout=subprocess.DEVNULL, env=dict(os.environ, TESSERA_TRANSPORT="gloo"))
        losses.append((out / f"{level}.losses").read_text())
    return losses[0] == losses[1]


def main():
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("build", type=pathlib.Path)
    parser.add_argument("--out", type=pathlib.Path, default=ROOT / "runs/tutorial")
    parser.add_argument("--write-guide", action="store_true")
    parser.add_argument("--rounds", type=int, default=3)
    options = parser.parse_args()
    options.out.mkdir(parents=True, exist_ok=True)
    cells = [(level, 2) for level in LEVELS] + [("p_g_os", 4)]
    figures = tables({cell: measured(options.build, *cell, options.rounds) for cell in cells})
    equal = draw_memory(options.build, options.out)
    page = filled(GUIDE.read_text(), figures)
    (options.out / "zero.md").write_text(page)
    if options.write_guide:
        GUIDE.write_text(page)
    print(page)
    print(f"The losses of 12 steps of train_gpt at none and at p_g_os are {'equal' if equal else 'NOT equal'} in all digits.")
    print(f"This page and the pictures: {options.out}", file=sys.stderr)
    return 0 if equal else 1


if __name__ == "__main__":
    sys.exit(main())
