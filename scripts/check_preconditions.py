#!/usr/bin/env python3
"""Compares docs/design/preconditions.md with the conditions that the comments of the public headers state.

    check_preconditions.py [--list] [ROOT]

A condition is a sentence of a `///` comment in a public header with one of the words of CONDITION. The page has a section for each header, and
in it a row for each such sentence: its first column is the sentence, or a part of it with the word, with `...` for what is left out. The
exit status is 1 if a sentence has no row, or a row no sentence. --list prints the sentences as rows, for authors of the page.
"""
import argparse
import pathlib
import re
import sys

from check_packages import public_headers

PAGE = "docs/design/preconditions.md"
CONDITION = re.compile(r"\b([Mm]ust|[Nn]ot with|all ranks call|(?<!may )[Cc]all it|outside the scope)\b")
SENTENCE = re.compile(r"(?<=[.!?])(?:\*\*)?\s+(?=[A-Z`*\[(])")


def sentences(header):
    """Yields the sentences with a condition in the comments of a header, each on one line."""
    blocks, ended = [], True
    for line in header.read_text().splitlines():
        code, mark, text = line.partition("///")
        if not mark:
            ended = True
            continue
        is_trailing = text.startswith("<")
        if ended or code.strip() or is_trailing != blocks[-1][0]:
            blocks.append((is_trailing, []))
        blocks[-1][1].append(text.lstrip("<").strip())
        ended = False
    for _, block in blocks:
        for paragraph in " ".join(text or "\n" for text in block).split("\n"):
            for sentence in SENTENCE.split(paragraph.strip()):
                if CONDITION.search(sentence):
                    yield " ".join(sentence.split())


def pattern_of(quote):
    return re.compile(".*?".join(re.escape(part.strip()) for part in quote.split("...")))


def read_page(text):
    """Returns the quotes of each section, by the header that names the section."""
    rows, header = {}, None
    for line in text.splitlines():
        if line.startswith("## "):
            header = line[3:].strip().strip("`")
        elif header and line.startswith("| ") and not line.startswith(("| condition |", "| --- |")):
            rows.setdefault(header, []).append(re.split(r"(?<!\\) \| ", line[2:])[0].strip().replace("\\|", "|"))
    return rows


def main():
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--list", action="store_true")
    parser.add_argument("root", nargs="?", default=pathlib.Path(__file__).parent.parent, type=pathlib.Path)
    arguments = parser.parse_args()
    stated = {name.removeprefix("tessera/"): list(sentences(path))
              for name, path in sorted(public_headers(arguments.root).items())}
    if arguments.list:
        for header, conditions in stated.items():
            if conditions:
                print(f"## `{header}`\n\n| condition | what holds it |\n| --- | --- |")
                print("\n".join(f"| {condition} |  |" for condition in conditions) + "\n")
        return 0
    rows = read_page((arguments.root / PAGE).read_text())
    problems = []
    for header, conditions in stated.items():
        patterns = [pattern_of(quote) for quote in rows.get(header, [])]
        problems += [f"{header}: no row for: {c}" for c in conditions if not any(p.search(c) for p in patterns)]
    for header, quotes in rows.items():
        problems += [f"{PAGE}: no such condition in {header}: {quote}" for quote in quotes
                     if not any(pattern_of(quote).search(c) for c in stated.get(header, []))]
    print("\n".join(problems) or f"{PAGE} has the {sum(map(len, stated.values()))} conditions of the headers")
    return 1 if problems else 0


if __name__ == "__main__":
    sys.exit(main())
