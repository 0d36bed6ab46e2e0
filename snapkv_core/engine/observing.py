"""Tells observers what happened, whatever they make of it."""

import logging

_logger = logging.getLogger(__name__)


def tell(observer: object | None, method: str, *arguments: object) -> None:
    """Call a method of an observer, if there is one; its failure is its own, and logged."""
    if observer is None:
        return
    try:
        getattr(observer, method)(*arguments)
    except Exception:
        _logger.exception("the observer failed in %s", method)
