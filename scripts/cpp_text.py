"""Reads C++ without a compiler: functions with their lengths, classes with their members."""
import re

RAW_TEXT = r'R"(\w*)\(.*?\)\1"'
COMMENT_OR_TEXT = re.compile(rf'//[^\n]*|/\*.*?\*/|{RAW_TEXT}|"(?:\\.|[^"\\\n])*"|\'(?:\\.|[^\'\\\n])\'', re.DOTALL)
DIRECTIVE = re.compile(r"^[ \t]*#(?:[^\n]*\\\n)*[^\n]*", re.MULTILINE)
ATTRIBUTE = re.compile(r"\[\[.*?\]\]|\balignas\s*\([^()]*\)|\b__attribute__\s*\(\(.*?\)\)|\b[A-Z]+_API\b|\bfinal\b")
ACCESS = re.compile(r"^\s*(?:(?:public|private|protected)\s*:\s*)+")
TEMPLATE = re.compile(r"^\s*template\s*<.*?>\s*(?=(?:requires\b.*\b)?(?:struct|class|union|enum)\b)", re.DOTALL)
NO_FUNCTION = re.compile(r"^\s*(?:namespace|class|struct|enum|union|extern|if|for|while|switch|catch|do|else|try)\b|=\s*$|"
                         r"\bnamespace\s*[\w:]*\s*$")
NAME = re.compile(r"([~\w:]+(?:operator\W+)?)\s*\(")
CLASS = re.compile(r"^\s*(struct|class)\b\s*([^={}()]*)$", re.DOTALL)
TYPE = re.compile(r"^\s*(?:struct|class|union|enum)\b")
NO_MEMBER = re.compile(r"^\s*(?:using|typedef|friend|static|template|struct|class|enum|union|static_assert|constexpr|TORCH_\w+)\b|\boperator\b")


def spaces(match):
    return re.sub(r"[^\n]", " ", match[0])


def blank(text):
    """Replaces comments and literals by spaces, so that braces in them do not count; keeps lines."""
    return COMMENT_OR_TEXT.sub(spaces, text)


def code(text):
    """As blank(), and without preprocessor directives."""
    return DIRECTIVE.sub(spaces, blank(text))


def functions(text):
    """Yields (name, first line, number of lines) of each outermost function body."""
    text = code(text)
    depth, start, head, body = 0, None, 0, 0
    for i, c in enumerate(text):
        if c == "{":
            signature = re.sub(r"^\s*template\s*<[^{]*?>\s*(?=[a-zA-Z])", "", text[head:i])
            if start is None and ")" in signature and not NO_FUNCTION.search(signature):
                match = NAME.search(signature)
                first = head + len(text[head:i]) - len(text[head:i].lstrip())
                start, body, name = first, depth, match[1] if match else "?"
            depth += 1
        elif c == "}":
            depth -= 1
            if start is not None and depth == body:
                first = text.count("\n", 0, start) + 1
                yield name, first, text.count("\n", 0, i) + 2 - first
                start = None
        if c in "{};":
            head = i + 1


class Class:
    """A class and its data members. `is_plain`: a struct of public data, with at most one function."""

    def __init__(self, kind, name, line):
        self.kind, self.name, self.line = kind, name, line
        self.members = self.functions = 0
        self.has_access = False

    @property
    def is_plain(self):
        return self.kind == "struct" and self.functions <= 1 and not self.has_access

    def add(self, statement):
        """Counts a declaration, without the bodies and initializers in braces."""
        statement = ACCESS.sub("", statement)
        if NO_MEMBER.search(statement) or not statement.strip():
            return
        declaration = re.sub(r"\[\[.*?\]\]|\balignas\s*\([^()]*\)", "", statement)
        while (shorter := re.sub(r"<[^<>]*>", "", declaration)) != declaration:
            declaration = shorter
        declaration = re.sub(r"=[^,]*", "", declaration)
        if "(" in declaration:
            self.functions += 1
        else:
            self.members += declaration.count(",") + 1


def classes(text):
    """Yields the classes that the text defines."""
    text = code(text)
    open_scopes, statement, head = [], "", 0  # `statement`: of the innermost class, so far
    for mark in re.finditer(r"[{};]", text):
        piece = text[head:mark.start()]
        head = mark.end()
        scope = open_scopes[-1][0] if open_scopes else None
        if scope:
            scope.has_access |= bool(re.search(r"\b(?:private|protected)\s*:", piece))
            statement += piece
        if mark[0] == "{":
            found = CLASS.match(ATTRIBUTE.sub(" ", TEMPLATE.sub("", ACCESS.sub("", piece))))
            inner = found and Class(found[1], re.split(r"(?<!:):(?!:)", found[2])[0].strip(), text.count("\n", 0, mark.start()) + 1)
            open_scopes.append((inner, statement))
            statement = ""
        elif mark[0] == ";" and scope:
            scope.add(statement)
            statement = ""
        elif mark[0] == "}" and open_scopes:
            closed, statement = open_scopes.pop()
            if closed:
                yield closed
            outer = open_scopes[-1][0] if open_scopes else None
            if outer and not closed and "(" in statement and not TYPE.match(ACCESS.sub("", statement)):
                outer.add(statement)  # a function with its body
                statement = ""
