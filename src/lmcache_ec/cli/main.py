"""The ``lmcache-ec`` command. A subcommand is one module of this package with ``add_to``."""

from __future__ import annotations

import argparse
import importlib.metadata
import logging
import sys
from typing import TYPE_CHECKING

from lmcache_ec.cli import config
from lmcache_ec.errors import LMCacheECError

if TYPE_CHECKING:
    from collections.abc import Callable, Sequence

COMMANDS = (config,)


def main(argv: Sequence[str] | None = None) -> int:
    """Run one subcommand.

    Args:
        argv: Arguments without the program's name; those of this process if None.

    Returns:
        The exit status: 0 on success, 2 when a setting cannot be used, with one line on stderr.

    Raises:
        SystemExit: The arguments are wrong (2), or ask for help or the version (0).
    """
    parser = argparse.ArgumentParser(
        prog="lmcache-ec", description="Look after the encoder cache of vLLM."
    )
    version = importlib.metadata.version("lmcache-ec")
    parser.add_argument("--version", action="version", version=f"lmcache-ec {version}")
    subparsers = parser.add_subparsers(title="commands", required=True, metavar="COMMAND")
    for command in COMMANDS:
        command.add_to(subparsers)
    arguments = parser.parse_args(argv)
    logging.basicConfig(format="lmcache-ec: %(message)s", level=logging.INFO, stream=sys.stderr)
    run: Callable[[argparse.Namespace], int] = arguments.run
    try:
        return run(arguments)
    except LMCacheECError as error:
        print(f"lmcache-ec: {error}", file=sys.stderr)
        return 2
