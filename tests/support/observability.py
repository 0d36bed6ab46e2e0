"""Reads the files under infra/observability as those who install them would."""

import json
import re
from dataclasses import dataclass
from typing import Any, Final

from tests.support.markdown import ROOT

FOLDER: Final = ROOT / "infra" / "observability"
RULES: Final = tuple(sorted((FOLDER / "prometheus").glob("*.rules.yml")))
ALERT_TESTS: Final = FOLDER / "prometheus" / "alerts.test.yml"
DASHBOARD: Final = FOLDER / "grafana" / "snapkv.json"
QUERIES: Final = tuple(sorted((FOLDER / "logs-insights").glob("*.query")))

#: What Logs Insights has and the queries use; `percentile` is none of them.
_FUNCTIONS: Final = frozenset({"avg", "bin", "count", "max", "min", "pct", "sum"})
_KEYWORDS: Final = frozenset(
    {"and", "asc", "by", "desc", "fields", "filter", "in", "limit", "or", "sort", "stats"}
)


@dataclass(frozen=True, slots=True)
class Panel:
    """One query of the dashboard.

    Attributes:
        title: Title of its panel.
        query: What Grafana would send: variables replaced.
    """

    title: str
    query: str


def panels(job: str, window: str) -> list[Panel]:
    """List the queries of the dashboard, for one job and one rate interval."""
    dashboard = json.loads(DASHBOARD.read_text(encoding="utf-8"))
    return [
        Panel(
            panel["title"],
            target["expr"].replace("$__rate_interval", window).replace("$job", job),
        )
        for panel in dashboard["panels"]
        for target in panel["targets"]
    ]


def metric_names(promql: str) -> set[str]:
    """Return the names of this service's metrics and of recorded series in an expression."""
    return set(re.findall(r"\b(?:(?:job|instance):)?(?:snapkv_|vllm:)[\w:]+", promql))


@dataclass(frozen=True, slots=True)
class Insight:
    """A query of CloudWatch Logs Insights.

    Attributes:
        event: The event it filters by.
        fields: Fields of log lines that it reads.
        functions: Functions that it calls.
    """

    event: str
    fields: frozenset[str]
    functions: frozenset[str]


def read_insight(text: str) -> Insight:
    """Take a query apart.

    Raises:
        ValueError: It does not filter by exactly one event, or does not begin with a comment.
    """
    if not text.startswith("# "):
        raise ValueError("a query begins with a comment that says what it is for")
    code = re.sub(r"^#.*$", "", text, flags=re.MULTILINE)
    events = re.findall(r'\bevent = "(\w+)"', code)
    if len(events) != 1:
        raise ValueError(f"filters by {events}")
    code = re.sub(r'"[^"]*"', "", code)
    aliases = set(re.findall(r"\bas (\w+)", code))
    functions = set(re.findall(r"\b([a-z]\w*)\(", code))
    words = set(re.findall(r"(?<![\w@.])@?[a-z_][\w.]*", code)) - {"as"}
    fields = words - aliases - functions - _KEYWORDS
    return Insight(events[0], frozenset(fields), frozenset(functions))


def unknown_functions(insight: Insight) -> set[str]:
    """Return what the query calls and Logs Insights does not have."""
    return set(insight.functions - _FUNCTIONS)


def fields_by_event(log: str) -> dict[str, set[str]]:
    """Return the fields of each kind of event in a log, and those CloudWatch adds."""
    fields: dict[str, set[str]] = {}
    for text in log.splitlines():
        line: dict[str, Any] = json.loads(text)
        fields.setdefault(line["event"], {"@timestamp", "@message"}).update(line)
    return fields
