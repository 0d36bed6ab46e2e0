"""The form that an answer of OpenAI's routes is asked for in."""

import json
from typing import Annotated, Any, Final, Literal

from pydantic import BaseModel, ConfigDict, Field, StringConstraints, model_validator

from app.api.schemas.common import Text

_ANY_OBJECT: Final = '{"type": "object"}'


class JSONSchemaFormat(BaseModel):
    """A JSON schema and its name."""

    model_config = ConfigDict(extra="forbid", strict=True, serialize_by_alias=True)

    name: Annotated[Text, StringConstraints(pattern=r"^[A-Za-z0-9_-]{1,64}$")] = Field(
        description="1 to 64 letters, digits, underscores and dashes; not used."
    )
    description: Text | None = Field(None, description="Accepted and not used.")
    json_schema: dict[str, Any] | None = Field(
        None, alias="schema", description="JSON schema of the answer; null is any object."
    )
    strict: bool | None = Field(
        None, description="Accepted: the answer always matches the whole schema."
    )


class ResponseFormat(BaseModel):
    """Free text, any JSON object, or JSON that matches a schema."""

    model_config = ConfigDict(extra="forbid", strict=True)

    type: Literal["text", "json_object", "json_schema"]
    json_schema: JSONSchemaFormat | None = Field(
        None, description="With type `json_schema` and only then."
    )

    @model_validator(mode="after")
    def _require_schema(self) -> "ResponseFormat":
        if (self.type == "json_schema") != (self.json_schema is not None):
            raise ValueError("json_schema goes with type json_schema, and only with it")
        return self

    def answer_schema(self) -> str | None:
        """Return the schema as JSON text; None for free text."""
        if self.type == "text":
            return None
        if self.json_schema is None or self.json_schema.json_schema is None:
            return _ANY_OBJECT
        return json.dumps(self.json_schema.json_schema)
