"""The reference page of the boards: each panel, what it shows, and where it may be empty."""

from collections.abc import Iterable, Iterator

from shoal_dev.generate.boards.plan import DashboardPlan, Panel


def boards_page(boards: Iterable[DashboardPlan]) -> str:
    """Markdown below the page's title."""
    return "\n".join(line for board in boards for line in _board(board)) + "\n"


def _board(board: DashboardPlan) -> Iterator[str]:
    yield from (f"## {board.title}", "", board.description, "")
    yield from ("| panel | content | may be empty, if | runbook |", "|---|---|---|---|")
    for panel in board.panels:
        runbook = f"[{panel.runbook}](../runbooks/{panel.runbook})" if panel.runbook else ""
        yield f"| {panel.title} | {panel.description} | {_empty(panel)} | {runbook} |"
    yield ""


def _empty(panel: Panel) -> str:
    reasons = dict.fromkeys(query.empty for query in panel.queries if query.empty is not None)
    return "; ".join(reasons)
