"""How an edge service takes part in a fleet: `serving: {fleet: …}` in its pool file."""

from __future__ import annotations

from typing import Annotated, TypeAlias

from pydantic import Field, model_validator

from cauc_ray.models.credentials import Credentials
from cauc_ray.models.kind import LocalFile

# Without a query, to which no `.sig` could be added; a password in it would appear in messages.
Url: TypeAlias = Annotated[str, Field(pattern=r"^https?://[^/@?#\s]+/[^?#\s]*$")]
EDGE_NAME = r"^[A-Za-z0-9][A-Za-z0-9._-]{0,99}$"


class FleetSpec(Credentials):
    """An edge's policy, which it pulls, and its reports.

    policy: where the policy is; its signature is there, too, with `.sig` after the name.   public_key: PEM file of the
    Ed25519 key that it is signed with.   report: where counts, drift and feedback are posted to.   state: a folder
    that no other service uses.   name: of the edge in reports, the host's without one.   every_s: how often, more or
    less.   queue_mb: feedback that may wait on disk, in 10^6 bytes.   token_env, ca, cert, key: as Credentials
    has them; the token is for the host of `report`, without that for the host of `policy`.
    """

    policy: Url | None = None
    public_key: LocalFile | None = None
    report: Url | None = None
    state: LocalFile
    name: str | None = Field(default=None, pattern=EDGE_NAME)
    every_s: float = Field(default=60.0, gt=0)
    queue_mb: float = Field(default=64.0, ge=1)

    @model_validator(mode="after")
    def _complete(self) -> FleetSpec:
        if self.policy is None and self.report is None:
            raise ValueError("a fleet needs policy, report or both")
        if (self.policy is None) != (self.public_key is None):
            raise ValueError("policy and public_key need each other: only a signed policy is taken")
        return self
