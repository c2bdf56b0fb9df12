"""The process world of one replica: its own process group for the model, and links of its own between its ranks: from
each to the leader, or from each to the next (`stage_links`).

It is formed anew, under a prefix that names replica and attempt, whenever the replica starts again, and never shares
a group with the student.
"""

from __future__ import annotations

import logging
import os
import secrets
import threading
from collections.abc import Callable
from dataclasses import replace
from datetime import timedelta

import torch
import torch.distributed as dist
from torch import Tensor
from torch.distributed.distributed_c10d import _set_pg_timeout

from disaggkd_cli.addresses import resolve_bind, split_endpoint
from disaggkd_cli.collective_texts import gathered_texts
from disaggkd_cli.config import Config
from disaggkd_cli.errors import RunError
from disaggkd_cli.launch import Place
from disaggkd_cli.replica.conversation import Conversation
from disaggkd_cli.replica.rounds import LEADER
from disaggkd_cli.runtime import init_group, meet
from disaggkd_cli.transport import Secret
from disaggkd_cli.transport.backends import open_payloads
from disaggkd_cli.transport.cuda import Cuda
from disaggkd_cli.transport.errors import LinkLost
from disaggkd_cli.transport.identity import Identity
from disaggkd_cli.transport.link import STUDENT, TEACHER, Link, form_link
from disaggkd_cli.transport.listeners import deafen_all_but
from disaggkd_cli.transport.protocol import Header
from disaggkd_cli.transport.rendezvous import store_endpoint

LEAVE_SECONDS = 15.0
"""Beyond `transport.timeout`: how long the others may take to say goodbye to their students."""
_STUCK_SECONDS = 10.0
"""A rank that lost a peer ends by itself; one that is kept from it is ended after this long."""

logger = logging.getLogger("disaggkd")


class World:
    """The ranks of this process's replica.

    Attributes:
        group: the default process group, of this replica's ranks and nobody else.
        names: of the ranks.
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
        self.names = [replace(place, rank=rank).name for rank in range(place.size)]
        self._place = place
        self._store = store
        deafen_all_but(split_endpoint(store_endpoint(store))[1])
        # The links between these ranks have a secret of their own: what only the group that has just met was told.
        drawn = secrets.token_hex(32) if self.rank == LEADER and config.launch.secret == "auto" else ""
        self._secret = Secret(self.gather(drawn)[LEADER].encode())
        self._bind = resolve_bind(config.launch.bind, store_endpoint(store))

    def form_link(self, number: int, side: int, peer: int) -> Link:
        """Form link `number` of the replica with rank `peer`, which calls this with the other side.

        Raises:
            LinkLost: it did not come in time.
        """
        return form_link(
            self._store.clone(),
            f"replica/{self._place.replica}/{self._place.attempt}/link/{number}",
            side,
            name=f"link {self.name} - {self.names[peer]}",
            generation=self._place.attempt,
            timeout=self.timeout,
            forming_timeout=self.timeout,  # the ranks have just met
            bind=self._bind,
            secret=self._secret,
        )

    def open_payloads(self, link: Link, side: int, ours: Identity, theirs: Identity, cuda: Cuda | None):
        """Return the payload channel of a link that was just formed: from the side TEACHER to the side STUDENT."""
        student, teacher = (ours, theirs) if side == STUDENT else (theirs, ours)
        return open_payloads(
            link, student, teacher, side, self._store.clone(), cuda, forming_timeout=self.timeout, bind=self._bind
        )

    def gather(self, text: str) -> list[str]:
        """Return the texts of all ranks, by rank. Collective.

        Raises:
            RunError: a rank ended meanwhile.
        """
        try:
            return gathered_texts(text, self.group)
        except RuntimeError as error:
            reason = str(error).strip().splitlines()[0]
            raise RunError(f"{self.name}: another rank of its replica ended at its start: {reason}") from error

    def converse(
        self, hear: Callable[[int, Header, Tensor | None], None], lost: Callable[[LinkLost], None]
    ) -> dict[int, Conversation]:
        """Return conversations, not started: by rank, with all others for the leader, with the leader for the rest."""

        def hear_from(peer: int) -> Callable[[Header, Tensor | None], None]:
            return lambda header, body: hear(peer, header, body)

        # The two sides of a link; a leader stands where the student stands in a link of the transport.
        side = STUDENT if self.rank == LEADER else TEACHER
        others = range(1, self.size) if self.rank == LEADER else [LEADER]
        links = {peer: self.form_link(max(self.rank, peer), side, peer) for peer in others}
        return {peer: Conversation(link, hear_from(peer), lost) for peer, link in links.items()}

    def end(self) -> None:
        """Dissolve the group, which nobody uses any more."""
        dist.destroy_process_group()

    def shorten_timeouts(self) -> None:
        """From the time of loading, when ranks wait for a disk, to that of serving: a layer waits for a forward."""
        _set_pg_timeout(timedelta(seconds=2 * self.timeout), self.group)


def end_soon(name: str, error: RunError) -> None:
    """Say that a rank was lost, and end this process if it has not ended by itself after a while."""
    logger.error("%s: its replica ends, since it lost a rank: %s", name, error)
    ender = threading.Timer(_STUCK_SECONDS, os._exit, (1,))
    ender.daemon = True
    ender.start()


def _meeting_place(place: Place) -> Place:
    """Return where this rank meets the others of its replica: in the job's own store where the replica is a job."""
    if place.world_endpoint is None:
        return place
    return replace(place, endpoint=place.world_endpoint, hosts_store=place.hosts_world)
