"""The counts of a long run in docs/reliability.md."""

import datetime
import platform
from pathlib import Path

import torch

import zerofunc

PAGE = Path(__file__).parents[2] / "docs" / "reliability.md"
BEGIN, END = "<!-- fuzz: begin -->", "<!-- fuzz: end -->"
MEANINGS = {
    "equal": "equal in every step",
    "raise": "equal, and some step raises on both sides",
    "alone": "equal, and some step raises in plain PyTorch alone",
    "refused": "a documented refusal",
    "different": "**different**",
    "error": "**an error where plain PyTorch has none**",
    "hang": "**a hang**",
}


def section(counts, first, last):
    """The text between the markers."""
    versions = f"zerofunc {zerofunc.__version__}, torch {torch.__version__}, Python {platform.python_version()}"
    rows = [f"| {meaning} | {counts[kind]} |" for kind, meaning in MEANINGS.items()]
    head = f"{sum(counts.values())} programs, seeds {first} to {last}, {datetime.date.today()}, {versions}:"
    return "\n".join([BEGIN, head, "", "| came out | programs |", "|---|---|", *rows, END])


def write(counts, first, last):
    """Puts the counts into the page, in place of those that are there."""
    page = PAGE.read_text()
    PAGE.write_text(page[: page.index(BEGIN)] + section(counts, first, last) + page[page.index(END) + len(END) :])
