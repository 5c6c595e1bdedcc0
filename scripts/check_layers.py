#!/usr/bin/env python3
"""Checks that the #includes follow the order of the layers.

    check_layers.py [ROOT]

A folder of src/ may include only itself and the folders above it in LAYERS, public headers include only public
headers, a dialect includes no other dialect, no other layer names one, and programs (examples, tools, the Python binding) include
public headers and files of their own folder only. Prints one line per violation; the exit status is 1 if there
is any.
"""
import pathlib
import re
import sys

LAYERS = ["memory", "device", "group", "message", "watch", "arena", "start", "dispatch", "mesh", "offload", "init", "unit", "grad",
          "access", "model", "optim", "dist", "tracer", "metrics", "checkpoint", "sim", "dialects"]
DIALECT_NAMES = re.compile(r"paddle|fairscale|colossal|group_sharded", re.IGNORECASE)
INCLUDE = re.compile(r'^\s*#\s*include\s*(["<])([^">]+)[">]')
SUFFIXES = {".h", ".cpp", ".hpp", ".cc"}


def sources(folder):
    return sorted(p for p in folder.rglob("*") if p.suffix in SUFFIXES) if folder.is_dir() else []


def includes(path):
    for number, line in enumerate(path.read_text().splitlines(), 1):
        match = INCLUDE.match(line)
        if match:
            yield number, match[1], match[2]


def check_private(root):
    src = root / "src"
    for path in sources(src):
        where, layer = path.relative_to(root), path.relative_to(src).parts[0]
        if layer not in LAYERS:
            yield f"{where}: lies in no layer; expected src/LAYER/, LAYER one of {', '.join(LAYERS)}"
            continue
        for number, quote, name in includes(path):
            other = name.split("/")[0]
            if quote == '"' and "/" not in name and not (path.parent / name).is_file():
                yield f"{where}:{number}: includes \"{name}\"; expected \"{layer}/{name}\" or another layer's file"
            elif quote == '"' and other in LAYERS and LAYERS.index(other) > LAYERS.index(layer):
                yield f"{where}:{number}: layer {layer} includes {name}, but {other} stands below it"
            elif name.startswith("tessera/dialects/") and layer != "dialects":
                yield f"{where}:{number}: layer {layer} includes the dialect {name}"
        if layer != "dialects":
            for number, line in enumerate(path.read_text().splitlines(), 1):
                if DIALECT_NAMES.search(line):
                    yield f"{where}:{number}: names a dialect; the engine knows only plans"


def check_public(root):
    include = root / "include"
    for path in sources(include):
        where = path.relative_to(root)
        for number, quote, name in includes(path):
            if quote == '"':
                yield f"{where}:{number}: includes \"{name}\"; public headers include only <tessera/...> and system headers"
            elif name.startswith("tessera/") and not (include / name).is_file():
                yield f"{where}:{number}: includes <{name}>, which is no public header"
            elif name in ("torch/torch.h", "ATen/ATen.h"):
                yield f"{where}:{number}: includes <{name}>, which takes seconds to compile; expected single headers"
            elif path.parent.name == "dialects" and name.startswith("tessera/dialects/"):
                yield f"{where}:{number}: a dialect includes the dialect <{name}>"


def check_programs(root):
    for folder in ("examples", "tools", "python"):
        for path in sources(root / folder):
            for number, quote, name in includes(path):
                known = any((base / name).is_file() for base in (path.parent, *path.parents) if root in base.parents)
                if quote == '"' and not known:
                    yield f"{path.relative_to(root)}:{number}: includes \"{name}\", which is not in {folder}/"


def main():
    root = pathlib.Path(sys.argv[1] if len(sys.argv) > 1 else pathlib.Path(__file__).parent.parent).resolve()
    problems = [*check_private(root), *check_public(root), *check_programs(root)]
    print("\n".join(problems) if problems else "layers: every include points upwards")
    return 1 if problems else 0


if __name__ == "__main__":
    sys.exit(main())
