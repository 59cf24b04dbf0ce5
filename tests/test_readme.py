"""What the README shows runs, and what it claims of files is true."""

from __future__ import annotations

import re
from pathlib import Path

import pytest
from click.testing import CliRunner

from hymell_jax.cli import main

ROOT = Path(__file__).parent.parent
README = (ROOT / "README.md").read_text()


def _blocks(language: str) -> list[str]:
    return re.findall(rf"```{language}\n(.*?)```", README, re.S)


@pytest.mark.parametrize("snippet", _blocks("python"), ids=lambda s: s.splitlines()[-1][:40])
def test_python_snippets_run(snippet, capsys):
    exec(compile(snippet, "README.md", "exec"), {})
    assert capsys.readouterr().out


def test_the_first_command_is_the_main_job():
    arguments = re.search(r"bin/hymell (predict [^\n]*)", README).group(1).split()
    assert CliRunner().invoke(main, arguments).exit_code == 0


def test_commands_it_names_exist():
    for name in re.findall(r"^hymell (\w+)", "\n".join(_blocks("sh")), re.M):
        assert name in main.commands, name


def test_links_lead_to_files():
    for target in re.findall(r"\]\((?!http)([^)#]+)\)", README):
        assert (ROOT / target).exists(), target
