"""`snapkv cost report`: what a day cost on AWS, as a table, as JSON, or sent to a topic."""

import json
from typing import Annotated

import typer
from rich.console import Console
from rich.table import Table
from rich.text import Text

from app.cli.generate import CommandError
from app.integrations.aws.cost.clients import AwsClients
from app.integrations.aws.cost.dates import ReportDates, parse_day, utc_now
from app.integrations.aws.cost.errors import CostReportError
from app.integrations.aws.cost.export import to_json
from app.integrations.aws.cost.message import (
    headline_of,
    notes_of,
    sections_of,
    threshold_line,
)
from app.integrations.aws.cost.publish import publish
from app.integrations.aws.cost.report import CostReport, make_report
from app.setting_groups.thresholds import parse_thresholds
from app.settings import Settings, load_settings

cost_app = typer.Typer(help="What the service costs on AWS.", no_args_is_help=True)


@cost_app.command()
def report(
    day: Annotated[
        str | None,
        typer.Option(help="Day in UTC, such as 2026-11-28; without it the day before yesterday."),
    ] = None,
    tag: Annotated[
        str | None,
        typer.Option(help="KEY=VALUE on the resources [SNAPKV_COST_TAG_KEY and _VALUE]."),
    ] = None,
    threshold: Annotated[
        list[str] | None,
        typer.Option(
            help="Mark a day above it: 100, or medium=80 for a tier; may be given several times "
            "[SNAPKV_COST_DAILY_THRESHOLD]."
        ),
    ] = None,
    as_json: Annotated[bool, typer.Option("--json", help="Print JSON.")] = False,
    send: Annotated[
        bool, typer.Option("--send", help="Publish it as well [SNAPKV_COST_TOPIC_ARN].")
    ] = False,
) -> None:
    """Report a day's costs; each report takes at least 2 Cost Explorer requests of 0.01 USD."""
    settings = _settings(tag, threshold)
    if send and settings.cost_topic_arn is None:
        raise CommandError("--send: SNAPKV_COST_TOPIC_ARN names no topic")
    now = utc_now()
    try:
        today = now.date()
        dates = ReportDates(parse_day(day), today) if day else ReportDates.latest_settled(today)
    except ValueError as error:
        raise CommandError(f"--day: {error}") from None
    try:
        aws = AwsClients()
        made = make_report(aws, settings, dates, now)
        _print(made, as_json=as_json)
        if send and settings.cost_topic_arn is not None:
            publish(aws, made, settings.cost_topic_arn)
            typer.echo(f"sent to {settings.cost_topic_arn}", err=True)
    except CostReportError as error:
        typer.echo(f"error: {error}", err=True)
        raise typer.Exit(1) from None


def _settings(tag: str | None, threshold: list[str] | None) -> Settings:
    given: dict[str, object] = {}
    if tag is not None:
        key, equals, value = tag.partition("=")
        if not key or not equals:
            raise CommandError(f"--tag: must be KEY=VALUE, got {tag!r}")
        given |= {"cost_tag_key": key, "cost_tag_value": value}
    if threshold:
        given["cost_daily_threshold"] = ",".join(threshold)
        try:
            parse_thresholds(",".join(threshold))
        except ValueError as error:
            raise CommandError(f"--threshold: {error}") from None
    return load_settings(given)


def _print(made: CostReport, *, as_json: bool) -> None:
    if as_json:
        typer.echo(json.dumps(to_json(made), indent=2))
        return
    console = Console()
    console.print(_text(console, headline_of(made)), soft_wrap=True)
    table = Table(show_header=False)
    table.add_column(justify="right", no_wrap=True)
    table.add_column()
    for section in sections_of(made):
        table.add_row("", Text(section.title, style="bold"))
        for figure, what in section.rows:
            table.add_row(figure, _text(console, what))
        table.add_section()
    console.print(table)
    for check in made.checks:
        style = "bold red" if check.verdict == "over" else ""
        console.print(_text(console, threshold_line(made, check), style), soft_wrap=True)
    for note in notes_of(made):
        console.print(_text(console, f"- {note}"), soft_wrap=True)


def _text(console: Console, words: str, style: str = "") -> Text:
    """Keep words from being read as markup, and from characters that the terminal cannot show."""
    return Text(words.encode(console.encoding, "backslashreplace").decode(console.encoding), style)
