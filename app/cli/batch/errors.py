"""Why a batch cannot go on."""

from snapkv_core import SnapKVError


class BatchStoppedError(SnapKVError):
    """The run cannot go on; what is in the output stays, and the next run goes on behind it."""
