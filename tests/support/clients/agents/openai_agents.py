"""The OpenAI Agents SDK, over chat completions and over responses, whole and streamed."""

import asyncio
import sys

from openai import AsyncOpenAI
from pydantic import BaseModel

from agents import (
    Agent,
    ModelSettings,
    OpenAIChatCompletionsModel,
    OpenAIResponsesModel,
    RunHooks,
    Runner,
    function_tool,
    set_tracing_disabled,
)
from tests.support.clients.agents.steps import STEPS, TASK, Number, calls, report


class Answer(BaseModel):
    """What ends a task where the model's weights are random: a guide writes it."""

    value: Number


class ThreeCalls(RunHooks):
    """Asks for no further call after the third."""

    def __init__(self) -> None:
        self.first = len(calls)

    async def on_tool_end(self, context, agent, tool, result) -> None:
        if len(calls) - self.first >= len(STEPS):
            agent.model_settings = ModelSettings(tool_choice="none", temperature=0)


async def run(url: str, mode: str) -> list[str]:
    client = AsyncOpenAI(base_url=url, api_key="none", max_retries=0)
    answers = []
    for kind in (OpenAIChatCompletionsModel, OpenAIResponsesModel):
        for streamed in (False, True):
            settings = ModelSettings() if mode == "auto" else ModelSettings(tool_choice="required", temperature=0)
            agent = Agent(
                name="calculator", instructions="Use the tools.", model=kind(model="tiny", openai_client=client),
                tools=[function_tool(step) for step in STEPS], model_settings=settings, reset_tool_choice=False,
                output_type=str if mode == "auto" else Answer,
            )  # fmt: skip
            hooks = ThreeCalls() if mode == "forced" else None
            if streamed:
                running = Runner.run_streamed(agent, TASK, hooks=hooks)
                async for _ in running.stream_events():
                    pass
                answers.append(running.final_output)
            else:
                answers.append((await Runner.run(agent, TASK, hooks=hooks)).final_output)
    return [str(answer) for answer in answers]


if __name__ == "__main__":
    set_tracing_disabled(True)
    report(asyncio.run(run(*sys.argv[1:])), ("openai-agents", "openai"))
