#!/usr/bin/env python3
"""Prints a header in the form that Doxygen should read; docs/Doxyfile names this script as its input filter.

    doxygen_filter.py FILE

Headers are printed without their friends and without lines that end with "// internal".
"""
import pathlib
import re
import sys

HIDDEN = re.compile(r"^.*// internal$|^ *friend [^;{]*;", re.MULTILINE)


def main(path):
    """Replaces hidden lines by empty ones, so that messages name the right line."""
    print(HIDDEN.sub(lambda m: "\n" * m[0].count("\n"), pathlib.Path(path).read_text()))


if __name__ == "__main__":
    main(sys.argv[1])
