#!/usr/bin/env python3
"""Compiles refused_calls.cpp: each `// error: ...` of it must be the text of one error, and there must be no other.

    refused_calls.py COMPILER [OPTION ...]
"""

import os
import re
import subprocess
import sys
from collections import Counter
from pathlib import Path

SOURCE = Path(__file__).with_suffix(".cpp")


def main() -> int:
    expected = Counter(re.findall(r"// error: (.*)", SOURCE.read_text()))
    compiled = subprocess.run([*sys.argv[1:], "-std=c++20", "-fsyntax-only", str(SOURCE)], text=True, capture_output=True,
                              env=dict(os.environ, LC_ALL="C"))
    errors = re.findall(r"error: (.*)", compiled.stderr)
    came = Counter(next((text for text in expected if text in error), error) for error in errors)
    if came == expected:
        print(f"{len(errors)} errors as expected, {len(compiled.stderr.splitlines())} lines")
        return 0
    print(compiled.stderr)
    print(f"expected {dict(expected)}\n  got {dict(came)}")
    return 1


if __name__ == "__main__":
    sys.exit(main())
