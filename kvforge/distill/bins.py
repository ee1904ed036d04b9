"""Which samples share a sequence: best fit in decreasing length."""

import numpy as np


def pack(lengths: np.ndarray, capacity: int) -> tuple[np.ndarray, np.ndarray]:
    """Distribute samples over sequences of ``capacity`` tokens; depends on the arguments alone.

    Samples are placed from the longest to the shortest, equal ones in their order, each into the fullest sequence
    that still has room. So little is padded, and sequences are near each other in how full they are.

    Args:
        lengths: tokens of each sample, [n], each from 1 to ``capacity``.
        capacity: tokens of a sequence.

    Returns:
        ``order`` [n] int64, the samples by sequence, and ``starts`` [sequences + 1] int64: sequence s holds
        ``order[starts[s]:starts[s + 1]]``.

    Raises:
        ValueError: a length is out of range.
    """
    if len(lengths) and not 1 <= lengths.min() <= lengths.max() <= capacity:
        raise ValueError(f"samples have {lengths.min()} to {lengths.max()} tokens and a sequence holds {capacity}")
    by_length = np.argsort(-lengths.astype(np.int64), kind="stable")
    sequence_of = np.empty(len(lengths), np.int64)
    with_room: list[list[int]] = [[] for _ in range(capacity + 1)]  # sequences by the tokens that still fit
    rooms = 0  # bit r is set where with_room[r] is not empty
    num_sequences = 0
    for place, sample in enumerate(by_length.tolist()):
        length = int(lengths[sample])
        large_enough = rooms >> length
        if large_enough:
            room = length + (large_enough & -large_enough).bit_length() - 1
            sequence = with_room[room].pop()
            if not with_room[room]:
                rooms &= ~(1 << room)
        else:
            room, sequence = capacity, num_sequences
            num_sequences += 1
        sequence_of[place] = sequence
        left = room - length
        if left:
            with_room[left].append(sequence)
            rooms |= 1 << left
    order = by_length[np.argsort(sequence_of, kind="stable")]
    starts = np.concatenate([[0], np.cumsum(np.bincount(sequence_of, minlength=num_sequences))]).astype(np.int64)
    return order, starts
