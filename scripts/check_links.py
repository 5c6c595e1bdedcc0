#!/usr/bin/env python3
"""Checks the relative links of all Markdown files of the repository: files, folders, and anchors.

    check_links.py [ROOT]

An anchor must be that of a heading, as GitHub makes it. Prints a line for each dead link; the exit status is 1 if there is any.
"""
import collections
import functools
import pathlib
import re
import subprocess
import sys

HEADING = re.compile(r"^#{1,6} (.*?)(?: #+)?$")
CODE = re.compile(r"(`+)(?!`).*?(?<!`)\1(?!`)")
LINK = re.compile(r"\]\(<?([^()\s<>]*)>?(?:\s+\"[^\"]*\")?\)")


def documents(root):
    """Returns the Markdown files that git tracks or would add; without git, all."""
    if (root / ".git").exists():
        listed = subprocess.run(["git", "-C", root, "ls-files", "-co", "--exclude-standard", "-z", "*.md"], capture_output=True,
                                text=True, check=True)
        names = [root / name for name in listed.stdout.split("\0") if name]
    else:
        names = root.rglob("*.md")
    return sorted(path for path in names if path.is_file())


def lines_of_prose(text):
    """Yields (number, line) outside of code blocks."""
    fence = ""
    for number, line in enumerate(text.split("\n"), 1):
        mark = re.match(r"\s*(`{3,}|~{3,})", line)
        if mark and (not fence or line.strip().startswith(fence) and not line.strip().strip(fence[0])):
            fence = "" if fence else mark[1]
        elif not fence:
            yield number, line


def slug_of(heading):
    text = re.sub(r"\[([^\]]*)\]\([^)]*\)", r"\1", heading)
    return re.sub(r"[^\w\- ]", "", text.strip().lower()).replace(" ", "-")


@functools.cache
def anchors(path):
    found, seen = set(), collections.Counter()
    for _, line in lines_of_prose(path.read_text()):
        match = HEADING.match(line)
        if match:
            slug = slug_of(match[1])
            found.add(f"{slug}-{seen[slug]}" if seen[slug] else slug)
            seen[slug] += 1
    return found


def dead_links(root, path):
    for number, line in lines_of_prose(path.read_text()):
        for target in LINK.findall(CODE.sub("`x`", line)):
            if re.match(r"[a-z]+:", target):
                continue
            name, _, anchor = target.partition("#")
            file = (path.parent / name).resolve() if name else path
            if not target or not file.exists() or root not in [file, *file.parents]:
                yield f"{path.relative_to(root)}:{number}: link to {target}, which does not exist"
            elif anchor and (file.suffix != ".md" or anchor not in anchors(file)):
                yield f"{path.relative_to(root)}:{number}: link to {target}, which has no such heading"


def main():
    root = pathlib.Path(sys.argv[1] if len(sys.argv) > 1 else pathlib.Path(__file__).parent.parent).resolve()
    pages = documents(root)
    problems = [problem for path in pages for problem in dead_links(root, path)]
    print("\n".join(problems) if problems else f"links: those of {len(pages)} Markdown files lead somewhere")
    return 1 if problems else 0


if __name__ == "__main__":
    sys.exit(main())
