"""``kvforge cache``: the engines that serving a checkpoint has built, and the prefixes that servers keep in files."""

import argparse
import json
from dataclasses import asdict
from datetime import datetime
from pathlib import Path

from kvforge.commands.parsers import add_command


def add_parser(subparsers: argparse._SubParsersAction) -> None:
    """Declare the command and its parts."""
    parser = add_command(
        subparsers,
        "cache",
        help="list or remove the engines that serving a checkpoint has built, or prompts kept by --prefix-dir",
        example="kvforge cache list",
    )
    parts = parser.add_subparsers(dest="part", required=True, metavar="PART")
    listing = add_command(
        parts,
        "list",
        help="list engines with their sizes, checkpoints, options and last use, or what is in --prefix-dir",
        example="kvforge cache list --json",
    )
    listing.add_argument("--json", action="store_true", help="print as JSON")
    listing.add_argument("--prefix-dir", type=Path, metavar="DIR", help="list the prefixes there (default: engines)")
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
    for name, text, run in (
        ("clear", "remove all prefixes in a folder, also while servers use it", run_clear),
        ("save", "pack the prefixes in a folder into a tar archive", run_save),
        ("load", "add the prefixes of such an archive to a folder", run_load),
    ):
        part = add_command(parts, name, help=text, example=f"kvforge cache {name} DIR{' FILE.tar' * (name != 'clear')}")
        part.add_argument("prefix_dir", type=Path, metavar="DIR", help="what --prefix-dir names")
        if name != "clear":
            part.add_argument("archive", type=Path, metavar="FILE", help="the archive")
        part.set_defaults(run=run)


def run_list(args: argparse.Namespace) -> int:
    """Print the engines of the cache, the last used first."""
    from kvforge.common.byte_sizes import format_bytes
    from kvforge.engine_cache.store import cache_folder, list_entries

    if args.prefix_dir is not None:
        return _list_prefixes(args)
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


def _list_prefixes(args: argparse.Namespace) -> int:
    from kvforge.common.byte_sizes import format_bytes
    from kvforge.prefix_store.inventory import list_prefixes

    engines = list_prefixes(args.prefix_dir)
    if args.json:
        names = ("key", "about", "num_pages", "num_bytes", "last_used")
        print(json.dumps([{name: getattr(engine, name) for name in names} for engine in engines], indent=1))
        return 0
    for engine in engines:
        used = datetime.fromtimestamp(engine.last_used).strftime("%Y-%m-%d %H:%M")
        about = engine.about
        num_tokens = engine.num_pages * about.get("page_size", 0)
        print(
            f"{engine.key}  {format_bytes(engine.num_bytes):>10}  {num_tokens} tokens  used {used}  "
            f"{about.get('model', 'unknown')}, {about.get('kv_dtype', '')} {about.get('kv_policy', '')}"
        )
    total = format_bytes(sum(engine.num_bytes for engine in engines))
    print(f"prefixes of {len(engines)} engine{'s' * (len(engines) != 1)}, {total} in {args.prefix_dir}")
    return 0


def run_clear(args: argparse.Namespace) -> int:
    """Remove; raises KvforgeError for a folder that cannot be read. What is no page stays."""
    from kvforge.prefix_store.inventory import list_prefixes

    paths = [path for engine in list_prefixes(args.prefix_dir) for path in engine.paths]
    for path in paths:
        path.unlink(missing_ok=True)
    print(f"removed {len(paths)} pages")
    return 0


def run_save(args: argparse.Namespace) -> int:
    """Pack; raises KvforgeError where the archive is there already."""
    from kvforge.prefix_store.inventory import save_prefixes

    print(f"saved {save_prefixes(args.prefix_dir, args.archive)} pages to {args.archive}")
    return 0


def run_load(args: argparse.Namespace) -> int:
    """Unpack; raises KvforgeError for a file that is no archive."""
    from kvforge.prefix_store.inventory import load_prefixes

    num_loaded, num_refused = load_prefixes(args.prefix_dir, args.archive)
    print(f"loaded {num_loaded} pages" + f"; left out {num_refused} that are damaged or no pages" * (num_refused > 0))
    return 0
