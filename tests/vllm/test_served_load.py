"""Load generators and OpenAI's clients against an engine of target ``vllm``: the tests of tests/e2e."""

from tests.e2e.test_aiperf import test_aiperf_gets_every_answer  # noqa: F401 - collected here, with this folder's fixtures
from tests.e2e.test_openai_client import (  # noqa: F401
    client,
    gateway,
    test_cached_tokens,
    test_chat,
    test_closing_a_stream_frees_the_pages,
    test_completions_are_those_of_the_engine_offline,
    test_errors,
    test_forced_calls,
    test_free_answers_with_tools,
    test_going_away_without_a_stream_frees_the_pages,
    test_guides_that_cannot_be_used,
    test_json_schema,
    test_logit_bias_and_stop_tokens,
    test_many_at_once,
    test_regex_and_choice,
    test_responses,
    test_responses_with_calls,
    test_schemas_that_no_guide_takes,
    test_several_calls_and_a_conversation_with_them,
    test_stop_strings,
    test_stop_tokens_are_those_of_the_engine_offline,
    tool_client,
)
from tests.e2e.test_perf_analyzer import test_every_request_gets_all_its_tokens  # noqa: F401
