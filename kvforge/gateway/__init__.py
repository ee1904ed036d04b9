"""An HTTP server in front of Triton that speaks OpenAI's API and Anthropic's: a process of its own.

    HTTP request -> fields, sampling, prompts -> Triton over gRPC (token ids) -> text -> JSON or SSE

`gateway_command(GatewayOptions(...))` is the command line that starts it; nothing heavy is imported for that.
"""

from kvforge.gateway.options import GatewayOptions, gateway_command

__all__ = ["GatewayOptions", "gateway_command"]
