#!/usr/bin/env python3
"""Writes the images that examples/sharded_ddp.cpp learns: the handwritten digits of scikit-learn.

    export_digits.py OUT

The file is the line "digits 1797", the images (8 rows of 8 bytes each, 0 is white and 16 black), and their labels
(a byte each, 0 to 9). scikit-learn has the images in its package; nothing is downloaded. The exit status is 3 if
this Python lacks scikit-learn.
"""
import argparse
import pathlib
import sys


def load():
    try:
        from sklearn.datasets import load_digits
    except ImportError:
        print(f"export_digits.py: scikit-learn was not found; install it: {sys.executable} -m pip install scikit-learn",
              file=sys.stderr)
        sys.exit(3)
    digits = load_digits()
    return digits.images.astype("uint8"), digits.target.astype("uint8")


def main():
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("out", type=pathlib.Path)
    out = parser.parse_args().out
    images, labels = load()
    assert images.shape == (len(labels), 8, 8) and images.max() == 16 and labels.max() == 9, images.shape
    out.parent.mkdir(parents=True, exist_ok=True)
    part = out.with_name(out.name + ".part")  # no reader sees a half-written file
    part.write_bytes(f"digits {len(labels)}\n".encode() + images.tobytes() + labels.tobytes())
    part.replace(out)
    print(f"{out}: {len(labels)} images, {out.stat().st_size} bytes")


if __name__ == "__main__":
    main()
