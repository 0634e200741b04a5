"""Texts of pictures that hold names of anybody's files."""

from matplotlib.figure import Figure
from matplotlib.text import Text


def show_as_written(figure: Figure) -> None:
    """Draw all texts as they are: names of files hold dollar signs, or bytes that are no letters."""
    for text in figure.findobj(Text):
        assert isinstance(text, Text)
        text.set_parse_math(False)
        text.set_text(text.get_text().encode("utf-8", "backslashreplace").decode("utf-8"))
