#!/usr/bin/env python3
"""Compiles the sources of a configured build with another compiler, or against the headers of another LibTorch.

    compile_with.py BUILD [--compiler CXX] [--torch FOLDER] [--targets NAMES] [--only PATTERN] [--flag=FLAG]...
                    [--syntax-only] [-j N]

Takes the commands of BUILD/compile_commands.json, puts the compiler CXX in place of theirs and FOLDER, which holds LibTorch's
include/, in place of their LibTorch, and throws the object files away: nothing is linked, so that a compiler for another kind
of processor does. A precompiled header of the build is read as an ordinary one. Prints the errors and warnings of each file
that has any, and a line at the end; the exit status is 1 if a file does not compile, or if there is none.
"""
import argparse
import concurrent.futures
import json
import os
import pathlib
import re
import shlex
import shutil
import subprocess
import sys
import tempfile

LIBRARY_AND_TOOL = "tessera_objects,tessera_launch,tessera_cli,tessera_commands,tessera_bench"
TARGET = re.compile(r"CMakeFiles/(\w+)\.dir/")
# Options of g++ that clang++ does not know.
GNU_ONLY = {"-fpch-preprocess", "-Wno-restrict", "-Winvalid-pch"}


def translated(entry, options, scratch):
    """Returns the command of an entry, changed as the options say."""
    words = shlex.split(entry["command"])
    while os.path.basename(words[0]) in {"ccache", "cmake"} or words[0] in {"-E", "env"} or re.match(r"CCACHE_\w+=", words[0]):
        words.pop(0)
    if options.compiler:
        words[0] = options.compiler
    result, skip = [], False
    for word, following in zip(words, words[1:] + [""]):
        if skip:
            skip = False
        elif word == "-o":
            skip = True
        elif word == "-include":  # a copy, beside which no precompiled one lies
            copy = scratch / (TARGET.search(following)[1] + "_" + pathlib.Path(following).name)
            copy.write_text(pathlib.Path(following).read_text())
            result += [word, str(copy)]
            skip = True
        elif word not in GNU_ONLY:
            result.append(word)
    if options.torch:
        own = torch_of(result)
        result = [word.replace(own, str(options.torch)) if word.startswith(own + "/include") else word for word in result]
    return result + options.flag + (["-fsyntax-only"] if options.syntax_only else ["-o", os.devnull])


def torch_of(words):
    """Returns the folder whose include/ is LibTorch's in a command."""
    for word in words:
        if word.endswith("/include/torch/csrc/api/include"):
            return word.removesuffix("/include/torch/csrc/api/include")
    return "\0"  # a file without LibTorch


def chosen(entries, options):
    """Yields the entries of the named targets that match the pattern, but for their precompiled headers."""
    targets = options.targets.split(",")
    for entry in entries:
        target = TARGET.search(entry["command"].split(" -o ")[-1])
        name = entry["file"].removesuffix(".cxx")
        if target and target[1] in targets and not name.endswith((".hxx", ".gch")) and re.search(options.only, entry["file"]):
            yield entry


def compile_one(entry, command):
    """Returns the exit status and the text of the compiler."""
    done = subprocess.run(command, cwd=entry["directory"], capture_output=True, text=True, env={**os.environ, "LC_ALL": "C"})
    return done.returncode, done.stderr


def parsed():
    parser = argparse.ArgumentParser(description=__doc__.split("\n", 1)[0])
    parser.add_argument("build", type=pathlib.Path)
    parser.add_argument("--compiler", help="another compiler, such as clang++-16 or aarch64-linux-gnu-g++-12")
    parser.add_argument("--torch", type=lambda name: pathlib.Path(name).resolve(), help="a folder with include/ of another LibTorch")
    parser.add_argument("--targets", default=LIBRARY_AND_TOOL, help="whose sources (default: %(default)s)")
    parser.add_argument("--only", default="", help="a regular expression that names of files must match")
    parser.add_argument("--flag", action="append", default=[], help="a flag that is added to each command")
    parser.add_argument("--syntax-only", action="store_true", help="make no code: faster, but blind to inline assembly")
    parser.add_argument("-j", "--jobs", type=int, default=os.cpu_count())
    options = parser.parse_args()
    if options.compiler and not shutil.which(options.compiler):
        parser.error(f"--compiler must name a program; {options.compiler} was not found")
    if options.torch and not (options.torch / "include/torch/csrc/api/include").is_dir():
        parser.error(f"--torch must hold include/torch/csrc/api/include; {options.torch} does not")
    if not (options.build / "compile_commands.json").is_file():
        parser.error(f"BUILD must be a folder that CMake has configured; {options.build} has no compile_commands.json")
    return options


def main():
    options = parsed()
    entries = list(chosen(json.loads((options.build / "compile_commands.json").read_text()), options))
    failed, warnings = [], 0
    with tempfile.TemporaryDirectory() as scratch, concurrent.futures.ThreadPoolExecutor(options.jobs) as pool:
        commands = [translated(entry, options, pathlib.Path(scratch)) for entry in entries]
        results = pool.map(compile_one, entries, commands)
        for entry, (status, text) in zip(entries, results):
            warnings += len(re.findall(r": warning: ", text))
            if status != 0:
                failed.append(entry["file"])
            if text:
                print(f"{entry['file']}:\n{text}", flush=True)
    print(f"{len(entries) - len(failed)} of {len(entries)} files compile, with {warnings} warnings")
    return 1 if failed or not entries else 0


if __name__ == "__main__":
    sys.exit(main())
