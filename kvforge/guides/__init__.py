"""Guides of requests, judged before an engine takes them.

    Judge ── asks ──► worker process: grammar ► compile ► trial ──► Verdict ──► the engine compiles what was accepted

A guide is a stranger's program for llguidance's parser: it may crash it, or hold it for hours. Here it does so in a
process that nobody else needs.
"""
