"""Reads the code of an error of AWS; it imports nothing of the service."""

import re
from typing import Final

from botocore.exceptions import ClientError

UNKNOWN: Final = "unknown"
_CODE: Final = re.compile(r"[A-Za-z0-9._-]{1,80}")


def error_code(error: ClientError) -> str:
    """Return the code that AWS named, or `UNKNOWN`.

    Whoever answered may have been something else than AWS, so a text that does not look like a
    code is not passed on: it may hold anything.
    """
    code = str(error.response.get("Error", {}).get("Code", ""))
    return code if _CODE.fullmatch(code) else UNKNOWN
