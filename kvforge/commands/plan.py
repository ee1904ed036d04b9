"""``kvforge plan``: what a cut, groups and a cache format save and cost, before anything is trained or built."""

import argparse
import json
import math
import sys
from pathlib import Path

from kvforge.commands.cut_options import add_num_anchors, anchors_of
from kvforge.commands.parsers import add_command, add_revision

_INPUT = 8192


def _positive(text: str) -> float:
    value = float(text)
    if not 0 < value < math.inf:
        raise argparse.ArgumentTypeError(f"{text} is not a positive number")
    return value


def _not_negative(text: str) -> float:
    value = float(text)
    if not 0 <= value < math.inf:
        raise argparse.ArgumentTypeError(f"{text} is not a number of at least 0")
    return value


def _count(text: str) -> int:
    value = int(text)
    if value < 1:
        raise argparse.ArgumentTypeError(f"{text} is not a positive whole number")
    return value


def add_parser(subparsers: argparse._SubParsersAction) -> None:
    """Declare the command."""
    from kvforge.common.number_formats import KV_FORMATS, whole_name
    from kvforge.costs.weights import WEIGHT_BYTES
    from model_defs.hf_config import CUT_KINDS

    parser = add_command(
        subparsers,
        "plan",
        help="show FLOPs, cache bytes and capacity of a model's cuts, from its sizes",
        example="kvforge plan --model llama-3.1-8b --memory-gib 80",
    )
    parser.add_argument(
        "--model",
        required=True,
        help="a preset (llama-3.1-8b, …), config.json, checkpoint or engine; or OWNER/NAME[@REVISION] on the Hub, of "
        "which config.json alone is read",
    )
    add_revision(parser)
    parser.add_argument(
        "--cut", type=int, nargs="+", metavar="K", help="first layer whose K,V come from the single input; several"
    )
    parser.add_argument("--group-size", type=int, nargs="+", metavar="G", help="layers that share a cache; several")
    parser.add_argument(
        "--cut-kind",
        nargs="+",
        choices=CUT_KINDS,
        metavar="KIND",
        help=f"what layers above the cut see of prompts: {', '.join(CUT_KINDS)}; several (default: the model's)",
    )
    add_num_anchors(parser)
    for option, known, number in (("--kv-dtype", KV_FORMATS, "+"), ("--weight-dtype", WEIGHT_BYTES, None)):
        parser.add_argument(
            option, nargs=number, type=whole_name, choices=tuple(known), metavar="D", help=", ".join(known)
        )
    parser.add_argument(
        "--weight-bits",
        type=_positive,
        metavar="B",
        help="bits of a weight on average, where some layers are int8 beside those in 4 bits (default: the engine's)",
    )
    parser.add_argument(
        "--kv-policy",
        metavar="POLICY",
        help="what one keeps of a sequence, as docs/kv-policies.md says (default: the engine's)",
    )
    parser.add_argument(
        "--draft-head", choices=("mtp",), help="count the checkpoint's module too (default: the engine's head)"
    )
    parser.add_argument("--page-size", type=_count, metavar="P", help="tokens of a page (default: the engine's, or 32)")
    parser.add_argument(
        "--input",
        type=_count,
        metavar="N",
        help=f"input tokens of a request (default: {_INPUT}, or as many as the model has positions for)",
    )
    parser.add_argument("--output", type=_count, default=256, metavar="M", help="output tokens of a request")
    parser.add_argument(
        "--memory-gib", type=_positive, nargs="+", default=[], metavar="X", help="memory of a GPU; several"
    )
    parser.add_argument(
        "--reserve-gib",
        type=_not_negative,
        default=0.25,
        metavar="X",
        help="of it for activations and runtime",
    )
    parser.add_argument("--tflops", type=_positive, default=0.0, metavar="Y", help="TFLOP/s of a GPU, for bounds")
    parser.add_argument(
        "--bandwidth-gb-s", type=_positive, default=0.0, metavar="B", help="memory bandwidth of a GPU in 1e9 bytes/s"
    )
    parser.add_argument("--gpus", type=_count, metavar="N", help="GPUs that share the model (default: 1)")
    parser.add_argument(
        "--tensor-parallel-size", type=_count, metavar="N", help="also what each of N ranks keeps; they are the GPUs"
    )
    parser.add_argument(
        "--tokens-per-second", type=_positive, default=0.0, metavar="R", help="a throughput to normalize"
    )
    parser.add_argument(
        "--distillation-tokens",
        type=_positive,
        default=680e6,
        metavar="N",
        help="for the break-even",
    )
    parser.add_argument(
        "--prefix-gib", type=_positive, metavar="X", help="also the tokens of prompts that --prefix-dir keeps in X GiB"
    )
    parser.add_argument("--json", action="store_true", help="print as JSON")
    parser.add_argument("--plot", type=Path, metavar="FILE", help="write a figure (.png, .svg, .pdf)")
    parser.set_defaults(run=run)


def run(args: argparse.Namespace) -> int:
    """Print the plan; raises KvforgeError for a model or a cut that is none."""
    from kvforge.common.errors import KvforgeError
    from kvforge.kv_policies import Need, parse
    from kvforge.planning.load import load_subject
    from kvforge.planning.plan import Fleet, PlannedWorkload, list_variants, make_plan
    from kvforge.planning.plot import plot_plan
    from kvforge.planning.ranks import plan_ranks
    from kvforge.planning.report import describe
    from kvforge.planning.sequence_memory import plan_policy

    subject = load_subject(args.model, args.revision)
    if args.weight_dtype is not None:
        subject = subject.with_weights(args.weight_dtype)
    if args.weight_bits is not None:
        subject = subject.with_bits(args.weight_bits)
    if args.draft_head is not None:
        subject = subject.with_module()
    if subject.head is not None and args.tensor_parallel_size is not None:
        raise KvforgeError("--tensor-parallel-size is for engines without a draft head; leave one of them out.")
    policy = subject.policy if args.kv_policy is None else parse(args.kv_policy)
    positions = subject.model.max_position
    num_input = args.input or max(1, min(_INPUT, positions - args.output))
    if num_input + args.output > positions and not args.quiet:
        print(
            f"kvforge: {num_input} + {args.output} tokens are beyond the {positions} positions of "
            f"{subject.name}, so no engine takes such a request; give a smaller --input or --output.",
            file=sys.stderr,
        )
    page_size = args.page_size or subject.page_size
    work = PlannedWorkload(
        num_input,
        args.output,
        subject.weight_dtype,
        args.distillation_tokens,
        page_size,
        subject.step_tokens,
        subject.head,
        subject.weight_bits,
    )
    size = args.tensor_parallel_size
    if size is not None and args.gpus not in (None, size):
        raise KvforgeError(f"--gpus is {args.gpus} and --tensor-parallel-size {size}; give one of them.")
    num_gpus = size or args.gpus or 1
    fleet = Fleet(tuple(args.memory_gib), args.reserve_gib, args.tflops, args.bandwidth_gb_s, num_gpus)
    variants = list_variants(
        subject.name,
        subject.model,
        args.cut or subject.cuts,
        args.group_size or subject.group_sizes,
        args.kv_dtype or [subject.kv_dtype],
        all_pairs=args.group_size is not None,
        anchors=anchors_of(args.cut_kind or (), args.num_anchors) or [None],
    )
    plan = make_plan(subject.name, subject.model, variants, work, fleet, args.tokens_per_second)
    if args.kv_policy is not None or Need.OWN_CACHE in policy.needs:
        plan["kv_policy"] = plan_policy(policy, variants, work, fleet)
    if size is not None:
        plan["ranks"] = plan_ranks(subject.name, variants, work, fleet, size)
    if args.prefix_gib is not None:
        if any(variant.model.is_blind for variant in variants):
            raise KvforgeError("--prefix-dir does not keep prompts of models with a blind cut; leave out --prefix-gib.")
        if (states := subject.model.linear) is not None:
            raise KvforgeError(
                f"--prefix-dir does not keep prompts of models with {states.title}; leave out --prefix-gib."
            )
        tokens = {row["name"]: int(args.prefix_gib * 2**30 / row["kv_bytes_per_token"]) for row in plan["variants"]}
        plan["prefixes"] = {"gib": args.prefix_gib, "tokens": tokens}
    if args.plot:
        plot_plan(plan, args.plot)
    print(json.dumps(plan, indent=1) if args.json else describe(plan))
    return 0
