"""What a person reads: whole messages against snapshots, and the promises that hold for every message."""

from __future__ import annotations

import io
import re

import pytest
from rich.cells import cell_len

from gradguard.core.diagnosis import Diagnosis, Fix, SourceSpan, TensorFacts
from gradguard.reporting import wording
from gradguard.reporting.terminal.layout import clean
from gradguard.reporting.terminal.render import headline, print_diagnosis, render, render_for_error

ESCAPES = re.compile(r"\x1b\[[0-9;]*m")


def diagnosis(culprit=None, *related, **fields):
    return Diagnosis(
        **{"code": "GG101", "name": "a-rule", "headline": "something is wrong", **fields}, culprit=culprit, related=list(related)
    )


def body(text):
    """The rows between the headline and the facts."""
    return text.split("\n\n", 1)[1].split("\n\n  more:")[0]


# --- whole messages


def test_full_story(story, snapshot):
    snapshot("full", render(story, width=100, unicode=False))


def test_full_story_drawn_with_box_characters(story, snapshot):
    snapshot("full_unicode", render(story, width=100, unicode=True))


def test_narrow_terminal(story, snapshot):
    snapshot("narrow", render(story, width=60, unicode=False))


def test_no_culprit(story, snapshot):
    unsure = story.model_copy(update={"culprit": None, "confidence": "possible", "repeats": 2, "severity": "warning"})
    snapshot("no_culprit", render(unsure, width=100, unicode=False))


def test_long_lists_are_cut(write, snapshot):
    source = write("".join(f"def f{i}(x):\n    return x.relu_()  # {i}\n\n" for i in range(9)))
    places = [source.span(f"x.relu_()  # {i}", f"write {i}", function=f"f{i}") for i in range(9)]
    many = diagnosis(
        *places,
        tensors=[TensorFacts(name=f"encoder.{i}.weight", kind="parameter", shape=[8], dtype="torch.float32") for i in range(9)],
        notes=[f"note number {i}" for i in range(9)],
        fixes=[Fix(title=f"try {i}") for i in range(5)],
        avoid=["first", "second", "third", "fourth"],
        breadcrumbs=[f"step {i}" for i in range(9)],
        torch_message="\n".join(f"line {i}" for i in range(30)),
    )
    snapshot("many", render(many, width=80, unicode=False))
    verbose = render(many, width=80, unicode=False, verbose=True)
    for i in range(9):
        assert f"write {i}" in verbose and f"note number {i}" in verbose and f"step {i}" in verbose
    assert "Try 4" in verbose and "fourth" in verbose and "line 29" in verbose
    assert "more:" in verbose and "and " not in verbose


# --- promises


@pytest.mark.parametrize("width", [40, 60, 80, 100, 120])
def test_no_word_is_broken_and_prose_keeps_to_the_width(story, width):
    name = "encoder.layers.0.self-attention.very_long_module_name.another_long_name.out-proj.weight"
    story.notes.append(f"The parameter {name} takes part, and `left + right` is one expression.")
    story.tensors.append(TensorFacts(name=name, kind="parameter", shape=[4, 4]))
    text = render(story, width=width, unicode=False)
    lines = text.split("\n")
    assert lines[0] == "error[GG101]: `share` was changed in place by `clamp_` after sigmoid had saved it for backward"
    assert sum(name in line for line in lines) == 2
    assert "`left + right`" in text
    story_rows = lines[1 : lines.index("  PyTorch said:")]
    too_long = [line for line in story_rows if cell_len(line) > width and name not in line]
    if width >= 60:
        assert not too_long
    words = set(" ".join(lines).split())
    for said in (story.explanation, *story.avoid, *story.notes, story.headline):
        assert set(said.split()) <= words


def test_pytorchs_words_stand_whole_at_the_end(story):
    assert render(story, width=60).endswith("    " + story.torch_message)


def test_a_person_is_shown_pytorchs_first_sentence(story):
    for words, shown in (
        ("It is at version 1; expected version 0 instead. Hint: enable it.", "It is at version 1; expected version 0 instead."),
        ("Error(s) in loading:\n\tMissing key(s): a.", "Error(s) in loading:\n\tMissing key(s): a."),
        ("mat1 (2x3) and torch.float32, e.g. this", "mat1 (2x3) and torch.float32, e.g. this"),
    ):
        story.torch_message = words
        said = render(story, brief=True).partition("PyTorch said:\n")[2]
        more = "" if shown == words else "\n(and more, in the exception's text and in the report)"
        assert re.sub("^    ", "", said, flags=re.M) == re.sub("^    ", "", clean(shown), flags=re.M) + more
        assert render(story, brief=True, verbose=True) == render(story, verbose=True)
    stream = io.StringIO()
    story.torch_message = "One. Two."
    print_diagnosis(story, stream)
    assert "    One.\n" in stream.getvalue() and "Two." not in stream.getvalue() and "    One. Two." in render_for_error(story)


def test_titles_of_fixes_have_one_form():
    for written, shown in (
        ("make it: `y = y + 1`", "Make it: `y = y + 1`"),
        ("Call `x.step()` first.", "Call `x.step()` first"),
        ("torch.no_grad() around it", "torch.no_grad() around it"),
        ("`y` as it was", "`y` as it was"),
        ("wait...", "wait..."),
    ):
        assert wording.fix_title(Fix(title=written)) == shown


@pytest.mark.parametrize("unicode", [False, True])
def test_colour_only_adds_escapes(story, unicode):
    plain = render(story, unicode=unicode)
    coloured = render(story, unicode=unicode, color=True)
    assert "\x1b" not in plain
    assert "\x1b[1;31merror[GG101]\x1b[0m" in coloured
    assert ESCAPES.sub("", coloured) == plain


def test_ascii_unless_the_program_is_not(story):
    assert render(story, unicode=False).isascii()


def test_no_trailing_blanks_and_no_double_blank_lines(story):
    text = render(story, unicode=True)
    assert not any(line != line.rstrip() for line in text.split("\n"))
    assert "\n\n\n" not in text


def test_control_characters_do_not_reach_the_terminal():
    hostile = diagnosis(headline="a\x1b[2Jb\rc\x07", notes=["x\x1b]0;title\x07"], torch_message="\x1b[31mred\x1b[0m\u202e")
    assert not re.search("[\x00-\x09\x0b-\x1f\x7f-\x9f\u202e]", render(hostile, unicode=False))


# --- snippets


def carets_point_at(text, source_row, marker="^"):
    """The text that stands right above the carets."""
    rows = text.split("\n")
    at = next(i for i, row in enumerate(rows) if source_row in row)
    below = next(row for row in rows[at + 1 :] if marker in row)
    first, last = below.index(marker), below.rindex(marker)
    # what the terminal shows above these cells
    shown, cell = "", 0
    for character in rows[at]:
        if first <= cell <= last:
            shown += character
        cell += cell_len(character)
    return shown


@pytest.mark.parametrize(
    "line",
    [
        "y = x.add_(1)",
        "\t\ty = x.add_(1)\t# tabs",
        "a\t=\tx.add_(1)",
        "名前 = '注意' + x.add_(1)",
        "smile = '🙂🚀' + x.add_(1)",
        "accent = 'e\u0301' + x.add_(1)",
    ],
)
def test_carets_stand_under_the_expression(write, line):
    source = write(f"if True:\n    pass\n{line}\n")
    shown = carets_point_at(render(diagnosis(source.span("x.add_(1)")), unicode=False), "x.add_(1)")
    assert shown == "x.add_(1)"


def test_carets_under_a_wide_name(write):
    source = write("結果 = 重み.add_(勾配)\n")
    text = render(diagnosis(source.span("重み.add_(勾配)", "changed")), unicode=False)
    assert body(text).split("\n")[1:] == ["  1 | 結果 = 重み.add_(勾配)", "    |        ^^^^^^^^^^^^^^^ changed"]


def test_block_is_dedented_as_a_whole(write):
    source = write("""\
        class A:
            def f(self, x):
                for row in x:
                    row.add_(1)
                return x.sum()
        """)
    text = render(
        diagnosis(source.span("row.add_(1)", "changed", function="A.f"), source.span("x.sum()", "read", function="A.f")), unicode=False
    )
    assert body(text) == "\n".join(
        [
            "    culprit: train.py:4:13 in A.f",
            "  4 |     row.add_(1)",
            "    |     ^^^^^^^^^^^ changed",
            "  5 | return x.sum()",
            "    |        ------- read",
        ]
    )


def test_marks_of_one_line_and_a_gap(write):
    source = write("""\
        y = x.exp()
        a = 1
        z = y.mul_(2) + y
        b = 1
        b = 2
        z.backward()
        """)
    text = render(
        diagnosis(
            source.span("y.mul_(2)", "changed", function="<module>"),
            source.span("x.exp()", "saved", function="<module>"),
            source.span("y.mul_(2) + y", "whole", function="<module>"),
            source.span("z.backward()", role="backward", function="<module>"),
        ),
        unicode=False,
    )
    assert body(text) == "\n".join(
        [
            "    culprit: train.py:3:5",
            "  1 | y = x.exp()",
            "    |     ------- saved",
            "  2 | a = 1",
            "  3 | z = y.mul_(2) + y",
            "    |     ^^^^^^^^^ changed",
            "    |     ------------- whole",
            " ...",
            "  6 | z.backward()",
            "    | ------------ backward was called here",
        ]
    )


def test_spans_over_several_lines(write, snapshot):
    source = write("""\
        def f(a, b, c):
            loss = (a
                    + b
                    + c).sum()
            total = [
                a,
                b,
                c,
                loss,
            ]
            loss.backward()
        """)
    first = source.span("(a\n            + b\n            + c).sum()", "four lines at most are shown whole", function="f")
    second = source.span("total = [\n        a,\n        b,\n        c,\n        loss,\n    ]", "longer ones are cut", function="f")
    inner = source.span("+ b\n            + c", "inner", function="f")
    both = diagnosis(first, second, inner)
    snapshot("multiline", body(render(both, unicode=False)) + "\n\n" + body(render(both, unicode=True)))


def test_long_line_is_cut_to_a_window_around_the_span(write):
    names = ", ".join(f"first_{i}" for i in range(20))
    source = write(f"y = torch.cat([{names}, hidden.relu_(), {names.replace('first', 'last')}])\n")
    rows = body(render(diagnosis(source.span("hidden.relu_()", "changed")), width=80, unicode=False)).split("\n")
    assert rows[1:] == [
        "  1 | ...rst_19, hidden.relu_(), last_0, last_1, last_2, last_3, last_4, last...",
        "    |            ^^^^^^^^^^^^^^ changed",
    ]
    assert cell_len(rows[1]) == 80


def test_span_longer_than_the_width(write):
    call = "torch.cat([" + ", ".join(f"part_{i}" for i in range(40)) + "])"
    source = write(f"y = {call}\n")
    rows = body(render(diagnosis(source.span(call, "made of a lot of parts")), width=60, unicode=False)).split("\n")
    assert all(cell_len(row) <= 60 for row in rows)
    assert rows[1].endswith("...") and set(rows[2][10:]) == {"^"}
    assert "made of a lot of parts" in rows[3]


def test_wide_characters_at_the_edge_of_the_window(write):
    source = write(f"y = '{'注意' * 60}' + x.add_(1) + '{'勾配' * 60}'\n")
    text = render(diagnosis(source.span("x.add_(1)", "changed")), width=60, unicode=True)
    assert carets_point_at(text, "x.add_(1)") == "x.add_(1)"
    assert all(cell_len(row) <= 60 for row in text.split("\n"))


def test_long_label_goes_on_under_itself(write):
    source = write("y.mul_(2)\n")
    label = "changed here, in the third pass of the loop, after the attention of the decoder had been saved for backward"
    rows = body(render(diagnosis(source.span("y.mul_(2)", label)), width=60, unicode=False)).split("\n")
    assert rows[2].startswith("    | ^^^^^^^^^ changed here,") and rows[3].startswith("    |           ")
    assert " ".join(" ".join(row.lstrip(" |^") for row in rows[2:]).split()) == label


# --- what is missing


def test_no_columns_marks_the_line(write):
    source = write("def f(y):\n    y.mul_(2)  # double\n")
    text = render(diagnosis(source.span("y.mul_(2)", "changed", columns=False)), unicode=False)
    assert body(text).split("\n")[1:] == ["  2 | y.mul_(2)  # double", "    | ^^^^^^^^^^^^^^^^^^^ changed"]


def test_no_source_shows_the_remembered_expression():
    span = SourceSpan(file="<stdin>", line=7, end_line=7, column=4, end_column=13, text="y.mul_(2)", label="changed", function="<module>")
    assert body(render(diagnosis(span), unicode=False)) == "    culprit: <stdin>:7\n  7 | y.mul_(2)\n    | ^^^^^^^^^ changed"


def test_no_source_and_no_text():
    spans = [SourceSpan(file="/srv/gone.py", line=7, end_line=7, label="changed"), SourceSpan(file="/srv/gone.py", line=9, end_line=9)]
    assert body(render(diagnosis(*spans), unicode=False)) == (
        "    culprit: /srv/gone.py:7\n      changed (source not at hand)\n\n    /srv/gone.py:9\n      here (source not at hand)"
    )


def test_source_edited_while_the_program_ran(write):
    source = write("y.mul_(2)\n")
    span = source.span("y.mul_(2)", "changed")
    write("print('something else altogether')\n", "other.py")
    moved = span.model_copy(update={"file": span.file.replace("train.py", "other.py")})
    rows = body(render(diagnosis(moved), unicode=False)).split("\n")
    assert rows == ["    culprit: other.py:1", "  1 | y.mul_(2)", "    | ^^^^^^^^^ changed"]


def test_columns_that_are_off_are_found_again_by_the_text(write):
    source = write("y = x + y.mul_(2)\n")
    span = source.span("y.mul_(2)", "changed").model_copy(update={"column": 2, "end_column": 300})
    assert carets_point_at(render(diagnosis(span), unicode=False), "x + y") == "y.mul_(2)"


def test_a_line_beyond_the_file(write):
    source = write("y.mul_(2)\n")
    span = source.span("y.mul_(2)").model_copy(update={"line": 900, "end_line": 905, "text": None})
    assert "culprit: train.py:900\n      this is the bug (source not at hand)" in render(diagnosis(span), unicode=False)


def test_nothing_but_a_headline():
    assert render(diagnosis(), unicode=False) == (
        "error[GG101]: something is wrong\n\n  where:  could not determine the exact line\n\n  more:   gradguard explain GG101 (a-rule)"
    )


def test_related_place_that_repeats_the_culprit_is_said_once(write):
    span = write("y.mul_(2)\n").span("y.mul_(2)", "changed")
    assert render(diagnosis(span, span), unicode=False).count("y.mul_(2)") == 1


def test_paths_below_the_working_directory_are_relative(write, tmp_path, monkeypatch):
    span = write("y.mul_(2)\n", "models/gate.py").span("y.mul_(2)")
    assert "culprit: models/gate.py:1:1" in render(diagnosis(span)).replace("\\", "/")
    assert headline(diagnosis(span)).replace("\\", "/") == "error[GG101]: something is wrong (models/gate.py:1)"
    (tmp_path / "elsewhere").mkdir()
    monkeypatch.chdir(tmp_path / "elsewhere")
    text = " ".join(render(diagnosis(span)).split())  # a long path has a line of its own
    assert f"culprit: {tmp_path / 'models' / 'gate.py'}:1:1" in text


# --- facts


@pytest.mark.parametrize(
    ("confidence", "said"), [("certain", "    culprit: "), ("likely", "    likely culprit: "), ("possible", "    possible culprit: ")]
)
def test_confidence_is_said_plainly(write, confidence, said):
    text = render(diagnosis(write("y.mul_(2)\n").span("y.mul_(2)"), confidence=confidence))
    assert said in text
    assert ("not certain" in text) == (confidence != "certain")


def test_tensors_stand_in_columns_and_devices_only_where_they_differ():
    tensors = [
        TensorFacts(name="encoder.0.weight", kind="parameter", shape=[4, 3], dtype="torch.float32", device="cuda:0", requires_grad=False),
        TensorFacts(name="x", shape=[], dtype="float32", device="cpu", module="encoder.0", version_saved=2),
    ]
    text = render(diagnosis(tensors=tensors), unicode=False)
    assert "  tensor: encoder.0.weight  parameter, float32 [4, 3], on cuda:0, requires_grad=False\n" in text
    assert "          x                 float32 [], on cpu, of encoder.0, saved at version 2\n" in text
    assert "cpu" not in render(diagnosis(tensors=tensors[1:]))


def test_step_rank_thread_and_repeats():
    text = render(diagnosis(step=7, rank=1, thread="loader-0", repeats=1))
    assert "  when:   step 7, rank 1, thread loader-0\n  again:  1 more time after it was first said" in text
    assert "when:" not in render(diagnosis(thread="MainThread"))


def test_code_in_an_explanation_is_kept_as_written():
    text = render(diagnosis(explanation="Write this:\n    y = x + 1   # spaced\n\nand not that."), unicode=False)
    assert "  why:    Write this:\n              y = x + 1   # spaced\n\n          and not that." in text


# --- streams


class Stream(io.StringIO):
    def __init__(self, terminal, encoding="utf-8"):
        super().__init__()
        self.terminal, self._encoding = terminal, encoding

    def isatty(self):
        return self.terminal

    @property
    def encoding(self):
        return self._encoding


@pytest.mark.parametrize(
    ("terminal", "variables", "coloured"),
    [
        (True, {}, True),
        (False, {}, False),
        (True, {"NO_COLOR": "1"}, False),
        (False, {"FORCE_COLOR": "1"}, True),
        (True, {"NO_COLOR": "1", "FORCE_COLOR": "1"}, False),
        (True, {"NO_COLOR": ""}, True),
        (True, {"TERM": "dumb"}, False),
    ],
)
def test_colour_follows_the_stream_and_the_environment(story, monkeypatch, terminal, variables, coloured):
    for name in ("NO_COLOR", "FORCE_COLOR", "TERM"):
        monkeypatch.delenv(name, raising=False)
    for name, value in variables.items():
        monkeypatch.setenv(name, value)
    stream = Stream(terminal)
    print_diagnosis(story, stream)
    assert ("\x1b[" in stream.getvalue()) == coloured
    assert stream.getvalue().endswith("\n")


def test_a_stream_without_unicode_gets_what_it_can_show(write):
    stream = Stream(False, "ascii")
    print_diagnosis(diagnosis(write("重み.add_(1)\n").span("重み.add_(1)", "changed")), stream)
    assert stream.getvalue().isascii() and "\\u91cd" in stream.getvalue()


@pytest.mark.parametrize(("columns", "width"), [("20", 40), ("72", 72), ("400", 120), ("wide", 100)])
def test_width_comes_from_the_terminal_within_bounds(story, monkeypatch, columns, width):
    monkeypatch.setenv("COLUMNS", columns)
    monkeypatch.setattr("sys.stderr", io.StringIO())
    assert render_for_error(story) == render(story, width=width, unicode=False)


def test_stderr_is_the_default_and_may_be_missing(story, monkeypatch, capsys):
    print_diagnosis(story)
    assert capsys.readouterr().err.startswith("error[GG101]")
    monkeypatch.setattr("sys.stderr", None)
    print_diagnosis(story)
    assert render_for_error(story).startswith("error[GG101]")


# --- narrow terminals, one line, everything


@pytest.mark.parametrize("columns", [40, 60, 80, 120])
@pytest.mark.parametrize("encoding", ["utf-8", "ascii"])
def test_a_terminal_is_filled_to_its_width(story, monkeypatch, columns, encoding):
    monkeypatch.setenv("COLUMNS", str(columns))
    monkeypatch.setenv("TERM", "xterm")
    monkeypatch.setenv("NO_COLOR", "1")
    many = story.model_copy(update={"tensors": [TensorFacts(name=f"encoder.{i}.weight", shape=[64, 32], dtype="float32") for i in (0, 1)]})
    stream = Stream(True, encoding)
    print_diagnosis(many, stream)
    shown = stream.getvalue()
    assert "\x1b" not in shown and (encoding != "ascii" or shown.isascii())
    patch = re.compile(r"\s*\d*\s[-+ ] |\s*\d* [-+] ")
    for row in shown.splitlines():  # a patch is copied, and a word stands alone
        assert cell_len(row) <= columns or patch.match(row) or " " not in row.strip(), row
    flat = " ".join(shown.split())
    assert many.headline in flat and many.torch_message.split(". ")[0] in flat


def test_what_is_piped_keeps_its_headline_on_one_line(story, monkeypatch):
    monkeypatch.setenv("COLUMNS", "40")
    stream = Stream(False)
    print_diagnosis(story, stream)
    assert stream.getvalue().splitlines()[0] == f"error[GG101]: {story.headline}"
    assert "\x1b" not in stream.getvalue()


def test_one_line_is_what_editors_jump_to(story, monkeypatch):
    monkeypatch.chdir(story.culprit.file.rpartition("/")[0])
    stream = Stream(False)
    print_diagnosis(story, stream, verbosity="quiet")
    assert stream.getvalue() == f"train.py:19: GG101 {story.headline}\n"
    stream = Stream(False)
    print_diagnosis(diagnosis(headline="two\nlines"), stream, verbosity="quiet", color=True)
    assert ESCAPES.sub("", stream.getvalue()) == "GG101 two lines\n"
    tried = Fix(title="make a copy", safety="safe", verified={"verdict": "verified", "steps": 8, "why": "ran"})
    stream = Stream(False)
    print_diagnosis(story.model_copy(update={"fixes": [tried]}), stream, verbosity="quiet")
    assert stream.getvalue().splitlines()[1:] == ["train.py:19: GG101 fix: Make a copy (safe; verified over 8 steps)"]


def test_all_that_is_known(story):
    shown = render(story, width=100, verbose=True, unicode=False)
    assert "  tensor: name   kind    dtype    shape    " in shown and "0 -> 1" in shown
    assert "  before: step 1: zero_grad, forward, backward, step\n          step 2" in shown
    narrow = render(story, width=40, verbose=True, unicode=False)
    assert "name   kind" not in narrow and "float32 [32, 8]" in narrow  # a table has no room


def test_characters_that_a_stream_lacks_are_put_in_others():
    stream = Stream(False, "ascii")
    print_diagnosis(diagnosis(headline="ranks 0–2 wait … ×3 → 重"), stream)
    assert stream.getvalue().startswith("error[GG101]: ranks 0-2 wait ... x3 -> \\u91cd\n")
