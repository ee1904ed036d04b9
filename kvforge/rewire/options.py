"""What to rewire to."""

from dataclasses import dataclass

from kvforge.common.errors import KvforgeError

INITS = ("copy", "mean", "fold", "ridge", "minicache")
FITTED_INITS = ("ridge", "minicache")
"""Those that calibrate: projections fitted to text."""


@dataclass(frozen=True)
class RewireOptions:
    """``cut`` is SwiftKV's k, None to choose it by measurement; ``group_size`` AcrossKV's G; ``init`` one of ``INITS``.

    ``ridge`` is the regulariser relative to the mean square of the inputs; ``quality_budget`` the largest share of a
    layer's K, V or updates of a state that may stay unexplained where the cut is chosen. Calibration takes
    ``num_samples`` sequences of at most ``num_tokens`` tokens; a shard of the output holds ``max_shard_bytes``. With
    ``num_anchors`` the cut is blind: layers above it keep their own projections, so that nothing is initialised.
    """

    cut: int | None
    group_size: int = 1
    init: str = "fold"
    drop_teacher: bool = False
    early_exit: bool = False
    ridge: float = 1e-2
    quality_budget: float = 0.1
    num_samples: int = 64
    num_tokens: int = 512
    max_shard_bytes: int = 5_000_000_000
    num_anchors: int | None = None

    def __post_init__(self) -> None:
        if self.num_anchors:
            self._check_blind()
        if self.init not in INITS:
            raise KvforgeError(f"--init {self.init!r} is unknown; choose from {', '.join(INITS)}.")
        if self.group_size < 1:
            raise KvforgeError(f"--group-size is {self.group_size}; give the layers that share a cache, at least 1.")
        if self.init == "minicache" and self.group_size != 2:
            raise KvforgeError(
                f"--init minicache merges layers in pairs and --group-size is {self.group_size}; give --group-size 2, "
                "or another --init."
            )
        if not 1e-12 <= self.ridge < float("inf"):
            raise KvforgeError(f"--ridge is {self.ridge:g}; give a number of at least 1e-12.")
        if not 0 < self.quality_budget < float("inf"):
            raise KvforgeError(f"--quality-budget is {self.quality_budget:g}; give a positive number.")
        if self.num_samples < 2 or self.num_tokens < 16:
            raise KvforgeError("--num-samples must be at least 2 and --num-tokens at least 16.")
        if self.max_shard_bytes < 1:
            raise KvforgeError("--max-shard-size must be positive, such as 5GB or 500MB.")

    def _check_blind(self) -> None:
        """Raise KvforgeError for what is of a cut with a single input alone."""
        given = {
            "--cut-layer auto": self.cut is None,
            f"--init {self.init}": self.init != RewireOptions.init,
            "--drop-teacher": self.drop_teacher,
            "--early-exit": self.early_exit,
        }
        for option, is_given in given.items():
            if is_given:
                raise KvforgeError(
                    f"{option} is for cuts with a single input, and --cut-kind blind has none; leave it out."
                )
