"""The TensorRT session without a GPU: which tensor goes where, which profile runs, and what is said when it cannot.

The engine and its contexts are stand-ins that record calls; that their methods exist is `test_api_names`' business.
"""

from types import SimpleNamespace

import pytest
import torch

from kvforge.common.errors import EngineError


class Context:
    def __init__(self, works=True):
        self.works, self.shapes, self.addresses, self.runs = works, {}, {}, []

    def set_optimization_profile_async(self, profile, stream):
        self.profile = profile
        return True

    def set_device_memory(self, address, size):
        self.memory = (address, size)

    def set_input_shape(self, name, shape):
        self.shapes[name] = shape
        return True

    def set_tensor_address(self, name, address):
        self.addresses[name] = address
        return True

    def execute_async_v3(self, stream):
        self.runs.append(stream)
        return self.works


class Engine:
    """input_ids [T] and a pool [P, 4]; hidden and the pool come out."""

    num_optimization_profiles = 2
    names = ("input_ids", "k_pool_0", "hidden", "k_pool_0_out")
    num_io_tensors = len(names)

    def __init__(self, trt):
        self.trt, self.contexts = trt, []

    def get_tensor_name(self, index):
        return self.names[index]

    def get_tensor_mode(self, name):
        return self.trt.TensorIOMode.INPUT if name in self.names[:2] else self.trt.TensorIOMode.OUTPUT

    def get_tensor_dtype(self, name):
        return self.trt.DataType.INT32 if name == "input_ids" else self.trt.DataType.FLOAT

    def get_tensor_profile_shape(self, name, profile):
        most = (4, 64)[profile]
        return [(1,), (most,), (most,)] if name == "input_ids" else [(1, 4), (8, 4), (100, 4)]

    def get_device_memory_size_for_profile_v2(self, profile):
        return (1000, 3000)[profile]

    def create_execution_context(self, strategy):
        self.contexts.append(Context())
        return self.contexts[-1]


@pytest.fixture
def engine(trt):
    return Engine(trt)


@pytest.fixture
def plan(engine, tmp_path):
    from kvforge.runtime.sessions.tensorrt_plan import Plan, PlanLogger

    path = tmp_path / "lower.plan"
    path.write_bytes(b"plan")
    plan = Plan(path, SimpleNamespace(deserialize_cuda_engine=lambda data: engine), PlanLogger())
    plan.make_contexts(torch.empty(plan.workspace_bytes, dtype=torch.uint8), stream=5)
    return plan


def tensors(tokens: int, pages: int = 8):
    return torch.zeros(tokens, dtype=torch.int32), torch.zeros(pages, 4), torch.zeros(tokens, 2)


def run(plan, tokens, pages=8):
    from kvforge.runtime.sessions.tensorrt import bind

    input_ids, pool, hidden = tensors(tokens, pages)
    bound = bind(plan, "lower", {"input_ids": input_ids}, {"k_pool_0": pool}, [hidden])
    plan.run(*bound, stream=5, nothing=77)
    return input_ids, pool, hidden


def test_a_pool_has_one_address_in_and_out(plan, engine):
    input_ids, pool, hidden = run(plan, tokens=3)
    context = engine.contexts[0]
    assert context.addresses == {
        "input_ids": input_ids.data_ptr(),
        "k_pool_0": pool.data_ptr(),
        "hidden": hidden.data_ptr(),
        "k_pool_0_out": pool.data_ptr(),
    }
    assert context.shapes == {"input_ids": (3,), "k_pool_0": (8, 4)} and context.runs == [5]


def test_contexts_share_the_largest_workspace(plan, engine):
    assert plan.workspace_bytes == 3000
    assert {context.memory for context in engine.contexts} == {(engine.contexts[0].memory[0], 3000)}
    assert [context.profile for context in engine.contexts] == [0, 1]


def test_the_first_profile_that_admits_the_step(plan, engine):
    run(plan, tokens=4)
    run(plan, tokens=5)
    assert [len(context.runs) for context in engine.contexts] == [1, 1]


def test_a_step_beyond_the_limits(plan):
    with pytest.raises(EngineError, match="not built for a step of this size"):
        run(plan, tokens=65)


def test_empty_tensors_have_an_address(plan, engine):
    pool = torch.zeros(8, 4)
    hidden = torch.zeros(0, 2)
    plan.run({"input_ids": torch.zeros(2, dtype=torch.int32), "k_pool_0": pool}, {"hidden": hidden}, 5, nothing=77)
    assert engine.contexts[0].addresses["hidden"] == 77


def test_repeated_runs_have_a_context_of_their_own(trt, engine, tmp_path, monkeypatch):
    """Where TensorRT records runs itself: steps of generated tokens that are repeated, in the first profile alone."""
    from kvforge.runtime.sessions import tensorrt_plan

    made, kept = [], []

    class Contexts:
        def make(self, repeated):
            made.append(repeated)
            return engine.create_execution_context(None)

        def keep(self):
            kept.append(True)

    flavour = SimpleNamespace(contexts=lambda *_: Contexts(), RECORDS_RUNS=True)
    monkeypatch.setattr(tensorrt_plan, "flavour", lambda: flavour)
    path = tmp_path / "lower.plan"
    path.write_bytes(b"plan")
    runtime = SimpleNamespace(deserialize_cuda_engine=lambda data: engine)
    plan = tensorrt_plan.Plan(path, runtime, tensorrt_plan.PlanLogger())
    plan.make_contexts(torch.empty(plan.workspace_bytes, dtype=torch.uint8), stream=5)
    assert made == [False, False, True] and [one.profile for one in engine.contexts] == [0, 1, 0]
    assert len({one.memory for one in engine.contexts}) == 1
    run(plan, tokens=3)
    plan.is_repeated = True
    run(plan, tokens=3)
    run(plan, tokens=5)
    assert [len(one.runs) for one in engine.contexts] == [1, 1, 1] and not kept
    plan.keep_kernels()
    assert kept == [True]


def test_a_failed_run_is_said(plan, engine):
    for context in engine.contexts:
        context.works = False
    plan._logger.log(engine.trt.ILogger.Severity.ERROR, "out of memory\nmore")
    with pytest.raises(EngineError, match=r"failed \(out of memory\)"):
        run(plan, tokens=3)


def test_another_engines_pools(plan):
    from kvforge.runtime.sessions.tensorrt import bind

    input_ids, pool, hidden = tensors(3)
    step = {"input_ids": input_ids}
    for pools, message in (
        ({"k_pool_0": pool, "v_pool_0": pool}, "the plan of lower has no tensor v_pool_0"),
        ({}, "the plan of lower has a tensor k_pool_0 that this runtime does not know"),
        ({"k_pool_0": pool.to(torch.int8)}, r"k_pool_0 of lower is torch\.float32 in the plan, not torch\.int8"),
    ):
        with pytest.raises(EngineError, match=message):
            bind(plan, "lower", step, pools, [hidden])
    plan.outputs = ("hidden",)
    with pytest.raises(EngineError, match="has no tensor k_pool_0_out"):
        bind(plan, "lower", step, {"k_pool_0": pool}, [hidden])


def test_inputs_that_a_graph_does_not_use(plan):
    from kvforge.runtime.sessions.tensorrt import bind

    input_ids, pool, hidden = tensors(3)
    step, pools = {"input_ids": input_ids, "positions": input_ids}, {"k_pool_0": pool, "position_0": pool}
    inputs, outputs = bind(plan, "lower", step, pools, [hidden])
    assert list(inputs) == ["input_ids", "k_pool_0"] and list(outputs) == ["hidden", "k_pool_0_out"]


def test_a_plan_of_another_gpu(trt, tmp_path):
    from kvforge.runtime.sessions.tensorrt_plan import Plan, PlanLogger

    path, logger = tmp_path / "upper.plan", PlanLogger()
    path.write_bytes(b"plan")
    logger.log(trt.ILogger.Severity.ERROR, "Engine plan file is not compatible")
    with pytest.raises(EngineError, match=r"upper\.plan does not load .*not compatible.*kvforge build"):
        Plan(path, SimpleNamespace(deserialize_cuda_engine=lambda data: None), logger)


def engine_of_plans(**fields):
    import plugins

    operators = {operator.name: operator.version for operator in plugins.OPERATORS.values()}
    return SimpleNamespace(operators=operators, graphs=("lower", "upper"), **fields)


def test_no_gpu(trt, monkeypatch, tmp_path):
    from kvforge.runtime.sessions.tensorrt import load_session

    monkeypatch.setattr(torch.cuda, "is_available", lambda: False)
    (tmp_path / "rank0").mkdir()
    for graph in ("lower", "upper"):
        (tmp_path / "rank0" / f"{graph}.plan").touch()
    with pytest.raises(EngineError, match="runs on an NVIDIA GPU and there is none"):
        load_session(tmp_path, engine_of_plans(plan_builder=None))


@pytest.mark.parametrize("has_gpu", [True, False])
def test_an_engine_without_plans(trt, monkeypatch, tmp_path, has_gpu):
    from kvforge.runtime.sessions.tensorrt import load_session

    monkeypatch.setattr(torch.cuda, "is_available", lambda: has_gpu)
    with pytest.raises(EngineError, match=r"has no lower\.plan: it was exported where TensorRT is not installed"):
        load_session(tmp_path, engine_of_plans())
