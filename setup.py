"""Gives the package its description, which is README.md without what a package index cannot show."""

import re
from pathlib import Path

from setuptools import setup

# With their captions.
PICTURES = re.compile(r"^!\[[^\]]*\]\((?!https?:).*\n(?:.+\n)*\n", re.MULTILINE)
LINKS = re.compile(r"\[([^\]]*)\]\((?!https?:)[^)]*\)")


def write_description(readme: str) -> str:
    """Return a README without pictures and links that lead into the repository; texts of links stay."""
    return LINKS.sub(r"\1", PICTURES.sub("", readme))


if __name__ == "__main__":
    readme = Path(__file__).with_name("README.md").read_text(encoding="utf-8")
    setup(
        long_description=write_description(readme),
        long_description_content_type="text/markdown",
    )
