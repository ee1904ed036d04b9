"""Filling the cache of prompts from the auxiliary model (arXiv 2410.08391), and what their tokens mean to it."""

import numpy as np
import torch
from torch import Tensor

from kvforge.common.mean_attention import NUM_QUERIES, mean_attention
from kvforge.runtime.requests.sequence import Sequence
from kvforge.runtime.scheduling.schedule import Schedule
from kvforge.runtime.scheduling.slot_table import SlotTable
from kvforge.runtime.sessions.inputs import LowerStep, PredictStep
from kvforge.runtime.sessions.pools import Pools
from kvforge.runtime.sessions.session import Session


class PromptPredictor:
    """Runs ``predict`` over the prompts of a plan; owns the auxiliary model's pools, whose pages are the engine's."""

    def __init__(self, session: Session, num_pages: int, page_size: int, needs_importance: bool) -> None:
        self._session, self._page_size, self._needs_importance = session, page_size, needs_importance
        self._pools = session.allocate_auxiliary_pools(num_pages)
        self._queries: dict[Sequence, list[Tensor]] = {}
        """The last queries, as far as computed, of each prompt that is not yet predicted to its end."""

    def run(self, plan: Schedule, slots: SlotTable, pools: Pools) -> None:
        """Predict ``plan.predictions``, and give those prompts that are then complete their ``importance``."""
        self._queries = {
            sequence: kept
            for sequence, kept in self._queries.items()
            if 0 < sequence.num_predicted < sequence.num_to_predict  # 0: preempted, or gone
        }
        step, rows = self._step(plan, slots)
        queries = self._session.predict(step, pools, self._pools)
        if not self._needs_importance:
            return
        for (sequence, count), (begin, end) in zip(plan.predictions, rows, strict=True):
            if sequence.num_predicted == 0:
                self._queries[sequence] = []
            kept = self._queries[sequence]
            if begin < end:
                kept.append(queries[begin:end].clone())
            if sequence.num_predicted + count == sequence.num_to_predict:
                q = torch.cat(self._queries.pop(sequence))
                plan.importance[sequence] = self._importance(
                    q, slots.page_table[sequence.slot], sequence.num_to_predict
                )

    def _step(self, plan: Schedule, slots: SlotTable) -> tuple[PredictStep, list[tuple[int, int]]]:
        """Return the packed tokens, and of each sequence which of the wanted queries are its."""
        size, starts, lengths = self._page_size, [0], []
        ids, positions, mapping = list[np.ndarray](), list[np.ndarray](), list[np.ndarray]()
        wanted: list[int] = []
        rows: list[tuple[int, int]] = []
        for sequence, count in plan.predictions:
            begin, end = sequence.num_predicted, sequence.num_predicted + count
            where = np.arange(begin, end, dtype=np.int32)
            ids.append(sequence.tokens[begin:end])
            positions.append(where)
            mapping.append(slots.page_table[sequence.slot, where // size] * size + where % size)
            first = max(begin, sequence.num_to_predict - NUM_QUERIES) if self._needs_importance else end
            rows.append((len(wanted), len(wanted) + max(end - first, 0)))
            wanted += range(starts[-1] + first - begin, starts[-1] + count) if first < end else ()
            starts.append(starts[-1] + count)
            lengths.append(end)
        num_pages = -(-max(lengths) // size)
        table = slots.page_table[[sequence.slot for sequence, _ in plan.predictions], :num_pages]
        tokens = LowerStep(
            _int32(np.concatenate(ids)),
            _int32(np.concatenate(positions)),
            _int32(np.concatenate(mapping)),
            _int32(np.array(starts)),
            _int32(np.array(lengths)),
            _int32(table),
        )
        return PredictStep(tokens, _int32(np.array(wanted or [0]))), rows

    def _importance(self, q: Tensor, pages: np.ndarray, num_tokens: int) -> list[float]:
        """Return of each of a prompt's tokens the attention that it gets of those of the last ``NUM_QUERIES`` queries
        that can see it, on average over these, heads and layers. ``q`` ``[Q, layers, heads, head_dim]``."""
        count = -(-num_tokens // self._page_size)
        index = torch.from_numpy(pages[:count].astype(np.int64))
        total = torch.zeros(num_tokens)
        for layer, (k_pool, _) in enumerate(self._pools):
            k = k_pool[index].flatten(0, 1)[:num_tokens]
            total += mean_attention(q[:, layer], k, q.shape[-1] ** -0.5)
        return (total / len(self._pools)).tolist()


def _int32(values: np.ndarray) -> Tensor:
    return torch.from_numpy(np.ascontiguousarray(values, dtype=np.int32))
