"""LangChain's agent, over chat completions and over responses, whole and streamed."""

import sys

from langchain.agents import create_agent
from langchain.agents.middleware import wrap_model_call
from langchain_core.messages import ToolMessage
from langchain_openai import ChatOpenAI

from tests.support.clients.agents.steps import LAST_TOKENS, STEPS, TASK, report


@wrap_model_call
def three_calls(request, handler):
    """Asks for a call three times and for none afterwards. Without `strict` the schemas allow further members, and
    random weights would write them for ever."""
    done = sum(isinstance(message, ToolMessage) for message in request.messages)
    if done < len(STEPS):
        return handler(request.override(tool_choice="any", model_settings={"strict": True}))
    return handler(request.override(tool_choice="none", model_settings={"max_tokens": LAST_TOKENS}))


def run(url: str, mode: str) -> list[str]:
    answers = []
    for responses in (False, True):
        for streamed in (False, True):
            greedy = {} if mode == "auto" else {"temperature": 0}
            model = ChatOpenAI(
                model="tiny", base_url=url, api_key="none", max_retries=0, use_responses_api=responses,
                streaming=streamed, **greedy,
            )  # fmt: skip
            middleware = [] if mode == "auto" else [three_calls]
            agent = create_agent(model, list(STEPS), system_prompt="Use the tools.", middleware=middleware)
            asked = {"messages": [{"role": "user", "content": TASK}]}
            answers.append(agent.invoke(asked)["messages"][-1].text)
    return answers


if __name__ == "__main__":
    report(run(*sys.argv[1:]), ("langchain", "langchain-openai", "openai"))
