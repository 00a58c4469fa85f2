"""Plans that are found, and what they bring: search, unbalanced models, slow links.

    python -m benchmarks.pipedream [--parts search,throughput,links] [--pipedream DIR] [--quick] [--json FILE]

search: how long the planner takes, and whether brute force finds anything better (`plan_search`); with --pipedream DIR,
a checkout of msr-fiddle/pipedream, its published optimizer beside ours (`published_optimizer`).
throughput: the automatic plan of an unbalanced model beside all hand cuts, and its prediction (`plan_throughput`).
links: a pipeline beside data parallelism over an emulated slow link, with bytes sent (`slow_links`; needs root).
"""

import argparse
import pathlib
from typing import Any

import torch

from benchmarks import plan_search, plan_throughput, published_optimizer, slow_links
from benchmarks.report import machine, write_json

PARTS = ("search", "throughput", "links")


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--parts", default=",".join(PARTS), help="names, with commas: %(default)s")
    parser.add_argument("--cases", type=int, default=200, help="random models for brute force")
    parser.add_argument("--steps", type=int, default=2, help="steps of each cut in a round")
    parser.add_argument("--repeats", type=int, default=5, help="rounds")
    parser.add_argument("--pipedream", metavar="DIR", type=pathlib.Path, help="with search: run its optimizer, too")
    parser.add_argument("--quick", action="store_true", help="small models, few steps: only to see that it works")
    parser.add_argument("--json", type=pathlib.Path, help="write the figures to this file instead of stdout")
    options = parser.parse_args()
    parts = options.parts.split(",")
    if unknown := {*parts} - {*PARTS}:
        parser.error(f"--parts: {', '.join(sorted(unknown))}: known are {', '.join(PARTS)}")
    if options.pipedream is not None:
        if "search" not in parts:
            parser.error("--pipedream: its optimizer runs beside our search: add search to --parts")
        if not (options.pipedream / published_optimizer.SCRIPT).is_file():
            parser.error(f"--pipedream: {options.pipedream} has no {published_optimizer.SCRIPT}: give a checkout of it")
    cases, steps, repeats = (10, 1, 2) if options.quick else (options.cases, options.steps, options.repeats)
    figures: dict[str, Any] = {
        "benchmark": "pipedream",
        "machine": {**machine(), "torch": torch.__version__},
        "settings": {"cases": cases, "steps": steps, "repeats": repeats},
    }
    if "search" in parts:
        figures["search"] = plan_search.figures(cases, is_quick=options.quick)
        plan_search.show(figures["search"])
    if options.pipedream is not None:
        wanted = published_optimizer.cases(is_quick=options.quick)
        figures["published"] = published_optimizer.figures(options.pipedream, wanted)
        published_optimizer.show(figures["published"])
    if "throughput" in parts:
        figures["throughput"] = {}
        for name, case in plan_throughput.cases(is_quick=options.quick).items():
            figures["throughput"][name] = plan_throughput.figures_of(case, steps, repeats)
            plan_throughput.show(name, case, figures["throughput"][name])
    if "links" in parts:
        figures["links"] = slow_links.figures(is_quick=options.quick)
        slow_links.show(figures["links"])
    write_json(figures, options.json)


if __name__ == "__main__":
    main()
