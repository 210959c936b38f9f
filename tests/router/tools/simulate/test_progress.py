from io import StringIO

from router.tools.simulate.command import ProgressBar


class Terminal(StringIO):
    def isatty(self):
        return True


def test_a_bar_is_drawn_over_itself_and_taken_away():
    stream = Terminal()
    bar = ProgressBar(stream, "run")
    for fraction in (0.0, 0.5, 0.5001, 1.0):
        bar.show(fraction)
    bar.clear()
    drawn = stream.getvalue().split("\r")
    assert [line.split()[-2] for line in drawn if "run" in line] == ["0%", "50%", "100%"]
    assert drawn[2].count("█") == drawn[2].count("░") == 15
    assert drawn[-2].strip() == drawn[-1] == ""


def test_without_a_terminal_no_bar_is_drawn():
    stream = StringIO()
    ProgressBar(stream, "run").show(0.5)
    assert stream.getvalue() == ""
