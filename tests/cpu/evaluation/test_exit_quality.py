"""``kvforge eval --early-exit-threshold``: the same prompts with and without exits, counted as the engine does."""

import json

import pytest

from kvforge.cli import main
from kvforge.evaluation.engine import EngineGenerator
from kvforge.evaluation.exit_quality import answer_with_exits, exit_quality, exit_table
from kvforge.evaluation.run import EvalOptions, make_prompts
from tests.support.models.engines import EARLY_EXIT, SWIFTKV
from tests.support.models.shelf import EngineShelf

TASKS = ("--task", "arithmetic", "--task", "amounts", "--num-prompts", "3", "--length", "400")


def test_answers_with_exits_are_compared_prompt_by_prompt(engines: EngineShelf, capsys) -> None:
    """A random model exits where it is told to; its answers are all wrong."""
    engine = engines.engine(EARLY_EXIT)
    examples = make_prompts(engine, EvalOptions(("arithmetic", "amounts"), 3, 400))
    full = EngineGenerator(engine, 400, show_progress=False)
    answers = {task: full.answer([example.prompt for example in wanted]) for task, wanted in examples.items()}
    lines = {}
    for threshold, prompts in ((0.001, False), (0.001, True), (0.999, False), (0.999, True)):
        found = answer_with_exits(engine, threshold, 400, examples, prompts=prompts)
        quality = exit_quality(examples, answers, found)
        lines[threshold, prompts] = exit_table(quality).splitlines()
        assert [row.task for row in quality.tasks] == ["arithmetic", "amounts"]
        for row in quality.tasks:
            if threshold < 0.5:
                assert row.num_exits == row.num_tokens - 3 * (not prompts) > 0, "all but prompts that may not"
            else:
                assert row.num_exits == 0 and row.num_same == 3
                assert row.num_tokens == sum(len(answer.token_ids) for answer in answers[row.task])
            assert row.num_prompt_exits == (3 if prompts and threshold < 0.5 else 0)
            assert row.paired.num_prompts == 3 and row.full == row.exits == 0.0
        if threshold < 0.5:
            assert sum(row.num_same for row in quality.tasks) < 6 and quality.share > 0.5
        assert quality.prompt_share == (prompts and threshold < 0.5)
    assert main(["eval", str(engine), *TASKS, "--early-exit-threshold", "0.001"]) == 0
    assert capsys.readouterr().out.splitlines()[-4:] == lines[0.001, False]
    assert main(["eval", str(engine), *TASKS, "--early-exit-threshold", "0.001", "--early-exit-prompts"]) == 0
    shown = capsys.readouterr().out.splitlines()
    assert shown[-9:] == [*lines[0.001, False], "", *lines[0.001, True]]
    assert shown[-4].endswith("; prompts too: 100.0% of them") and shown[-3].endswith("  prompts")
    assert main(["eval", str(engine), *TASKS, "--early-exit-threshold", "1", "--json"]) == 0
    report = json.loads(capsys.readouterr().out)
    assert "exits_of_prompts" not in report and report["exits"]["threshold"] == 1.0
    assert [row["num_same"] for row in report["exits"]["tasks"]] == [3, 3]
    assert main(["eval", str(engine), *TASKS, "--early-exit-threshold", "1", "--early-exit-prompts", "--json"]) == 0
    report = json.loads(capsys.readouterr().out)
    assert (report["exits"]["prompts"], report["exits_of_prompts"]["prompts"]) == (False, True)


@pytest.mark.parametrize(
    ("spec", "options", "message"),
    [
        (SWIFTKV, ("--early-exit-threshold", "0.9"), "this engine has no early exit; build it"),
        (EARLY_EXIT, ("--early-exit-threshold", "1.5"), "must be a probability above 0, at most 1"),
        (EARLY_EXIT, ("--early-exit-threshold", "0"), "must be a probability above 0, at most 1"),
        (EARLY_EXIT, ("--early-exit-threshold", "0.9", "--task", "none"), "needs tasks to answer"),
        (EARLY_EXIT, ("--early-exit-prompts",), "--early-exit-prompts goes with --early-exit-threshold; add that"),
    ],
)
def test_what_cannot_be_answered_is_refused(engines: EngineShelf, spec, options, message, capsys) -> None:
    tasks = () if "--task" in options else TASKS
    assert main(["eval", str(engines.engine(spec)), *tasks, *options]) == 1
    assert message in capsys.readouterr().err
