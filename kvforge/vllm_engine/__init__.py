"""Engines of target ``vllm``: what one is, where it runs, and vLLM's engine behind the interface of ours.

    settings.py     what an engine's ``vllm.json`` says
    environment.py  the other interpreter: what is in it, and how a process of kvforge is started there
    params.py       sampling parameters in vLLM's words, and what vLLM cannot honour
    engine.py       runs under that interpreter: add, abort, step, statistics
    vllm_core.py    what of vLLM's own names the engine depends on

The first three need neither torch nor vLLM.
"""
