"""What a rule keeps of the attention that tokens receive."""

from enum import Enum

from kvforge.kv_policies.state import StateInput

OBSERVATION_INPUTS = (
    StateInput("state_table", is_table=True, neutral=-1),
    StateInput("observed"),
    StateInput("scored"),
)
"""Each sequence's state pages, how many of the step's last queries are observed, and the slots that have statistics."""
LANE_INPUTS = (StateInput("lane_slot", neutral=-1),)
"""A sequence's row of the pools behind, -1 before its cache is cut down."""
IS_CUT = "is_cut"
"""The column of policies whose cut caches need not be shorter: 1 from the first transition on."""
NOTE_INPUTS = (StateInput("note_slot"), StateInput("num_noted"), StateInput("note_place"))
"""See ``model_defs.notes``."""


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
