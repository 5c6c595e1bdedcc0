#!/usr/bin/env python3
"""Checks names and texts of the repository's files.

    check_words.py [ROOT]

Files and types are named for a concept (no *_utils, *Helper, ...), no text holds a path of one machine, lines end
without blanks, and the targets of relative links in Markdown files exist. Comments and documents name the actor and the
thing: clauses that begin with "what" or "who" in place of a noun ("what is gathered", "who waits") are counted, and
there may be at most CLAUSES_PER_THOUSAND in a thousand words. So are HABITS: sentences that begin with "Of", "The same"
without a noun, some words, and clauses appended with ", which". The exit status is 1 if a rule is broken.

The library knows devices by `c10`'s generic interfaces (core/base/device/): no source names CUDA or NCCL, but for those that build
NCCL in.

    check_words.py --clauses --habits [ROOT]

Prints each such clause and habit, with its file and line.
"""
import argparse
import pathlib
import re
import subprocess
import sys

from check_packages import is_of_library

VAGUE_FILE = re.compile(r"(?:^|_)(utils?|helpers?|common|misc|manager|engine)(?:_|\.|$)")
VAGUE_TYPE = re.compile(r"^\s*(?:class|struct)\s+(?:TESSERA_API\s+)?(\w*(?:Utils?|Helpers?|Common|Misc|Manager|Engine))\b")
MACHINE_PATH = re.compile(r"(?<![\w.$}~/-])/(?:work|root|home/\w+|Users/\w+)/[\w.]")
LINK = re.compile(r"\]\(([^)#:\s]+)(?:#[^)\s]*)?\)")
ONE_DEVICE = re.compile(r"is_cuda|kCUDA|hasCUDA|DeviceType::CUDA|DispatchKey::CUDA|at::cuda|torch::cuda|c10::cuda|\"nccl\"")
NAMES_NCCL = {"core/comm/group/nccl.cpp", "core/comm/group/no_nccl.cpp", "core/comm/group/registered_backends.cpp"}
CLAUSES_PER_THOUSAND = 2
COMMENT = {".h": re.compile(r"(?:^|\s)//[/<!]*(.*)"), ".cpp": re.compile(r"(?:^|\s)//[/<!]*(.*)"), ".py": re.compile(r"(?:^|\s)#(?!!)(.*)")}
WORD = re.compile(r"[A-Za-z][A-Za-z'-]*")
# "Tell what it is" is a question in a sentence, and "a rank who waits" or "the user, who pays" has its noun.
ASKING = set("""ask asks asked say says said saying tell tells told telling show shows shown showing see sees seen know
    knows known learn learns decide decides find finds found print prints printed describe describes described explain
    explains check checks guess matter matters name names named choose chooses compare compares mean means list lists
    listed read""".split())
# A sentence begins with its paragraph, after a mark, or in a cell of a table.
BEGIN = r"(?:^\W*|[.:;?!|]\W*\s\W*)"
HABITS = {
    '"Of" at the beginning of a sentence': re.compile(BEGIN + r"Of (?!course)"),
    '"The same" without a noun': re.compile(BEGIN + r"The same(?=[.,:;]|\s+(?:of|for|as|with|without|in|on|where|if|by|from|to|when)\b)"),
    '"in vain"': re.compile(r"\bin vain\b"),
    '"for good"': re.compile(r"\bfor good\b(?! reasons?\b)"),
    '"told"': re.compile(r"\btold\b"),
    '"gone"': re.compile(r"\bgone\b"),
    '", which"': re.compile(r", which\b"),
}
WHICH = '", which"'
WHICH_PER_THOUSAND = 0.5
# In tests the habits may still occur so often, together. Elsewhere none may, but for WHICH_PER_THOUSAND. The numbers only
# fall: whoever rewrites a comment lowers them.
OLD_HABITS = {
    '"Of" at the beginning of a sentence': 20,
    '"The same" without a noun': 7,
    '"in vain"': 0,
    '"for good"': 0,
    '"told"': 1,
    '"gone"': 5,
    WHICH: 74,
}
CLAUSE = re.compile(r"\b(what|who|whoever|whatever|whosever)\b", re.IGNORECASE)
TEXT = {".h", ".cpp", ".hpp", ".py", ".md", ".txt", ".cmake", ".in", ".json", ".yaml", ".yml", ".sh", ""}
SKIPPED = {".git", ".venv", ".cache", "build", "data", "runs", "__pycache__"}


def files(root):
    """Returns the files that git tracks or would add; without git, all outside the folders that builds make."""
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
        if is_of_library(where) and str(where) not in NAMES_NCCL and ONE_DEVICE.search(line.split("//")[0]):
            yield f"{where}:{number}: {ONE_DEVICE.search(line)[0]}; expected a device of any type (core/base/device/)"
        if line != line.rstrip():
            yield f"{where}:{number}: blanks at the end of the line"
        if path.suffix == ".md":
            for target in LINK.findall(line):
                if not (path.parent / target).exists():
                    yield f"{where}:{number}: link to {target}, which does not exist"


def prose(path):
    """Yields the lines of a file's comments, or of a document outside of code, with their numbers; others as empty."""
    in_code = False
    for number, line in enumerate(path.read_text(errors="replace").split("\n"), 1):
        if path.suffix == ".md":
            in_code ^= line.lstrip().startswith("```")
            yield number, "" if in_code else re.sub(r"`[^`]*`", "`x`", line)
        else:
            match = COMMENT[path.suffix].search(line)
            yield number, re.sub(r"`[^`]*`", "`x`", match[1]) if match else ""


def is_clause(before, text, match, after):
    """Returns true if the word stands in place of a noun."""
    words = WORD.findall(before + " " + text[:match.start()])
    last = words[-1].lower() if words else ""
    begins = not re.search(r"[A-Za-z0-9`)\"'][,]?\s*$", text[:match.start()] or before)
    sentence = re.split(r"[.;:|]\s", text[match.start():] + " " + after)[0]
    if sentence.rstrip().endswith("?") or "?" in sentence:
        return False
    if match[1].lower() == "who":
        return begins or last in {"of", "to", "by", "for", "from", "with", "and", "or", "but", "if", "that", "than", "as", "is"}
    return begins or last not in ASKING


def clauses(root, checked):
    """Returns the clauses that begin with "what" or "who" in place of a noun, and the number of words."""
    found, words = [], 0
    for path in checked:
        if path.suffix not in {*COMMENT, ".md"}:
            continue
        lines = list(prose(path))
        for i, (number, text) in enumerate(lines):
            words += len(WORD.findall(text))
            before, after = lines[i - 1][1] if i else "", lines[i + 1][1] if i + 1 < len(lines) else ""
            found += [f"{path.relative_to(root)}:{number}: {text.strip()}" for match in CLAUSE.finditer(text)
                      if is_clause(before, text, match, after)]
    return found, words


def paragraphs(path):
    """Yields the paragraphs of a file's comments, or of a document: their lines with their numbers."""
    lines = path.read_text(errors="replace").split("\n")
    paragraph = []
    for number, text in prose(path):
        line = lines[number - 1].strip()
        goes_on = text.strip() and (line[0] not in "|-*" if path.suffix == ".md" else line[:1] in "/#")
        if paragraph and not (goes_on and paragraph[-1][0] == number - 1):
            yield paragraph
            paragraph = []
        if text.strip():
            paragraph.append((number, text.strip()))
    if paragraph:
        yield paragraph


def habits(root, checked):
    """Returns the habits as (folder is old, habit, place), and the number of words in the other folders."""
    found, words = [], 0
    for path in checked:
        if path.suffix not in {*COMMENT, ".md"}:
            continue
        where = path.relative_to(root)
        is_old = "tests" in where.parts
        for paragraph in paragraphs(path):
            text = " ".join(line for _, line in paragraph)
            words += 0 if is_old else len(WORD.findall(text))
            for habit, pattern in HABITS.items():
                for match in pattern.finditer(text):
                    end, place = match.end(), paragraph
                    while end > len(place[0][1]) and len(place) > 1:
                        end, place = end - len(place[0][1]) - 1, place[1:]
                    found.append((is_old, habit, f"{where}:{place[0][0]}: {place[0][1]}"))
    return found, words


def check_habits(found, words):
    """Yields the habits that occur more often than they may."""
    for habit in HABITS:
        old, new = [sum(1 for is_old, name, _ in found if name == habit and is_old == wanted) for wanted in (True, False)]
        most = WHICH_PER_THOUSAND * max(words, 2000) / 1000 if habit == WHICH else 0
        for count, limit, folders in ((old, OLD_HABITS[habit], "in tests"), (new, most, "elsewhere")):
            if count > limit:
                yield f"{habit} occurs {count} times {folders}; expected at most {limit:.0f}. See scripts/check_words.py --habits"


def main():
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--clauses", action="store_true")
    parser.add_argument("--habits", action="store_true")
    parser.add_argument("root", nargs="?", default=pathlib.Path(__file__).parent.parent, type=pathlib.Path)
    arguments = parser.parse_args()
    root = arguments.root.resolve()
    checked = files(root)
    found, words = clauses(root, checked)
    if arguments.clauses:
        print("\n".join(found))
    habitual, habit_words = habits(root, checked)
    if arguments.habits:
        print("\n".join(f"{place} [{habit}]" for _, habit, place in habitual))
    problems = [problem for path in checked for problem in check(root, path)]
    problems += check_habits(habitual, habit_words)
    rate = 1000 * len(found) / max(words, 1)
    if rate > CLAUSES_PER_THOUSAND and words > 1000:
        problems.append(f"{rate:.1f} clauses in a thousand words begin with \"what\" or \"who\" in place of a noun; expected at "
                        f"most {CLAUSES_PER_THOUSAND}. They are listed by scripts/check_words.py --clauses")
    print("\n".join(problems) if problems else f"words: {len(checked)} files follow the rules; {rate:.1f} clauses in a "
          f"thousand words begin with \"what\" or \"who\" in place of a noun (at most {CLAUSES_PER_THOUSAND})")
    return 1 if problems else 0


if __name__ == "__main__":
    sys.exit(main())
