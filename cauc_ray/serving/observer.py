"""What an observer of a service may do; each method does nothing where it is not needed."""

from __future__ import annotations

from typing import TYPE_CHECKING

from cauc_ray.models.answers import Wire

if TYPE_CHECKING:
    from cauc_ray.serving.feedback import Feedback
    from cauc_ray.serving.policies_live import InForce
    from cauc_ray.serving.request_state import RequestState


class Observer:
    """Looks at requests of one router. Its methods are called on the event loop, except `close`."""

    def on_request(self, request: RequestState) -> None:
        """Take a request before its first call."""

    def on_call(self, stage: int, n_rows: int, call_s: float, wire: Wire | None) -> None:
        """Take an answered call of a stage.

        Args:
            stage: The stage.
            n_rows: Number of rows.
            call_s: Seconds until the answer.
            wire: Its bytes on the network.
        """

    def on_answer(self, request: RequestState) -> None:
        """Take a request at its end, whether it was answered, refused or cancelled."""

    def on_feedback(self, rows: Feedback, in_force: InForce) -> int | None:
        """Take new rows of feedback; return how many count, None if no such feedback is used."""
        return None

    def on_policies(self, in_force: InForce) -> None:
        """Take the policies that are active from now on."""

    async def settle(self) -> None:
        """Evaluate what has come since the last time; called each second."""

    def close(self) -> None:
        """End what was started outside of the event loop."""
