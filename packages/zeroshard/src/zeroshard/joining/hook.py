"""What a rank that has run out of data does with a sharded optimizer, as a hook of a Join context."""

from __future__ import annotations

from collections.abc import Callable

from torch.distributed.algorithms.join import JoinHook

from zeroshard.joining.attendance import Call
from zeroshard.joining.uneven import UnevenInputs
from zeroshard.param_groups import ParamGroup


class OptimizerJoinHook(JoinHook):
    """Steps the joined rank's shard with the gradients of the others.

    Args:
        uneven: of the optimizer.
        groups: returns its public param groups.
        leave: takes the optimizer out of the context.
        consolidate: brings the optimizer's state to a rank.

    Attributes:
        steps: how many steps this rank has shadowed.
    """

    def __init__(
        self,
        uneven: UnevenInputs,
        groups: Callable[[], list[ParamGroup]],
        leave: Callable[[], None],
        consolidate: Callable[[int], None],
    ) -> None:
        self._uneven, self._groups, self._leave, self._consolidate = uneven, groups, leave, consolidate
        self._told = False
        self.steps = 0
        super().__init__()

    @property
    def steps_in_backward(self) -> bool:
        """Whether a communication hook steps the optimizer, so that its own step communicates nothing."""
        return self._uneven.steps_in_backward

    @property
    def calling(self) -> Call | None:
        """What a call of the optimizer on this rank does that has begun and not come to its end."""
        return self._uneven.calling

    def refuse_untold(self) -> None:
        """Raise if ranks without data cannot be told this rank's hyperparameters.

        Raises:
            TypeError: naming one.
        """
        error = self._uneven.untold(self._groups())
        if error is not None:
            raise error

    def leave(self) -> None:
        """Leave the context, also after an error; safe to call repeatedly."""
        self._leave()

    def follow(self, someone_joined: Callable[[], bool]) -> None:
        """Let the context tell when a rank has run out, and call :meth:`main_hook` once for each of the others' calls.

        Args:
            someone_joined: see :class:`~zeroshard.joining.uneven.UnevenInputs`.
        """
        self._told = True
        self._uneven.someone_joined = someone_joined

    def main_hook(self) -> None:
        """Do what the others do: once where the context announces calls, else until they have stepped. Collective.

        Raises:
            PeerLostError: if a rank is gone.
            Exception: what a rank has met.
        """
        self._uneven.finish_backward()
        if self._told:
            self.steps += self._uneven.shadow(self._groups(), self._consolidate) is Call.STEP
            return
        if self._uneven.steps_in_backward:
            self._uneven.has_shadowed = True
        else:
            self.steps += self._uneven.shadow_iteration(self._groups(), self._consolidate)
        self._uneven.forget_what_others_used()

    def begin_backward(self, *, adds: bool) -> None:
        """Take note that a backward begins, before its first gradient, whether this rank makes or shadows it.

        Args:
            adds: whether there are gradients to which it adds.
        """
        self._uneven.begin_backward(adds=adds)

    def finish_backward(self) -> None:
        """Finish a backward whose buckets this rank has shadowed; a no-op if there was none. Collective."""
        self._uneven.finish_backward()

    def report(self, error: Exception, call: Call) -> None:
        """Tell ranks that are in, or before, a call that this rank has failed; see :class:`UnevenInputs`."""
        self._uneven.report(error, call, self._groups())

    def post_hook(self, is_last_joiner: bool) -> None:  # noqa: ARG002 - torch's signature
        """Leave the context."""
        self._leave()
