"""Training of the tiny teacher and its SwiftKV student in plain torch."""
