#!/usr/bin/env python3
"""Checks that #includes follow the order of the packages, and that no package has more lines than it states.

    check_packages.py [ROOT]

A package is a folder whose CMakeLists.txt calls tessera_package(): see cmake/TesseraPackages.cmake. Its files include its own
files, public headers and private ones of packages that it stands on, directly or through others; a room of a package includes
only itself and the rooms before it. Tests include what their package may, engine, the packages that they are TESTED_WITH, and
tests/support. Programs (commands, benchmarks, examples, the Python binding) include public headers, and files of their own
folder, command/ and launcher/. The launcher includes nothing of the library. Only dialects name dialects. Python modules of a
dialect import no other one. Prints the packages, and one line per violation; the exit status is 1 if there is any.
"""
import pathlib
import re
import sys

CALL = re.compile(r"^tessera_package\((\w+)([^)]*)\)", re.MULTILINE)
INCLUDE = re.compile(r'^\s*#\s*include\s*(["<])([^">]+)[">]')
DIALECT_NAMES = re.compile(r"paddle|fairscale|colossal|group_sharded", re.IGNORECASE)
SUFFIXES = {".h", ".cpp", ".hpp", ".cc"}
SLOW_HEADERS = ("torch/torch.h", "ATen/ATen.h")
# Programs that measure: exported for them.
EXPORTED = {"core/comm/message/gloo_backend.h"}
ANY_PACKAGE = ("tessera.h", "version.h", "export.h")


# The folders with the library's sources and public headers, and those in them that are none of it.
LIBRARY = ("include", "core", "dialects", "interop", "loop", "trace", "planner", "capi")
BESIDE = {"tests", "command", "python"}


class Package:
    def __init__(self, root, folder, name, arguments):
        self.root, self.folder, self.name = root, folder, name
        words = {"": []}
        key = ""
        for word in arguments.split():
            if word.isupper():
                key = word
                words[key] = []
            else:
                words[key].append(word)
        self.stands_on, self.rooms = words.get("STANDS_ON", []), words.get("ROOMS", [])
        self.tested_with = words.get("TESTED_WITH", [])
        self.budget = int(words["LINES"][0]) if words.get("LINES") else 0
        self.is_dialect = folder.parent.name == "dialects"
        own = self.folder / "include"
        self.headers = sources(own) if own.is_dir() else sources(root / "include/tessera" / name)
        self.sources = [p for p in sources(folder) if p.relative_to(folder).parts[0] not in {"include", *BESIDE}]
        self.tests = sources(folder / "tests")
        self.lines = sum(p.read_text().count("\n") for p in self.headers + self.sources)

    def room(self, path):
        first = path.relative_to(self.folder).parts[0] if path.is_relative_to(self.folder) else ""
        return self.rooms.index(first) if first in self.rooms else None


def is_of_library(where):
    """Returns true for the path of a file of the library, from the root."""
    return where.parts[0] in LIBRARY and not BESIDE & set(where.parts)


def library(root):
    """Returns the files of the library."""
    return [p for folder in LIBRARY for p in sources(root / folder) if is_of_library(p.relative_to(root))]


def public_headers(root):
    """Returns the public headers by the names that programs include them by."""
    folders = [root / "include", *sorted(root.glob("dialects/*/include"))]
    return {path.relative_to(folder).as_posix(): path for folder in folders for path in sources(folder)}


def programs(root):
    """Returns the files of the programs that are built beside it."""
    folders = {root / name for name in ("benchmarks", "launcher", "command", "python")}
    folders |= {*root.glob("*/command"), *root.glob("dialects/*/python")}
    return sorted({p for folder in folders for p in sources(folder) if "tests" not in p.relative_to(root).parts})


def sources(folder):
    return sorted(p for p in folder.rglob("*") if p.suffix in SUFFIXES) if folder.is_dir() else []


def includes(path):
    for number, line in enumerate(path.read_text().splitlines(), 1):
        match = INCLUDE.match(line)
        if match:
            yield number, match[1], match[2]


class House:
    def __init__(self, root):
        self.root, self.packages = root, {}
        for page in sorted(p for pattern in ("*/CMakeLists.txt", "*/*/CMakeLists.txt") for p in root.glob(pattern)):
            for name, arguments in CALL.findall(page.read_text()):
                self.packages[name] = Package(root, page.parent, name, arguments)
        self.closures = {}
        self.order = []
        for name in self.packages:
            self.closure(name)
        self.owner = {p: package for package in self.packages.values() for p in package.headers}
        self.public = {name: self.owner[path] for name, path in public_headers(root).items() if path in self.owner}

    def closure(self, name, below=()):
        """Returns the package and all that it stands on."""
        if name in below:
            raise SystemExit(f"the packages {' -> '.join([*below, name])} stand on each other")
        if name not in self.closures:
            self.closures[name] = {name}.union(*(self.closure(other, (*below, name)) for other in self.packages[name].stands_on))
            self.order.append(name)
        return self.closures[name]

    def package_of(self, path):
        for package in self.packages.values():
            if path.is_relative_to(package.folder):
                return package
        return self.owner.get(path)

    def find(self, path, name):
        """Returns the file that a private include means."""
        for base in (path.parent, self.root / "core", self.root / "tests", self.root):
            if (base / name).is_file():
                return (base / name).resolve()
        return None

    def check_include(self, path, number, quote, name, allowed, who):
        """Yields what is wrong with an include, by a file that may use the packages `allowed`."""
        where = f"{path.relative_to(self.root)}:{number}"
        if quote == "<":
            if not name.startswith("tessera/") or name.removeprefix("tessera/") in ANY_PACKAGE:
                return
            if name not in self.public:
                yield f"{where}: includes <{name}>, which is no public header"
            elif self.public[name].name not in allowed:
                yield f"{where}: {who} includes <{name}>, but does not stand on {self.public[name].name}"
            return
        found = self.find(path, name)
        if not found:
            yield f"{where}: includes \"{name}\", which is not there"
            return
        other = self.package_of(found)
        if other and other.name not in allowed:
            yield f"{where}: {who} includes \"{name}\", but does not stand on {other.name}"

    def check_package(self, package):
        for path in package.sources + package.headers:
            is_public = path in package.headers
            for number, quote, name in includes(path):
                where = f"{path.relative_to(self.root)}:{number}"
                if is_public and quote == '"':
                    yield f"{where}: includes \"{name}\"; public headers include only <tessera/...> and system headers"
                    continue
                if name in SLOW_HEADERS:
                    yield f"{where}: includes <{name}>, which takes seconds to compile; expected single headers"
                if quote == "<" and name.removeprefix("tessera/") == "tessera.h":
                    yield f"{where}: includes <{name}>; expected single headers"
                yield from self.check_include(path, number, quote, name, self.closures[package.name], f"package {package.name}")
                found = quote == '"' and self.find(path, name)
                if found and found.is_relative_to(package.folder) and package.room(path) is not None:
                    here, there = package.room(path), package.room(found)
                    if there is not None and there > here:
                        yield (f"{where}: room {package.rooms[here]} includes \"{name}\", but {package.rooms[there]} "
                               "comes after it")
            if not package.is_dialect:
                for number, line in enumerate(path.read_text().splitlines(), 1):
                    if DIALECT_NAMES.search(line):
                        yield f"{path.relative_to(self.root)}:{number}: names a dialect; the engine knows only plans"
        for path in package.sources:
            if package.rooms and package.room(path) is None:
                yield f"{path.relative_to(self.root)}: lies in no room of {package.name}: {', '.join(package.rooms)}"
        allowed = self.closures[package.name].union(*(self.closures[p] for p in ("engine", *package.tested_with)
                                                      if p in self.closures))
        for path in package.tests:
            for number, quote, name in includes(path):
                yield from self.check_include(path, number, quote, name, allowed, f"a test of {package.name}")
        if package.lines > package.budget:
            yield (f"{package.folder.relative_to(self.root)}: has {package.lines} lines of C++; it states LINES "
                   f"{package.budget}")

    def check_programs(self):
        """Programs see what a user's program sees."""
        for path in programs(self.root) + sources(self.root / "examples"):
            inside = path.relative_to(self.root).parts
            for number, quote, name in includes(path):
                where = f"{path.relative_to(self.root)}:{number}"
                found = quote == '"' and self.find(path, name)
                if quote == '"' and not found:
                    yield f"{where}: includes \"{name}\", which is not there"
                elif found and name not in EXPORTED:
                    other = found.relative_to(self.root).parts
                    if not (other[0] in (inside[0], "command", "launcher", "python") or "command" in other) or \
                            (self.package_of(found) and not {"command", "python"} & set(other)):
                        yield f"{where}: includes \"{name}\"; programs include public headers"
                elif quote == "<" and name.startswith("tessera/"):
                    if inside[0] == "launcher" and name != "tessera/version.h":
                        yield f"{where}: the launcher includes <{name}>; it starts without the library"
                    elif name not in self.public and name.removeprefix("tessera/") not in ANY_PACKAGE:
                        yield f"{where}: includes <{name}>, which is no public header"

    def check_python(self):
        dialects = [p.name for p in self.packages.values() if p.is_dialect]
        for dialect in dialects:
            for path in sorted((self.packages[dialect].folder / "python").glob("*.py")):
                for number, line in enumerate(path.read_text().splitlines(), 1):
                    for other in dialects:
                        if other != dialect and re.match(rf"\s*(from|import)\b.*\b{other}\b", line):
                            yield f"{path.relative_to(self.root)}:{number}: a dialect imports the dialect {other}"

    def list(self):
        """Prints the packages, bottom up."""
        for name in self.order:
            package = self.packages[name]
            stands_on = f"stands on {', '.join(package.stands_on)}" if package.stands_on else "stands on LibTorch alone"
            print(f"  {str(package.folder.relative_to(self.root)):22}{package.lines:6} of {package.budget:6} lines   {stands_on}")


def main():
    root = pathlib.Path(sys.argv[1] if len(sys.argv) > 1 else pathlib.Path(__file__).parent.parent).resolve()
    house = House(root)
    problems = [problem for package in house.packages.values() for problem in house.check_package(package)]
    problems += [*house.check_programs(), *house.check_python()]
    house.list()
    print("\n".join(problems) if problems else "packages: every include points downwards")
    return 1 if problems else 0


if __name__ == "__main__":
    sys.exit(main())
