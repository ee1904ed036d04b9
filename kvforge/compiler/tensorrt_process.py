"""A process of its own that builds an engine's plans.

TensorRT's parser ends the process on some errors, two flavours of TensorRT do not live in one, and what a build takes
of memory is given back.
"""

import dataclasses
import json
import os
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

from kvforge.common.child_process import end_with_parent, ending, module_environment
from kvforge.common.errors import BuildError, KvforgeError, first_line
from kvforge.compiler.options import ResolvedOptions
from kvforge.kv_policies import parse

_HUGE_PAGES = "glibc.malloc.hugetlb=1"
"""Weights are copied several times; in small pages a fifth of a build's time went into page faults."""


def build_plans_apart(rank_dir: Path, options: ResolvedOptions, progress: Callable[[str], object]) -> dict[str, Any]:
    """Call ``kvforge.compiler.tensorrt_build.build_plans`` in a process of its own; see there.

    Raises:
        BuildError: also where that process ends without an answer.
    """
    command = [sys.executable, "-m", "kvforge.compiler.tensorrt_process", str(rank_dir)]
    environment = module_environment(GLIBC_TUNABLES=_HUGE_PAGES)
    answer: dict[str, Any] = {}
    with subprocess.Popen(command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, env=environment) as process:
        assert process.stdin is not None and process.stdout is not None
        try:
            with process.stdin:
                process.stdin.write(_as_json(options).encode())
            for line in process.stdout:
                answer = json.loads(line)
                if "stage" in answer:
                    progress(answer["stage"])
        except BrokenPipeError:
            pass  # it ended at once; its code says how
        except BaseException:
            process.kill()
            raise
    if "error" in answer:
        raise BuildError(answer["error"])
    if "built" not in answer:
        raise BuildError(
            f"TensorRT's builder ended without a plan ({ending(process.returncode)}); what it said is above, "
            "and kvforge doctor tells whether it is whole."
        )
    return {name: tuple(value) if isinstance(value, list) else value for name, value in answer["built"].items()}


def _as_json(options: ResolvedOptions) -> str:
    """The target has no prediction, so that all is text and numbers."""
    assert options.prediction is None
    names = [field.name for field in dataclasses.fields(options) if field.name not in ("policy", "prediction")]
    return json.dumps({**{name: getattr(options, name) for name in names}, "policy": str(options.policy)})


def _from_json(text: str) -> ResolvedOptions:
    fields = json.loads(text)
    kv_scales, policy = tuple(map(tuple, fields["kv_scales"])), parse(fields["policy"])
    int8_layers = tuple(fields["int8_layers"])
    return ResolvedOptions(**{**fields, "kv_scales": kv_scales, "policy": policy, "int8_layers": int8_layers})


def main(arguments: list[str]) -> None:
    """Build in the folder that is named, with the options on standard input; answer on standard output, a line each.

    The process ends with the one that wants the plans.
    """
    end_with_parent()
    with os.fdopen(os.dup(1), "w", encoding="utf-8") as answers:
        os.dup2(2, 1)  # nothing that libraries print gets into the answers

        def say(**answer: Any) -> None:
            print(json.dumps(answer), file=answers, flush=True)

        options = _from_json(sys.stdin.read())
        try:
            from kvforge.compiler.tensorrt_build import build_plans

            say(built=build_plans(Path(arguments[0]), options, lambda stage: say(stage=stage)))
        except KvforgeError as error:
            say(error=str(error))
        except MemoryError as error:
            say(error=f"TensorRT's builder has not enough memory ({first_line(error)}); build on a larger machine.")


if __name__ == "__main__":
    main(sys.argv[1:])
