"""An experiment of the queue, and what its result depends on."""

from dataclasses import dataclass
from pathlib import Path

from perf.gpu.queue.sources import digest_of
from perf.harness.engines import ROOT


@dataclass(frozen=True)
class Experiment:
    """One program and what it is run for.

    ``seconds``: what it takes on one Hopper GPU, as measured, or as estimated where ``measured`` is false.
    ``module`` and ``arguments`` are what a GPU runs; ``tiny`` are the arguments of the form that a CPU runs.
    ``sources``: patterns below the repository's root of the files that decide the result.
    ``carried``: names of ``perf.gpu.carry.contents.CONTENTS``, what a bare machine lacks; ``{carried}`` in an argument
    is the folder that has them.
    """

    name: str
    question: str
    seconds: int
    module: str
    arguments: tuple[str, ...]
    tiny: tuple[str, ...]
    sources: tuple[str, ...]
    carried: tuple[str, ...] = ()
    measured: bool = False

    @property
    def limit_s(self) -> float:
        """After this time it is ended."""
        return 2.0 * self.seconds

    def command(self, tiny: bool) -> tuple[str, ...]:
        """Return module and arguments, without Python and the place of the result."""
        return (self.module, *(("--device", "cpu", *self.tiny) if tiny else self.arguments))


def sources_digest(experiment: Experiment, root: Path = ROOT) -> str:
    """Return a digest of the experiment's sources and of its own command.

    Raises:
        FileNotFoundError: a pattern finds no file.
    """
    return digest_of(experiment.sources, " ".join(experiment.command(tiny=False)), root)
