"""What a draft head may still spend on entries of prompts."""

KEPT = 0.9
"""What was spent and gained still counts after each later step that spends."""
SHARE = 0.0025
"""Of the time without drafting: what is spent on entries of prompts, whether drafting gains anything or not."""


class PromptCredit:
    """Account of a draft head's entries of prompts, in seconds: ``is_open`` while as much was gained as was spent.

    What drafting gains beyond what its own ``Balance`` keeps comes in here, and ``SHARE`` of the time without drafting.
    So entries of prompts are made as long as drafting pays for them too; those of the first prompts are made on trust.
    Older sums fade with each that is spent, so that old gains do not pay for long.
    """

    def __init__(self) -> None:
        self._gained = self._spent = 0.0

    @property
    def is_open(self) -> bool:
        """The next prompts may have entries."""
        return self._gained >= self._spent

    def gain(self, seconds: float) -> None:
        """Drafting has gained so much more than its own balance keeps."""
        self._gained += seconds

    def add_plain(self, seconds: float) -> None:
        """A step without drafting took so long."""
        self._gained += SHARE * seconds

    def spend(self, seconds: float) -> None:
        """Entries of a step's prompts took so long."""
        if seconds > 0:
            self._gained, self._spent = KEPT * self._gained, KEPT * self._spent + seconds
