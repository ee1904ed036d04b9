"""What a rule keeps of the attention that tokens receive."""

from enum import Enum


class Statistic(Enum):
    """What is kept of the weights w that queries give a token; the values are ``attention_mass``'s kinds."""

    SUM = 0
    SUM_AND_SQUARES = 1
    BELOW_AVERAGE = 2
    """In how many queries w was below the mean over all that the query saw."""
    MAXIMUM = 3

    @property
    def pool_names(self) -> tuple[str, ...]:
        """The pools that it is kept in."""
        return ("mass", "squares") if self is Statistic.SUM_AND_SQUARES else ("mass",)
