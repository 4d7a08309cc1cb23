"""How ranks make sure that they do the same thing, before anything is sent.

A rank that finds its input bad must not simply raise: its peers would wait for it. So every collective method of an
object begins with an *agreement*. The ranks combine one 64-bit word: 31 bits of a digest of what each is about to do,
the complement of these bits, one bit that says "failed", and one for a yes-or-no question of the caller. After a
bitwise OR no bit is set in the digest and at the same bit of the complement exactly if all digests are equal. Few ranks
combine their words by one collective, see :mod:`zeroshard_comm.ring`; the first agreement, and all of many ranks,
travel in rounds, see :mod:`zeroshard_comm.rounds`. Only after a difference texts follow: to rank 0, which decides, and
back.

A rank that is lost is noticed by those that wait for its words, and they tell the others in the same agreement. Of one
that is lost between two rounds some may learn later: its word is out, and they have agreed with it.
"""

from __future__ import annotations

import hashlib
import json
import time
import zlib
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager, suppress
from dataclasses import astuple, dataclass, field, replace
from functools import cached_property

import torch
import torch.distributed as dist
from zeroshard_core import Plan

from zeroshard_comm.errors import (
    OWN,
    DifferentCallsError,
    DisagreementError,
    Explain,
    PeerLostError,
    RankReport,
    builtin_name,
    rebuild_exception,
    resolve_errors,
)
from zeroshard_comm.messages import receive_text, send_text, wait_for_collective
from zeroshard_comm.process_group import RankGroup
from zeroshard_comm.ring import Connections
from zeroshard_comm.rounds import combine_in_rounds
from zeroshard_comm.traffic import Traffic

TAG_WORD = 0x5A530001
TAG_INTS = 0x5A530004

_DIGEST_BITS = 31
_DIGEST = (1 << _DIGEST_BITS) - 1
_FAILED = 1 << 62
_FLAG = -1 << 63
"""The highest bit of a signed integer."""


def word_of(digest: int | None, *, failed: bool, flag: bool = False) -> int:
    """Return the 64 bits that a rank puts into an agreement; a digest of None agrees with every other."""
    bits = 0 if digest is None else digest & _DIGEST | (digest & _DIGEST ^ _DIGEST) << _DIGEST_BITS
    return bits | (_FAILED if failed else 0) | (_FLAG if flag else 0)


def is_unanimous(combined: int) -> bool:
    """Tell from the OR of all words whether their digests are equal.

    >>> is_unanimous(word_of(5, failed=False) | word_of(5, failed=True))
    True
    >>> is_unanimous(word_of(5, failed=False) | word_of(4, failed=False))
    False
    """
    return combined & _DIGEST & combined >> _DIGEST_BITS == 0


@dataclass(frozen=True, slots=True)
class Position:
    """Where a rank is. Two similar optimizers, or two steps of one, must not be mistaken for each other.

    Attributes:
        optimizer: its number among those built on the process group, from 1.
        name: of its class.
        steps: how many steps all ranks have begun with it.
    """

    optimizer: int
    name: str
    steps: int

    def __str__(self) -> str:
        """Return text such as ``"after 4 steps of optimizer 2 (AdamW)"``."""
        return f"after {self.steps} steps of optimizer {self.optimizer} ({self.name})"


class Coordinator:
    """Agreements of the ranks of one process group.

    Messages travel over gloo and CPU memory, on connections of our own that are made once per process group, see
    :class:`~zeroshard_comm.ring.Connections`: so no agreement ever waits for an accelerator, and closing them closes
    none of the user's. The first agreement comes before, since connecting waits for a rank that is gone: on the group
    itself where it has gloo for CPU tensors, else on a gloo group that is made for it. With torch's ``fake`` backend
    nothing travels, and an agreement raises only what this rank itself found.

    One thread at a time may call methods of all objects of this class on one process group.

    Args:
        ranks: the group whose ranks agree.
        traffic: where bytes and waiting are counted, as kind ``"control"``.

    Attributes:
        position: must be equal on all ranks in every operation; None if that does not matter. Its owner
            changes it, at the same time on all ranks.
        flagged: whether any rank has set ``flag`` in the last :meth:`agree`, also if that has raised.
    """

    def __init__(self, ranks: RankGroup, traffic: Traffic | None = None) -> None:
        self.ranks = ranks
        self.traffic = traffic if traffic is not None else Traffic()
        # The gloo group that carries the messages of the first agreement.
        self._first: RankGroup | None = None
        if ranks.moves_data() and ranks.world_size > 1:
            has_gloo = ranks.sends_tagged(torch.device("cpu"))
            self._first = ranks if has_gloo else ranks.private_group("gloo", "control")
        self.position: Position | None = None
        self.flagged = False

    @property
    def is_single_rank(self) -> bool:
        """True if no other rank can answer: there is one rank, or the backend moves no data."""
        return self._first is None

    @property
    def channel(self) -> RankGroup:
        """The group that messages travel on now; nothing may be sent on it if :attr:`is_single_rank`."""
        connections = self.ranks.context.connections
        return connections.channel if connections is not None else self._first or self.ranks

    def agree(
        self,
        operation: str,
        digest: int | None = 0,
        *,
        error: Exception | None = None,
        detail: Callable[[], str] = str,
        explain: Explain | None = None,
        flag: bool = False,
    ) -> bool:
        """Raise on every rank if any rank failed or differs. Collective.

        Args:
            operation: what this rank is about to do, e.g. ``"step()"``.
            digest: an integer that is equal on ranks that hold the same, of which 31 bits of a checksum are compared;
                None agrees with every digest, and with every operation.
            error: what went wrong on this rank, if something did.
            detail: called only after a difference: the text of which the digest was made.
            explain: called only after a difference, on rank 0, with the details of two ranks and the two ranks; names
                the first difference.
            flag: the answer of this rank to a yes-or-no question.

        Returns:
            Whether any rank has set ``flag``.

        Raises:
            DisagreementError: if ranks are in different operations, or their digests differ.
            PeerLostError: if a rank is gone.
            RuntimeError: if another thread is in an agreement of this process group.
            Exception: if a rank reported an error: one of the same built-in type and the same message, with the rank,
                of which that error is the cause on the rank itself.
        """
        self.flagged, failure = flag, error
        if not self.is_single_rank:
            with self.exclusive(operation):
                combined = self._combine_words(operation, digest, error, flag=flag)
                self.flagged = bool(combined & _FLAG)
                if combined & _FAILED or not is_unanimous(combined):
                    held = "" if is_unanimous(combined) else detail()
                    failure = self._exchange_errors(operation, digest, held, error, explain)
        if failure is None:
            return self.flagged
        try:
            raise failure from (error if failure is not error else None)
        finally:
            # Else the traceback of the error refers to the error, and what its frames hold is not freed at once.
            del failure, error

    def gather_ints(self, numbers: Sequence[int], operation: str) -> list[list[int]]:
        """Return the 64-bit integers of every rank, in rank order. Collective. Agree on the same operation first.

        Args:
            numbers: as many on every rank, at least one.
            operation: what the ranks are doing, for messages of errors.

        Raises:
            PeerLostError: if a rank is gone.
        """
        if self.is_single_rank:
            return [list(numbers)]
        rows = torch.zeros((self.ranks.world_size, len(numbers)), dtype=torch.int64, device="cpu")
        rows[self.ranks.rank] = torch.tensor(numbers, dtype=torch.int64, device="cpu")
        combined: list[list[int]] = self._combine_ints(rows.view(-1), operation).view_as(rows).tolist()
        return combined

    def combine_disjoint(self, numbers: torch.Tensor, operation: str) -> torch.Tensor:
        """Return numbers of which each is known to one rank, to the bit. Collective. Agree on the same operation first.

        On the CPU they travel as agreements do. On an accelerator it is one all-reduce of the process group, for which
        the host does not wait.

        Args:
            numbers: float64, 1-D, as many on every rank, with 0 for those that other ranks know; may be overwritten.
            operation: what the ranks are doing, for messages of errors.

        Raises:
            PeerLostError: if a rank is gone.
        """
        if self.is_single_rank:
            return numbers
        if numbers.device.type == "cpu":
            return self._combine_ints(numbers.view(torch.int64), operation).view(torch.float64)
        started = time.perf_counter()
        # As exact as the bits: every sum has one term that is not 0.
        work = dist.all_reduce(numbers, group=self.ranks.group, async_op=True)
        wait_for_collective(work, self.ranks, operation)
        nbytes, waited = numbers.nbytes, time.perf_counter() - started
        self.traffic.add("control", sent=nbytes, received=nbytes, calls=1, waited=waited)
        return numbers

    def any_of(self, bits: Sequence[bool], operation: str) -> list[bool]:
        """Return by place whether any rank has set a bit. Collective. Agree on the same operation first.

        Args:
            bits: as many on every rank.
            operation: what the ranks are doing, for messages of errors.

        Raises:
            PeerLostError: if a rank is gone.
        """
        if self.is_single_rank or not bits:
            return list(bits)
        padded = torch.zeros(-(-len(bits) // 8) * 8, dtype=torch.uint8, device="cpu")
        padded[: len(bits)] = torch.tensor(bits, dtype=torch.uint8, device="cpu")
        combined = self._combine_ints(padded.view(torch.int64), operation).view(torch.uint8)
        return [bool(byte) for byte in combined[: len(bits)].tolist()]

    @contextmanager
    def exclusive(self, operation: str) -> Iterator[None]:
        """Let only one thread at a time run a block that exchanges something: two would mix up their messages.

        After any error in it, or an interruption such as Ctrl-C, the exchange is incomplete: this rank closes its
        connections, so that no other one waits for the rest.
        """
        context = self.ranks.context
        if context.closed:
            raise PeerLostError(
                f"{operation}: this rank has closed its connections to the other ranks: load a checkpoint and build "
                f"the optimizer again, on a new process group. They were closed after: {context.closed}"
            )
        if not context.busy.acquire(blocking=False):
            raise RuntimeError(
                f"{operation} was called while another thread is in {context.doing} on the same process group: call "
                f"the collective methods of one process group from one thread, or one after the other"
            )
        context.doing = operation
        try:
            yield
        except BaseException as error:
            if not self.is_single_rank:
                self.ranks.close(error)
            raise
        finally:
            context.busy.release()

    def _combine_ints(self, numbers: torch.Tensor, operation: str) -> torch.Tensor:
        with self.exclusive(operation):
            return self._or(numbers, TAG_INTS, operation)

    def _combine_words(self, operation: str, digest: int | None, error: Exception | None, *, flag: bool) -> int:
        """The OR of the words of all ranks. If they agree, this rank uses connections of our own from now on."""
        code = zlib.crc32(f"{operation} {self.position} {digest}".encode())
        word = word_of(None if digest is None else code, failed=error is not None, flag=flag)
        lost = error if isinstance(error, PeerLostError) else None
        combined = int(self._or(torch.tensor([word], dtype=torch.int64, device="cpu"), TAG_WORD, operation, lost))
        if is_unanimous(combined) and not combined & _FAILED and self.ranks.context.connections is None:
            assert self._first is not None
            self.ranks.context.connections = Connections(self._first)
        return combined

    def _or(self, numbers: torch.Tensor, tag: int, operation: str, lost: PeerLostError | None = None) -> torch.Tensor:
        connections = self.ranks.context.connections
        if connections is not None:
            return connections.combine(numbers, tag, operation, self.traffic, lost)
        return combine_in_rounds(self.channel, numbers, tag, operation, self.traffic, lost)

    def _exchange_errors(
        self, operation: str, digest: int | None, detail: str, error: Exception | None, explain: Explain | None
    ) -> Exception:
        """Send this rank's report to rank 0, which decides what every rank raises."""
        kind, message = (builtin_name(error), str(error)) if error is not None else ("", "")
        mine = RankReport(self.ranks.rank, operation, str(self.position or ""), digest, detail, kind, message)
        channel = self.channel
        if mine.rank:
            send_text(channel, 0, json.dumps(astuple(mine)), operation, self.traffic, "control")
            kind, message = json.loads(receive_text(channel, 0, operation))
        else:
            reports, gone = [mine], ""
            for peer in range(1, channel.world_size):
                try:
                    reports.append(RankReport(*json.loads(receive_text(channel, peer, operation))))
                except PeerLostError as lost:
                    gone = gone or str(lost)
            kind, message = ("PeerLostError", gone) if gone else resolve_errors(reports, explain)
            for peer in self.ranks.peers:
                # The others must still hear of it.
                with suppress(PeerLostError):
                    send_text(channel, peer, json.dumps([kind, message]), operation, self.traffic, "control")
        if kind == OWN:
            assert error is not None
            return error
        known = {own.__name__: own for own in (PeerLostError, DisagreementError, DifferentCallsError)}
        return known[kind](message) if kind in known else rebuild_exception(kind, message)


Setting = str | int | float | bool | None


@dataclass(frozen=True)
class ShardingConfig:
    """The plan, and the settings that change which messages a rank sends.

    Attributes:
        plan: the plan this rank holds.
        settings: named values that must be equal on all ranks, e.g. ``{"parameters_as_bucket_view": True}``.
        active: per tensor, whether it takes part now; empty if that is not said.
    """

    plan: Plan
    settings: Mapping[str, Setting] = field(default_factory=dict)
    active: tuple[bool, ...] = ()

    @cached_property
    def digest(self) -> int:
        """63 bits of a SHA-256 of the configuration, for :meth:`Coordinator.agree`."""
        text = json.dumps([self.plan.fingerprint(), dict(self.settings), self.active], sort_keys=True)
        return int.from_bytes(hashlib.sha256(text.encode()).digest()[:8], "big") >> 1

    def to_json(self) -> str:
        """Write the configuration as text that :meth:`from_json` reads."""
        return json.dumps({"plan": self.plan.to_json(), "settings": dict(self.settings), "active": list(self.active)})

    @classmethod
    def from_json(cls, text: str) -> ShardingConfig:
        """Read what :meth:`to_json` wrote.

        Raises:
            ValueError: if the text is damaged.
        """
        parts = json.loads(text)
        return cls(Plan.from_json(parts["plan"]), parts["settings"], tuple(parts["active"]))


def agree(plan: Plan, group: dist.ProcessGroup | None = None, *, settings: Mapping[str, Setting] | None = None) -> None:
    """Make sure that every rank of ``group`` holds the same plan. Collective.

    Args:
        plan: this rank's plan.
        group: the process group, the default group if None.
        settings: further values that must be equal on all ranks.

    Raises:
        DisagreementError: on every rank, naming the first difference and the ranks that differ.
        PeerLostError: if a rank is gone.
    """
    check_config(Coordinator(RankGroup.of(group)), "agree()", ShardingConfig(plan, settings or {}))


def check_config(
    coordinator: Coordinator,
    operation: str,
    config: ShardingConfig,
    *,
    error: Exception | None = None,
    once: Mapping[str, Setting] | None = None,
) -> None:
    """As :func:`agree`, over an existing control channel.

    Args:
        coordinator: the channel.
        operation: what this rank is about to do.
        config: what it holds.
        error: its own failure, if it had one.
        once: settings of this call alone, which must be equal on all ranks too.

    Raises:
        DisagreementError: as :func:`agree`.
        PeerLostError: as :func:`agree`.
        Exception: if a rank reported an error: that error, on every rank.
    """
    settings = once or {}

    def detail() -> str:
        return replace(config, settings={**config.settings, **settings}).to_json()

    # Not by replacing: the digest of a plan takes a while, and is kept.
    digest = config.digest ^ zlib.crc32(json.dumps(dict(settings), sort_keys=True).encode())
    coordinator.agree(operation, digest, error=error, detail=detail, explain=explain_configs)


@dataclass
class Proposal:
    """This rank's contribution to the agreement at the end of a block of :func:`agreed`, as for `Coordinator.agree`."""

    digest: int = 0
    detail: Callable[[], str] = str
    flag: bool = False

    def set(self, config: ShardingConfig) -> None:
        """Propose a configuration."""
        self.digest, self.detail = config.digest, config.to_json


@contextmanager
def agreed(coordinator: Coordinator, operation: str, explain: Explain | None = None) -> Iterator[Proposal]:
    """Run a block, and then raise on every rank if it failed on one, or if ranks differ. Collective.

    Args:
        coordinator: the channel.
        operation: what this rank is about to do.
        explain: names a difference of two details, see :meth:`Coordinator.agree`; of configurations if None.

    Yields:
        The contribution, for the block to set.

    Raises:
        DisagreementError: as :func:`agree`.
        PeerLostError: as :func:`agree`.
        Exception: an error of the block on some rank, on every rank.
    """
    proposal = Proposal()
    failure: Exception | None = None
    try:
        yield proposal
    except StopIteration as error:
        # No generator may raise one.
        failure = RuntimeError(f"StopIteration: {error}")
    except Exception as error:  # noqa: BLE001 - every rank must hear of it, whatever it is
        failure = error
    coordinator.agree(
        operation,
        proposal.digest,
        error=failure,
        detail=proposal.detail,
        explain=explain or explain_configs,
        flag=proposal.flag,
    )


def explain_configs(reference: str, other: str, reference_rank: int, other_rank: int) -> str | None:
    """Name the first difference between two configurations, given as JSON; None if there is none."""
    if not reference or not other:
        return None
    here, there = ShardingConfig.from_json(reference), ShardingConfig.from_json(other)
    difference = here.plan.difference(there.plan)
    if difference is not None:
        difference = f"{difference} (here: rank {reference_rank}, there: rank {other_rank})"
    if here.plan.tensors != there.plan.tensors:
        return difference
    for name in dict.fromkeys([*here.settings, *there.settings]):
        left, right = here.settings.get(name), there.settings.get(name)
        if left != right:
            return f"{name} is {left!r} on rank {reference_rank} and {right!r} on rank {other_rank}"
    # Who owns what may follow from the settings.
    if difference is not None:
        return difference
    for index, (left, right) in enumerate(zip(here.active, there.active, strict=False)):
        if left != right:
            yes, no = (reference_rank, other_rank) if left else (other_rank, reference_rank)
            return (
                f"tensor {index} {here.plan.tensors[index].name!r} is trainable or has a gradient on rank {yes}, but "
                f"is frozen on rank {no}"
            )
    return None
