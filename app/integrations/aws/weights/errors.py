"""What goes wrong with weights in S3."""

from snapkv_core import SnapKVError


class WeightsError(SnapKVError):
    """Weights cannot be had, kept or stored; one line that names the object or the file."""
