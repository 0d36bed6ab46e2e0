"""What has to be done before a report says all that it could."""

from datetime import date
from typing import Final

from app.integrations.aws.cost.cost_explorer import Tag, TagStatus

_WHERE: Final = (
    "In the payer (management) account: Billing and Cost Management, Cost allocation tags, "
    "activate {key}; or: aws ce update-cost-allocation-tags-status "
    "--cost-allocation-tags-status TagKey={key},Status=Active. "
    "It takes up to 24 hours and does not reach back to earlier days."
)


def tag_notice(tag: Tag, status: TagStatus) -> str:
    """Say why no cost carries the tag, and what to do.

    Args:
        tag: The tag that costs were filtered by.
        status: What is known of its key.
    """
    where = _WHERE.format(key=tag.key)
    shown = f"No cost of this month carries {tag}, so this is the cost of the whole account."
    match status:
        case "inactive":
            return f"{shown} The tag {tag.key} is not activated for cost allocation. {where}"
        case "unseen":
            return (
                f"{shown} AWS has not seen the tag {tag.key} on any resource yet: tag the "
                f"resources, and up to 24 hours later activate the tag. {where}"
            )
        case "active":
            return (
                f"{shown} The tag {tag.key} is activated, so either no resource carries {tag} "
                f"(nodes that scaling starts need it in their launch settings), or it was "
                f"activated less than 24 hours ago; it does not reach back to earlier days."
            )
        case "unreadable":
            return (
                f"{shown} Either the tag {tag.key} is not activated for cost allocation, which "
                f"only the payer account can see, or no resource carries {tag}. {where}"
            )


def tier_notice(tier: str, tier_tag_key: str) -> str:
    """Say that a threshold is for a tier that costs nothing, which may be a mistake."""
    return (
        f"No cost of this month carries {Tag(tier_tag_key, tier)}, for which there is a threshold: "
        f"check the name, that resources carry it, and that the tag {tier_tag_key} is activated "
        f"for cost allocation in the payer (management) account."
    )


def day_notice(tag: Tag, day: date) -> str:
    """Say that the day is without costs while its month is not."""
    return (
        f"No cost of {day} carries {tag}, though other days of the month do: either nothing ran, "
        f"or the tag {tag.key} was activated later, which does not reach back to earlier days."
    )
