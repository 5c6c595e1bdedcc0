#!/usr/bin/env python3
"""Checks names and texts of the repository's files.

    check_words.py [ROOT]

Files and types are named for a concept (no *_utils, *Helper, ...), no text holds a path of somebody's machine, text
ends without blanks, and relative links in Markdown files lead somewhere. The exit status is 1 if one does not.
"""
import pathlib
import re
import subprocess
import sys

VAGUE_FILE = re.compile(r"(?:^|_)(utils?|helpers?|common|misc|manager|engine)(?:_|\.|$)")
VAGUE_TYPE = re.compile(r"^\s*(?:class|struct)\s+(?:TESSERA_API\s+)?(\w*(?:Utils?|Helpers?|Common|Misc|Manager|Engine))\b")
MACHINE_PATH = re.compile(r"(?<![\w.$}~/-])/(?:work|root|home/\w+|Users/\w+)/[\w.]")
LINK = re.compile(r"\]\(([^)#:\s]+)(?:#[^)\s]*)?\)")
TEXT = {".h", ".cpp", ".hpp", ".py", ".md", ".txt", ".cmake", ".in", ".json", ".yaml", ".yml", ".sh", ""}
SKIPPED = {".git", ".venv", ".cache", "build", "data", "runs", "__pycache__"}


def files(root):
    """What git would keep; without git, everything outside the folders that builds make."""
    listed = subprocess.run(["git", "-C", root, "ls-files", "-co", "--exclude-standard", "-z"], capture_output=True, text=True) \
        if (root / ".git").exists() else None
    if listed and listed.returncode == 0:
        names = [root / name for name in listed.stdout.split("\0") if name]
    else:
        names = [p for p in root.rglob("*") if not SKIPPED & set(p.relative_to(root).parts)]
    return sorted(p for p in names if p.is_file() and p.suffix in TEXT)


def check(root, path):
    where = path.relative_to(root)
    if path.suffix in {".h", ".cpp", ".py"} and VAGUE_FILE.search(path.name):
        yield f"{where}: is named \"{VAGUE_FILE.search(path.name)[1]}\"; expected the name of a concept"
    for number, line in enumerate(path.read_text(errors="replace").split("\n"), 1):
        if path.suffix in {".h", ".cpp"} and VAGUE_TYPE.match(line):
            yield f"{where}:{number}: type {VAGUE_TYPE.match(line)[1]}; expected the name of a concept"
        if MACHINE_PATH.search(line):
            yield f"{where}:{number}: a path of one machine: {MACHINE_PATH.search(line)[0]}..."
        if line != line.rstrip():
            yield f"{where}:{number}: blanks at the end of the line"
        if path.suffix == ".md":
            for target in LINK.findall(line):
                if not (path.parent / target).exists():
                    yield f"{where}:{number}: link to {target}, which does not exist"


def main():
    root = pathlib.Path(sys.argv[1] if len(sys.argv) > 1 else pathlib.Path(__file__).parent.parent).resolve()
    checked = files(root)
    problems = [problem for path in checked for problem in check(root, path)]
    print("\n".join(problems) if problems else f"words: {len(checked)} files follow the rules")
    return 1 if problems else 0


if __name__ == "__main__":
    sys.exit(main())
