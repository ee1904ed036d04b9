"""Anthropic's Messages API: a request is the chat that it stands for, an answer is the same text in other blocks."""
