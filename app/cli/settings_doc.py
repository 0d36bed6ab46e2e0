"""Writes the table of settings from their definitions, so that it cannot be out of date."""

from typing import Final

from pydantic.fields import FieldInfo

from app.settings import Settings, env_name

_INTRODUCTION: Final = """\
# Settings

Every setting is an environment variable; a `.env` file in the working directory may hold them too,
and the environment wins over it. Some may come from a
[secret on AWS](aws.md#settings-from-a-secret), which both win over. A misspelled `SNAPKV_` variable
or a value out of range stops the start with one line that names it. This page is written by
`snapkv settings-doc`.

| variable | default | meaning |
| --- | --- | --- |
"""


def settings_table() -> str:
    """Return the page as Markdown."""
    rows = [
        f"| `{env_name(name)}` | {_default(info)} | {info.description} |\n"
        for name, info in Settings.model_fields.items()
    ]
    return _INTRODUCTION + "".join(rows)


def _default(info: FieldInfo) -> str:
    return "unset" if info.default is None else f"`{info.default}`"
