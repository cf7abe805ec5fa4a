"""``lmcache-ec config``: the settings in effect and where each comes from."""

from __future__ import annotations

import argparse
import json

from lmcache_ec.config import CONFIG_FILE_VARIABLE, EXTRA_SOURCE, SETTINGS, load_ec_engine_config


def add_to(subparsers: argparse._SubParsersAction[argparse.ArgumentParser]) -> None:
    """Declare the subcommand."""
    width = max(map(len, SETTINGS))
    parser = subparsers.add_parser(
        "config",
        help="show the settings in effect and where each comes from",
        description="Show the settings that a server started here would have.",
        epilog="keys:\n" + "\n".join(f"  {k:{width}}  {s.help}" for k, s in SETTINGS.items()),
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    parser.add_argument(
        "--config-file",
        metavar="FILE",
        help=f"LMCache's YAML file (default: what {CONFIG_FILE_VARIABLE} names)",
    )
    parser.add_argument(
        "--set",
        metavar="KEY=VALUE",
        type=_assignment,
        action="append",
        default=[],
        help=f"a setting as if vLLM's {EXTRA_SOURCE} had it; may be repeated",
    )
    parser.set_defaults(run=run)


def run(arguments: argparse.Namespace) -> int:
    """Print one line a key: key, value as JSON, source. Returns 0.

    Raises:
        ConfigError: As ``load_ec_engine_config``.
    """
    config = load_ec_engine_config(dict(arguments.set), config_file=arguments.config_file)
    rows = [("KEY", "VALUE", "SOURCE")]
    rows += [(key, json.dumps(getattr(config, key)), config.sources[key]) for key in SETTINGS]
    key_width, value_width = (max(len(row[column]) for row in rows) for column in (0, 1))
    for key, value, source in rows:
        print(f"{key:{key_width}}  {value:{value_width}}  {source}")
    return 0


def _assignment(text: str) -> tuple[str, str]:
    key, equals, value = text.partition("=")
    if not key or not equals:
        raise argparse.ArgumentTypeError(f"{text!r} is not KEY=VALUE")
    return key, value
