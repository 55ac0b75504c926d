"""The verdict on every key of a configuration as a table."""

from __future__ import annotations

from typing import Any

from rich import box
from rich.table import Table
from rich.text import Text

from zerofunc.config.findings import Finding
from zerofunc.config.judgement import Judgement
from zerofunc.config.keys import Verdict, first_spelling
from zerofunc.config.reading import show

__all__ = ["table"]

_STYLES = {
    Verdict.HONOURED: "green",
    Verdict.REFUSED: "bold red",
}


def table(judgement: Judgement) -> Table:
    """Return a row per key: its line, its value, the verdict, and the resolved value or the reason."""
    resolved = {} if judgement.config is None else judgement.config.model_dump()
    shown = Table(title=judgement.document.name, box=box.SIMPLE_HEAD)
    shown.add_column("line", justify="right")
    for title in ("key", "given", "verdict", "resolved, or why"):
        shown.add_column(title, overflow="fold")
    findings = sorted(judgement.findings, key=lambda finding: judgement.line_of(finding.key) or 0)
    for finding in findings:
        line = judgement.line_of(finding.key)
        texts = ["" if line is None else str(line), finding.key, show(finding.value), finding.verdict.value]
        style = _STYLES.get(finding.verdict, "yellow")
        shown.add_row(*map(Text, texts[:-1]), Text(texts[-1], style), Text(_result(finding, resolved)))
    return shown


def _result(finding: Finding, resolved: dict[str, Any]) -> str:
    """Return the note of a finding, and the resolved value where it is not the one given."""
    value: Any = resolved
    for name in first_spelling(finding.key).split("."):
        value = value.get(name) if isinstance(value, dict) else None
    is_other = finding.verdict is Verdict.HONOURED and value is not None and value != finding.value
    return ": ".join(part for part in (finding.note, show(value) if is_other else "") if part)
