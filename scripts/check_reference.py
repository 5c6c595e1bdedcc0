#!/usr/bin/env python3
"""Checks that the pages of the reference have each function that the library exports.

    check_reference.py PAGES [ROOT]

Prints a line for each function of the public headers that has no heading in its header's page; the exit status is 1 if there
is any.
"""
import pathlib
import re
import sys

from check_packages import public_headers

UNSEEN = re.compile(r"^[^\n]*// internal$|//[^\n]*|^namespace detail \{.*?^\}  // namespace detail$|^ *#[^\n]*",
                    re.DOTALL | re.MULTILINE)
EXPORTED = re.compile(r"\bTESSERA_API\s+(?!class|struct)[^;{()]*?(\w+)\(")
HEADING = re.compile(r"^#+ `(?:\w+::)*(\w+)\(\)`$", re.MULTILINE)


def exported(header):
    text = UNSEEN.sub(lambda m: "\n" * m[0].count("\n"), header.read_text())
    return {match[1] for match in EXPORTED.finditer(text)}


def described(page):
    return set(HEADING.findall(page.read_text())) if page.exists() else set()


def main():
    pages = pathlib.Path(sys.argv[1])
    root = pathlib.Path(sys.argv[2] if len(sys.argv) > 2 else pathlib.Path(__file__).parent.parent).resolve()
    headers = {header: exported(path) for header, path in sorted(public_headers(root).items())}
    problems = [f"{header}: the reference lacks {name}()" for header, names in headers.items()
                for name in sorted(names - described((pages / header.removeprefix("tessera/")).with_suffix(".md")))]
    count = sum(map(len, headers.values()))
    print("\n".join(problems) if problems else f"reference: has the {count} functions of the headers")
    return 1 if problems or not count else 0


if __name__ == "__main__":
    sys.exit(main())
