"""Words of the source: terms of the field, docstrings without habits of translation, errors with a remedy."""

import ast
import re
from functools import cache
from pathlib import Path

from ringspan.core import errors
from tests.docs.pages import pages

SOURCE = Path(__file__).parents[1] / "src"
# As words and as parts of identifiers: `_MAILBOX`, `next_parcel`, `OldMailbox` (taken apart before the search).
DROPPED = re.compile(
    r"(?<![a-z])(?:mail(?: ?box(?:es)?)?|letters?|parcels?|freights?|manieth|passages?|journeys?|wires?)(?![a-z])"
)
# By file, the parts of lines in which a word has its ordinary use, or is what a file on disk says.
ALLOWED = {
    "ringspan/jax/kernels/pallas.py": ("has a letter for each array",),
    # The keys of a profile that is written as JSON.
    "ringspan/measure/trace/profile.py": (
        "``passages``",
        "passages: list[dict",
        "self.passages",
        "passages=[",
    ),
    "ringspan/report/profile_page.py": ("profile.passages",),
}

# Habits of docstrings: a pattern, its count in src and what to write. A count may fall, and never rise again.
HABITS = {
    r"\A(What|Whether|Which|Who|How|Where|Why|Of|As|By|For|Those|That|While|Until)\b": (
        0,
        "a verb or a noun first",
    ),
    r"\b[Nn]one where\b(?!\()": (0, "None if"),
    r"\b(of|in|by|from|to|for|with|on|beside|behind) (which|whom|whose)\b": (
        19,
        "two sentences",
    ),
    r"\b[Nn]one (when|for|of|is)\b": (15, "None if, or no X"),
    r"\bwhere (there|it|they|that|the|a|one|no|nothing)\b": (8, "if, when"),
    r"\b(that|those) of\b": (19, "the noun again"),
    r"\b(is|are|was) no (?!longer)[a-z]": (2, "is not a"),
    r"(?<!``)\bbehind\b": (0, "after"),
    r"\b[Bb]eside\b": (0, "next to, in addition to, except"),
    r"\balike\b(?!:)": (0, "equally, the same"),
    r"\banew\b": (0, "again"),
    r"\b\w+ alone\b": (5, "only"),
    r"\b(nobody|somebody|anybody|whoever|whom)\b": (1, "no rank, another process"),
    r"\b(so|as) many\b": (5, "N, the number"),
    r"\bma(k|d)es? of\b": (2, "the result of"),
    r"\bgo(es)? on\b": (1, "continue"),
}
# Habits of comments, of messages and of pages, likewise: a pattern, its counts in the three, and what to write.
OF_PROSE = {
    r"\A(?i:(of|by|in|from|for|to|with|at) (which|what|whom|whose|that|those)|whose|which|whom|of|by)\b": (
        (0, 0, 14),
        "a whole sentence, not the tail of another",
    ),
    r"\b(of|in|by|from|to|for|with|on|beside|behind) (which|whom|whose)\b": (
        (14, 11, 27),
        "two sentences",
    ),
    r"\b(is|are|was) no (?!longer)[a-z]": ((6, 25, 14), "is not a"),
    r"\bwhere (there|it|they|that|a|one|no|nothing)\b": ((5, 13, 44), "if, when"),
    r"\b\w+ alone\b": ((0, 15, 33), "only"),
    r"\banew\b": ((0, 0, 2), "again"),
    r";[^;]*;": ((2, 9, 34), "two sentences"),
}
PRAGMAS = ("fmt:", "type:", "noqa", "pyright:", "pragma")
LONGEST_NAME = 60  # characters of a test's name
OURS = {
    name
    for name, each in vars(errors).items()
    if isinstance(each, type) and issubclass(each, Exception)
}
# An error says what to do in an imperative or by what must hold, or passes on a remedy or another error's text.
REMEDY = re.compile(
    r"(?<![\w-])(add|append|build|call|change|choose|close|compute|convert|copy|correct|create|cut|delete|detach|download|"
    r"drop|free|freeze|generate|give|install|keep|launch|leave|list|load|lower|make|merge|move|name|pad|pass|plan|prepare|"
    r"put|quantise|raise|read|remove|repair|replace|restore|restart|resume|run|save|scale|see|set|shard|show|shut|split|"
    r"start|stop|take|train|try|turn|unset|use|wait|write)(?![\w-])|must|expected|need(s|ed)?\b|should|at (least|most)"
    r"|instead|\{\w*(?i:advice|answer|callbacks|error|explain|first|forms|hint|hooked|known|line|_other|problem|reason"
    r"|refus|remed|why|wrong)"
)


@cache
def nodes(folder: Path) -> tuple[ast.AST, ...]:
    return tuple(
        node
        for file in folder.rglob("*.py")
        for node in ast.walk(ast.parse(file.read_text(encoding="utf-8")))
    )


def test_habits_of_translation_only_become_fewer():
    kinds = ast.Module | ast.ClassDef | ast.FunctionDef | ast.AsyncFunctionDef
    docstrings = [
        " ".join((ast.get_docstring(node) or "").split())
        for node in nodes(SOURCE)
        if isinstance(node, kinds)
    ]
    for pattern, (ceiling, remedy) in HABITS.items():
        count = sum(len(re.findall(pattern, docstring)) for docstring in docstrings)
        assert ceiling - 3 <= count <= ceiling, (
            f"{pattern!r}: {count} of {ceiling}; write {remedy}, or lower the ceiling"
        )


def comments() -> list[str]:
    """The comments of the source, a block of lines as one."""
    found: list[str] = []
    for file in SOURCE.rglob("*.py"):
        text, before = file.read_text(encoding="utf-8"), -1
        lines = text.splitlines(keepends=True)
        for number, line in enumerate(lines):
            starts_line = line.lstrip().startswith("#")
            if not starts_line and "  # " not in line:
                continue
            said = line.partition("#" if starts_line else "  # ")[2].strip("# \n")
            if said.startswith(PRAGMAS):
                continue
            if starts_line and before == number - 1:
                found[-1] += f" {said}"
            else:
                found.append(said)
            before = number if starts_line else -1
    return found


def messages() -> list[str]:
    calls = [node for node in nodes(SOURCE) if isinstance(node, ast.Call) and node.args]
    return [
        said(node.args[0]) for node in calls if getattr(node.func, "id", "") in OURS
    ]


def sentences() -> list[str]:
    """The lines of the pages outside of blocks of code and tables."""
    found: list[str] = []
    for page in pages():
        text = re.sub(
            r"(?ms)^(`{3,}|:{3,}).*?^\1$", "", page.read_text(encoding="utf-8")
        )
        text = "\n".join(line for line in text.splitlines() if not line.startswith("|"))
        text = re.sub(r"`[^`\n]*`", "code", text)
        found += [" ".join(each.split()) for each in re.split(r"(?<=[.:!?])\s", text)]
    return found


def test_comments_messages_and_pages_have_fewer_habits():
    prose = comments(), messages(), sentences()
    counts = {
        pattern: tuple(
            sum(len(re.findall(pattern, each)) for each in texts) for texts in prose
        )
        for pattern in OF_PROSE
    }
    for pattern, (ceilings, remedy) in OF_PROSE.items():
        for what, count, ceiling in zip(
            ("comments", "messages", "pages"), counts[pattern], ceilings, strict=True
        ):
            assert ceiling - 3 <= count <= ceiling, (
                f"{what}, {pattern!r}: {count} of {ceiling}; write {remedy}, or lower the ceiling"
            )


def test_names_of_tests_are_short():
    names = [
        node.name
        for node in nodes(Path(__file__).parent)
        if isinstance(node, ast.FunctionDef)
    ]
    assert [
        name for name in names if name.startswith("test_") and len(name) > LONGEST_NAME
    ] == [], "shorten these"


def said(message: ast.AST) -> str:
    """The text of a message, and the names in it after a brace."""
    found = [
        (getattr(node, "value", ""), getattr(node, "id", getattr(node, "attr", "")))
        for node in ast.walk(message)
    ]
    return " ".join(
        f"{{{name}" if name else str(text)
        for text, name in found
        if name or isinstance(text, str)
    )


def test_every_error_of_ours_says_what_to_do():
    found = messages()
    assert len(found) > 700
    assert [message for message in found if not REMEDY.search(message)] == []
    assert [
        bool(REMEDY.search(said(ast.parse(text))))
        for text in ('f"{x} is odd"', 'f"{x}; use 2"')
    ] == [False, True]


def dropped_words(text: str) -> list[str]:
    """Those that occur in a text, in lower case."""
    return DROPPED.findall(re.sub(r"(?<=[a-z])(?=[A-Z])", " ", text).lower())


def test_metaphors_for_messages_do_not_occur():
    found: dict[str, list[str]] = {}
    for file in sorted(SOURCE.rglob("*.py")):
        name, text = file.relative_to(SOURCE).as_posix(), file.read_text()
        for ordinary in ALLOWED.get(name, ()):
            assert ordinary in text, (
                f"{name} no longer has {ordinary!r}: take it off the list"
            )
            text = text.replace(ordinary, "")
        if words := dropped_words(text):
            found[name] = words
    assert not found


def test_words_are_found_in_prose_and_in_identifiers():
    text = "self._mailboxes _LETTERS: class NextParcel(mail.x) manieth journey of freight gradient_wire SharedMailBox"
    found = [
        "mailboxes",
        "letters",
        "parcel",
        "mail",
        "manieth",
        "journey",
        "freight",
        "wire",
        "mail box",
    ]
    assert (
        dropped_words(text) == found
        and dropped_words("newsletter, passenger, e-mailed") == []
    )
