"""What is deployed, as the tests read it: the files, and the jorca commands in them."""

from __future__ import annotations

import re
import shlex
from pathlib import Path
from typing import Any

import click
import yaml

from jorca.cli import main

ROOT = Path(__file__).parents[2]
GUIDE = ROOT / "docs" / "deploy.md"
SLURM = ROOT / "deploy" / "jorca.slurm"
MANIFEST = ROOT / "deploy" / "kubernetes.yaml"


def read_manifest() -> tuple[dict[str, Any], dict[str, Any]]:
    """Returns the JobSet and the NetworkPolicy."""
    jobset, policy = yaml.safe_load_all(MANIFEST.read_text())
    return jobset, policy


def jorca_commands(text: str) -> list[list[str]]:
    """Returns the arguments of every `jorca COMMAND ...` that stands alone, or behind another, on a line."""
    lines = text.replace("\\\n", " ").splitlines()
    found = [re.search(rf"(?<![\w/.`-])jorca ({'|'.join(main.commands)})\b.*", line) for line in lines]
    return [shlex.split(match[0], comments=True)[1:] for match in found if match]


def parse(arguments: list[str]) -> dict[str, Any]:
    """Returns what a jorca command takes its options for, by name; an option that it lacks raises."""
    name, *rest = arguments
    command = main.commands[name]
    parser = command.make_parser(click.Context(command, info_name=name))
    return parser.parse_args(rest)[0]


def options_of(name: str) -> set[str]:
    return {text for option in main.commands[name].params for text in option.opts if text.startswith("--")}
