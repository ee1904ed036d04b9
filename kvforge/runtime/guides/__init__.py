"""Guided decoding: guides are judged before an engine takes them, compiled beside its steps, and followed by sequences.

    Judge ── asks ──► worker process: grammar ► compile ► trial ──► Verdict ──► GuideCompiler ──► Guide of a sequence

A guide is a stranger's program for llguidance's parser: it may crash it, or hold it for hours. The worker is a process
that nobody else needs.
"""
