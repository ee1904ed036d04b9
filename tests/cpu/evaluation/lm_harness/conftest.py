"""Models and tasks that lm-evaluation-harness is run with."""

import json
from pathlib import Path

import pytest

from kvforge.manifest import TOKENIZER_DIR
from tests.support.models.engines import PLAIN, SWIFTKV, with_tokens_around
from tests.support.models.shelf import EngineShelf


@pytest.fixture(autouse=True)
def own_environment(monkeypatch: pytest.MonkeyPatch) -> None:
    """The command sets this for its own process."""
    monkeypatch.setenv("TQDM_DISABLE", "1")


@pytest.fixture(scope="package")
def model(engines: EngineShelf):
    from kvforge.evaluation.lm_harness import EngineLM

    return EngineLM(engines.engine(PLAIN))


@pytest.fixture(scope="package")
def reference(engines: EngineShelf):
    from tests.support.lm_harness import Reference

    return Reference(engines.checkpoint(PLAIN))


@pytest.fixture(scope="package")
def chat_model(engines: EngineShelf, tmp_path_factory: pytest.TempPathFactory):
    """A SwiftKV engine whose tokenizer puts `<s>` before a text, and with a chat template."""
    from kvforge.evaluation.lm_harness import EngineLM
    from tests.support.lm_harness import TEMPLATE

    folder = with_tokens_around(engines.engine(SWIFTKV), tmp_path_factory.mktemp("chat") / "engine", before="<s>")
    (folder / TOKENIZER_DIR / "chat_template.jinja").write_text(TEMPLATE)
    return EngineLM(folder)


@pytest.fixture(scope="package")
def tasks(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A folder of three tasks on a data set in it: multiple choice, generation and perplexity."""
    folder = tmp_path_factory.mktemp("tasks")
    rows = [{"question": f"{i} and {i}?", "options": ["one", "two!", "3"], "gold": i % 3} for i in range(8)]
    data = folder / "rows.jsonl"
    data.write_text("".join(json.dumps(row) + "\n" for row in rows))
    common = f"""dataset_path: json
dataset_kwargs: {{data_files: {{test: {data}, train: {data}}}}}
test_split: test
fewshot_split: train
doc_to_text: "Q: {{{{question}}}}\\nA:"
"""
    (folder / "local_choice.yaml").write_text(
        f"task: local_choice\n{common}output_type: multiple_choice\ndoc_to_target: gold\n"
        "doc_to_choice: '{{options}}'\nmetric_list:\n- {metric: acc}\n- {metric: acc_norm}\n"
    )
    (folder / "local_generate.yaml").write_text(
        f"task: local_generate\n{common}output_type: generate_until\ndoc_to_target: '{{{{options[gold]}}}}'\n"
        "generation_kwargs: {until: ['Q:'], max_gen_toks: 6}\nmetric_list:\n- {metric: exact_match}\n"
    )
    rolling = common.replace('"Q: {{question}}\\nA:"', '""')
    (folder / "local_rolling.yaml").write_text(
        f"task: local_rolling\n{rolling}output_type: loglikelihood_rolling\ndoc_to_target: '{{{{question}}}}'\n"
        "metric_list:\n- {metric: bits_per_byte}\n"
    )
    (folder / "local_group.yaml").write_text("group: local_group\ntask: [local_choice, local_rolling]\n")
    return folder
