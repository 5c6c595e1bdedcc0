"""Every command of the pages exists as written, options included; those that need no more than this machine are run.

TESSERA_CLI: the tool; without it the options of its commands are not looked up. COMMANDS_VERBOSE=1 prints what was done with each.
"""
import functools
import os
import pathlib
import re
import shlex
import subprocess
import sys
import tempfile
import unittest

ROOT = pathlib.Path(__file__).resolve().parents[2]
CLI = os.environ.get("TESSERA_CLI", "")
sys.path.insert(0, str(ROOT / "scripts"))
import check_links  # noqa: E402

PAGES = [str(page.relative_to(ROOT)) for page in check_links.documents(ROOT)]
PROGRAMS = r"\./dev|tessera|torchrun|mpirun|srun|python3?|pip|cmake|ctest|cpack|docker|apt-get|\.ci/\w+|benchmarks/\S+|scripts/\S+" \
           r"|build/\S+|tests/\S+\.py"
COMMAND = re.compile(rf"^(?:\$ )?(?:export )?(?:[A-Z_]+=\S+ +)*(?:{PROGRAMS})(?: (?!\w+:)|$)")
# In place of what the user has: names of files and hosts, and numbers.
PLACEHOLDER = re.compile(r"^([A-Z_]+|\.\.\.|\S*\.\.\.|[A-Z]+=\S*)$")

# What commands of others need. They are not judged.
NEEDS = {
    "srun": "a Slurm cluster", "docker": "Docker", "apt-get": "a package that is built", "cpack": "a build", "pip": "an index of packages",
    "ctest": "a build", "mpirun": "Open MPI: ProcessesOnHostsSlow.AreStartedByMpirun runs it",
}


def in_fences(text):
    for language, block in re.findall(r"^ *```(\S*)\n(.*?)^ *```$", text, re.DOTALL | re.MULTILINE):
        if language in ("", "sh", "console"):
            yield from re.sub(r"\\\n\s*", " ", block).splitlines()


def inline(text):
    text = re.sub(r"^ *```.*?^ *```$", "", text, flags=re.DOTALL | re.MULTILINE)
    for code in re.findall(r"`([^`]+)`", text):
        if " " in code and "\n\n" not in code:
            yield " ".join(code.split())


def commands():
    """Each command, and the pages that have it."""
    found = {}
    for page in PAGES:
        text = (ROOT / page).read_text()
        for line in (*in_fences(text), *inline(text)):
            line = re.sub(r"\s+#.*", "", line.strip())
            if COMMAND.match(line):
                for part in line.removeprefix("$ ").split(" && "):
                    found.setdefault(part, set()).add(page)
    return found


@functools.cache
def help_of(*command):
    # As a number of columns for which no line is broken inside an option.
    run = subprocess.run([*command, "--help"], capture_output=True, text=True, env={**os.environ, "COLUMNS": "200"}, timeout=120)
    return run.stdout + run.stderr


def unknown_options(words, text):
    """The options among `words` that the help does not name, up to the first word that belongs to another program."""
    for word in words:
        name = word.partition("=")[0]
        if re.match(r"--?[a-z]", name) and not re.search(rf"(?<![\w-]){re.escape(name)}(?![\w-])", text):
            yield name


def before_program(words):
    """The options of a launcher: a program and its options follow."""
    for number, word in enumerate(words):
        if re.match(r"\./\w|\w+\.py$|program|train|hostname|micro_benchmarks", word):
            return words[:number]
    return words


class Judge:
    """What is wrong with a command; None: nothing, and it need not be run. Raises `Skipped` with a reason."""

    class Skipped(Exception):
        pass

    def __call__(self, words):
        while words and re.match(r"^[A-Z_]+=", words[0]) or words[0] == "export":
            words = words[1:]
            if not words:
                raise self.Skipped("it sets a variable")
        name = words[0]
        if name in NEEDS:
            raise self.Skipped(f"needs {NEEDS[name]}")
        known = {"./dev": self.dev, "tessera": self.tessera, "torchrun": self.torchrun, "cmake": self.cmake}
        if name in known:
            return known[name](words[1:])
        if name.startswith("python"):
            return self.python(words[1:])
        return self.file(name, words[1:])

    def dev(self, words):
        verb = words[0]
        if verb not in set(re.findall(r"^  (\w+) ", help_of(ROOT / "dev"), re.MULTILINE)):
            return f"./dev has no verb {verb}"
        if verb == "tessera":
            return self.tessera(words[1:])
        if verb == "example" and not PLACEHOLDER.match(pathlib.Path(words[1]).name) and not (ROOT / f"examples/{words[1]}.cpp").exists():
            return f"there is no example {words[1]}"
        if verb == "differential" and words[1:2] in (["dist"], ["op_db"]):
            return self.file(f"tests/differential/{words[1].replace('dist', 'dist_programs')}.py", words[2:])
        program = {"demo": "examples/train_gpt", "example": f"examples/{words[-1] if len(words) < 2 else words[1]}",
                   "differential": "tests/differential/differential"}.get(verb)
        program = program and CLI and pathlib.Path(CLI).parents[1] / program
        if not program or not program.exists():
            return None
        options = [word for word in words if word not in ("--compare", "--resume", "--memory")]  # of the verb, and of all examples
        return next((f"{program.name} has no option {option}" for option in unknown_options(options, help_of(program))), None)

    def tessera(self, words):
        if not CLI:
            raise self.Skipped("TESSERA_CLI is not set")
        command = []
        for word in words[:2]:
            if re.search(rf"^  {re.escape(word)}(?:\s|$)", help_of(CLI, *command).partition("Subcommands:")[2], re.MULTILINE):
                command.append(word)
            else:
                break
        if words and not command and not words[0].startswith("-") and not PLACEHOLDER.match(words[0]) and "|" not in words[0]:
            return f"tessera has no command {words[0]}"
        own = before_program(words) if command[:1] == ["run"] else words
        return next((f"tessera {' '.join(command)} has no option {option}" for option in unknown_options(own, help_of(CLI, *command))), None)

    def torchrun(self, words):
        text = help_of(sys.executable, "-m", "torch.distributed.run").replace("_", "-")
        if "--nproc-per-node" not in text:
            raise self.Skipped("needs PyTorch's Python package")
        return next((f"torchrun has no option {option}" for option in unknown_options(before_program(words), text)), None)

    def cmake(self, words):
        presets = re.findall(r'"name": "(\w+)"', (ROOT / "CMakePresets.json").read_text())
        for option, value in zip(words, words[1:]):
            if option == "--preset" and value not in presets:
                return f"there is no preset {value}"
        raise self.Skipped("needs minutes: builds are tested by the package's tests")

    def python(self, words):
        if words[0] == "-m" and words[1].startswith("tessera."):
            file = ROOT / "python" / words[1].replace(".", "/")
            places = (file.with_suffix(".py"), file / "__main__.py", ROOT / "launcher" / f"{file.name}.py")
            source = next((f for f in places if f.exists()), None)
            if source is None:
                return f"there is no module {words[1]}"
            texts = "\n".join(f.read_text() for f in ([source] if source.name != "__main__.py" else source.parent.glob("*.py")))
            return next((f"{words[1]} has no option {option}" for option in unknown_options(words[2:], texts)), None)
        if words[0].startswith("-"):
            raise self.Skipped("a line of Python that downloads a model" if words[0] == "-c" else "a program of others")
        return self.file(words[0], words[1:])

    def file(self, name, words):
        if name.startswith("build/"):
            raise self.Skipped("needs a build in build/release")
        places = [ROOT / name, *ROOT.glob(f"docs/**/{name}")]
        file = next((place for place in places if place.exists()), None)
        if file is None:
            raise self.Skipped("the user's own program") if "/" not in name else AssertionError(f"there is no file {name}")
        text = file.read_text()
        return next((f"{name} has no option {option}" for option in unknown_options(words, text)), None)


def runs_here(words):
    """The arguments for the tool, if a command of it needs neither files of the user, hosts nor minutes."""
    words = words[1:] if words[0] == "./dev" else words
    if words[:2] != ["tessera", "plan"] or len(words) < 4 or any(PLACEHOLDER.match(word) for word in words):
        return None
    return words[1:] if "--parameters" in words or (ROOT / words[2]).exists() else None


class Commands(unittest.TestCase):
    def test_each_exists_or_has_a_reason(self):
        judge, counts = Judge(), {"exists": 0, "ran": 0, "not judged": 0}
        for command, pages in sorted(commands().items()):
            place = f"{', '.join(sorted(pages))}: {command}"
            with self.subTest(place):
                try:
                    words = shlex.split(command)
                    problem = judge(words)
                    self.assertIsNone(problem, place)
                    arguments = runs_here(words)
                    if arguments:
                        with tempfile.TemporaryDirectory() as scratch:
                            run = subprocess.run([CLI, *arguments], cwd=ROOT, capture_output=True, text=True, timeout=120,
                                                 env={**os.environ, "TMPDIR": scratch})
                        self.assertIn(run.returncode, (0, 3), f"{place}\n{run.stderr}")  # 3: it does not fit
                    what = "ran" if arguments else "exists"
                except Judge.Skipped as reason:
                    what = f"not judged: {reason}"
                counts[what.partition(":")[0]] += 1
                if os.environ.get("COMMANDS_VERBOSE"):
                    print(f"{what:12} {place}")
        print(f"commands: {sum(counts.values())} found; {counts['ran']} ran, {counts['exists']} exist with their options, "
              f"{counts['not judged']} are of others or need more than this machine")
        if CLI:  # without it most are not judged
            self.assertGreater(counts["exists"] + counts["ran"], counts["not judged"])

    def test_a_wrong_one_is_found(self):
        judge = Judge()
        self.assertIn("no verb", judge(["./dev", "tset"]))
        self.assertIn("no example", judge(["./dev", "example", "cookbook/nothing"]))
        self.assertIn("no preset", judge(["cmake", "--preset", "fast"]))
        self.assertIn("no module", judge(["python", "-m", "tessera.exchanges"]))
        self.assertIn("no option", judge(["python", "-m", "tessera.exchange", "import", "--optimiser", "x"]))
        if CLI:
            self.assertIn("no command", judge(["tessera", "plans"]))
            self.assertIn("no option", judge(["tessera", "plan", "--parameter", "1e9"]))
            self.assertIsNone(judge(["tessera", "run", "-n", "2", "./program", "--parameter"]))


if __name__ == "__main__":
    unittest.main()
