"""What one of Triton's Python models is started with."""

import json
from dataclasses import dataclass
from pathlib import Path

from kvforge.serving.logs.request_log import configure
from kvforge.serving.options import ModelOptions, read_serve_file
from kvforge.serving.processes.facts import server_of_stub
from kvforge.serving.processes.stacks import show_when_asked
from kvforge.serving.processes.watchdog import end_with_server


@dataclass(frozen=True)
class TritonConfig:
    """The model's config.pbtxt, where `parameters` are what users of TensorRT-LLM know, and the server's options."""

    name: str
    version: str
    inputs: tuple[str, ...]
    max_batch_size: int
    decoupled: bool
    parameters: dict[str, str]
    run_dir: Path
    options: ModelOptions

    @classmethod
    def of(cls, args: dict[str, str]) -> "TritonConfig":
        """From the arguments that Triton gives a model. Raises EngineError where `serve.json` is damaged."""
        config = json.loads(args["model_config"])
        parameters = {key: value["string_value"] for key, value in config["parameters"].items()}
        run_dir = Path(parameters["run_dir"])
        return cls(
            name=args["model_name"],
            version=args["model_version"],
            inputs=tuple(tensor["name"] for tensor in config["input"]),
            max_batch_size=config["max_batch_size"],
            decoupled=config.get("model_transaction_policy", {}).get("decoupled", False),
            parameters=parameters,
            run_dir=run_dir,
            options=read_serve_file(run_dir),
        )


def begin_model(args: dict[str, str]) -> TritonConfig:
    """The same, first of all in a model's process, which from now on ends with the server, and logs as it does."""
    end_with_server(server_of_stub())
    show_when_asked()
    config = TritonConfig.of(args)
    configure(config.options.log_format, config.options.log_level)
    return config
