"""The `hymell` command. Results go to stdout, everything else to stderr; errors exit with 2.

The commands stand in the `cli_*` modules; what needs JAX or pandas is imported inside them, so that
`--help` is instant.
"""

from __future__ import annotations

from typing import Any

import click

from hymell_jax import (
    cli_compare,
    cli_data,
    cli_predict,
    cli_profile,
    cli_rank,
    cli_report,
    cli_search,
    compile_cache,
)
from hymell_jax.version import __version__


class _Group(click.Group):
    """Turns the package's ValueErrors into one sentence and exit status 2."""

    def resolve_command(self, ctx: click.Context, args: list[str]) -> Any:
        name, command, rest = super().resolve_command(ctx, args)
        compile_cache.configure(name)
        return name, command, rest

    def invoke(self, ctx: click.Context) -> Any:
        try:
            return super().invoke(ctx)
        except ValueError as error:
            raise click.UsageError(" ".join(str(error).split())) from error
        except BrokenPipeError:
            raise
        except OSError as error:
            raise click.UsageError(f"Output cannot be written: {error.strerror}.") from error


@click.group(cls=_Group, context_settings={"help_option_names": ["-h", "--help"]})
@click.version_option(__version__, prog_name="hymell")
def main() -> None:
    """Latency, energy and memory of LLM inference, from a model's configuration and a GPU."""


for _room in (cli_predict, cli_compare, cli_report, cli_search, cli_rank, cli_data, cli_profile):
    for _command in _room.COMMANDS:
        main.add_command(_command)


if __name__ == "__main__":
    main()
