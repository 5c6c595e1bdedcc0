#!/usr/bin/env python3
"""Prints a file in the form that Doxygen should read; docs/Doxyfile names this script as its input filter.

    doxygen_filter.py FILE

Doxygen 1.9 makes no anchors from the text of headings: each heading of a Markdown file gets the one that GitHub makes,
and links refer to it. Headers are printed without their friends and without lines that end with "// internal".
"""
import collections
import pathlib
import re
import sys

HEADING = re.compile(r"^#+ (.*)$")
LINK = re.compile(r"\]\(([\w./-]*\.md)?#([\w-]+)\)")
HIDDEN = re.compile(r"^.*// internal$|^ *friend [^;{]*;", re.MULTILINE)


def anchor(page, slug):
    """Returns an anchor that no other page has."""
    return f"{pathlib.Path(page).stem}--{slug}"


def slug_of(heading):
    return re.sub(r"[^\w -]", "", heading.lower()).replace(" ", "-")


def markdown(path, text):
    in_code, seen = False, collections.Counter()
    for line in text.splitlines():
        in_code ^= line.startswith("```")
        heading = None if in_code else HEADING.match(line)
        if heading:
            slug = slug_of(heading[1])
            number = f"-{seen[slug]}" if seen[slug] else ""
            seen[slug] += 1
            yield f"{line} {{#{anchor(path, slug + number)}}}"
        else:
            yield line if in_code else LINK.sub(lambda m: f"](@ref {anchor(m[1] or path, m[2])})", line)


def header(text):
    """Replaces hidden lines by empty ones, so that messages name the right line."""
    return HIDDEN.sub(lambda m: "\n" * m[0].count("\n"), text)


def main(path):
    text = pathlib.Path(path).read_text()
    print("\n".join(markdown(path, text)) if path.endswith(".md") else header(text))


if __name__ == "__main__":
    main(sys.argv[1])
