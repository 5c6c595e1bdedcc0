"""The scripts behind ./dev docs: links, the page of errors, the pages of the site, and the reference."""
import pathlib
import subprocess
import sys
import tempfile
import unittest

ROOT = pathlib.Path(__file__).resolve().parents[2]


def run(script, *arguments):
    result = subprocess.run([sys.executable, "-B", ROOT / "scripts" / script, *arguments], capture_output=True, text=True)
    return result.returncode, result.stdout + result.stderr


class TreeTest(unittest.TestCase):
    def setUp(self):
        folder = tempfile.TemporaryDirectory()
        self.addCleanup(folder.cleanup)
        self.tree = pathlib.Path(folder.name).resolve()

    def write_all(self, files):
        for name, text in files.items():
            path = self.tree / name
            path.parent.mkdir(parents=True, exist_ok=True)
            path.write_text(text)

    def read(self, name):
        return (self.tree / name).read_text()


class CheckLinks(TreeTest):
    def assert_dead(self, files, *problems):
        self.write_all(files)
        status, output = run("check_links.py", self.tree)
        self.assertEqual((status, output.splitlines()), (1, list(problems)))

    def test_finds_files_and_anchors_that_do_not_exist(self):
        self.assert_dead({"README.md": "# One\n\n[a](docs/none.md) [b](docs/a.md#two)\n[c](#three), [d](docs)\n",
                          "docs/a.md": "# A\n[one](../README.md#one) [x](../x.h#line)\n", "x.h": ""},
                         "README.md:3: link to docs/none.md, which does not exist",
                         "README.md:3: link to docs/a.md#two, which has no such heading",
                         "README.md:4: link to #three, which has no such heading",
                         "docs/a.md:2: link to ../x.h#line, which has no such heading")

    def test_finds_files_outside_of_the_repository(self):
        self.assert_dead({"a.md": "[up](../..)\n"}, "a.md:1: link to ../.., which does not exist")

    def test_takes_the_anchors_that_github_makes(self):
        self.write_all({"a.md": "## `tessera ckpt`\n## Costs & benefits, [all](b.md)!\n## Twice\n## Twice\n"
                                "[a](#tessera-ckpt) [b](#costs--benefits-all) [c](#twice) [d](#twice-1) [e](https://a.b/c#d)\n",
                        "b.md": ""})
        self.assertEqual(run("check_links.py", self.tree), (0, "links: those of 2 Markdown files lead somewhere\n"))

    def test_leaves_code_alone(self):
        self.write_all({"a.md": "```\n# Not a heading\n[a](none.md)\n```\n`[a](none.md)` and ``x[`i`](y)``\n"})
        self.assertEqual(run("check_links.py", self.tree)[0], 0)

    def test_finds_links_to_what_looks_like_a_heading_in_code(self):
        self.assert_dead({"a.md": "```\n# In code\n```\n[a](#in-code)\n"}, "a.md:4: link to #in-code, which has no such heading")

    def test_the_repository_has_no_dead_link(self):
        status, output = run("check_links.py")
        self.assertEqual(status, 0, output)


class CheckErrors(TreeTest):
    SOURCE = """
TORCH_CHECK_VALUE(size > 0, "[make] `size` must be positive; got ", size, " (of ",
                  name, ")");  // "[make] no message at all"
std::string error = fmt::format("[join] rank {} has not come {:.1f} s", rank, 1.0);
if (x) TORCH_WARN("the disk is full");
TORCH_INTERNAL_ASSERT(x, "a fault of our own");
"""
    PAGE = """
## Making

Areas: `[take]`,
`[make]`

| message | cause | remedy |
| --- | --- | --- |
| ``must be positive; got ... (of ...)`` | a | b `x` |

## Others

Areas: `[join]`

| message | cause | remedy |
| --- | --- | --- |
| `rank ... has not come`<br>`disk is full` | a | b |
"""

    def check(self, source, page):
        self.write_all({"core/a.cpp": source, "docs/guide/errors.md": page})
        status, output = run("check_errors.py", self.tree)
        return status, output.splitlines()

    def test_takes_a_page_that_has_all_messages(self):
        self.assertEqual(self.check(self.SOURCE, self.PAGE), (0, ["errors: docs/guide/errors.md has the 3 messages of the sources"]))

    def test_finds_messages_that_the_sources_no_longer_have(self):
        self.assertEqual(self.check(self.SOURCE, self.PAGE.replace("`disk", "`memory is full`, `disk")),
                         (1, ["docs/guide/errors.md: no source has the message `memory is full`"]))
        self.assertEqual(self.check(self.SOURCE, self.PAGE.replace("has not come", "does not come"))[0], 1)

    def test_finds_messages_that_the_page_lacks(self):
        self.assertEqual(self.check(self.SOURCE + 'C10_THROW_ERROR(Error, "it is much too late");', self.PAGE),
                         (1, ["docs/guide/errors.md: lacks a message of core/a.cpp: it is much too late"]))

    def test_finds_areas_that_have_no_section(self):
        problem = "lacks a message of core/a.cpp, in the area [join]: [join] rank ... has not come ... s"
        self.assertEqual(self.check(self.SOURCE, self.PAGE.replace("`[join]`", "`[leave]`")),
                         (1, [f"docs/guide/errors.md: {problem}"]))

    def test_a_message_is_looked_for_in_one_statement(self):
        self.assertEqual(self.check(self.SOURCE, self.PAGE.replace("`disk", "`has not come ... disk`, `disk"))[0], 1)

    def test_the_page_has_the_messages_of_the_repository(self):
        status, output = run("check_errors.py")
        self.assertEqual(status, 0, output)


class SitePages(TreeTest):
    def make(self, files):
        self.write_all({"docs/nav.yml": "nav:\n  - README.md\n", **files})
        status, output = run("site_pages.py", self.tree / "pages", self.tree)
        self.assertEqual(status, 0, output)
        return output

    def test_copies_documents_to_their_own_places(self):
        output = self.make({"README.md": "[a](docs/howto/a.md#x) [out](https://a.b)\n", "docs/howto/a.md": "# X\n"})
        self.assertEqual(output, "pages: 2 documents, and 0 files and folders to which they link\n")
        self.assertEqual(self.read("pages/README.md"), "[a](docs/howto/a.md#x) [out](https://a.b)\n")
        self.assertEqual(self.read("pages/docs/howto/a.md"), "# X\n")
        self.assertEqual(self.read("pages/.nav.yml"), "nav:\n  - README.md\n")

    def test_shows_files_to_which_documents_link(self):
        self.make({"docs/howto/a.md": "see [it](../../examples/x.cpp), `[no](y.cpp)`\n```\n[code](../../examples/x.cpp)\n```\n",
                   "examples/x.cpp": "int x;\n"})
        self.assertEqual(self.read("pages/docs/howto/a.md"),
                         "see [it](../../sources/examples/x.cpp.md), `[no](y.cpp)`\n```\n[code](../../examples/x.cpp)\n```\n")
        self.assertEqual(self.read("pages/sources/examples/x.cpp.md"),
                         '---\nsearch:\n  boost: 0.2\n---\n# examples/x.cpp\n\n``````cpp title="examples/x.cpp"\nint x;\n``````\n')

    def test_copies_pictures(self):
        self.make({"docs/a.md": "![a](../b/c.svg) [b](d.png)\n", "b/c.svg": "<svg/>", "docs/d.png": ""})
        self.assertEqual(self.read("pages/docs/a.md"), "![a](../b/c.svg) [b](d.png)\n")
        self.assertEqual(self.read("pages/b/c.svg"), "<svg/>")
        self.assertEqual(self.read("pages/docs/d.png"), "")
        self.assertFalse((self.tree / "pages/sources").exists())

    def test_guides_count_more_in_the_search(self):
        self.make({"docs/guide/errors.md": "# Errors\n", "docs/guide/a.md": "# A\n", "docs/design/b.md": "# B\n"})
        self.assertEqual(self.read("pages/docs/guide/errors.md"), "---\nsearch:\n  boost: 4\n---\n# Errors\n")
        self.assertEqual(self.read("pages/docs/guide/a.md"), "---\nsearch:\n  boost: 6\n---\n# A\n")
        self.assertEqual(self.read("pages/docs/design/b.md"), "# B\n")

    def test_shows_folders_or_their_overview(self):
        self.make({"README.md": "[a](docs/design) [b](examples/consumer)\n", "docs/design/overview.md": "# Over\n",
                   "examples/consumer/CMakeLists.txt": "project(a)\n", "examples/consumer/main.cpp": "int main() {}\n"})
        self.assertEqual(self.read("pages/README.md"), "[a](docs/design/overview.md) [b](sources/examples/consumer.md)\n")
        self.assertEqual(self.read("pages/sources/examples/consumer.md").count("``````"), 4)
        self.assertIn('cmake title="examples/consumer/CMakeLists.txt"', self.read("pages/sources/examples/consumer.md"))

    def test_links_to_public_headers_lead_to_the_reference(self):
        self.make({"docs/a.md": "[a](../dialects/b/include/tessera/dialects/x.h)\n", "dialects/b/include/tessera/dialects/x.h": ""})
        self.assertEqual(self.read("pages/docs/a.md"), "[a](../reference/dialects/x.md)\n")


class CheckSite(TreeTest):
    def check(self, **pages):
        self.write_all({"index.html": "", "a/x y.html": "", "c.svg": "", **{f"{name}.html": text for name, text in pages.items()}})
        return run("check_site.py", self.tree)

    def test_takes_links_to_pages_pictures_and_other_sites(self):
        self.assertEqual(self.check(b='<a href="a/x%20y.html#z">z</a><a href=".">i</a><img src="c.svg?v"><a href="#q">q</a>'
                                      '<a href="https://a.b/c">c</a><link href="/d.css">'),
                         (0, "site: the links of 3 pages lead somewhere\n"))

    def test_finds_files_that_the_site_lacks_and_pictures_that_are_pages(self):
        self.assertEqual(self.check(b='<a href="d.html">d</a><script src="e.js"></script><img src="index.html"><a href="a">a</a>'),
                         (1, "b.html: link to d.html, which the site lacks\nb.html: link to e.js, which the site lacks\n"
                             "b.html: picture index.html, which is a page\nb.html: link to a, which the site lacks\n"))


class CheckReference(TreeTest):
    HEADER = """
namespace tessera {
namespace detail {
TESSERA_API void hidden();
}  // namespace detail
struct TESSERA_API Type {};
TESSERA_API void shown(int x);
TESSERA_API std::vector<int> left_out(int x,
                                      int y);
TESSERA_API void own();  // internal
}  // namespace tessera
"""

    def check(self, page):
        self.write_all({"include/tessera/a.h": self.HEADER, "pages/a.md": page, "pages/b.md": "## `left_out()`\n"})
        return run("check_reference.py", self.tree / "pages", self.tree)

    def test_names_the_exported_functions_that_the_reference_lacks(self):
        self.assertEqual(self.check("## `shown()`\n\nSee `left_out()`.\n"),
                         (1, "tessera/a.h: the reference lacks left_out()\n"))

    def test_takes_a_reference_that_has_all(self):
        self.assertEqual(self.check("## `shown()`\n### `Type::left_out()`\n"),
                         (0, "reference: has the 2 functions of the headers\n"))


class DoxygenFilter(TreeTest):
    def test_hides_what_is_internal_and_keeps_the_lines(self):
        self.write_all({"a.h": "void f();  // internal\n  friend void g(int a,\n      int b);\nvoid h();\n"})
        self.assertEqual(run("doxygen_filter.py", self.tree / "a.h"), (0, "\n\n\nvoid h();\n\n"))


class ReferencePages(TreeTest):
    MEMBER = """<memberdef kind="{kind}" id="{id}" prot="{prot}" static="no"><type>{type}</type><name>{name}</name>
<argsstring>{args}</argsstring>{more}<briefdescription></briefdescription>
<detaileddescription>{text}</detaileddescription><location file="tessera/a.h" line="{line}"/></memberdef>"""

    def member(self, name, line, kind="function", type="void", args="()", text="", prot="public", more=""):
        return self.MEMBER.format(kind=kind, id=f"{name}{line}", type=type, name=name, args=args, text=text, prot=prot, line=line,
                                  more=more)

    def pages(self, kind, name, body, more=""):
        self.write_all({"include/tessera/a.h": "namespace tessera {\n\n// Of tensors.\n// All of them.\n\nstruct A;\n}\n",
                        "xml/a.xml": f'<doxygen><compounddef kind="{kind}" prot="public"><compoundname>{name}</compoundname>'
                                     f'<sectiondef>{body}</sectiondef>{more}</compounddef></doxygen>'})
        status, output = run("reference_pages.py", self.tree / "xml", self.tree / "pages", self.tree)
        self.assertEqual(status, 0, output)
        return self.read("pages/a.md")

    def test_has_overloads_under_one_heading_in_the_headers_order(self):
        text = "<para>Gathers <computeroutput>flat</computeroutput> *now*.</para><para>Collective.</para>"
        page = self.pages("namespace", "tessera::paddle",
                          self.member("second", 30) + self.member("first", 10, args="(const at::Tensor &amp;x)", text=text)
                          + self.member("first", 11, type="at::Tensor", args="(int n=0)"))
        self.assertEqual(page, "# tessera/a.h\n\nOf tensors.\nAll of them.\n\n## `paddle::first()`\n\n"
                               "```cpp\nvoid first(const at::Tensor& x);\n```\n\nGathers `flat` \\*now\\*.\n\nCollective.\n\n"
                               "```cpp\nat::Tensor first(int n = 0);\n```\n\n## `paddle::second()`\n\n```cpp\nvoid second();\n```\n\n")
        self.assertIn("| [tessera/a.h](a.md) | [`paddle::first()`](a.md#paddlefirst), [`paddle::second()`](a.md#paddlesecond) |", self.read("pages/index.md"))

    def test_has_the_public_members_of_classes(self):
        more = '<detaileddescription><para>Holds.</para></detaileddescription><location file="tessera/a.h" line="6"/>'
        page = self.pages("struct", "tessera::A",
                          self.member("hidden", 9, prot="private") + self.member("~A", 8, type="")
                          + self.member("n", 7, "variable", "int", "", "<para>elements</para>", more="<initializer>= 1</initializer>"),
                          more)
        self.assertEqual(page.split("\n\n", 2)[2], "## `A`\n\nHolds.\n\n### `A::n`\n\n`int n = 1;`\n\nelements\n")

    def test_splits_long_declarations(self):
        args = "(const std::map&lt; std::string, int &gt; &amp;first_argument, const std::vector&lt; std::string &gt; &amp;second_argument)"
        page = self.pages("namespace", "tessera", self.member("f", 1, args=args))
        self.assertIn("void f(\n    const std::map<std::string, int>& first_argument,\n"
                      "    const std::vector<std::string>& second_argument);", page)

    def test_refuses_elements_that_it_does_not_know(self):
        self.write_all({"xml/a.xml": '<doxygen><compounddef kind="namespace"><compoundname>tessera</compoundname><sectiondef>'
                                     + self.member("f", 1, text="<para><image/></para>") + "</sectiondef></compounddef></doxygen>"})
        status, output = run("reference_pages.py", self.tree / "xml", self.tree / "pages", self.tree)
        self.assertEqual(status, 1)
        self.assertIn("image: an element of a comment", output)


if __name__ == "__main__":
    unittest.main()
