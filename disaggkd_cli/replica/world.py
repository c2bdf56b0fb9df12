"""The process world of one replica: its own process group for the model, and a link from each rank to its leader.

It is formed anew, under a prefix that names replica and attempt, whenever the replica starts again, and never shares
a group with the student.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from datetime import timedelta

import torch
import torch.distributed as dist
from torch import Tensor
from torch.distributed.distributed_c10d import _set_pg_timeout

from disaggkd_cli.addresses import resolve_bind
from disaggkd_cli.config import Config
from disaggkd_cli.errors import RunError
from disaggkd_cli.launch import Place
from disaggkd_cli.replica.conversation import Conversation
from disaggkd_cli.replica.rounds import LEADER
from disaggkd_cli.runtime import init_group, meet
from disaggkd_cli.transport.errors import LinkLost
from disaggkd_cli.transport.link import STUDENT, TEACHER, Link, form_link
from disaggkd_cli.transport.protocol import Header
from disaggkd_cli.transport.rendezvous import store_endpoint


class World:
    """The ranks of this process's replica.

    Attributes:
        group: the default process group, of this replica's ranks and nobody else.
        links: by rank, to all others for the leader, to the leader for the rest.
        names: by rank, those at the other end of the links.
    """

    def __init__(self, config: Config, place: Place, device: torch.device) -> None:
        """Form it. Collective over the replica's ranks.

        Raises:
            UserError: there is nowhere to meet.
            RunError: a rank of the replica did not come.
        """
        self.name, self.rank, self.size = place.name, place.rank, place.size
        self.timeout = config.transport.timeout
        store = meet(config, _meeting_place(place), timeout=config.transport.teacher_wait)
        try:
            self.group = init_group(config, place, store, device)
        except (dist.DistError, RuntimeError) as error:
            raise RunError(f"{place.name}: the {place.size} ranks of its replica did not meet: {error}") from error
        others = range(1, place.size) if place.rank == LEADER else [LEADER]
        self.names = {rank: replace(place, rank=rank).name for rank in others}
        self.links = {rank: self._link(config, place, store, rank) for rank in others}

    def _link(self, config: Config, place: Place, store: dist.Store, peer: int) -> Link:
        member = max(place.rank, peer)
        # The two sides of a link; a leader stands where the student stands in a link of the transport.
        side = STUDENT if place.rank == LEADER else TEACHER
        return form_link(
            store.clone(),
            f"replica/{place.replica}/{place.attempt}/link/{member}",
            side,
            name=f"link {place.name} - {self.names[peer]}",
            generation=place.attempt,
            timeout=self.timeout,
            forming_timeout=self.timeout,  # the ranks have just met
            bind=resolve_bind(config.launch.bind, store_endpoint(store)),
        )

    def converse(
        self, hear: Callable[[int, Header, Tensor | None], None], lost: Callable[[LinkLost], None]
    ) -> dict[int, Conversation]:
        """Return the conversations with the ranks that this one has links to; not started."""

        def hear_from(peer: int) -> Callable[[Header, Tensor | None], None]:
            return lambda header, body: hear(peer, header, body)

        return {peer: Conversation(link, hear_from(peer), lost) for peer, link in self.links.items()}

    def end(self) -> None:
        """Dissolve the group, which nobody uses any more."""
        dist.destroy_process_group()

    def shorten_timeouts(self) -> None:
        """From the time of loading, when ranks wait for a disk, to that of serving: a layer waits for a forward."""
        _set_pg_timeout(timedelta(seconds=2 * self.timeout), self.group)


def _meeting_place(place: Place) -> Place:
    """Return where this rank meets the others of its replica: in the job's own store where the replica is a job."""
    if place.world_endpoint is None:
        return place
    return replace(place, endpoint=place.world_endpoint, hosts_store=place.hosts_world)
