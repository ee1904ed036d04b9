"""The GPU benchmarks' arithmetic, options and tables, and one run of each on the CPU."""

import json
from pathlib import Path

import pytest
import torch

from kvforge.runtime.config import resolve_config
from kvforge.runtime.engine import LLMEngine
from kvforge.runtime.requests.params import SamplingParams
from perf.gpu import costs, llama8b, models, operators, shadowkv
from perf.gpu.attention import Case
from perf.gpu.llama8b import LLAMA_8B, TINY, GreedySession, parse_arguments, run_requests
from perf.gpu.llama8b import Case as Load8B
from perf.gpu.models import VARIANTS, Limits
from perf.harness.files import ROUNDED
from perf.shadowkv.decode import Load, kept
from tests.support.sessions.eager import EagerSession

LIMITS = Limits(max_num_seqs=4, max_num_tokens=64, max_seq_len=128, page_size=16)


def manifest(shape, name, target="cpu"):
    config = models.model_config(shape, VARIANTS[name])
    return models.manifest_of(config, models.resolved_options(config, VARIANTS[name], LIMITS, target))


def test_shapes_are_llama_8b_and_its_cuts():
    plain, cut, groups, fp8 = (manifest(LLAMA_8B, name) for name in VARIANTS)
    assert plain.num_parameters == 8_030_261_248  # Llama-3.1-8B's own
    assert (plain.model.cut, cut.model.cut, groups.model.cut) == (32, 16, 16)
    assert (plain.model.num_owners, cut.model.num_owners, groups.model.num_owners) == (32, 32, 20)
    assert plain.kv_bytes_per_token == 131072
    assert fp8.kv_element_bytes_per_token * 2 == groups.kv_bytes_per_token
    assert fp8.kv_scale_bytes_per_token == 20 * 2 * 8 * 4


def test_normalized_rate_is_the_papers():
    """8B, 8K inputs on an H100: 30K tokens/s are 480 TFLOPS (arXiv 2410.03960, abstract)."""
    assert costs.normalized_tflops(8_000_000_000, 30_000) == pytest.approx(480)


@pytest.mark.parametrize("name", VARIANTS)
def test_flops_agree_with_the_planner_and_a_count_by_hand(name):
    made = manifest(LLAMA_8B, name)
    context = 8192
    prompt = costs.prompt_flops(made, context)
    skipped = made.prefill_flops_per_token(context) * context
    last = costs.decode_flops(made, context)
    assert skipped < prompt < skipped + last
    # The last token's share below the cut is in both: what is added is the layers above, and the vocabulary.
    hidden, inner, q_dim = 4096, 14336, 4096
    above = (32 - made.model.cut) * (
        4 * hidden * q_dim + 6 * hidden * inner + 4 * q_dim * context
    ) + 2 * hidden * 128256
    assert prompt == pytest.approx(skipped + above)
    kv = made.model.num_owners * 4 * hidden * 1024
    assert last == pytest.approx(
        32 * (4 * hidden * q_dim + 6 * hidden * inner + 4 * q_dim * context) + kv + 2 * hidden * 128256
    )


def test_bytes_of_a_decode_token():
    plain, fp8 = manifest(LLAMA_8B, "baseline"), manifest(LLAMA_8B, "cut16-4way-fp8")
    assert costs.kv_read_bytes(plain, 1000) == 1000 * plain.kv_bytes_per_token
    assert costs.kv_read_bytes(fp8, 1) == 32 * 2 * 8 * (128 + 4)  # every layer reads, owners are fewer
    norms = (2 * 32 + 1) * 4096
    assert plain.weight_bytes == 2 * (8_030_261_248 - 128256 * 4096 - norms)


TABLES = 0.01
"""What a cache has beside its elements: pages that are not full, and tables of places and counts."""


def test_floors_are_below_what_the_paper_measured():
    """On an H100's 989 TFLOP/s the baseline cannot reach the paper's rate of the cut model at 8K inputs."""
    rates = {"bf16_gemm_flops_per_s": 989e12, "copy_bytes_per_s": 3.35e12}
    case = Load8B(8192, 256, 100, 50)
    rate = {}
    for name in ("baseline", "cut16-4way"):
        floor = llama8b.floors(manifest(LLAMA_8B, name), case, rates)
        rate[name] = 100 * case.length / (floor["flops_floor_s"] + floor["kv_bytes_floor_s"])
        assert 0 < floor["ttft_floor_s"] < 0.2 and 3 < 1000 * floor["tpot_floor_s"] < 6
    assert 30_000 < rate["baseline"] < 45_000 < rate["cut16-4way"]


def test_arguments(tmp_path, monkeypatch, capsys):
    monkeypatch.setenv("OUT", str(tmp_path))
    options = parse_arguments(["--device", "cpu", "--tiny"])
    assert options.json == tmp_path / "llama8b.json" and options.variants == list(VARIANTS)
    options.subset = True
    assert [case.input_tokens for case in llama8b.selected_cases(options)] == [96]
    options.inputs = [5]
    with pytest.raises(SystemExit, match="no case of"):
        llama8b.selected_cases(options)
    for arguments in (["--device", "cpu"], ["--variants", "cut99"]):
        with pytest.raises(SystemExit):
            parse_arguments(arguments)
    if not torch.cuda.is_available():
        with pytest.raises(SystemExit):
            parse_arguments([])
        assert "torch sees no GPU" in capsys.readouterr().err


def test_tiny_run_on_the_cpu(tmp_path, full, capfd):
    """The same path as on a GPU: compile, random weights, scheduler, floors, table and JSON."""
    if not full:
        pytest.skip("compiles a model: --full")
    names = list(VARIANTS)
    arguments = ["--device", "cpu", "--tiny", "--work", str(tmp_path / "work"), "--json", str(tmp_path / "report.json")]
    llama8b.main([*arguments, "--inputs", "48", "--variants", *names])
    assert "Warning" not in capfd.readouterr().err
    report = json.loads((tmp_path / "report.json").read_text())
    assert [row["variant"] for row in report["rows"]] == names
    for row in report["rows"]:
        assert row["combined_tok_s"] == pytest.approx(6 * 56 / row["total_s"], rel=3 * ROUNDED)
        assert 0 < row["ttft_s"] <= row["loaded_ttft_s"] * 50 and row["tpot_s"] > 0
    text = llama8b.table(report["rows"])
    assert len(text.splitlines()) == 1 + len(names) and len({len(line) for line in text.splitlines()}) == 1
    _same_tokens_as_the_engine(tmp_path / "work" / "cpu" / "cut16-4way-fp8")


def _same_tokens_as_the_engine(folder: Path) -> None:
    """The benchmark's loop draws what LLMEngine's sampler draws."""
    config, options = llama8b._model("cut16-4way-fp8", TINY, "cpu")
    made = models.manifest_of(config, options)
    session = models.open_session(made, models.random_weights(config, options), folder)
    drawn: list[list[int]] = []

    class Spy(GreedySession):
        def upper(self, step, pools):
            tokens = super().upper(step, pools)
            drawn.append(tokens.tolist())
            return tokens

    runtime = resolve_config(made, 0, num_pages=16, max_num_seqs=1, enable_prefix_cache=False)
    run_requests(Spy(session, session.allocate_pools(16)), runtime, Load8B(48, 6, 1, 1), seed=3)
    prompt = llama8b.np.random.default_rng(3).integers(3, made.vocab_size, 48, dtype="int32").tolist()
    engine = LLMEngine(session=session, num_pages=16)
    engine.add_request("r", prompt, SamplingParams(temperature=0.0, max_tokens=6, ignore_eos=True))
    tokens = []
    while engine.has_unfinished():
        tokens += [token for output in engine.step() for token in output.new_token_ids]
    assert [row[0] for row in drawn] == tokens


def test_operators_run_on_the_cpu(tmp_path, capsys):
    operators.main(["--device", "cpu", "--tiny", "--json", str(tmp_path / "report.json")])
    report = json.loads((tmp_path / "report.json").read_text())
    assert len(report["rows"]) == 6 and all(row["share_of_floor"] > 0 for row in report["rows"])
    exact = report["rows"][0]
    assert exact["flash_s"] > 0 and set(exact["without"]) == {"cudnn", "fa3"}  # each said why
    lines = capsys.readouterr().out.splitlines()
    table = lines[lines.index("") + 1 :]
    assert len(table) == 7 and len({len(line) for line in table}) == 1


def test_attention_costs():
    assert Case(1, 1, 10, "bf16").flops == 4 * 32 * 128 * 10
    assert Case(3, 10, 10, "bf16").flops == 3 * 4 * 32 * 128 * 55
    assert Case(2, 1, 10, "bf16").num_bytes == 2 * (2 * 10 * 8 * 256 + 2 * 32 * 256)
    assert Case(1, 1, 10, "int8").num_bytes == 2 * 10 * 8 * (128 + 4) + 2 * 32 * 256


def test_tiny_shadowkv_run_on_the_cpu(tmp_path, capsys, monkeypatch, full):
    """The same path as on a GPU: full attention and ShadowKV, synthetic caches, floors, ratio, table and JSON. Graphs
    are compiled with --full only."""
    if not full:
        monkeypatch.setattr(models, "compile_graphs", lambda config, options, folder: None)
        monkeypatch.setattr(models, "open_session", lambda manifest, weights, _: EagerSession(*made(manifest), weights))

    def made(manifest):
        variant = models.Variant(kv_policy=str(manifest.policy))
        config = models.model_config(TINY, variant)
        limits = shadowkv.limits_of(shadowkv.TINY_CASES, "cpu")
        return config, models.resolved_options(config, variant, limits, "cpu")

    report = tmp_path / "report.json"
    path = ["--work", str(tmp_path / "work"), "--json", str(report)]
    shadowkv.main(["--device", "cpu", "--tiny", "--steps", "2", *path])
    exact, missing, hitting = json.loads(report.read_text())["rows"]
    assert (exact["batch"], missing["batch"], missing["measured_hit_rate"]) == (2, 3, 0.0)
    assert 0.4 < hitting["measured_hit_rate"] < 0.8 and hitting["floor_s"] < missing["floor_s"]
    assert missing["ratio"] == pytest.approx(missing["tok_s"] / exact["tok_s"], rel=3 * ROUNDED)
    assert missing["device_cache_bytes"] == pytest.approx(missing["formula_device_bytes"], rel=TABLES)
    assert missing["host_cache_bytes"] * 4 == missing["formula_host_bytes"]  # four layers share it
    lines = capsys.readouterr().out.splitlines()
    assert len({len(line) for line in lines if line.startswith(("engine", "full", "shadowkv-64 "))}) == 1


def test_shadowkv_shapes_are_the_papers():
    """At 122K a sequence of 8B takes 15.25 GiB in full and under a sixth of that with ShadowKV."""
    limits = shadowkv.limits_of(shadowkv.CASES, "cuda")
    assert limits.max_num_seqs == 48 and limits.max_seq_len <= LLAMA_8B["max_position_embeddings"]
    case, made = shadowkv.CASES[1], {}
    for policy in ("full", str(case.policy)):
        config = models.model_config(LLAMA_8B, models.Variant(kv_policy=policy))
        options = models.resolved_options(config, models.Variant(kv_policy=policy), limits, "cpu")
        made[policy] = models.manifest_of(config, options)
    load = Load(case.context, 1)
    full, sparse = (kept(one, load)[0] / 2**30 for one in made.values())
    assert full == pytest.approx(15.25, rel=TABLES) and sparse < full / 6
    rates = {"copy_bytes_per_s": 4e12, "host_copy_bytes_per_s": 5e10}
    steps = [
        shadowkv.floor_s(one, Load(case.context, batch), 0.6, rates) / batch
        for one, batch in zip(made.values(), (case.full_batch, case.batch), strict=True)
    ]
    assert steps[0] / steps[1] > 1


def test_shadowkv_arguments(monkeypatch, capsys):
    monkeypatch.delenv("OUT", raising=False)
    assert shadowkv.parse_arguments(["--device", "cpu", "--tiny"]).cases == shadowkv.TINY_CASES
    for arguments in (["--device", "cpu"], ["--device", "cpu", "--tiny", "--contexts", "5"]):
        with pytest.raises(SystemExit):
            shadowkv.parse_arguments(arguments)
    assert "there are cases of [400] tokens only" in capsys.readouterr().err
