"""Blind cuts of a teacher that follows chains: what they are distilled on, and how they are asked."""

import dataclasses
import json

from kvforge.rewire import rewire_checkpoint
from perf.harness.engines import TEACHER_DIR
from perf.quality.blind_chains import ANCHORS, asked, kinds, write_rows
from perf.quality.chains import CHAINS, held_out
from perf.quality.swiftkv_students import Subject

SUBJECT = Subject(TEACHER_DIR, dataclasses.replace(CHAINS.documents, sequences=2))


def test_answers_alone_count(tmp_path):
    rows = [json.loads(line) for line in write_rows(tmp_path / "rows.jsonl", SUBJECT).read_text().splitlines()]
    assert len(rows) == 2
    for row in rows:
        assert len(row["input_ids"]) == len(row["weights"]) and set(row["weights"]) == {0.0, 1.0}
        assert 0.01 < sum(row["weights"]) / len(row["weights"]) < 0.6


def test_answers_of_a_blind_cut_are_other_ones_than_the_teachers(tmp_path):
    """They see no prompt above the cut, and anchors there."""
    single, blind = kinds([4])
    assert (single.options.num_anchors, blind.options.num_anchors) == (None, ANCHORS)
    rewire_checkpoint(TEACHER_DIR, tmp_path / "blind", blind.options)
    documents = held_out(2, SUBJECT)
    teacher, found = asked(TEACHER_DIR, documents), asked(tmp_path / "blind", documents)
    assert {task: len(each) for task, each in teacher.items()} == {task: len(each) for task, each in found.items()}
    assert teacher != found
