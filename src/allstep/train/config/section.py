"""The base of the sections of a config."""

from pydantic import BaseModel, ConfigDict


class Section(BaseModel):
    """A part of a config: frozen, and a key that it does not know is an error."""

    model_config = ConfigDict(frozen=True, extra="forbid")
