"""Words that queries have in common.

Shoal's own series name a Model by `model`, gateways by `gen_ai_request_model` (OpenTelemetry's name); both are
`namespace/name`. Beyond the number of Models that a gateway labels it counts the rest as `other`; a choice of
namespaces lets that through only where all are chosen.
"""

from typing import Final, Literal

from shoal_dev.generate.boards.plan import PanelQuery, Variable

WINDOW: Final = "[$__rate_interval]"
"""Grafana's: at least four scrapes, so that one missed scrape leaves no hole."""

_KNOWN: Final = "shoal_model_replicas_wanted"
_HERE: Final = f'{_KNOWN}{{model=~"$namespace/.*"}}'
NAMESPACE: Final = Variable("namespace", "Namespace", _KNOWN, "model", regex=r"/^([^\/]+)\//")
MODELS: Final = Variable("model", "Model", _HERE, "model")
ONE_MODEL: Final = Variable("model", "Model", _HERE, "model", several=False)
TENANT: Final = Variable("tenant", "Tenant", "shoal_tenant_requests_total", "tenant")

SPACE: Final = 'model=~"$namespace/.*"'
MODEL: Final = 'model=~"$model"'
GATEWAY_SPACE: Final = 'gen_ai_request_model=~"$namespace(/.*)?"'
GATEWAY_MODEL: Final = 'gen_ai_request_model=~"$model"'

BROKEN: Final = 'outcome=~"failed|refused|expired"'
"""Requests that were accepted and not answered, by Shoal's doing or an engine's; not those that their client broke
off, nor those that the engine itself refused as wrong."""


def total(metric: str, match: str = "", by: str = "") -> str:
    """The sum of a gauge."""
    return f"sum{_by(by)} ({_of(metric, match)})"


def rate(metric: str, match: str = "", by: str = "") -> str:
    """A counter's rate per second, summed."""
    return f"sum{_by(by)} (rate({_of(metric, match)}{WINDOW}))"


def rise(metric: str, match: str = "", by: str = "") -> str:
    """What a counter grew by in the time that the board shows."""
    return f"sum{_by(by)} (increase({_of(metric, match)}[$__range]))"


def events(metric: str, match: str, by: str = "") -> str:
    """Events of a process without memory in the time shown, the first of their kind included: an increase does not see
    what a series begins with. A process that starts anew has series of its own, by its pod."""
    of = _of(metric, match)
    last = f"max_over_time({of}[$__range])"
    return f"sum{_by(by)} ({last} - ({of} offset $__range or {last} * 0))"


def quantile(share: float, metric: str, match: str = "", by: str = "") -> str:
    """A quantile of a histogram's observations, interpolated inside its bucket."""
    return f"histogram_quantile({share}, {rate(metric + '_bucket', match, f'le, {by}' if by else 'le')})"


def quantiles(metric: str, match: str = "") -> tuple[PanelQuery, ...]:
    """The usual three."""
    return tuple(PanelQuery(quantile(share, metric, match), f"p{share * 100:g}") for share in (0.5, 0.9, 0.99))


def quantile_of_range(share: float, metric: str, match: str = "", by: str = "") -> str:
    """The same over all the time that the board shows, for what is rare."""
    return f"histogram_quantile({share}, {rise(metric + '_bucket', match, f'le, {by}' if by else 'le')})"


def by_model(query: str) -> str:
    """A gateway's query by `gen_ai_request_model`, by `model` instead."""
    return f'sum by (model) (label_replace({query}, "model", "$1", "gen_ai_request_model", "(.+)"))'


def hours(metric: str, match: str = "", by: str = "") -> str:
    """A gauge's area over the time shown, in hours times its unit, from a look at it every minute: so that what was
    there for a part of the time counts for that part."""
    return f"sum{_by(by)} (sum_over_time({_of(metric, match)}[$__range:1m])) / 60"


def ratio(part: str, whole: str) -> str:
    """A share of something; zero where there is nothing to be a share of."""
    return or_zero(f"({or_zero(part)}) / ({whole} > 0)")


def or_zero(query: str, by: str = "") -> str:
    """Zero where no such thing was ever counted, since a counter's series begins with its first event. `by`: the label
    that the series have, which then is `none`."""
    zero = f'label_replace(vector(0), "{by}", "none", "", "")' if by else "vector(0)"
    return f"{query} or on () {zero}"


def replicas(state: Literal["wanted", "desired", "ready", "starting"], match: str, by: str = "") -> str:
    """Replicas: `wanted` is what was decided on, `desired` what there are GPUs for."""
    if state == "wanted":
        return total("shoal_model_replicas_wanted", match, by)
    return total("shoal_model_replicas", f'{match}, state="{state}"', by)


def gpus(state: Literal["capacity", "allocatable", "allocated", "free"], by: str = "") -> str:
    """GPUs of the classes: on all nodes, on those that take pods, held by pods, and free."""
    return total("shoal_gpu_class_gpus", f'state="{state}"', by)


def _of(metric: str, match: str) -> str:
    return f"{metric}{{{match}}}" if match else metric


def _by(labels: str) -> str:
    return f" by ({labels})" if labels else ""
