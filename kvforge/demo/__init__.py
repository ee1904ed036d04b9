"""`kvforge demo`: a teacher and its SwiftKV student, from checkpoint to streamed answers, side by side."""
