"""The engine directory: the manifest that compiler and runtime share, and the names of the files in it."""

from kvforge.manifest.calls import GraphCalls, PackageCall, calls_file, load_calls, piece_file, save_calls
from kvforge.manifest.files import (
    MANIFEST_DIGEST,
    MANIFEST_FILE,
    check_not_replaced,
    load_manifest,
    load_plans,
    save_manifest,
    sha256_of,
    target_of,
    verify_files,
)
from kvforge.manifest.manifest import (
    OPERATORS_FILE,
    PLANS_FILE,
    RANK_DIR,
    SCHEMA_VERSION,
    TOKENIZER_DIR,
    WEIGHTS_FILE,
    Manifest,
    graph_names,
    package_file,
)
from model_defs.draft_head import HeadKind

__all__ = [
    "MANIFEST_DIGEST",
    "MANIFEST_FILE",
    "OPERATORS_FILE",
    "PLANS_FILE",
    "RANK_DIR",
    "SCHEMA_VERSION",
    "TOKENIZER_DIR",
    "WEIGHTS_FILE",
    "GraphCalls",
    "HeadKind",
    "Manifest",
    "PackageCall",
    "calls_file",
    "check_not_replaced",
    "graph_names",
    "load_calls",
    "load_manifest",
    "load_plans",
    "package_file",
    "piece_file",
    "save_calls",
    "save_manifest",
    "sha256_of",
    "target_of",
    "verify_files",
]
