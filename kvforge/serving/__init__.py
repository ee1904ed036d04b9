"""Serving an engine behind Triton Inference Server.

    tritonserver ── preprocessing   text to token ids                     (preprocess.py)
                 ── tensorrt_llm    thin stub: forwards requests, streams (stub.py, engine_client.py)
                 │     └─ engine process: the scheduler and the graphs    (engine/process.py)
                 ── postprocessing  token ids to text, cancel watch       (postprocess.py)
                 ├─ ensemble        the three above as one model
                 └─ tensorrt_llm_bls  the same by calls between models  (bls.py)

`launcher.TritonServer` starts and stops all of it; `supervisor.Supervisor`, which is `kvforge serve`, starts it again
when a process died, answers /live and /ready, and keeps the OpenAI gateway beside it.
"""
