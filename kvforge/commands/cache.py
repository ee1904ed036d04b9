"""``kvforge cache``: the engines that serving a checkpoint has built."""

import argparse
import json
from dataclasses import asdict
from datetime import datetime

from kvforge.commands.parsers import add_command


def add_parser(subparsers: argparse._SubParsersAction) -> None:
    """Declare the command and its two parts."""
    parser = add_command(
        subparsers,
        "cache",
        help="list or remove the engines that serving a checkpoint has built",
        example="kvforge cache list",
    )
    parts = parser.add_subparsers(dest="part", required=True, metavar="PART")
    listing = add_command(
        parts,
        "list",
        help="list engines with their sizes, checkpoints, options and last use",
        example="kvforge cache list --json",
    )
    listing.add_argument("--json", action="store_true", help="print as JSON")
    listing.set_defaults(run=run_list)
    removing = add_command(
        parts,
        "remove",
        help="remove engines that no process uses",
        example="kvforge cache remove --all",
    )
    which = removing.add_mutually_exclusive_group(required=True)
    which.add_argument("keys", nargs="*", default=[], metavar="KEY", help="key of an engine, or its beginning")
    which.add_argument("--all", action="store_true", help="all engines, and what interrupted builds left")
    removing.set_defaults(run=run_remove)


def run_list(args: argparse.Namespace) -> int:
    """Print the engines of the cache, the last used first."""
    from kvforge.common.byte_sizes import format_bytes
    from kvforge.engine_cache.store import cache_folder, list_entries

    entries = list_entries(cache_folder())
    if args.json:
        print(json.dumps([asdict(entry) for entry in entries], indent=1))
        return 0
    for entry in entries:
        used = datetime.fromtimestamp(entry.last_used).strftime("%Y-%m-%d %H:%M")
        options = ", ".join(f"{name} {value}" for name, value in entry.options.items()) or "default options"
        print(f"{entry.key}  {format_bytes(entry.num_bytes):>10}  used {used}  {entry.source}, {options}")
    total = format_bytes(sum(entry.num_bytes for entry in entries))
    print(f"{len(entries)} engine{'s' * (len(entries) != 1)}, {total} in {cache_folder()}")
    return 0


def run_remove(args: argparse.Namespace) -> int:
    """Remove; raises KvforgeError for a key that is none, and for an engine in use."""
    from kvforge.common.byte_sizes import format_bytes
    from kvforge.engine_cache.store import cache_folder, remove_all, remove_entry

    folder = cache_folder()
    removed = remove_all(folder) if args.all else [entry for key in args.keys for entry in remove_entry(folder, key)]
    size = format_bytes(sum(entry.num_bytes for entry in removed))
    print(f"removed {len(removed)} engine{'s' * (len(removed) != 1)}, {size}")
    return 0
