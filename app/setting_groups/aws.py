"""Settings of what the service uses on AWS.

Credentials, region and endpoints are the SDK's own business: `AWS_REGION`, `AWS_ENDPOINT_URL` and
the rest of its chain.
"""

from pydantic import BaseModel, Field, field_validator

from app.setting_groups.thresholds import CostThresholds, parse_thresholds


class AwsSettings(BaseModel):
    """Tables, secrets, weights and cost reports; everything is off until it is named."""

    request_log_table: str | None = Field(
        None,
        pattern=r"^[A-Za-z0-9_.-]{3,255}$",
        description="DynamoDB table that gets one item per request; unset writes none.",
    )
    request_log_ttl_days: int = Field(
        30, ge=1, le=3_650, description="Days after which an item of the request log expires."
    )
    secret_id: str | None = Field(
        None,
        min_length=1,
        max_length=2_048,
        description="Secrets Manager secret with settings, such as `snapkv/inference-config`; "
        "unset reads none.",
    )
    secret_refresh_s: int = Field(
        300,
        ge=0,
        le=86_400,
        description="Seconds after which the secret is read again; 0 reads it at start only.",
    )
    weights_cache_dir: str = Field(
        "~/.cache/snapkv/weights",
        min_length=1,
        description="Folder for weights that come from S3.",
    )
    weights_cache_max_bytes: int | None = Field(
        None,
        gt=0,
        description="Bytes that folder may hold; unused models go first. Unset: no limit.",
    )
    cost_tag_key: str = Field(
        "Project", min_length=1, max_length=128, description="Tag that the cost report filters by."
    )
    cost_tag_value: str = Field(
        "snapkv", max_length=256, description="Value of that tag on the service's resources."
    )
    cost_tier_tag_key: str = Field(
        "Tier",
        min_length=1,
        max_length=128,
        description="Tag whose value is the tier of a resource, for costs by tier.",
    )
    cost_daily_threshold: str | None = Field(
        None,
        description="Cost of a day above which the report is marked: an amount, amounts by tier "
        "such as `medium=80,large=300`, or both; unset marks none.",
    )
    cost_topic_arn: str | None = Field(
        None,
        pattern=r"^arn:[a-z-]+:sns:[a-z0-9-]+:[0-9]{12}:\S+$",
        description="SNS topic that gets the cost report.",
    )

    @field_validator("cost_daily_threshold")
    @classmethod
    def _check_thresholds(cls, value: str | None) -> str | None:
        if value is not None:
            parse_thresholds(value)
        return value

    def cost_thresholds(self) -> CostThresholds:
        """Return the thresholds of `cost_daily_threshold`, none of them when it is unset."""
        text = self.cost_daily_threshold
        return CostThresholds() if text is None else parse_thresholds(text)
