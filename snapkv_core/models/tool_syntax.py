"""How models write calls of tools, told from their chat templates."""

from functools import lru_cache
from typing import Final, Literal

from jinja2 import Environment, TemplateSyntaxError, meta

#: `tags`: each call is a JSON object between `<tool_call>` and `</tool_call>`, as Qwen's and
#: Hermes' models write it. `marker`: a JSON list of calls after `[TOOL_CALLS]`, as Mistral's do.
ToolSyntax = Literal["tags", "marker"]

#: What a template says about its model's calls; the longer one first, which holds the other.
_SIGNS: Final[tuple[tuple[str, ToolSyntax], ...]] = (
    ("<tool_call>", "tags"),
    ("[TOOL_CALLS]", "marker"),
)
#: Written by Mistral's models before calls; a special token, and yet a part of the answer.
CALLS_MARKER: Final = "[TOOL_CALLS]"
#: A model has one or two.
_MAX_TEMPLATES: Final = 8


@lru_cache(_MAX_TEMPLATES)
def offers_tools(template: str) -> bool:
    """Tell whether a chat template has a place for tools."""
    try:
        names = meta.find_undeclared_variables(Environment(autoescape=False).parse(template))
    except TemplateSyntaxError:  # uses what only transformers' own environment knows
        return "tools" in template
    return "tools" in names


def syntax_of(template: str) -> ToolSyntax | None:
    """Return how a template's model writes calls; None when the template does not tell."""
    if not offers_tools(template):
        return None
    return next((syntax for sign, syntax in _SIGNS if sign in template), None)
