"""A board as Grafana's JSON, made with Grafana's own SDK: its schema is that of Grafana 10.1."""

import json
from string import ascii_uppercase
from typing import Final, assert_never

from grafana_foundation_sdk.builders import common, dashboard, prometheus, stat, table, timeseries
from grafana_foundation_sdk.cog.encoder import JSONEncoder
from grafana_foundation_sdk.models import common as words
from grafana_foundation_sdk.models import dashboard as schema
from grafana_foundation_sdk.models.prometheus import PromQueryFormat

from shoal.api.chartvalues import RUNBOOKS
from shoal_dev.generate.boards.plan import DashboardPlan, GridPlace, Panel, PanelRow, Variable

TAG: Final = "shoal"
_SOURCE: Final = schema.DataSourceRef(type_val="prometheus", uid="${datasource}")
_ALL: Final = ".*"

_Builder = stat.Panel | table.Panel | timeseries.Panel


def to_json(board: DashboardPlan) -> str:
    """The file that Grafana imports: no id of an installation's in it, and its data source is asked for."""
    made = (
        dashboard.Dashboard(board.title)
        .uid(board.uid)
        .description(board.description)
        .tags([TAG])
        .time("now-1h", "now")
        .refresh("30s")
        .tooltip(schema.DashboardCursorSync.CROSSHAIR)
        .with_variable(dashboard.DatasourceVariable("datasource").label("Data source").type("prometheus"))
        .link(
            dashboard.DashboardLink("Shoal")
            .type(schema.DashboardLinkType.DASHBOARDS)
            .tags([TAG])
            .as_dropdown(True)
            .include_vars(True)
            .keep_time(True)
        )
    )
    for variable in board.variables:
        made.with_variable(_variable(variable))
    for number, (thing, place) in enumerate(board.placed(), 1):
        where = schema.GridPos(h=place.height, w=place.width, x=place.x, y=place.y)
        if isinstance(thing, PanelRow):
            made.with_row(dashboard.Row(thing.title).id(number).grid_pos(where))
        else:
            made.with_panel(_panel(thing, place).id(number))
    return json.dumps(made.build(), cls=JSONEncoder, indent=2, sort_keys=True) + "\n"


def _variable(variable: Variable) -> dashboard.QueryVariable:
    made = (
        dashboard.QueryVariable(variable.name)
        .label(variable.label)
        .datasource(_SOURCE)
        .query(f"label_values({variable.metric}, {variable.of})")
        .regex(variable.regex)
        .refresh(schema.VariableRefresh.ON_TIME_RANGE_CHANGED)
        .sort(schema.VariableSort.ALPHABETICAL_ASC)
    )
    if variable.several:
        everything = schema.VariableOption(selected=True, text="All", value="$__all")
        made.multi(True).include_all(True).all_value(_ALL).current(everything)
    return made


def _panel(panel: Panel, place: GridPlace) -> _Builder:
    made = _drawn(panel)
    made.title(panel.title).description(panel.description).unit(panel.unit).datasource(_SOURCE)
    made.grid_pos(schema.GridPos(h=place.height, w=place.width, x=place.x, y=place.y))
    if panel.least is not None:
        made.min(panel.least)
    if panel.most is not None:
        made.max(panel.most)
    steps = [schema.Threshold(None, "green"), *(schema.Threshold(mark.value, mark.color) for mark in panel.marks)]
    made.thresholds(dashboard.ThresholdsConfig().mode(schema.ThresholdsMode.ABSOLUTE).steps(steps))
    if panel.runbook is not None:
        # The chart puts an installation's own base there.
        url = f"{RUNBOOKS}/{panel.runbook}"
        made.links([dashboard.DashboardLink("Runbook").type(schema.DashboardLinkType.LINK).url(url).target_blank(True)])
    for letter, query in zip(ascii_uppercase, panel.queries, strict=False):
        target = prometheus.Dataquery().expr(query.expr).ref_id(letter).legend_format(query.legend).datasource(_SOURCE)
        if panel.kind == "table":
            target.instant().format(PromQueryFormat.TABLE)
        else:
            target.range().format(PromQueryFormat.TIME_SERIES)
        made.with_target(target)
    return made


def _drawn(panel: Panel) -> _Builder:
    match panel.kind:
        case "number":
            newest = common.ReduceDataOptions().calcs(["lastNotNull"]).values(False)
            return (
                stat.Panel()
                .reduce_options(newest)
                .color_mode(words.BigValueColorMode.VALUE)
                .graph_mode(words.BigValueGraphMode.AREA)
                .color_scheme(dashboard.FieldColor().mode(schema.FieldColorModeId.THRESHOLDS))
            )
        case "table":
            return _table(panel)
        case "lines" | "stacked":
            return _lines(panel)
        case _:
            assert_never(panel.kind)


def _table(panel: Panel) -> table.Panel:
    """One row per series; the columns are named by the queries."""
    names = [query.legend for query in panel.queries]
    # Grafana names the column of a query's values so, and just "Value" where there is one query only.
    columns = ["Value"] if len(names) == 1 else [f"Value #{letter}" for letter in ascii_uppercase[: len(names)]]
    shown = {
        "excludeByName": {"Time": True},
        "indexByName": {},
        "renameByName": dict(zip(columns, names, strict=True)),
    }
    return (
        table.Panel()
        .with_transformation(schema.DataTransformerConfig(id_val="merge", options={}))
        .with_transformation(schema.DataTransformerConfig(id_val="organize", options=shown))
        .color_scheme(dashboard.FieldColor().mode(schema.FieldColorModeId.THRESHOLDS))
    )


def _lines(panel: Panel) -> timeseries.Panel:
    made = (
        timeseries.Panel()
        .legend(
            common.VizLegendOptions()
            .display_mode(words.LegendDisplayMode.LIST)
            .placement(words.LegendPlacement.BOTTOM)
            .show_legend(True)
            .calcs([])
        )
        .tooltip(common.VizTooltipOptions().mode(words.TooltipDisplayMode.MULTI).sort(words.SortOrder.DESCENDING))
        .color_scheme(dashboard.FieldColor().mode(schema.FieldColorModeId.PALETTE_CLASSIC))
        .line_width(1)
        .fill_opacity(60 if panel.kind == "stacked" else 5)
        .show_points(words.VisibilityMode.NEVER)
        # A hole is a time of which nothing is known: not bridged.
        .span_nulls(False)
    )
    if panel.kind == "stacked":
        made.stacking(common.StackingConfig().mode(words.StackingMode.NORMAL).group("A"))
    if panel.marks:
        style = common.GraphThresholdsStyleConfig().mode(words.GraphTresholdsStyleMode.DASHED)
        made.thresholds_style(style)
    return made
