"""A checkpoint's tokenizer: its files, its chat template, and token sequences to calibrate with."""
