"""An MCP client whose server has the tools of the task among forty others, with schemas as MCP servers, zod and
pydantic write them. The conversation is that of the official OpenAI client."""

import asyncio
import json
import re
import sys
from pathlib import Path
from typing import Any

import mcp.types as types
from mcp.server.lowlevel import Server
from mcp.shared.memory import create_connected_server_and_client_session
from openai import AsyncOpenAI
from pydantic import TypeAdapter

from tests.support.clients.agents.steps import LAST_TOKENS, STEPS, TASK, report

SCHEMAS = json.loads(Path(__file__).parents[1].joinpath("schemas.json").read_text(encoding="utf-8"))
NAMES = {re.sub(r"\W+", "_", title, flags=re.ASCII).strip("_")[:60]: schema for title, schema in SCHEMAS.items()}


def make_server() -> Server:
    server: Server = Server("forty")
    steps = {step.__name__: step for step in STEPS}
    given = [
        types.Tool(name=name, description=step.__doc__, inputSchema=TypeAdapter(step).json_schema())
        for name, step in steps.items()
    ]
    given += [types.Tool(name=name, description="d", inputSchema=schema) for name, schema in NAMES.items()]

    @server.list_tools()
    async def list_tools() -> list[types.Tool]:
        return given

    @server.call_tool()
    async def call_tool(name: str, arguments: dict[str, Any]) -> list[types.TextContent]:
        return [types.TextContent(type="text", text=str(steps[name](**arguments)))]

    return server


async def converse(session: Any, client: AsyncOpenAI, mode: str) -> str:
    listed = (await session.list_tools()).tools
    tools = [
        {"type": "function", "function": {"name": t.name, "description": t.description, "parameters": t.inputSchema}}
        for t in listed
    ]
    assert len(tools) == len(STEPS) + len(SCHEMAS)
    messages: list[Any] = [{"role": "user", "content": TASK}]
    for turn in range(len(STEPS) + 1):
        more: dict[str, Any] = {}
        if mode == "forced" and turn < len(STEPS):
            more = {"tool_choice": {"type": "function", "function": {"name": STEPS[turn].__name__}}}
        elif mode == "forced":
            more = {"tool_choice": "none", "max_tokens": LAST_TOKENS}
        message = (
            (await client.chat.completions.create(model="tiny", messages=messages, tools=tools, temperature=0, **more))
            .choices[0]
            .message
        )
        if not message.tool_calls:
            return message.content or ""
        messages.append(message)
        for call in message.tool_calls:
            result = await session.call_tool(call.function.name, json.loads(call.function.arguments))
            assert not result.isError, result
            messages.append({"role": "tool", "tool_call_id": call.id, "content": result.content[0].text})
    raise AssertionError("the model calls on")


async def run(url: str, mode: str) -> list[str]:
    client = AsyncOpenAI(base_url=url, api_key="none", max_retries=0)
    async with create_connected_server_and_client_session(make_server()) as session:
        return [await converse(session, client, mode)]


if __name__ == "__main__":
    report(asyncio.run(run(*sys.argv[1:])), ("mcp", "openai"))
