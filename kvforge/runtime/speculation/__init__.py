"""Speculative decoding: guess the next tokens cheaply, compute them in one step, keep those that are right.

Drafting (whom to draft for, how much) -> Drafter -> Scheduler -> Runner -> Verifier
"""
