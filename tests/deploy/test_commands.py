"""Every jorca command and option that stands in the guide and the deployed files exists."""

import re

import click
import pytest

from deploy.files import GUIDE, MANIFEST, SLURM, jorca_commands, options_of, parse

COMMANDS = [(path.name, command) for path in (GUIDE, SLURM) for command in jorca_commands(path.read_text())]


def test_commands_are_found():
    text = "x\n  jorca generate a --n 1 \\\n  --stages 2  # why\n`jorca worker` is\nsbatch f jorca worker b\n"
    assert jorca_commands(text) == [
        ["generate", "a", "--n", "1", "--stages", "2"],
        ["worker", "b"],
    ]
    assert {name for name, _ in COMMANDS} == {GUIDE.name, SLURM.name}


def test_an_option_that_does_not_exist_is_seen():
    with pytest.raises(click.NoSuchOption):
        parse(["worker", "checkpoint", "--no-such-thing", "1"])


@pytest.mark.parametrize(("where", "command"), COMMANDS)
def test_a_command_parses(where, command):
    assert parse(command)


def test_options_that_the_guide_names_are_jorcas_or_stand_in_the_files():
    prose = re.sub(r"```.*?```", "", GUIDE.read_text(), flags=re.DOTALL)
    named = set(re.findall(r"`(--[a-z-]+)", prose))
    assert len(named) > 5
    files = SLURM.read_text() + MANIFEST.read_text()
    assert named <= options_of("generate") | set(re.findall(r"--[a-z-]+", files))
