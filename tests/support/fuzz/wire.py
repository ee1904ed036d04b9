"""Sends fuzz cases over Triton's protocols and reads every answer there is, within a bound."""

import http.client
import json
import math
from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any

import grpc
import numpy as np
from tritonclient.grpc import service_pb2, service_pb2_grpc

from tests.support.fuzz.cases import Case, Tensor

ANSWER_WITHIN_S = 180.0
OUTPUTS = {"tensorrt_llm": "output_ids", "ensemble": "text_output", "tensorrt_llm_bls": "text_output"}


@dataclass
class Answer:
    """What came back: error messages, the generated tokens or text, whether the request had an end, and what gRPC says
    of a call that failed: the peer, the time and the layer, as in `Socket closed`."""

    errors: list[str] = field(default_factory=list)
    tokens: list[int] = field(default_factory=list)
    text: str = ""
    ended: bool = False
    call: str = ""

    def result(self, model: str) -> tuple[int, ...] | str:
        return tuple(self.tokens) if model == "tensorrt_llm" else self.text


class Grpc:
    """One channel; a stream per request."""

    def __init__(self, url: str) -> None:
        limit = [("grpc.max_receive_message_length", -1), ("grpc.max_send_message_length", -1)]
        self._channel = grpc.insecure_channel(url, options=[*limit, ("grpc.use_local_subchannel_pool", 1)])
        self._stub = service_pb2_grpc.GRPCInferenceServiceStub(self._channel)

    def stream(self, case: Case) -> Answer:
        answer = Answer()
        try:
            for response in self._stub.ModelStreamInfer(iter([grpc_request(case)]), timeout=ANSWER_WITHIN_S):
                if response.error_message:
                    answer.errors.append(response.error_message)
                else:
                    read_response(case.model, response.infer_response, answer)
                final = response.infer_response.parameters["triton_final_response"].bool_param
                answer.ended = answer.ended or bool(response.error_message) or final
        except grpc.RpcError as error:
            _rpc_error(error, answer)
        return answer

    def unary(self, case: Case) -> Answer:
        answer = Answer()
        try:
            read_response(case.model, self._stub.ModelInfer(grpc_request(case), timeout=ANSWER_WITHIN_S), answer)
            answer.ended = True
        except grpc.RpcError as error:
            _rpc_error(error, answer)
        return answer

    def close(self) -> None:
        self._channel.close()


def _rpc_error(error: grpc.RpcError, answer: Answer) -> None:
    assert error.code() is not grpc.StatusCode.DEADLINE_EXCEEDED, f"no answer within {ANSWER_WITHIN_S} s"
    answer.errors.append(error.details())
    answer.call = str(error)
    answer.ended = True


def grpc_request(case: Case) -> Any:
    request = service_pb2.ModelInferRequest(model_name=case.model, id=case.request_id)
    request.parameters["triton_enable_empty_final_response"].bool_param = True
    for name, value in case.parameters.items():
        kind = {bool: "bool_param", int: "int64_param", str: "string_param", float: "double_param"}[type(value)]
        setattr(request.parameters[name], kind, value)
    for tensor in case.tensors:
        request.inputs.add(name=tensor.name, datatype=tensor.datatype, shape=tensor.shape)
        request.raw_input_contents.append(tensor.raw())
    for name in case.outputs:
        request.outputs.add(name=name)
    return request


def read_response(model: str, response: Any, answer: Answer) -> None:
    for output, raw in zip(response.outputs, response.raw_output_contents, strict=False):
        if output.name == OUTPUTS.get(model):
            if model == "tensorrt_llm":
                answer.tokens += np.frombuffer(raw, np.int32).tolist()
            else:
                answer.text += raw[4:].decode()


class Http:
    """One connection, opened anew whenever the server closes it."""

    def __init__(self, url: str) -> None:
        host, port = url.removeprefix("http://").split(":")
        self._connection = http.client.HTTPConnection(host, int(port), timeout=ANSWER_WITHIN_S)

    def post(self, path: str, body: bytes, headers: dict[str, str] | None = None) -> tuple[int, bytes]:
        """(status, body); raises an OSError where none comes."""
        try:
            self._connection.request("POST", path, body, headers or {})
            response = self._connection.getresponse()
            return response.status, response.read()
        except (http.client.HTTPException, ConnectionError):
            self._connection.close()
            self._connection.request("POST", path, body, headers or {})
            response = self._connection.getresponse()
            return response.status, response.read()

    def generate(self, case: Case, body: bytes | None = None, stream: bool = False) -> Answer:
        path = f"/v2/models/{case.model}/generate{'_stream' if stream else ''}"
        status, content = self.post(path, generate_json(case) if body is None else body)
        answer = Answer(ended=True)
        if status != 200 and not content.startswith(b"data:"):
            answer.errors.append(error_of(content, status))
            return answer
        lines = content.split(b"\n\n") if stream else [content]
        for line in lines:
            event = json.loads(line.removeprefix(b"data: ")) if line.strip() else {}
            if "error" in event:
                answer.errors.append(event["error"])
            text = event.get(OUTPUTS.get(case.model, ""), "")
            answer.text += text if isinstance(text, str) else ""
        return answer

    def infer(self, case: Case, body: bytes, header_size: int | None) -> Answer:
        headers = {} if header_size is None else {"Inference-Header-Content-Length": str(header_size)}
        status, content = self.post(f"/v2/models/{case.model}/infer", body, headers)
        return Answer(ended=True, errors=[] if status == 200 else [error_of(content, status)])

    def close(self) -> None:
        self._connection.close()


def error_of(content: bytes, status: int) -> str:
    """The message of an HTTP error; Triton sends some without a body."""
    if not content:
        return f"status {status}"
    try:
        return str(json.loads(content)["error"])
    except (ValueError, KeyError, TypeError):
        return content.decode(errors="replace")


def json_value(tensor: Tensor, value: Any) -> Any:
    if isinstance(value, bytes):
        return value.decode("utf-8", errors="replace")
    return value if not isinstance(value, float) or math.isfinite(value) else str(value)


def generate_json(case: Case) -> bytes:
    """The body of `generate`: one value, or a list of values, by name."""
    body: dict[str, Any] = {**case.parameters}
    if case.request_id:
        body["id"] = case.request_id
    for tensor in case.tensors:
        values = [json_value(tensor, value) for value in tensor.values]
        body[tensor.name] = values[0] if len(values) == 1 and len(tensor.shape) <= 2 else values
    return json.dumps(body).encode()


def infer_json(case: Case, binary: Sequence[bool]) -> tuple[bytes, int]:
    """The body of `infer` and the size of its JSON; `binary` says which tensors follow behind it."""
    inputs, blobs = [], []
    for tensor, behind in zip(case.tensors, binary, strict=True):
        entry: dict[str, Any] = {"name": tensor.name, "datatype": tensor.datatype, "shape": tensor.shape}
        if behind:
            blobs.append(tensor.raw())
            entry["parameters"] = {"binary_data_size": len(blobs[-1])}
        else:
            entry["data"] = [json_value(tensor, value) for value in tensor.values]
        inputs.append(entry)
    head: dict[str, Any] = {"inputs": inputs, "parameters": case.parameters}
    if case.request_id:
        head["id"] = case.request_id
    if case.outputs:
        head["outputs"] = [{"name": name, "parameters": {"binary_data": True}} for name in case.outputs]
    text = json.dumps(head).encode()
    return text + b"".join(blobs), len(text)
