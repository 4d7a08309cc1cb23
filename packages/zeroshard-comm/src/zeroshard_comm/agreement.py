"""Agreement of ranks on the operation that they are about to begin, before any of them sends data.

A rank whose input is invalid must not raise by itself, because its peers would wait for it. So every collective method
begins with an *agreement*. The ranks combine one 64-bit word: 31 bits of a digest of the operation, the complement of
these bits, one bit for "failed", and one for a yes-or-no question of the caller. After a bitwise OR, the digest and the
complement have no bit in common if and only if all digests are equal. If ranks differ or one failed, every rank sends a
text to rank 0, which decides what all ranks raise.

Ranks that wait for a lost rank notice the loss, and tell the others in the same agreement. If a rank is lost between
two rounds, ranks that have already received its word may complete this agreement, and raise in the next one.

A rank that raises outside of an agreement *tells* the others: it writes its error to the store, and sends its word of
the next agreement at once, with the bit for "failed". Its own next agreement uses this word, so all ranks raise there.
"""

from __future__ import annotations

import json
import time
import zlib
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager, suppress
from dataclasses import astuple, dataclass, replace

import torch
import torch.distributed as dist
from zeroshard_core import Plan

from zeroshard_comm.errors import Explain, PeerLostError, RankReport, builtin_name, rebuild_exception, resolve_errors
from zeroshard_comm.messages import receive_text, send_text, wait_for_collective
from zeroshard_comm.process_group import RankGroup
from zeroshard_comm.ring import Connections
from zeroshard_comm.rounds import combine_in_rounds
from zeroshard_comm.sharding_config import Setting, ShardingConfig, explain_configs
from zeroshard_comm.traffic import Traffic

TAG_WORD = 0x5A530001
TAG_INTS = 0x5A530004

_DIGEST_BITS = 31
_DIGEST = (1 << _DIGEST_BITS) - 1
_FAILED = 1 << 62
_FLAG = -1 << 63


def word_of(digest: int | None, *, failed: bool, flag: bool = False) -> int:
    """Return the word of a rank, a signed 64-bit integer. A digest of None agrees with every other."""
    bits = 0 if digest is None else digest & _DIGEST | (digest & _DIGEST ^ _DIGEST) << _DIGEST_BITS
    return bits | (_FAILED if failed else 0) | (_FLAG if flag else 0)


def is_unanimous(combined: int) -> bool:
    """Return True if all digests are equal, given the OR of all words."""
    return combined & _DIGEST & combined >> _DIGEST_BITS == 0


@dataclass(frozen=True, slots=True)
class Position:
    """The optimizer and the step of a rank, which all ranks must have in common.

    Attributes:
        optimizer: number of the optimizer among those built on the process group, from 1.
        name: name of its class.
        steps: number of steps that all ranks have begun with it.
    """

    optimizer: int
    name: str
    steps: int

    def __str__(self) -> str:
        """Return text such as ``"after 4 steps of optimizer 2 (AdamW)"``."""
        return f"after {self.steps} steps of optimizer {self.optimizer} ({self.name})"


class Coordinator:
    """Lets the ranks of one process group agree.

    Messages are sent over gloo from CPU memory, so no agreement waits for an accelerator. They use zeroshard's own
    connections, which are made once per process group, after the first agreement, because connecting would wait for a
    rank that is gone. The first agreement uses the group itself if it has gloo for CPU tensors, otherwise a gloo group
    made for this purpose. With torch's ``fake`` backend nothing is sent; an agreement raises only this rank's error.

    Only one thread at a time may call methods of the objects of this class on one process group. Their argument
    ``operation`` names the operation of the ranks, for errors. They raise :class:`PeerLostError` if a rank is gone, and
    :class:`RuntimeError` if another thread is in one of them.

    Args:
        ranks: the group whose ranks agree.
        traffic: counts bytes and time spent waiting, as kind ``"control"``; a new counter if None.

    Attributes:
        is_single_rank: True if no other rank can answer: there is one rank, or the backend moves no data.
        position: must be equal on all ranks in every operation; None if it does not matter. The caller changes it at
            the same time on all ranks.
        flagged: whether any rank set ``flag`` in the last :meth:`agree`, even if that raised.
        told: type and message of an error of :meth:`tell` that the next :meth:`agree` raises; None if there is none.
        defers: whether :meth:`agree` keeps an error of :meth:`tell` instead of raising it. Equal on all ranks.
    """

    def __init__(self, ranks: RankGroup, traffic: Traffic | None = None) -> None:
        self.ranks = ranks
        self.traffic = traffic if traffic is not None else Traffic()
        self.is_single_rank = ranks.world_size == 1 or not ranks.moves_data()
        self.position: Position | None = None
        self.flagged = self.defers = False
        self.told: tuple[str, str] | None = None
        has_gloo = self.is_single_rank or ranks.sends_tagged(torch.device("cpu"))
        # The group of the first agreement.
        self._first = ranks if has_gloo else ranks.private_group("gloo", "control")

    @property
    def channel(self) -> RankGroup:
        """The group on which messages are sent now. It must not be used if ``is_single_rank``."""
        connections = self.ranks.context.connections
        return self._first if connections is None else connections.channel

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
            operation: the operation that this rank is about to begin, e.g. ``"step()"``.
            digest: an integer that must be equal on all ranks. Ranks compare 31 bits of a checksum. None agrees with
                every digest and every operation.
            error: the error of this rank; None if it has none.
            detail: returns the text from which the digest was made. Called only if ranks differ.
            explain: names the first difference, given the details of two ranks and their numbers. Called only on
                rank 0, and only if ranks differ.
            flag: the answer of this rank to a yes-or-no question.

        Returns:
            True if any rank set ``flag``.

        Raises:
            DisagreementError: if ranks are in different operations, or their digests differ.
            PeerLostError: if a rank is gone.
            RuntimeError: if another thread is in an agreement of this process group.
            Exception: if a rank passed an error. Every rank raises one of the same built-in type that names that rank.
                On that rank, the cause is its own error. If all ranks passed the same error, each raises its own.
        """
        if self.told is not None and not self.defers:
            error, self.told = error or rebuild_exception(*self.told), None
        self.flagged, failure = flag, error
        if not self.is_single_rank:
            with self.exclusive(operation):
                combined = self._combine_words(operation, digest, error, flag=flag)
                while combined & _FAILED and self._is_only_told():
                    combined = self._combine_words(operation, digest, error, flag=flag)
                self.flagged = bool(combined & _FLAG)
                if self.told is not None and not self.defers:
                    failure, self.told = rebuild_exception(*self.told), None
                elif combined & _FAILED or not is_unanimous(combined):
                    held = "" if is_unanimous(combined) else detail()
                    failure = self._exchange_errors(operation, digest, held, error, explain)
        if failure is None:
            return self.flagged
        context = failure.__context__
        try:
            if failure is error:
                raise failure
            raise failure from error
        finally:
            # Python replaces the context if this is called while another error is handled.
            failure.__context__ = context or failure.__context__
            # Break the cycle of the error and its traceback, so that objects in its frames are freed at once.
            del failure, error, context

    def tell(self, error: Exception) -> None:
        """Make the next agreement raise, on every rank, an error that only this rank raises now. Not collective.

        The agreement raises nothing if every rank has told an error. If a rank has told several, only the first counts.
        """
        context = self.ranks.context
        # If a rank is gone, the next agreement raises.
        with context.busy, suppress(RuntimeError):
            if context.connections is not None and not context.closed:
                context.connections.tell(_FAILED, (builtin_name(error), str(error)))

    def gather_ints(self, numbers: Sequence[int], operation: str) -> list[list[int]]:
        """Return the 64-bit integers of every rank, in rank order. Collective. Agree on the same operation first.

        Every rank passes the same number of integers, at least one.
        """
        if self.is_single_rank:
            return [list(numbers)]
        rows = torch.zeros((self.ranks.world_size, len(numbers)), dtype=torch.int64, device="cpu")
        rows[self.ranks.rank] = torch.tensor(numbers, dtype=torch.int64, device="cpu")
        combined: list[list[int]] = self._combine_ints(rows.view(-1), operation).view_as(rows).tolist()
        return combined

    def combine_disjoint(self, numbers: torch.Tensor, operation: str) -> torch.Tensor:
        """Return all numbers, each of which one rank knows, without rounding. Collective. Agree on the operation first.

        ``numbers`` is a 1-D float64 tensor of the same length on every rank, with 0 for each number that another rank
        knows. It may be overwritten. CPU tensors use the connections of agreements. Tensors on an accelerator are
        combined by one all-reduce of the process group, for which the host does not wait.
        """
        if self.is_single_rank:
            return numbers
        if numbers.device.type == "cpu":
            return self._combine_ints(numbers.view(torch.int64), operation).view(torch.float64)
        started = time.perf_counter()
        # The sums are exact, because each has one term that is not 0.
        work = dist.all_reduce(numbers, group=self.ranks.group, async_op=True)
        wait_for_collective(work, self.ranks, operation)
        nbytes, waited = numbers.nbytes, time.perf_counter() - started
        self.traffic.add("control", sent=nbytes, received=nbytes, calls=1, waited=waited)
        return numbers

    def any_of(self, bits: Sequence[bool], operation: str) -> list[bool]:
        """Return for each position whether any rank set the bit. Collective. Agree on the same operation first.

        Every rank passes the same number of bits.
        """
        if self.is_single_rank or not bits:
            return list(bits)
        combined = self._combine_ints(torch.tensor(bits, dtype=torch.int64, device="cpu"), operation)
        return [bool(bit) for bit in combined.tolist()]

    @contextmanager
    def exclusive(self, operation: str) -> Iterator[None]:
        """Let only one thread at a time run a block that communicates, because two would mix up their messages.

        If the block raises, or is interrupted by Ctrl-C, the exchange is incomplete. This rank then closes its
        connections, so that no other rank waits for the rest.
        """
        context = self.ranks.context
        if context.closed:
            raise PeerLostError(
                f"{operation}: this rank has closed its connections to the other ranks: load a checkpoint and build "
                f"the optimizer again, on a new process group. It closed them after this error: {context.closed}"
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
            return self._combine(numbers, TAG_INTS, operation, None)

    def _combine_words(self, operation: str, digest: int | None, error: Exception | None, *, flag: bool) -> int:
        """Return the OR of the words of all ranks. After the first agreement, make zeroshard's own connections."""
        code = zlib.crc32(f"{operation} {self.position} {digest}".encode())
        word = word_of(None if digest is None else code, failed=error is not None, flag=flag)
        lost = error if isinstance(error, PeerLostError) else None
        combined = int(self._combine(torch.tensor([word], dtype=torch.int64, device="cpu"), TAG_WORD, operation, lost))
        context = self.ranks.context
        if context.connections is None and is_unanimous(combined) and not combined & _FAILED:
            context.connections = Connections(self._first)
        return combined

    def _is_only_told(self) -> bool:
        """Return True if ranks have told errors that this agreement does not raise, so that they must agree again."""
        connections, ranks = self.ranks.context.connections, range(self.ranks.world_size)
        errors = connections.told() if connections is not None else {}
        if not 0 < len(errors) < len(ranks):
            return bool(errors)
        reports = [RankReport(rank, "", "", None, "", *errors.get(rank, ("", ""))) for rank in ranks]
        self.told = resolve_errors(reports, None)
        return self.defers

    def _combine(self, numbers: torch.Tensor, tag: int, operation: str, lost: PeerLostError | None) -> torch.Tensor:
        connections = self.ranks.context.connections
        if connections is None:
            return combine_in_rounds(self._first, numbers, tag, operation, self.traffic, lost)
        return connections.combine(numbers, tag, operation, self.traffic, lost)

    def _exchange_errors(
        self, operation: str, digest: int | None, detail: str, error: Exception | None, explain: Explain | None
    ) -> Exception:
        """Send this rank's report to rank 0, which decides what every rank raises."""
        own = (builtin_name(error), str(error)) if error is not None else ("", "")
        call = operation if self.position is None else f"{operation} {self.position}"
        mine = RankReport(self.ranks.rank, operation, call, digest, detail, *own)
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
                # The other ranks must still get their message.
                with suppress(PeerLostError):
                    send_text(channel, peer, json.dumps([kind, message]), operation, self.traffic, "control")
        return error if error is not None and own == (kind, message) else rebuild_exception(kind, message)


def agree(plan: Plan, group: dist.ProcessGroup | None = None, *, settings: Mapping[str, Setting] | None = None) -> None:
    """Check that every rank of a group has the same plan and settings. Collective.

    Args:
        plan: the plan of this rank.
        group: the process group; the default group if None.
        settings: further values by name, which must be equal on all ranks; none if None.

    Raises:
        DisagreementError: on every rank if ranks differ; it names the first difference and these ranks.
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
    """Check that every rank has the same configuration. Collective.

    Args:
        coordinator: agrees on the process group.
        operation: the operation that this rank is about to begin, which must be the same on all ranks.
        config: the configuration of this rank.
        error: the error of this rank; None if it has none.
        once: settings of this call only, which must also be equal on all ranks; none if None.

    Raises:
        Exception: the same errors as :meth:`Coordinator.agree`.
    """
    settings = once or {}

    def detail() -> str:
        return replace(config, settings={**config.settings, **settings}).to_json()

    # Uses the cached digest of `config`, because the digest of a new configuration takes long to compute.
    digest = config.digest ^ zlib.crc32(json.dumps(dict(settings), sort_keys=True).encode())
    coordinator.agree(operation, digest, error=error, detail=detail, explain=explain_configs)


@dataclass
class Proposal:
    """This rank's arguments of :meth:`Coordinator.agree` at the end of a block of :func:`agreed`."""

    digest: int = 0
    detail: Callable[[], str] = str
    flag: bool = False

    def set(self, config: ShardingConfig) -> None:
        """Propose a configuration."""
        self.digest, self.detail = config.digest, config.to_json


@contextmanager
def agreed(coordinator: Coordinator, operation: str, explain: Explain = explain_configs) -> Iterator[Proposal]:
    """Run a block, and then raise on every rank if it failed on one, or if ranks differ. Collective.

    Args:
        coordinator: agrees on the process group.
        operation: the operation of the block, which must be the same on all ranks.
        explain: as for :meth:`Coordinator.agree`; by default, the details are configurations.

    Yields:
        The proposal of this rank, which the block may set.

    Raises:
        Exception: the same errors as :meth:`Coordinator.agree`, to which this rank passes the error of the block.
    """
    proposal = Proposal()
    failure: Exception | None = None
    try:
        yield proposal
    except StopIteration as error:
        # A generator must not raise StopIteration.
        failure = RuntimeError(f"StopIteration: {error}")
        failure.__cause__ = error
    except Exception as error:  # noqa: BLE001 - raised on every rank by the agreement
        failure = error
    coordinator.agree(
        operation, proposal.digest, error=failure, detail=proposal.detail, explain=explain, flag=proposal.flag
    )
