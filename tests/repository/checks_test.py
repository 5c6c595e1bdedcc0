"""The scripts behind ./dev check find what they look for."""
import pathlib
import subprocess
import sys
import tempfile
import unittest

ROOT = pathlib.Path(__file__).resolve().parents[2]


def run(script, files):
    """Runs a script over a tree of the given files; returns its exit status and output."""
    with tempfile.TemporaryDirectory() as tree:
        for name, text in files.items():
            path = pathlib.Path(tree, name)
            path.parent.mkdir(parents=True, exist_ok=True)
            path.write_text(text)
        result = subprocess.run([sys.executable, "-B", ROOT / "scripts" / script, tree], capture_output=True, text=True)
    return result.returncode, result.stdout


class CheckLayers(unittest.TestCase):
    def assert_finds(self, files, message):
        status, output = run("check_layers.py", files)
        self.assertEqual(status, 1, output)
        self.assertIn(message, output)

    def test_takes_an_include_of_a_layer_above(self):
        status, output = run("check_layers.py", {"src/unit/a.cpp": '#include "comm/b.h"\n#include <vector>\n',
                                                 "src/comm/b.h": "", "include/tessera/x.h": "#include <tessera/y.h>\n",
                                                 "include/tessera/y.h": ""})
        self.assertEqual(status, 0, output)

    def test_finds_an_include_of_a_layer_below(self):
        self.assert_finds({"src/comm/a.cpp": '\n#include "unit/b.h"\n', "src/unit/b.h": ""},
                          "src/comm/a.cpp:2: layer comm includes unit/b.h")

    def test_finds_a_file_in_no_layer(self):
        self.assert_finds({"src/extra/a.cpp": ""}, "src/extra/a.cpp: lies in no layer")

    def test_finds_a_dialect_in_the_engine(self):
        self.assert_finds({"src/unit/a.cpp": "#include <tessera/dialects/x.h>\n"}, "includes the dialect")
        self.assert_finds({"src/unit/a.cpp": "// as FairScale does\n"}, "names a dialect")

    def test_finds_a_private_header_in_a_public_one(self):
        self.assert_finds({"include/tessera/x.h": '#include "unit/b.h"\n', "src/unit/b.h": ""},
                          "public headers include only")

    def test_finds_a_private_header_in_a_program(self):
        self.assert_finds({"examples/x.cpp": '#include "unit/b.h"\n', "src/unit/b.h": ""}, "which is not in examples/")


class CheckWords(unittest.TestCase):
    def assert_finds(self, files, message):
        status, output = run("check_words.py", files)
        self.assertEqual(status, 1, output)
        self.assertIn(message, output)

    def test_finds_vague_names(self):
        self.assert_finds({"src/comm/tensor_utils.h": ""}, 'is named "utils"')
        self.assert_finds({"src/comm/a.h": "class BufferManager {};\n"}, "type BufferManager")

    def test_finds_paths_of_a_machine(self):
        self.assert_finds({"docs/a.md": "see /home/" + "somebody/tessera\n"}, "a path of one machine")

    def test_finds_dead_links_and_blanks(self):
        self.assert_finds({"README.md": "[a](docs/none.md)\n"}, "link to docs/none.md")
        self.assert_finds({"a.cpp": "int a; \n"}, "blanks at the end")

    def test_takes_a_clean_tree(self):
        status, output = run("check_words.py", {"README.md": "[a](docs/a.md#b)\n", "docs/a.md": "https://a.b/work\n"})
        self.assertEqual(status, 0, output)


class CheckBudgets(unittest.TestCase):
    def test_measures_functions_and_never_fails(self):
        body = "".join(f"  a({i});  // }}\n" for i in range(50))
        status, output = run("check_budgets.py", {"src/unit/a.cpp": "namespace n {\nvoid long_one(int x) {\n" + body + "}\n}\n"})
        self.assertEqual(status, 0)
        self.assertIn("src/unit/a.cpp:2: long_one has 52 lines, budget 40", output)


if __name__ == "__main__":
    unittest.main()
