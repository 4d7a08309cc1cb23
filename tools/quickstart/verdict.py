"""What a run found, whether it is as promised, and the same as JSON."""

from __future__ import annotations

from dataclasses import asdict, dataclass
from typing import Any

from choices import class_names
from job import Continuation, Training, largest, worst

TOLERANCE = 0.05
"""How far a run may be off where sums are rounded in another order, relative to how far the uninterrupted one moved.

That is so at another number of ranks, and beside DDP's all-reduce at three ranks and more: owners add up gradients in
the order of the ranks. An optimizer may enlarge the difference where a gradient is nearly zero, and Muon rounds to
bfloat16: it is off by 0.02 on three ranks. A run resumed without its optimizer state is off by the order of 1.
"""


@dataclass(frozen=True, slots=True)
class Found:
    """All results of a quickstart.

    Attributes:
        optimizer: classes and their parameters, as chosen.
        partition: as chosen.
        ranks: that trained.
        resume_ranks: that resumed.
        steps: before the checkpoint.
        training: one answer per rank.
        resumed: on ``resume_ranks`` ranks, sharded.
        plain: resumed on one process with a plain optimizer for each class.
        seconds: wall time of the whole run, in seconds.
        checkpoint: the file with the consolidated state.
    """

    optimizer: str
    partition: str
    ranks: int
    resume_ranks: int
    steps: int
    training: list[Training]
    resumed: Continuation
    plain: Continuation
    seconds: float
    checkpoint: str

    @property
    def classes(self) -> str:
        """The optimizer classes, for people to read."""
        return class_names(self.optimizer)

    @property
    def again(self) -> Continuation:
        """Resumed on the same ranks, with the largest differences of any rank."""
        return worst([answer.again for answer in self.training])

    @property
    def difference(self) -> float:
        """Largest parameter difference between sharded and unsharded, over all ranks and steps."""
        return largest([answer.difference for answer in self.training])

    @property
    def relative(self) -> float:
        """The difference in the end as L2 norm, relative to how far the unsharded run moved, of the worst rank."""
        return largest([answer.relative for answer in self.training])

    def failures(self) -> list[str]:
        """Return what is not as promised, one sentence each; empty if all is well."""
        failed = []
        if self.ranks <= 2 and self.difference != 0.0:
            failed.append(
                f"parameters of the sharded optimizer differ from the unsharded one's by up to {self.difference:.3g}, "
                f"but must be equal bit for bit"
            )
        if not self.relative <= TOLERANCE:
            failed.append(
                f"parameters of the sharded optimizer are off by {self.relative:.2g} of the distance that the "
                f"unsharded one moved, more than {TOLERANCE}"
            )
        places = {
            f"the same {self.ranks} ranks": self.again,
            f"{self.resume_ranks} ranks": self.resumed,
            "plain optimizers": self.plain,
        }
        failed += [
            f"resumed on {place}, parameters are off by {went.relative:.2g} of the distance that training moved since "
            f"the checkpoint, more than {TOLERANCE}"
            for place, went in places.items()
            if not went.relative <= TOLERANCE
        ]
        return failed

    def as_json(self) -> dict[str, Any]:
        """Return everything as plain values; sizes in bytes, times in seconds."""
        return {
            **asdict(self),
            "again": asdict(self.again),
            "difference": self.difference,
            "relative": self.relative,
            "failures": self.failures(),
            "passed": not self.failures(),
        }
