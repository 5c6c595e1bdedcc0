#!/usr/bin/env python3
"""Writes the text that the demo trains on: the C++ headers that come with LibTorch itself.

    make_corpus.py OUT [--include DIR]

All headers under torch/csrc/api and c10 (about 2.7 MB), in the order of their paths. The include folder is that of
`Torch_DIR` if it is set, else that of the `torch` package of this Python.
"""
import argparse
import importlib.util
import os
import pathlib
import sys

FOLDERS = ("torch/csrc/api", "c10")
SUFFIXES = (".h", ".hpp")


def include_folder():
    if os.environ.get("Torch_DIR"):  # .../share/cmake/Torch
        return pathlib.Path(os.environ["Torch_DIR"]).resolve().parents[2] / "include"
    spec = importlib.util.find_spec("torch")
    if spec is None or not spec.submodule_search_locations:
        sys.exit("make_corpus.py: LibTorch was not found; expected the Python package torch, Torch_DIR or --include DIR")
    return pathlib.Path(spec.submodule_search_locations[0]) / "include"


def headers(include):
    found = [p for folder in FOLDERS for p in (include / folder).rglob("*") if p.suffix in SUFFIXES and p.is_file()]
    return sorted(found, key=lambda path: path.relative_to(include).as_posix())


def main():
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("out", type=pathlib.Path)
    parser.add_argument("--include", type=pathlib.Path)
    arguments = parser.parse_args()
    include = arguments.include or include_folder()
    text = b"".join(path.read_bytes() for path in headers(include))
    if not text:
        sys.exit(f"make_corpus.py: no headers under {include}; expected the folders {' and '.join(FOLDERS)}")
    arguments.out.parent.mkdir(parents=True, exist_ok=True)
    part = arguments.out.with_name(arguments.out.name + ".part")  # no reader sees a half-written file
    part.write_bytes(text)
    part.replace(arguments.out)
    print(f"{arguments.out}: {len(text)} bytes of text")


if __name__ == "__main__":
    main()
