#!/usr/bin/env python3
"""Checks that an installed copy has a list in SPDX of the libraries that are compiled in, and the notice of each.

    check_notices.py FOLDER
"""
import json
import pathlib
import sys

folder = pathlib.Path(sys.argv[1])
document = json.loads((folder / "tessera.spdx.json").read_text())
packages = {package["SPDXID"]: package for package in document["packages"]}
parts = {relation["relatedSpdxElement"] for relation in document["relationships"] if relation["relationshipType"] == "CONTAINS"}
problems = [f"{part} is no package of the list" for part in parts - set(packages)]
problems += [f"{package['name']}: {key} is not known" for package in packages.values() for key in ("name", "versionInfo", "licenseDeclared")
             if package[key] in ("", "NOASSERTION")]
names = {packages[part]["name"] for part in parts}
notices = {notice.stem for notice in (folder / "third_party").iterdir() if notice.stat().st_size > 100}
problems += [f"there is no notice of {name}" for name in sorted(names - notices)]
if not {"fmt", "nlohmann_json", "xxhash", "mbedtls"} <= names:
    problems.append(f"the list has only {sorted(names)}")
print("\n".join(problems) if problems else f"notices: of {', '.join(sorted(names))}")
sys.exit(1 if problems else 0)
